//! Checks of pods, their sidecars, and what stands beside them.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use sallyport_api::{AgentPolicyObject, CaptureMode, names};

use super::{answers, full_name, none};
use crate::check::Found;
use crate::check::snapshot::{Snapshot, guarded_and_running, is_guarded, opted_in};

pub(super) fn unguarded_pods(s: &Snapshot) -> Found {
    let label = |p: &Pod| {
        p.namespace().and_then(|n| {
            s.namespaces.iter().find(|x| x.name_any() == n)?.labels().get(names::INJECT).cloned()
        })
    };
    let asked = |p: &Pod| {
        p.labels()
            .get(names::INJECT)
            .or_else(|| p.annotations().get(names::INJECT))
            .is_some_and(|v| v == "true")
    };
    let missed: Vec<_> = s
        .pods
        .iter()
        .filter(|p| !is_guarded(p) && p.metadata.deletion_timestamp.is_none())
        .filter(|p| label(p).as_deref() == Some("required") || asked(p))
        .map(full_name)
        .collect();
    none(&missed, "none was missed", Found::Fail)
}

pub(super) fn sidecar_version(s: &Snapshot) -> Found {
    const OURS: &str = env!("CARGO_PKG_VERSION");
    let operator = s.deployment.as_ref().and_then(|d| d.labels().get("app.kubernetes.io/version").cloned());
    let wanted = operator.unwrap_or_else(|| OURS.to_owned());
    let other: Vec<_> = s
        .subscribers
        .iter()
        .filter(|p| p.version != wanted)
        .map(|p| format!("{}/{} is {}", p.namespace, p.pod, p.version))
        .collect();
    none(&other, &format!("{} are {wanted}", s.subscribers.len()), Found::Warn)
}

/// Guarded pods whose container of that name is not ready.
fn not_ready(s: &Snapshot, container: &str) -> Vec<String> {
    let ready = |p: &Pod| {
        let list = p.status.as_ref().and_then(|s| s.init_container_statuses.as_ref());
        list.into_iter().flatten().any(|c| c.name == container && c.ready)
    };
    s.pods.iter().filter(|p| guarded_and_running(p) && !ready(p)).map(full_name).collect()
}

pub(super) fn extproc(s: &Snapshot) -> Found {
    let mut wrong = not_ready(s, names::EXTPROC_CONTAINER);
    let silent = s.sidecars.iter().filter_map(|o| Some(format!("{}: {}", o.pod, o.metrics.as_ref().err()?)));
    wrong.extend(silent);
    none(&wrong, &format!("{} sidecars", s.sidecars.len()), Found::Fail)
}

pub(super) fn envoy(s: &Snapshot) -> Found {
    none(&not_ready(s, names::ENVOY_CONTAINER), &format!("{} sidecars", s.sidecars.len()), Found::Fail)
}

pub(super) fn failed_open(s: &Snapshot) -> Found {
    if s.sidecars.is_empty() {
        return Found::Ok("no sidecar runs".into());
    }
    let all = match answers(&s.sidecars) {
        Ok(all) => all,
        Err(found) => return found,
    };
    let open: Vec<_> = all
        .iter()
        .map(|(pod, m)| (pod, m.sum_of_suffix("ext_proc_failure_mode_allowed")))
        .filter(|(_, n)| *n > 0.0)
        .map(|(pod, n)| format!("{pod}: {n:.0} calls"))
        .collect();
    none(&open, "none", Found::Warn)
}

pub(super) fn privileged_pods(s: &Snapshot) -> Found {
    let beside: std::collections::BTreeSet<_> =
        s.pods.iter().filter(|p| is_guarded(p)).filter_map(kube::ResourceExt::namespace).collect();
    let privileged = |p: &Pod| {
        let Some(spec) = &p.spec else { return false };
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        spec.host_pid == Some(true)
            || spec.host_network == Some(true)
            || containers.filter_map(|c| c.security_context.as_ref()).any(|c| c.privileged == Some(true))
    };
    let wrong: Vec<_> = s
        .pods
        .iter()
        .filter(|p| !is_guarded(p) && p.namespace().is_some_and(|n| beside.contains(&n)) && privileged(p))
        .map(full_name)
        .collect();
    none(&wrong, "none", Found::Warn)
}

pub(super) fn pod_security(s: &Snapshot) -> Found {
    let wrong: Vec<_> = s
        .namespaces
        .iter()
        .filter(|n| opted_in(n))
        .filter(|n| n.labels().get("pod-security.kubernetes.io/enforce").is_some_and(|l| l != "privileged"))
        .filter(|n| {
            let init = |p: &&AgentPolicyObject| p.spec.capture.mode == CaptureMode::Init;
            s.policies.iter().filter(init).any(|p| p.namespace().as_deref() == Some(n.name_any().as_str()))
        })
        .map(kube::ResourceExt::name_any)
        .collect();
    none(&wrong, "everywhere", Found::Fail)
}

/// Pods whose sidecar runs and has not become ready for a minute.
pub(super) fn captured(s: &Snapshot) -> Found {
    const LONG_SECONDS: i64 = 60;
    let waits = |p: &Pod| {
        let statuses = p.status.iter().flat_map(|s| s.init_container_statuses.iter().flatten());
        statuses.filter(|c| c.name == names::EXTPROC_CONTAINER && c.started != Some(true)).any(|c| {
            let running = c.state.as_ref().and_then(|s| s.running.as_ref());
            let since = running.and_then(|r| r.started_at.as_ref());
            since.is_some_and(|t| Timestamp::now().as_second() - t.0.as_second() > LONG_SECONDS)
        })
    };
    let wrong: Vec<_> = s.pods.iter().filter(|p| is_guarded(p) && waits(p)).map(full_name).collect();
    none(&wrong, "none does", Found::Fail)
}
