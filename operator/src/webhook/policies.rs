//! `/validate-policies`: whether a policy can be loaded, by the code that will load it.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::core::DynamicObject;
use kube::core::admission::Operation;
use sallyport_api::{
    AgentPolicyObject, AgentPolicySpec, CaptureMode, DefaultAction, EgressAction, FailurePolicy, Mode,
    load_policy,
};
use sallyport_engine::Engine;
use serde_json::Value;

use super::review::Request;
use super::{Admission, Answer};

/// How long compiling may take; below the deadline of an answer, so that the reason is told.
const COMPILE: Duration = Duration::from_secs(3);

/// Refuses a policy that no sidecar could load.
pub(super) async fn validate(admission: &Admission, request: &Request) -> Answer {
    validated(admission, request).await.unwrap_or_else(|answer| answer)
}

async fn validated(admission: &Admission, request: &Request) -> Result<Answer, Answer> {
    if !matches!(request.operation(), Operation::Create | Operation::Update)
        || request.subresource().is_some()
    {
        return Ok(Answer::allowed("allowed", "NotAChange"));
    }
    // Labels and annotations change (the kill switch is one), also of a policy that an older operator let
    // in and this one would refuse.
    if let (Some(old), Some(new)) = (request.old_json(), request.json())
        && old.data.get("spec") == new.data.get("spec")
    {
        return Ok(Answer::allowed("allowed", "Unchanged"));
    }
    let policy: AgentPolicyObject = request.object()?;
    if let Some(object) = request.json() {
        check(object)?;
    }
    let spec = policy.spec;
    let load = sallyport_plan::size(&spec).load_percent;
    compile(admission, spec.clone()).await?;
    let mut warnings = warnings(&spec, admission.settings.cni, Timestamp::now());
    if load > 100 {
        warnings.push(format!("spec.capacity: the stated load takes {load} % of what the sidecar gets"));
    }
    let patch = json_patch::Patch::default();
    Ok(Answer::Allowed { outcome: "allowed", reason: "Valid", warnings, patch })
}

fn invalid(message: String) -> Answer {
    Answer::denied(422, "Invalid", message)
}

/// The checks that a policy file goes through.
fn check(object: &DynamicObject) -> Result<(), Answer> {
    let named = object.metadata.name.clone().or_else(|| object.metadata.generate_name.clone());
    let document = serde_json::json!({
        "apiVersion": sallyport_api::API_VERSION,
        "kind": sallyport_api::KIND,
        "metadata": {"name": named},
        "spec": object.data.get("spec").unwrap_or(&Value::Null),
    });
    load_policy(&document.to_string()).map(|_| ()).map_err(|e| invalid(e.to_string()))
}

/// Compiles a policy, on a thread for such work, within bounds.
pub(super) async fn compile(admission: &Admission, spec: AgentPolicySpec) -> Result<(), Answer> {
    let Ok(slot) = tokio::time::timeout(COMPILE, Arc::clone(&admission.compilers).acquire_owned()).await
    else {
        return Err(Answer::failed("Busy", "other policies are being compiled; try again".into()));
    };
    let compiling = tokio::task::spawn_blocking(move || {
        // Held until the work has ended, also when nobody waits for it any more.
        let _slot = slot;
        Engine::new(&spec).map(|_| ()).map_err(|e| e.to_string())
    });
    match tokio::time::timeout(COMPILE, compiling).await {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(error))) => Err(invalid(error)),
        Ok(Err(error)) => {
            Err(Answer::denied(500, "InternalError", format!("compiling the policy failed: {error}")))
        }
        // Mostly it is this replica that is busy, and the same policy is compiled in time a moment later.
        Err(_) => Err(Answer::failed(
            "Busy",
            format!("it takes longer than {} s to compile; try again", COMPILE.as_secs()),
        )),
    }
}

/// What is legal and yet may not be what was meant.
fn warnings(spec: &AgentPolicySpec, cni: bool, now: Timestamp) -> Vec<String> {
    let mut out = Vec::new();
    let mut warn = |text: String| out.push(text);
    if spec.mode == Mode::Observe {
        warn("spec.mode is Observe: decisions are recorded, nothing is blocked".into());
    }
    if spec.failure_policy == FailurePolicy::Open {
        warn("spec.failurePolicy is Open: what can't be inspected passes".into());
    }
    if spec.capture.mode == CaptureMode::Explicit {
        warn("spec.capture.mode is Explicit: advisory, nothing forces the agent through the sidecar".into());
    }
    if spec.capture.mode == CaptureMode::Cni && !cni {
        warn(
            "spec.capture.mode is CNI, and this installation has no CNI plugin on its nodes: pods of this policy \
             are refused; helm upgrade with --set cni.enabled=true"
                .into(),
        );
    }
    if !spec.capture.exclude_cidrs.is_empty() || !spec.capture.exclude_ports.is_empty() {
        warn("spec.capture excludes connections: they go past the sidecar, uninspected".into());
    }
    if spec.egress.default == DefaultAction::Allow {
        warn("spec.egress.default is Allow: every destination that no rule names can be called".into());
    }
    for (i, rule) in spec.egress.rules.iter().enumerate() {
        if rule.action == EgressAction::Allow && rule.hosts.iter().any(|h| h == "*") {
            warn(format!("spec.egress.rules[{i}].hosts: `*` allows every destination"));
        }
    }
    for (i, exception) in spec.exceptions.iter().enumerate().filter(|(_, e)| e.until <= now) {
        warn(format!(
            "spec.exceptions[{i}]: `{}` ended at {} and holds no longer",
            exception.id, exception.until
        ));
    }
    out
}
