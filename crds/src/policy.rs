//! The types of an AgentPolicy, field by field.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// What an agent may call and what its traffic is inspected for.
#[derive(Clone, Debug, Deserialize, Serialize)]
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
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
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

/// The wanted behaviour.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AgentPolicySpec {
    /// Whether decisions are carried out (`Enforce`) or only recorded (`Observe`). Hot.
    pub mode: Mode,
    /// What Envoy does with a message while the filter can't answer. Listener.
    pub failure_policy: FailurePolicy,
    /// Which destinations the agent may call. Hot.
    pub egress: Egress,
    /// Which rules look at the traffic. Hot.
    pub detection: Detection,
    /// Cedar of the namespace's own. Hot.
    pub cedar: Cedar,
    /// Named, expiring exceptions that Cedar policies may read. Hot.
    pub exceptions: Vec<Exception>,
    /// Bounds on what is held and inspected. `maxBodyBytes`: Listener.
    pub limits: Limits,
}

/// Whether decisions are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum Mode {
    /// Decisions are carried out.
    #[default]
    Enforce,
    /// Decisions are recorded; not a byte or a status changes.
    Observe,
}

/// What happens to a message while the filter can't answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum FailurePolicy {
    /// It is refused.
    #[default]
    Closed,
    /// It passes, uninspected, and is counted.
    Open,
}

/// Which destinations an agent may call.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Egress {
    /// What holds for a destination that no rule names.
    pub default: DefaultAction,
    /// Rules in order; the first that matches decides.
    pub rules: Vec<EgressRule>,
}

/// What holds where no rule matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum DefaultAction {
    /// Refused. A policy that says nothing about egress denies all of it.
    #[default]
    Deny,
    /// Allowed, and inspected like everything else.
    Allow,
}

/// One egress rule; every condition it states must hold.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EgressRule {
    /// Host names. `*.example.com` matches every name below `example.com`, not the name itself.
    pub hosts: Vec<String>,
    /// Ports; empty means every port.
    #[serde(default)]
    pub ports: Vec<u16>,
    /// HTTP methods in capitals; empty means every method.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Paths: exact, or a prefix where the pattern ends in `*`; empty means every path.
    #[serde(default)]
    pub paths: Vec<String>,
    /// What the rule does.
    pub action: EgressAction,
}

/// What an egress rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum EgressAction {
    /// The call goes on to inspection.
    Allow,
    /// The call is refused.
    Deny,
}

/// Which rules look at the traffic.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[derive(Default)]
pub struct Detection {
    /// Pack names. `core` is always on, named or not. Left out, every shipped pack is on.
    pub packs: Option<Vec<String>>,
    /// What single rules do instead of what the shipped policies say. Rules of `core` can't be overridden.
    pub overrides: Vec<RuleOverride>,
}

/// A rule's action, set by hand.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RuleOverride {
    /// The rule's id, for example `SLP-SEC-0001`.
    pub rule: String,
    /// What a finding of that rule leads to.
    pub action: OverrideAction,
}

/// The actions an override may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
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
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Cedar {
    /// `forbid` policies, each with an `@id` and an `@action`, validated against the shipped schema.
    pub inline: String,
}

/// A named exception with an end.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Exception {
    /// A rule's id, the word `egress`, or a name that the policy's own Cedar reads.
    pub id: String,
    /// The instant from which it holds no longer (RFC 3339).
    pub until: Timestamp,
    /// Why it exists, for the reader of the audit.
    pub reason: String,
}

/// Bounds on what is held and inspected.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// The largest body, in bytes, that is held for inspection; a larger one is refused with 413.
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
