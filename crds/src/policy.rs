//! The types of an AgentPolicy, field by field.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::bounds;
#[cfg(feature = "kube")]
use crate::cel;
use crate::egress::{Dns, Egress};

/// What an agent may call and what its traffic is inspected for: the document that `sallyport up`, `lint`
/// and the filter read. In a cluster the same document is an `AgentPolicyObject`, which carries
/// Kubernetes' own metadata and a status; this one needs no Kubernetes library.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AgentPolicy {
    /// Always `sallyport.dev/v1alpha1`.
    pub api_version: String,
    /// Always `AgentPolicy`.
    pub kind: String,
    /// Name and namespace, as for every Kubernetes object.
    pub metadata: Metadata,
    /// The policy itself.
    pub spec: AgentPolicySpec,
}

/// The part of Kubernetes' ObjectMeta that a policy file carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// The policy's name.
    pub name: String,
    /// The policy's namespace; empty outside a cluster.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Labels, kept but not read.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations, kept but not read.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// The wanted behaviour. Each field's description ends with when a change of it reaches pods that run: Hot,
/// at once; Listener, once Envoy took new listeners, which cuts no connection; Pod, when the pod is made anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[cfg_attr(
    feature = "kube",
    derive(kube::CustomResource, schemars::JsonSchema),
    kube(
        group = "sallyport.dev",
        version = "v1alpha1",
        kind = "AgentPolicy",
        root = "AgentPolicyObject",
        namespaced,
        shortname = "ap",
        category = "sallyport",
        status = "crate::AgentPolicyStatus",
        derive = "PartialEq",
        doc = "What an agent may call, and what its traffic is inspected for.",
        annotation("sallyport.dev/crd-version", "2"),
        validation = (cel::NAME, cel::NAME_MESSAGE),
        printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
        printcolumn(
            name = "Accepted",
            type_ = "string",
            json_path = r#".status.conditions[?(@.type=="Accepted")].status"#
        ),
        printcolumn(
            name = "Enforced",
            type_ = "string",
            json_path = ".status.enforced",
            description = "Pods that acknowledged the newest generation, of guarded pods that run"
        ),
        printcolumn(
            name = "CPU/Pod",
            type_ = "string",
            json_path = ".status.capacity.cpu",
            description = "CPU request of one pod's sidecar"
        ),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
        printcolumn(name = "Rules", type_ = "integer", json_path = ".status.rules", priority = 1),
        printcolumn(name = "Digest", type_ = "string", json_path = ".status.digest", priority = 1),
        printcolumn(name = "Capacity", type_ = "string", json_path = ".status.capacity.summary", priority = 1),
    )
)]
pub struct AgentPolicySpec {
    /// Which pods of the namespace the policy is for; empty means every guarded pod. Pod.
    #[serde(skip_serializing_if = "is_default")]
    pub selector: Selector,
    /// Whether decisions are carried out (`Enforce`) or only recorded (`Observe`). Listener.
    pub mode: Mode,
    /// What Envoy does with a message while the filter can't answer: `Closed` refuses it, `Open` lets it
    /// pass uninspected, counted. Listener.
    pub failure_policy: FailurePolicy,
    /// How the pod's connections reach the sidecar. Pod.
    pub capture: Capture,
    /// Which destinations the agent may call. Hot.
    pub egress: Egress,
    /// Which names the agent may resolve. Hot.
    #[serde(skip_serializing_if = "is_default")]
    pub dns: Dns,
    /// Which rules look at the traffic. Hot.
    #[serde(skip_serializing_if = "is_default")]
    pub detection: Detection,
    /// Cedar of the namespace's own. Hot.
    #[serde(skip_serializing_if = "is_default")]
    pub cedar: Cedar,
    /// Named, expiring exceptions that Cedar policies may read. Hot.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::EXCEPTIONS), extend("x-kubernetes-validations" = cel::exceptions()))
    )]
    pub exceptions: Vec<Exception>,
    /// Bounds on what is held and inspected. Listener.
    pub limits: Limits,
    /// What the agent's containers may be. Pod.
    pub isolation: Isolation,
    /// The load to size the sidecar for. Pod.
    pub capacity: Capacity,
}

/// Chooses pods by their labels, as a Kubernetes LabelSelector does; every condition must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Selector {
    /// Labels that must be there with these values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            extend("maxProperties" = bounds::LABELS),
            transform = cel::label_values,
            extend("x-kubernetes-validations" = cel::match_labels())
        )
    )]
    pub match_labels: BTreeMap<String, String>,
    /// Conditions on labels.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::LABELS), extend("x-kubernetes-validations" = cel::match_expressions()))
    )]
    pub match_expressions: Vec<LabelRequirement>,
}

/// A condition on one label.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelRequirement {
    /// The label.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = bounds::LABEL_KEY)))]
    pub key: String,
    /// What must hold for it.
    pub operator: LabelOperator,
    /// Values for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::LABEL_VALUES), inner(length(max = bounds::LABEL_VALUE)))
    )]
    pub values: Vec<String>,
}

/// What must hold for a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum LabelOperator {
    /// It has one of the values.
    In,
    /// It is not there, or has none of the values.
    NotIn,
    /// It is there.
    Exists,
    /// It is not there.
    DoesNotExist,
}

impl Isolation {
    /// Capabilities that no container of a guarded pod may have: each lets its holder change the capture
    /// rules, become another user (the sidecar's, which is let out), or reach into the sidecar's or the
    /// node's processes.
    pub const FORBIDDEN_CAPABILITIES: [&str; 17] = [
        "ALL",
        "BPF",
        "CHECKPOINT_RESTORE",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "NET_ADMIN",
        "NET_RAW",
        "PERFMON",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_ADMIN",
        "SYS_BOOT",
        "SYS_MODULE",
        "SYS_PTRACE",
        "SYS_RAWIO",
    ];
}

impl Selector {
    /// Whether a pod with these labels is chosen.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let given = self.match_labels.iter().all(|(k, v)| labels.get(k) == Some(v));
        given
            && self.match_expressions.iter().all(|r| {
                let value = labels.get(&r.key);
                match r.operator {
                    LabelOperator::In => value.is_some_and(|v| r.values.contains(v)),
                    LabelOperator::NotIn => value.is_none_or(|v| !r.values.contains(v)),
                    LabelOperator::Exists => value.is_some(),
                    LabelOperator::DoesNotExist => value.is_none(),
                }
            })
    }
}

/// How the pod's connections reach the sidecar.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Capture {
    /// By which means. `CNI`: the node's CNI plugin writes rules into the pod's network namespace before its
    /// first container starts; needs the chart's `cni.enabled`, and no capability. `Init`: an init container
    /// with NET_ADMIN writes the same rules. `Explicit`: the agent is told by `HTTP_PROXY`; advisory, because
    /// nothing forces it.
    pub mode: CaptureMode,
    /// Networks whose connections go past the sidecar, uninspected. Only the policy can say so.
    #[serde(rename = "excludeCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::EXCLUDES),
            inner(length(max = bounds::CIDR)),
            extend("x-kubernetes-validations" = cel::cidrs())
        )
    )]
    pub exclude_cidrs: Vec<String>,
    /// TCP ports whose connections go past the sidecar, uninspected.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(with = "Vec<i32>", length(max = bounds::EXCLUDES), inner(range(min = 1, max = 65_535)))
    )]
    pub exclude_ports: Vec<u16>,
}

/// By which means connections reach the sidecar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum CaptureMode {
    /// The node's CNI plugin writes rules into the pod's network namespace before its first container starts.
    #[serde(rename = "CNI")]
    Cni,
    /// An init container with NET_ADMIN writes rules into the pod's network namespace.
    #[default]
    Init,
    /// The agent is told by `HTTP_PROXY`; advisory, because nothing forces it.
    Explicit,
}

impl CaptureMode {
    /// Whether rules in the pod's network namespace bring its connections to the sidecar, so that an agent
    /// can't choose another way.
    pub const fn forces(self) -> bool {
        matches!(self, Self::Cni | Self::Init)
    }
}

/// What the agent's containers may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Isolation {
    /// The RuntimeClass that guarded pods must have; set where the pod names none. Empty: not looked at.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::NAME), extend("x-kubernetes-validations" = cel::runtime_class()))
    )]
    pub runtime_class: String,
    /// Linux capabilities that the agent's containers may add, without `CAP_`; everything else is dropped.
    /// Those with which an agent could get round its sidecar are refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::CAPABILITIES),
            inner(length(max = bounds::CAPABILITY)),
            extend("x-kubernetes-validations" = cel::capabilities())
        )
    )]
    pub allow_capabilities: Vec<String>,
    /// Whether the agent's containers may run as root.
    pub allow_root: bool,
    /// Whether the agent's containers get a read-only root file system.
    pub read_only_root: bool,
}

/// The load to size the sidecar for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Capacity {
    /// Calls per second that one pod makes at its busiest.
    #[cfg_attr(feature = "kube", schemars(with = "i32", range(min = 1, max = bounds::REQUESTS_PER_SECOND)))]
    pub requests_per_second: u32,
    /// The 95th percentile of its requests' bodies, a quantity in bytes such as `8Ki`.
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::QUANTITY), extend("x-kubernetes-validations" = cel::quantity()))
    )]
    pub request_body_p95: String,
    /// The 95th percentile of its responses' bodies, a quantity in bytes.
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::QUANTITY), extend("x-kubernetes-validations" = cel::quantity()))
    )]
    pub response_body_p95: String,
    /// What is added to the computed need, in percent.
    #[cfg_attr(feature = "kube", schemars(with = "i32", range(min = 0, max = bounds::HEADROOM_PERCENT)))]
    pub headroom_percent: u32,
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            requests_per_second: 50,
            request_body_p95: "8Ki".into(),
            response_body_p95: "16Ki".into(),
            headroom_percent: 30,
        }
    }
}

/// Whether decisions are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum Mode {
    /// Decisions are carried out.
    #[default]
    Enforce,
    /// Decisions are recorded; not a byte or a status changes.
    Observe,
}

/// What happens to a message while the filter can't answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum FailurePolicy {
    /// It is refused.
    #[default]
    Closed,
    /// It passes, uninspected, and is counted.
    Open,
}

/// Which rules look at the traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Detection {
    /// Pack names. `core` is always on, named or not. Left out, every shipped pack is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::PACKS),
            inner(length(max = bounds::PACK)),
            extend("x-kubernetes-validations" = cel::packs())
        )
    )]
    pub packs: Option<Vec<String>>,
    /// What single rules do instead of what the shipped policies say. Rules of `core` can't be overridden.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(length(max = bounds::OVERRIDES), extend("x-kubernetes-validations" = cel::overrides()))
    )]
    pub overrides: Vec<RuleOverride>,
}

/// A rule's action, set by hand.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RuleOverride {
    /// The rule's id, for example `SLP-SEC-0001`.
    #[cfg_attr(feature = "kube", schemars(length(max = bounds::RULE)))]
    pub rule: String,
    /// What a finding of that rule leads to. `Hold` waits for an approval; until approvals exist it
    /// refuses with code `held`.
    pub action: OverrideAction,
}

/// The actions an override may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum OverrideAction {
    /// The finding is recorded and nothing else.
    Allow,
    /// The message passes, marked.
    Flag,
    /// The finding is replaced by a placeholder.
    Redact,
    /// The message waits for an approval; until approvals exist it is refused with code `held`.
    Hold,
    /// The message is refused.
    Block,
}

/// Cedar of the namespace's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Cedar {
    /// `forbid` policies, each with an `@id` and an `@action`, validated against the shipped schema.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = bounds::CEDAR)))]
    pub inline: String,
}

/// A named exception with an end.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Exception {
    /// A rule's id, the word `egress`, or a name that the policy's own Cedar reads.
    #[cfg_attr(feature = "kube", schemars(length(max = bounds::EXCEPTION_ID)))]
    pub id: String,
    /// The instant from which it holds no longer (RFC 3339).
    pub until: Timestamp,
    /// Why it exists, for the reader of the audit.
    #[cfg_attr(feature = "kube", schemars(length(max = bounds::REASON)))]
    pub reason: String,
}

/// Bounds on what is held and inspected.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// The largest body, in bytes, that is held for inspection; a larger one is refused with 413. The
    /// sidecar's memory and timeouts are computed from it, and follow when the pod is made anew.
    #[cfg_attr(
        feature = "kube",
        schemars(
            with = "i32",
            range(min = Limits::LEAST_MAX_BODY_BYTES, max = Limits::MOST_MAX_BODY_BYTES)
        )
    )]
    pub max_body_bytes: u32,
}

impl Limits {
    /// The default of `maxBodyBytes`: 1 MiB.
    pub const DEFAULT_MAX_BODY_BYTES: u32 = 1 << 20;
    /// The smallest `maxBodyBytes` that is accepted: 4 KiB.
    pub const LEAST_MAX_BODY_BYTES: u32 = 4 << 10;
    /// The largest `maxBodyBytes` that is accepted: 64 MiB.
    pub const MOST_MAX_BODY_BYTES: u32 = 64 << 20;
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_body_bytes: Self::DEFAULT_MAX_BODY_BYTES }
    }
}

/// Whether a field says what would hold without it.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(feature = "kube")]
impl From<AgentPolicyObject> for AgentPolicy {
    /// The document without what only a cluster knows.
    fn from(object: AgentPolicyObject) -> Self {
        let metadata = object.metadata;
        Self {
            api_version: crate::API_VERSION.to_owned(),
            kind: crate::KIND.to_owned(),
            metadata: Metadata {
                name: metadata.name.unwrap_or_default(),
                namespace: metadata.namespace.unwrap_or_default(),
                labels: metadata.labels.unwrap_or_default(),
                annotations: metadata.annotations.unwrap_or_default(),
            },
            spec: object.spec,
        }
    }
}
