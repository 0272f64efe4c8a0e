//! Makes a pod a guarded pod, or says why not.
//!
//! Injection puts the sidecar before every other init container, confines every other container, and refuses
//! what no setting can make safe. It never trusts what the pod says of itself: whatever looks injected is
//! taken out and injected anew, so a pod that was prepared by hand comes out like any other.
//!
//! What it can *not* see, and so does not promise: the user that an image names (a numeric `USER` equal to the
//! sidecar's, in a pod that sets none), a PersistentVolume that is a directory of the node, a RuntimeClass
//! whose name hides gVisor. With `isolation.allowRoot`, root can write `/etc/hosts`, which the sidecar
//! resolves names by. Probes are left alone: inbound connections are not captured.

mod containers;
mod harden;
mod refusal;
mod resources;
mod update;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LimitRange, LocalObjectReference, Pod};
use sallyport_api::names::{GUARDED, INJECT, POLICY, STATUS};
use sallyport_api::{AgentPolicyObject, AgentPolicySpec, Capture, CaptureMode};
use serde::{Deserialize, Serialize};

pub use refusal::{Refusal, Skip};
pub use update::{check_created, check_update};

use crate::digest::sha256_hex;
use crate::size::size;

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
    /// Whether the nodes have the CNI plugin; without it pods that rely on it are refused.
    #[serde(default)]
    pub cni: bool,
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
    /// The namespace's policies that can be in force: the caller leaves invalid ones out.
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
    if let Some(skip) = match asked(pod, facts) {
        Ok(skip) => skip,
        Err(refusal) => return Outcome::Refused(refusal),
    } {
        return Outcome::Skipped(skip);
    }
    match guard(pod, facts, settings) {
        Ok(injection) => Outcome::Guarded(Box::new(injection)),
        Err(refusal) => Outcome::Refused(refusal),
    }
}

/// Whether the pod is to be guarded; if not, why.
fn asked(pod: &Pod, facts: &Facts<'_>) -> Result<Option<Skip>, Refusal> {
    let namespace = || facts.namespace.to_owned();
    let required = match facts.namespace_inject {
        Some("required") => true,
        Some("enabled") => false,
        Some("disabled") => return Ok(Some(Skip::NamespaceDisabled { namespace: namespace() })),
        None => return Ok(Some(Skip::NamespaceNotLabelled { namespace: namespace() })),
        Some(other) => {
            return Err(Refusal::BadInjectValue {
                field: format!("label {INJECT} of namespace {}", facts.namespace),
                value: other.into(),
                expected: "enabled, required or disabled",
            });
        }
    };
    // Nothing that a webhook does to it changes what the kubelet runs already.
    if annotation(pod, "kubernetes.io/config.mirror").is_some() {
        return Ok(Some(Skip::StaticPod));
    }
    let label = pod.metadata.labels.as_ref().and_then(|l| l.get(INJECT));
    let mut wishes = Vec::new();
    for (value, field) in [(label, "labels"), (annotation(pod, INJECT), "annotations")] {
        let Some(value) = value else { continue };
        let field = format!("metadata.{field}[{INJECT}]");
        match value.as_str() {
            "true" => wishes.push(true),
            "false" if required => return Err(Refusal::OptOutForbidden { field, namespace: namespace() }),
            "false" => wishes.push(false),
            _ => {
                return Err(Refusal::BadInjectValue {
                    field,
                    value: value.clone(),
                    expected: "true or false",
                });
            }
        }
    }
    match (wishes.contains(&true), wishes.contains(&false)) {
        (true, true) => Err(Refusal::ConflictingInject {}),
        (false, true) => Ok(Some(Skip::OptedOut)),
        (false, false) if !required => Ok(Some(Skip::NotOptedIn)),
        _ => Ok(None),
    }
}

fn guard(pod: &Pod, facts: &Facts<'_>, settings: &InjectSettings) -> Result<Injection, Refusal> {
    let mut pod = pod.clone();
    let mut warnings = Vec::new();
    strip(&mut pod);
    let policy = policy_of(&pod, facts)?;
    let name = policy.metadata.name.clone().unwrap_or_default();
    let spec = &policy.spec;
    if spec.capture.mode == CaptureMode::Cni && !settings.cni {
        return Err(Refusal::CniNotInstalled { policy: name });
    }
    harden::harden(&mut pod, &harden::Rules { policy: &name, spec }, &mut warnings)?;

    let sizing = size(spec);
    let pod_spec = pod.spec.get_or_insert_default();
    let ranges = facts.limit_ranges;
    let demands = resources::demands(&sizing, spec.capture.mode, pod_spec, ranges, &name, &mut warnings)?;
    if pod_spec.resources.is_some() {
        warnings.push(
            "spec.resources bounds the whole pod: the sidecar's share is taken out of it, so raise it by what \
             `sallyport explain pod` shows"
                .into(),
        );
    }
    let mut containers = containers::init_containers(spec, &sizing, &demands, settings);
    let injected: Vec<String> = containers.iter().map(|c| c.name.clone()).collect();
    containers.extend(pod_spec.init_containers.take().unwrap_or_default());
    pod_spec.init_containers = Some(containers);
    pod_spec.volumes.get_or_insert_default().extend(containers::volumes());
    for secret in &settings.image_pull_secrets {
        let secrets = pod_spec.image_pull_secrets.get_or_insert_default();
        if !secrets.iter().any(|s| s.name == *secret) {
            secrets.push(LocalObjectReference { name: secret.clone() });
        }
    }

    let status = Status {
        version: env!("CARGO_PKG_VERSION"),
        policy: &name,
        generation: policy.metadata.generation.unwrap_or_default(),
        digest: pod_fields_digest(spec, settings),
        containers: injected,
        volumes: containers::VOLUMES,
        capture: (spec.capture.mode == CaptureMode::Cni).then_some(&spec.capture),
    };
    // Strings, numbers and lists of strings: nothing in it can fail.
    let status = serde_json::to_string(&status).unwrap_or_default();
    pod.metadata.labels.get_or_insert_default().insert(GUARDED.into(), "true".into());
    pod.metadata.annotations.get_or_insert_default().insert(STATUS.into(), status);
    Ok(Injection { pod, warnings, policy: name })
}

/// What stands in the annotation [`STATUS`].
#[derive(Serialize)]
struct Status<'a> {
    version: &'static str,
    policy: &'a str,
    generation: i64,
    digest: String,
    containers: Vec<String>,
    volumes: [&'static str; 3],
    /// What the node's CNI plugin writes rules from; only where it is the one to write them.
    #[serde(skip_serializing_if = "Option::is_none")]
    capture: Option<&'a Capture>,
}

/// What the node's CNI plugin has to do for a pod, from its annotation [`STATUS`]: nothing where the pod is
/// captured by other means. Text that is not understood is an error, and then the pod must not run: half of a
/// policy's exclusions, or a field of a later version, would be other rules than the policy's.
pub fn cni_capture(status: &str) -> Result<Option<Capture>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Told {
        capture: Option<Capture>,
    }
    Ok(serde_json::from_str::<Told>(status)?.capture.filter(|c| c.mode == CaptureMode::Cni))
}

/// Takes out what an earlier injection, or somebody who imitates one, put in. Only where the annotation
/// says that there was one: a pod that uses our names without knowing of us is told so.
fn strip(pod: &mut Pod) {
    let annotations = pod.metadata.annotations.as_mut();
    if annotations.and_then(|a| a.remove(STATUS)).is_none() {
        return;
    }
    let Some(spec) = pod.spec.as_mut() else { return };
    if let Some(all) = spec.init_containers.as_mut() {
        all.retain(|c| !containers::CONTAINERS.contains(&c.name.as_str()));
    }
    if let Some(all) = spec.volumes.as_mut() {
        all.retain(|v| !containers::VOLUMES.contains(&v.name.as_str()));
    }
}

fn policy_of<'a>(pod: &Pod, facts: &Facts<'a>) -> Result<&'a AgentPolicyObject, Refusal> {
    let empty = BTreeMap::new();
    let labels = pod.metadata.labels.as_ref().unwrap_or(&empty);
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&empty);
    if let Some(policy) = choose(labels, annotations, facts.policies) {
        return Ok(policy);
    }
    Err(match annotations.get(POLICY) {
        None => Refusal::NoPolicy { namespace: facts.namespace.into() },
        Some(wanted) if facts.policies.iter().any(|p| p.metadata.name.as_ref() == Some(wanted)) => {
            Refusal::PolicyDoesNotSelect { policy: wanted.clone() }
        }
        Some(wanted) => Refusal::PolicyNotFound { namespace: facts.namespace.into(), policy: wanted.clone() },
    })
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a String> {
    pod.metadata.annotations.as_ref()?.get(key)
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

/// Digest of what injection takes from a policy (capture, isolation, sizing) and of the images: pods that
/// carry another one are stale.
pub fn pod_fields_digest(spec: &AgentPolicySpec, settings: &InjectSettings) -> String {
    let sizing = size(spec);
    // An array keeps its order whatever features serde_json is built with.
    let fields = serde_json::json!([
        serde_json::to_string(&spec.capture).unwrap_or_default(),
        serde_json::to_string(&spec.isolation).unwrap_or_default(),
        [sizing.extproc_cpu_millis, sizing.envoy_cpu_millis, sizing.concurrency],
        [sizing.extproc_memory_bytes, sizing.envoy_memory_bytes, sizing.budget_bytes],
        sizing.scan_timeout.as_millis().to_string(),
        [&settings.images.extproc, &settings.images.envoy, &settings.images.capture],
    ]);
    format!("sha256:{}", sha256_hex(&fields.to_string()))
}
