{{/* Every object of ours has this name, whatever the release is called: one operator per cluster. */}}
{{- define "sallyport.name" -}}sallyport-operator{{- end -}}

{{/* The oldest definition this chart works with: a counter, annotation sallyport.dev/crd-version. */}}
{{- define "sallyport.crdVersion" -}}2{{- end -}}

{{- define "sallyport.selectorLabels" -}}
app.kubernetes.io/name: sallyport-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sallyport.labels" -}}
{{ include "sallyport.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: sallyport
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sallyport.cniSelectorLabels" -}}
app.kubernetes.io/name: sallyport-cni
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sallyport.cniLabels" -}}
{{ include "sallyport.cniSelectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: sallyport
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* One image, from (list . IMAGE), IMAGE being one of the values' images. */}}
{{- define "sallyport.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{/* sallyport_plan::inject::InjectSettings, as YAML. */}}
{{- define "sallyport.config" -}}
images:
  extproc: {{ include "sallyport.image" (list . .Values.images.extproc) | quote }}
  envoy: {{ include "sallyport.image" (list . .Values.images.envoy) | quote }}
  capture: {{ include "sallyport.image" (list . .Values.images.capture) | quote }}
{{- with .Values.imagePullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
imagePullSecrets: {{ toJson .Values.imagePullSecrets }}
cni: {{ .Values.cni.enabled }}
discovery: https://{{ include "sallyport.name" . }}.{{ .Release.Namespace }}.svc:8443
{{- end -}}

{{- define "sallyport.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
{{- end -}}

{{- define "sallyport.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Namespaces that no webhook of ours sees: what the cluster and our own return depend on. */}}
{{- define "sallyport.excludedNamespaces" -}}
{{- $fixed := list "kube-system" "kube-node-lease" .Release.Namespace -}}
- key: kubernetes.io/metadata.name
  operator: NotIn
  values: {{ concat $fixed .Values.webhooks.excludedNamespaces | uniq | toJson }}
{{- end -}}

{{/* The operator keeps caBundle, with cert-manager too: it alone knows which authority signed what it serves. The
     field is left out, so that an upgrade leaves it as it is. cert-manager's injector is not asked: two writers
     would undo each other's until every pod has the new Secret. */}}
{{- define "sallyport.clientConfig" -}}
{{- $root := index . 0 -}}
service:
  name: {{ include "sallyport.name" $root }}
  namespace: {{ $root.Release.Namespace }}
  path: {{ index . 1 }}
  port: 443
{{- end -}}

{{/* A pod's spec, restartPolicy excepted: all three ports of the operator answer through its Service, and a
     replica is ready. */}}
{{- define "sallyport.probePod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- include "sallyport.podSecurityContext" . | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: probe
    image: {{ include "sallyport.image" (list . .Values.images.operator) | quote }}
    {{- with .Values.imagePullPolicy }}
    imagePullPolicy: {{ . }}
    {{- end }}
    command: [/sallyport-operator]
    args:
      - probe
      - http://{{ include "sallyport.name" . }}.{{ .Release.Namespace }}.svc:8080/readyz
      - tcp://{{ include "sallyport.name" . }}.{{ .Release.Namespace }}.svc:443
      - tcp://{{ include "sallyport.name" . }}.{{ .Release.Namespace }}.svc:8443
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    securityContext: {{- include "sallyport.securityContext" . | nindent 6 }}
{{- end -}}

{{/* CEL: the pod asks to be guarded, by annotation or label. */}}
{{- define "sallyport.asks" -}}
(has(object.metadata.annotations) && "sallyport.dev/inject" in object.metadata.annotations
&& object.metadata.annotations["sallyport.dev/inject"] == "true")
|| (has(object.metadata.labels) && "sallyport.dev/inject" in object.metadata.labels
&& object.metadata.labels["sallyport.dev/inject"] == "true")
{{- end -}}
