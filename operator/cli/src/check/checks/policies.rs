//! Checks of policies, by what their status and their fields say.

use kube::ResourceExt as _;
use sallyport_api::names::{self, conditions, reasons};
use sallyport_api::{AgentPolicyObject, CaptureMode};

use super::{full_name, none};
use crate::check::Found;
use crate::check::snapshot::Snapshot;

fn condition<'p>(
    policy: &'p AgentPolicyObject,
    kind: &str,
) -> Option<&'p k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    policy.status.as_ref()?.conditions.iter().find(|c| c.type_ == kind)
}

pub(super) fn policies(s: &Snapshot) -> Found {
    let wrong: Vec<_> = s
        .policies
        .iter()
        .filter_map(|p| match condition(p, conditions::ACCEPTED) {
            Some(c) if c.status == "True" => None,
            Some(c) => Some(format!("{}: {}: {}", full_name(p), c.reason, c.message)),
            None => Some(format!("{} has no status yet", full_name(p))),
        })
        .collect();
    none(&wrong, &format!("{} policies", s.policies.len()), Found::Fail)
}

pub(super) fn acks(s: &Snapshot) -> Found {
    let behind: Vec<_> = s
        .policies
        .iter()
        .filter_map(|p| {
            let enforced = p.status.as_ref().map(|s| s.enforced.clone()).unwrap_or_default();
            let (n, m) = enforced.split_once('/')?;
            (n != m).then(|| format!("{} in {enforced} pods", full_name(p)))
        })
        .collect();
    none(&behind, "all of them", Found::Fail)
}

pub(super) fn rollout(s: &Snapshot) -> Found {
    let stale: Vec<_> = s
        .policies
        .iter()
        .filter_map(|p| {
            let c = condition(p, conditions::ROLLOUT_REQUIRED).filter(|c| c.status == "True")?;
            Some(format!("{}: {}", full_name(p), c.message))
        })
        .collect();
    none(&stale, "none", Found::Warn)
}

pub(super) fn bench_record(s: &Snapshot) -> Found {
    let without: Vec<_> = s
        .policies
        .iter()
        .filter(|p| p.status.as_ref().is_some_and(|s| s.capacity.record.is_empty()))
        .map(full_name)
        .collect();
    none(&without, "all of them", Found::Warn)
}

pub(super) fn advisory(s: &Snapshot) -> Found {
    let explicit: Vec<_> =
        s.policies.iter().filter(|p| p.spec.capture.mode == CaptureMode::Explicit).map(full_name).collect();
    none(&explicit, "none does", Found::Warn)
}

pub(super) fn killed(s: &Snapshot) -> Found {
    let on = |annotation: Option<&String>| annotation.is_some_and(|v| !v.is_empty() && v != "false");
    let namespaces = s.namespaces.iter().filter(|n| on(n.annotations().get(names::KILL)));
    let policies = s.policies.iter().filter(|p| {
        on(p.annotations().get(names::KILL))
            || condition(p, conditions::ENFORCED).is_some_and(|c| c.reason == reasons::KILLED)
    });
    let all: Vec<_> = namespaces
        .map(|n| format!("namespace {}", n.name_any()))
        .chain(policies.map(|p| format!("agentpolicy {}", full_name(p))))
        .collect();
    none(&all, "none", Found::Warn)
}
