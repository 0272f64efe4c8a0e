//! Why a pod stays as it is, or must not run: every case with a name that is public API, and a way out.

/// Why a pod stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Skip {
    /// Neither label nor annotation of the pod asks for it, and the namespace does not require it.
    #[error("the pod does not ask for it; annotate it with sallyport.dev/inject=true")]
    NotOptedIn,
    /// The pod says that it does not want it, in a namespace that leaves it the choice.
    #[error("the pod says sallyport.dev/inject=false; set it to true")]
    OptedOut,
    /// The namespace has no label of ours, so the webhook never sees its pods.
    #[error(
        "namespace {namespace} is not labelled; kubectl label namespace {namespace} sallyport.dev/inject=enabled"
    )]
    NamespaceNotLabelled {
        /// The pod's namespace.
        namespace: String,
    },
    /// The namespace's label is `disabled`.
    #[error(
        "namespace {namespace} says sallyport.dev/inject=disabled; \
         kubectl label --overwrite namespace {namespace} sallyport.dev/inject=enabled"
    )]
    NamespaceDisabled {
        /// The pod's namespace.
        namespace: String,
    },
    /// The kubelet's image of a static pod: no webhook can change what runs.
    #[error("a static pod is its node's own and can't be guarded; run it as a Deployment or a DaemonSet")]
    StaticPod,
}

impl Skip {
    /// The reason's name, as in metrics and Events.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NotOptedIn => "NotOptedIn",
            Self::OptedOut => "OptedOut",
            Self::NamespaceNotLabelled { .. } => "NamespaceNotLabelled",
            Self::NamespaceDisabled { .. } => "NamespaceDisabled",
            Self::StaticPod => "StaticPod",
        }
    }
}

macro_rules! refusals {
    ($($(#[doc = $doc:literal])+ #[error($($message:tt)+)] $name:ident { $($(#[doc = $fdoc:literal])+ $field:ident: $kind:ty),* $(,)? },)+) => {
        /// Why a pod must not run as it is, or must not be changed so.
        #[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
        pub enum Refusal {
            $($(#[doc = $doc])+ #[error($($message)+)] $name { $($(#[doc = $fdoc])+ $field: $kind),* },)+
        }

        impl Refusal {
            /// Every reason, in the order of the code.
            pub const REASONS: &'static [&'static str] = &[$(stringify!($name)),+];

            /// The reason's name, as in metrics and Events.
            pub const fn reason(&self) -> &'static str {
                match self {
                    $(Self::$name { .. } => stringify!($name),)+
                }
            }
        }
    };
}

refusals! {
    /// A label or annotation `sallyport.dev/inject` has a value that means nothing.
    #[error("{field} is `{value}`; it must be {expected}")]
    BadInjectValue {
        /// Where it stands.
        field: String,
        /// What it says.
        value: String,
        /// What it may say.
        expected: &'static str,
    },
    /// The pod's label and annotation contradict each other.
    #[error("the pod's label and annotation sallyport.dev/inject contradict each other; keep one of them")]
    ConflictingInject {},
    /// A pod wants out where the namespace requires it to be guarded.
    #[error(
        "{field} is `false`, and namespace {namespace} requires every pod to be guarded; remove it, or run \
         the pod in another namespace"
    )]
    OptOutForbidden {
        /// Where it stands.
        field: String,
        /// The pod's namespace.
        namespace: String,
    },
    /// No policy of the namespace selects the pod.
    #[error(
        "no AgentPolicy in namespace {namespace} selects the pod; kubectl apply -n {namespace} -f POLICY.yaml, \
         with a spec.selector that matches its labels"
    )]
    NoPolicy {
        /// The pod's namespace.
        namespace: String,
    },
    /// The pod's annotation names a policy that there is not.
    #[error(
        "metadata.annotations[sallyport.dev/policy] names `{policy}`, and namespace {namespace} has no such \
         AgentPolicy; kubectl get agentpolicy -n {namespace}"
    )]
    PolicyNotFound {
        /// The pod's namespace.
        namespace: String,
        /// What the annotation names.
        policy: String,
    },
    /// The pod's annotation names a policy that is for other pods.
    #[error(
        "metadata.annotations[sallyport.dev/policy] names `{policy}`, whose spec.selector does not match the \
         pod's labels; change the labels, or remove the annotation"
    )]
    PolicyDoesNotSelect {
        /// What the annotation names.
        policy: String,
    },
    /// A Windows pod.
    #[error("spec.os.name is windows; the sidecar runs on Linux only")]
    WindowsPod {},
    /// The pod shares a namespace of its node.
    #[error("{field} is true, which puts the agent outside the pod's own namespaces; remove it")]
    HostNamespace {
        /// The field.
        field: &'static str,
    },
    /// The pod's containers see each other's processes.
    #[error(
        "spec.shareProcessNamespace is true, which lets the agent see and signal the sidecar's processes; \
         remove it"
    )]
    SharedProcesses {},
    /// A volume is a part of the node's file system.
    #[error(
        "volume `{volume}` is a hostPath, which reaches past the pod's walls; use an emptyDir, a ConfigMap or \
         a PersistentVolumeClaim"
    )]
    HostPathVolume {
        /// The volume's name.
        volume: String,
    },
    /// The pod names another RuntimeClass than its policy demands.
    #[error(
        "spec.runtimeClassName is `{found}`, and AgentPolicy `{policy}` demands `{wanted}` \
         (spec.isolation.runtimeClass); remove the field"
    )]
    RuntimeClassMismatch {
        /// What the pod says.
        found: String,
        /// What the policy says.
        wanted: String,
        /// The policy's name.
        policy: String,
    },
    /// A runtime that rules in the pod's network namespace don't reach.
    #[error(
        "RuntimeClass `{found}` keeps its own network stack, which spec.capture.mode {mode:?} can't write rules \
         into; use another runtime (Kata works with spec.capture.mode: Init), or spec.capture.mode: Explicit"
    )]
    UnsupportedRuntime {
        /// The RuntimeClass.
        found: String,
        /// How the policy captures.
        mode: sallyport_api::CaptureMode,
    },
    /// The policy wants the node's CNI plugin to capture, and there is none.
    #[error(
        "AgentPolicy `{policy}` says spec.capture.mode: CNI, and this installation has no CNI plugin on its \
         nodes; helm upgrade sallyport charts/sallyport -n sallyport-system --reuse-values --set \
         cni.enabled=true, or spec.capture.mode: Init"
    )]
    CniNotInstalled {
        /// The policy.
        policy: String,
    },
    /// Another mesh's sidecar.
    #[error(
        "container `{container}` is another mesh's sidecar, and two can't capture the same connections; turn \
         that mesh's injection off for this pod"
    )]
    OtherMesh {
        /// The container's name.
        container: String,
    },
    /// A container or volume has a name of ours and is not ours.
    #[error("{kind} `{name}` has a name that belongs to Sallyport; rename it")]
    ReservedName {
        /// `container` or `volume`.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// A container mounts a volume of the sidecar.
    #[error("container `{container}` mounts `{volume}`, which belongs to the sidecar; remove the volumeMount")]
    MountsSidecarVolume {
        /// The container's name.
        container: String,
        /// The volume's name.
        volume: String,
    },
    /// A volume holds a token by which the pod could speak to the operator as the sidecar.
    #[error(
        "volume `{volume}` projects a token for the audience sallyport.dev, which only the sidecar may hold; \
         remove it"
    )]
    SidecarToken {
        /// The volume's name.
        volume: String,
    },
    /// The sidecar's user or group is given to another container.
    #[error("{field} is {uid}, the sidecar's own, whose traffic is not captured; use another id")]
    SidecarIdentity {
        /// The field.
        field: String,
        /// The id.
        uid: i64,
    },
    /// A privileged container.
    #[error("container `{container}` is privileged, so nothing holds it; set securityContext.privileged: false")]
    Privileged {
        /// The container's name.
        container: String,
    },
    /// A container sees all of /proc.
    #[error("container `{container}` has procMount Unmasked; remove securityContext.procMount")]
    UnmaskedProc {
        /// The container's name.
        container: String,
    },
    /// A container without the kernel's usual confinement.
    #[error("{field} is Unconfined; remove it, or set it to RuntimeDefault or Localhost")]
    Unconfined {
        /// The field.
        field: String,
    },
    /// A container runs as root and its policy does not allow that.
    #[error(
        "container `{container}` runs as root; set securityContext.runAsUser to another user, or have \
         AgentPolicy `{policy}` say spec.isolation.allowRoot: true"
    )]
    RootUser {
        /// The container's name.
        container: String,
        /// The policy's name.
        policy: String,
    },
    /// A capability with which the sidecar can be got round; no policy can allow it.
    #[error(
        "container `{container}` adds the capability {capability}, with which the sidecar can be got round; \
         remove it from securityContext.capabilities.add (no policy can allow it)"
    )]
    ForbiddenCapability {
        /// The container's name.
        container: String,
        /// The capability.
        capability: String,
    },
    /// A capability that the policy does not list.
    #[error(
        "container `{container}` adds the capability {capability}; remove it, or list it in \
         spec.isolation.allowCapabilities of AgentPolicy `{policy}`"
    )]
    CapabilityNotAllowed {
        /// The container's name.
        container: String,
        /// The capability.
        capability: String,
        /// The policy's name.
        policy: String,
    },
    /// A kernel setting outside the ones that Kubernetes calls safe.
    #[error("spec.securityContext.sysctls sets `{name}`, which may undo the capture; remove it")]
    UnsafeSysctl {
        /// The setting.
        name: String,
    },
    /// A container listens on a port of the sidecar.
    #[error("container `{container}` declares port {port}, which the sidecar uses; use another port")]
    PortCollision {
        /// The container's name.
        container: String,
        /// The port.
        port: i32,
    },
    /// The pod brings a resolver of its own.
    #[error(
        "{field} would let the pod's author say where a permitted name leads; remove it and use dnsPolicy \
         ClusterFirst"
    )]
    OwnDns {
        /// The field.
        field: &'static str,
    },
    /// The pod says itself what names mean.
    #[error(
        "spec.hostAliases would let a permitted name lead to any address; remove it and use a Service or the \
         cluster's DNS"
    )]
    HostAliases {},
    /// The sidecar does not fit a LimitRange.
    #[error(
        "LimitRange `{object}` has {bound}, and {what} needs {need}; raise it, or lower spec.capacity \
         of AgentPolicy `{policy}`"
    )]
    LimitRangeConflict {
        /// The LimitRange's name.
        object: String,
        /// The field in it, and what that says.
        bound: String,
        /// Who does not fit.
        what: String,
        /// What that needs.
        need: String,
        /// The policy's name.
        policy: String,
    },
    /// An init container runs before the sidecar.
    #[error(
        "init container `{container}` stands before the sidecar's, so it would run unguarded; another webhook \
         put it there: have that one append instead"
    )]
    InitContainerBeforeSidecar {
        /// The container's name.
        container: String,
    },
    /// A pod that shall be guarded lacks a part of the sidecar, or has an altered one.
    #[error(
        "container `{container}` is missing or is not what Sallyport injected; another webhook changed it: \
         exclude guarded pods from that one"
    )]
    SidecarAltered {
        /// The container's name.
        container: String,
    },
    /// A container lost what injection confined it by.
    #[error(
        "container `{container}` lacks the securityContext that Sallyport gave it; another webhook changed or \
         added it: exclude guarded pods from that one"
    )]
    NotHardened {
        /// The container's name.
        container: String,
    },
    /// An update gives or takes the mark of a guarded pod.
    #[error("metadata.labels[sallyport.dev/guarded] is written by Sallyport only; delete the pod to have it made anew")]
    GuardedLabelChanged {},
    /// An update changes what injection wrote or was decided by.
    #[error("{field} can't change while the pod runs; change the workload's pod template instead")]
    ProtectedMetadata {
        /// The field.
        field: String,
    },
    /// An update of labels would put the pod under another policy.
    #[error(
        "with these labels the pod would leave AgentPolicy `{from}` for {to}; change the workload's pod \
         template instead"
    )]
    PolicyWouldChange {
        /// The policy in force.
        from: String,
        /// The one that would be.
        to: String,
    },
    /// An update changes a container of the sidecar.
    #[error("{field} of `{container}` can't change while the pod runs; upgrade Sallyport and restart the workload")]
    SidecarChanged {
        /// The container's name.
        container: String,
        /// The field.
        field: &'static str,
    },
    /// A debug container that looks into the sidecar.
    #[error("ephemeral container `{container}` targets `{target}`; debug the sidecar with its logs and metrics")]
    DebugsSidecar {
        /// The container's name.
        container: String,
        /// The target.
        target: String,
    },
    /// A debug container that is not as confined as the agent.
    #[error(
        "ephemeral container `{container}` must have {field}; kubectl debug --profile=restricted sets it"
    )]
    DebugNotConfined {
        /// The container's name.
        container: String,
        /// The field and value it lacks.
        field: &'static str,
    },
}
