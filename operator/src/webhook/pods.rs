//! `/mutate-pods` and `/validate-pods`.

use k8s_openapi::api::core::v1::Pod;
use kube::core::admission::Operation;
use sallyport_api::names;
use sallyport_plan::inject::{Facts, Outcome, Refusal, check_created, check_update};

use super::cluster::Surroundings;
use super::reports::Report;
use super::review::Request;
use super::{Admission, Answer, policies};

/// Policies that are compiled for one pod: somebody wrote them in the last moment, or they are invalid.
const MOST_NEW: usize = 4;

/// Makes a new pod a guarded pod, or says why not.
pub(super) async fn mutate(admission: &Admission, request: &Request) -> Answer {
    mutated(admission, request).await.unwrap_or_else(|answer| answer)
}

async fn mutated(admission: &Admission, request: &Request) -> Result<Answer, Answer> {
    if *request.operation() != Operation::Create || request.subresource().is_some() {
        return Ok(Answer::allowed("skipped", "NotACreation"));
    }
    let namespace = request.namespace()?;
    let pod: Pod = request.object()?;
    admission.cluster.ready()?;
    let decide = |s: &Surroundings| sallyport_plan::inject(&pod, &facts(namespace, s), &admission.settings);
    let outcome = admission.cluster.known(namespace).await?.map(|s| decide(&s));
    // The index may be a moment behind a label or a policy that was just written.
    let mut unsure = None;
    let outcome = match outcome {
        Some(guarded @ Outcome::Guarded(_)) => guarded,
        Some(refused @ Outcome::Refused(_)) => {
            fresh(admission, namespace, &mut unsure).await.map_or(refused, |s| decide(&s))
        }
        Some(Outcome::Skipped(_)) | None => decide(&fresh(admission, namespace, &mut unsure).await?),
    };
    // "There is no policy" would send its author looking for what is there.
    if let (Outcome::Refused(Refusal::NoPolicy { .. } | Refusal::PolicyNotFound { .. }), Some(busy)) =
        (&outcome, unsure)
    {
        return Err(busy);
    }
    let report = |reason: &'static str, warning: bool, note: String| {
        if !request.dry_run() {
            admission.reports.send(Report { regarding: regarding(&pod, namespace), reason, warning, note });
        }
    };
    match outcome {
        Outcome::Guarded(injection) => {
            let patch = difference(&pod, &injection.pod)?;
            let unchanged = patch.0.is_empty();
            if !unchanged {
                report(
                    names::reasons::INJECTED,
                    false,
                    format!("guarded by AgentPolicy {}", injection.policy),
                );
            }
            let reason = if unchanged { "Unchanged" } else { "Injected" };
            Ok(Answer::Allowed { outcome: "injected", reason, warnings: injection.warnings, patch })
        }
        Outcome::Refused(refusal) => {
            report(names::reasons::INJECTION_SKIPPED, true, format!("{}: {refusal}", refusal.reason()));
            Ok(denied(&refusal))
        }
        Outcome::Skipped(skip) => {
            let mut warnings = Vec::new();
            if asked(&pod) {
                warnings.push(format!("the pod is not guarded: {}: {skip}", skip.reason()));
                report(names::reasons::INJECTION_SKIPPED, true, format!("{}: {skip}", skip.reason()));
            }
            let patch = json_patch::Patch::default();
            Ok(Answer::Allowed { outcome: "skipped", reason: skip.reason(), warnings, patch })
        }
    }
}

/// Refuses changes that would take a guarded pod out of its guard; and new pods to which another webhook
/// did something after injection.
pub(super) async fn validate(admission: &Admission, request: &Request) -> Answer {
    validated(admission, request).await.unwrap_or_else(|answer| answer)
}

async fn validated(admission: &Admission, request: &Request) -> Result<Answer, Answer> {
    let namespace = request.namespace()?;
    let new: Pod = request.object()?;
    let old: Option<Pod> = match request.operation() {
        Operation::Update => Some(request.old_object()?),
        Operation::Create if request.subresource().is_none() => None,
        _ => return Ok(Answer::allowed("allowed", "NotAChange")),
    };
    admission.cluster.ready()?;
    let decide = |s: &Surroundings| match &old {
        Some(old) => check_update(old, &new, &facts(namespace, s)),
        None => check_created(&new, &facts(namespace, s), &admission.settings),
    };
    let decided = match admission.cluster.known(namespace).await?.map(|s| decide(&s)) {
        Some(Ok(())) => Ok(()),
        Some(Err(refusal)) => {
            fresh(admission, namespace, &mut None).await.map_or(Err(refusal), |s| decide(&s))
        }
        None => decide(&fresh(admission, namespace, &mut None).await?),
    };
    Ok(match decided {
        Ok(()) => Answer::allowed("allowed", "Valid"),
        Err(refusal) => denied(&refusal),
    })
}

/// What the API server says now. Policies that the index does not know are compiled here, as the index
/// will: one that can't be loaded guards no pod. Where it was not found out in time whether one can,
/// `unsure` is the answer that says so.
async fn fresh(
    admission: &Admission,
    namespace: &str,
    unsure: &mut Option<Answer>,
) -> Result<Surroundings, Answer> {
    let (mut surroundings, new) = admission.cluster.fresh(namespace).await?;
    for policy in new.into_iter().take(MOST_NEW) {
        match policies::compile(admission, policy.spec.clone()).await {
            Ok(()) => surroundings.policies.push(policy),
            Err(answer @ Answer::Failed { .. }) => *unsure = Some(answer),
            Err(_) => {}
        }
    }
    Ok(surroundings)
}

fn facts<'a>(namespace: &'a str, surroundings: &'a Surroundings) -> Facts<'a> {
    Facts {
        namespace,
        namespace_inject: surroundings.labels.get(names::INJECT).map(String::as_str),
        policies: &surroundings.policies,
        limit_ranges: &surroundings.limit_ranges,
    }
}

fn denied(refusal: &Refusal) -> Answer {
    Answer::denied(403, refusal.reason(), refusal.to_string())
}

/// Both sides are what our types know of a pod, so a field that only a newer API server knows is in
/// neither, and no operation takes it away.
fn difference(before: &Pod, after: &Pod) -> Result<json_patch::Patch, Answer> {
    let json = |pod: &Pod| {
        serde_json::to_value(pod)
            .map_err(|e| Answer::failed("InternalError", format!("writing the pod: {e}")))
    };
    Ok(json_patch::diff(&json(before)?, &json(after)?))
}

/// Whether the pod itself asks to be guarded.
fn asked(pod: &Pod) -> bool {
    [&pod.metadata.labels, &pod.metadata.annotations]
        .into_iter()
        .flatten()
        .any(|m| m.get(names::INJECT).is_some_and(|v| v == "true"))
}

/// Whom an Event is about: the pod's owner; a pod without one by its name, which has no uid yet.
fn regarding(pod: &Pod, namespace: &str) -> k8s_openapi::api::core::v1::ObjectReference {
    let metadata = &pod.metadata;
    let owners = metadata.owner_references.iter().flatten();
    let owner = owners.clone().find(|o| o.controller == Some(true)).or_else(|| owners.clone().next());
    let named = || metadata.name.clone().or_else(|| metadata.generate_name.clone());
    k8s_openapi::api::core::v1::ObjectReference {
        api_version: Some(owner.map_or_else(|| "v1".into(), |o| o.api_version.clone())),
        kind: Some(owner.map_or_else(|| "Pod".into(), |o| o.kind.clone())),
        name: owner.map(|o| o.name.clone()).or_else(named),
        uid: owner.map(|o| o.uid.clone()),
        namespace: Some(namespace.to_owned()),
        ..Default::default()
    }
}
