//! Makes a pod a guarded pod, or says why not.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LimitRange, Pod};
use sallyport_api::{AgentPolicyObject, AgentPolicySpec};
use serde::{Deserialize, Serialize};

/// What injection needs to know besides the pod and the policies; the operator's configuration file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InjectSettings {
    /// Images of the injected containers.
    pub images: Images,
    /// `Always`, `IfNotPresent` or `Never`; left out, Kubernetes decides by the tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<String>,
    /// Names of pull secrets that are added to guarded pods.
    #[serde(default)]
    pub image_pull_secrets: Vec<String>,
    /// Where sidecars find the operator: `https://sallyport-operator.sallyport-system.svc:8443`.
    pub discovery: String,
}

/// Images of the injected containers.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Images {
    /// The filter's process.
    pub extproc: String,
    /// Envoy.
    pub envoy: String,
    /// The one that writes the capture rules.
    pub capture: String,
}

/// What is known of the pod's surroundings.
#[derive(Clone, Debug, Default)]
pub struct Facts<'a> {
    /// The pod's namespace.
    pub namespace: &'a str,
    /// The namespace's label [`sallyport_api::names::INJECT`].
    pub namespace_inject: Option<&'a str>,
    /// Every policy of the namespace, valid or not.
    pub policies: &'a [AgentPolicyObject],
    /// Every LimitRange of the namespace.
    pub limit_ranges: &'a [LimitRange],
}

/// What becomes of a pod.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It stays as it is.
    Skipped(Skip),
    /// It must not run as it is.
    Refused(Refusal),
    /// It is guarded.
    Guarded(Box<Injection>),
}

/// Why a pod stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Skip {
    /// Neither pod nor namespace asks for it.
    #[error("the pod does not ask for it; annotate it with sallyport.dev/inject=true")]
    NotOptedIn,
}

/// Why a pod must not run as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No policy of the namespace selects the pod.
    #[error(
        "no AgentPolicy in namespace {namespace} selects the pod; kubectl apply -n {namespace} -f POLICY.yaml"
    )]
    NoPolicy {
        /// The pod's namespace.
        namespace: String,
    },
}

impl Skip {
    /// The reason's name, as in metrics and Events.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NotOptedIn => "NotOptedIn",
        }
    }
}

impl Refusal {
    /// The reason's name, as in metrics and Events.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NoPolicy { .. } => "NoPolicy",
        }
    }
}

/// A guarded pod.
#[derive(Clone, Debug)]
pub struct Injection {
    /// The pod as it shall run.
    pub pod: Pod,
    /// What the pod's author should know.
    pub warnings: Vec<String>,
    /// Name of the policy it is guarded by.
    pub policy: String,
}

/// Decides what becomes of a pod. Injecting an injected pod changes nothing.
pub fn inject(pod: &Pod, facts: &Facts<'_>, settings: &InjectSettings) -> Outcome {
    let _ = (pod, facts, settings);
    Outcome::Skipped(Skip::NotOptedIn)
}

/// The policy in force for a pod, among those of its namespace: the one its annotation names, if that
/// selects it; else, of those that select it, the oldest, then the first by name.
pub fn choose<'p>(
    labels: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
    policies: &'p [AgentPolicyObject],
) -> Option<&'p AgentPolicyObject> {
    let wanted = annotations.get(sallyport_api::names::POLICY);
    policies
        .iter()
        .filter(|p| p.spec.selector.matches(labels))
        .filter(|p| wanted.is_none_or(|w| p.metadata.name.as_ref() == Some(w)))
        .min_by_key(|p| (p.metadata.creation_timestamp.clone().map(|t| t.0), p.metadata.name.clone()))
}

/// Whether a guarded pod may be changed so; both as the API server shows them.
pub fn check_update(old: &Pod, new: &Pod, facts: &Facts<'_>) -> Result<(), Refusal> {
    let _ = (old, new, facts);
    Ok(())
}

/// Digest of what injection takes from a policy: pods that carry another one are stale.
pub fn pod_fields_digest(spec: &AgentPolicySpec, settings: &InjectSettings) -> String {
    let _ = (spec, settings);
    String::new()
}
