//! From a policy to what pods get of it. Pure, but slow: it compiles the policy, so it runs off the watch.

use std::sync::Arc;

use bytes::Bytes;
use sallyport_api::{AgentPolicySpec, CapacityStatus, CaptureMode};
use sallyport_engine::Engine;
use sallyport_plan::inject::{InjectSettings, pod_fields_digest};
use sallyport_plan::sidecar::render_sidecar;
use sallyport_plan::size;
use sallyport_proto::discovery::{
    Bundle, ENVOY_PART, Kill, POLICY_PART, Part, PolicyRef, SCHEMA, bundle_digest, part_digest,
};

use super::kill::KilledBy;
use super::packed::Packed;

/// A generation of a policy that waits to be compiled.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) generation: i64,
    pub(crate) spec: AgentPolicySpec,
}

/// What became of a [`Job`].
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) generation: i64,
    pub(crate) result: Result<Good, String>,
}

impl Job {
    /// Ends the job without having compiled it.
    pub(crate) fn failed(self, error: String) -> Compiled {
        self.ended(Err(error))
    }

    fn ended(self, result: Result<Good, String>) -> Compiled {
        Compiled {
            namespace: self.namespace,
            name: self.name,
            uid: self.uid,
            generation: self.generation,
            result,
        }
    }
}

/// A generation of a policy that can be enforced. Every pod of the policy shares its bundles.
#[derive(Debug)]
pub(crate) struct Good {
    pub(crate) spec: AgentPolicySpec,
    pub(crate) generation: i64,
    pub(crate) rules: u32,
    /// What each sidecar gets.
    pub(crate) capacity: CapacityStatus,
    /// What pods that carry the newest pod fields say in their annotation.
    pub(crate) pod_fields: String,
    plain: Arc<Packed>,
    killed_by_policy: Arc<Packed>,
    killed_by_namespace: Arc<Packed>,
}

impl Good {
    /// The bundle for a pod of this policy.
    pub(crate) fn bundle(&self, killed: Option<KilledBy>) -> &Arc<Packed> {
        match killed {
            None => &self.plain,
            Some(KilledBy::Policy) => &self.killed_by_policy,
            Some(KilledBy::Namespace) => &self.killed_by_namespace,
        }
    }

    /// Whether the capture can be got round.
    pub(crate) fn is_advisory(&self) -> bool {
        self.spec.capture.mode == CaptureMode::Explicit
    }
}

/// Compiles a policy as the sidecar will, so that what a sidecar would refuse is never sent. The engine
/// itself is dropped: the operator needs to know that it can be built, and how many rules it has.
pub(crate) fn compile(job: Job, settings: &InjectSettings) -> Compiled {
    let result = build(&job, settings);
    job.ended(result)
}

fn build(job: &Job, settings: &InjectSettings) -> Result<Good, String> {
    // A policy may have been stored under an older definition than this one's.
    sallyport_api::check_spec(&job.spec).map_err(|e| e.to_string())?;
    let engine = Engine::new(&job.spec).map_err(|e| e.to_string())?;
    let rules = u32::try_from(engine.rule_count()).unwrap_or(u32::MAX);
    drop(engine);
    let policy = serde_json::to_vec(&job.spec).map_err(|e| e.to_string())?;
    let envoy = serde_json::to_vec(&render_sidecar(&job.spec)).map_err(|e| e.to_string())?;
    let parts = vec![part(POLICY_PART, policy), part(ENVOY_PART, envoy)];
    let bundle = |kill: Option<String>| {
        let mut bundle = Bundle {
            digest: String::new(),
            schema: SCHEMA,
            policy: Some(PolicyRef {
                namespace: job.namespace.clone(),
                name: job.name.clone(),
                generation: job.generation,
            }),
            // The contents are reference-counted: three bundles hold them once.
            parts: parts.clone(),
            kill: kill.map(|by| Kill { by }),
        };
        bundle.digest = bundle_digest(&bundle);
        Arc::new(Packed::new(bundle))
    };
    Ok(Good {
        spec: job.spec.clone(),
        generation: job.generation,
        rules,
        capacity: capacity(&job.spec),
        pod_fields: pod_fields_digest(&job.spec, settings),
        plain: bundle(None),
        killed_by_policy: bundle(Some(KilledBy::Policy.text(&job.namespace, &job.name))),
        killed_by_namespace: bundle(Some(KilledBy::Namespace.text(&job.namespace, &job.name))),
    })
}

fn capacity(spec: &AgentPolicySpec) -> CapacityStatus {
    let sizing = size(spec);
    CapacityStatus { cpu: sizing.cpu(), summary: sizing.summary(), record: sizing.record }
}

fn part(name: &str, content: Vec<u8>) -> Part {
    let content = Bytes::from(content);
    Part { name: name.into(), digest: part_digest(&content), content: Some(content) }
}
