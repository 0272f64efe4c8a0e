//! Checks of what was installed: the cluster, the operator, its webhooks, its certificates, the CNI plugin.

use jiff::Timestamp;
use kube::ResourceExt as _;
use sallyport_api::{CaptureMode, names};

use super::{answers, listed, none};
use crate::check::Found;
use crate::check::snapshot::{Snapshot, opted_in};

/// The CRD's version that this build was made with.
const CRD_VERSION: &str = "2";
/// A clock that is further off makes certificates and exceptions hold at the wrong time.
const MOST_SKEW_SECONDS: i64 = 30;
/// Below this the own authority should long have been renewed.
const LEAST_CA_SECONDS: f64 = 30.0 * 86_400.0;
/// Below this a serving certificate should long have been renewed.
const LEAST_SERVING_SECONDS: f64 = 3_600.0;

pub(super) fn kubernetes_version(s: &Snapshot) -> Found {
    match s.version {
        Some((major, minor)) if (major, minor) >= (1, 33) => Found::Ok(format!("{major}.{minor}")),
        Some((major, minor)) => Found::Fail(format!("this one is {major}.{minor}")),
        None => Found::Unknown("the API server did not say".into()),
    }
}

pub(super) fn crd(s: &Snapshot) -> Found {
    let Some(crd) = &s.crd else { return Found::Fail("agentpolicies.sallyport.dev is not there".into()) };
    match crd.annotations().get(names::CRD_VERSION).map(String::as_str) {
        Some(CRD_VERSION) => Found::Ok(format!("version {CRD_VERSION}")),
        Some(other) => Found::Fail(format!("version {other}, expected {CRD_VERSION}")),
        None => Found::Fail(format!("no version, expected {CRD_VERSION}")),
    }
}

pub(super) fn operator(s: &Snapshot) -> Found {
    let Some(deployment) = &s.deployment else {
        return Found::Fail("deployment sallyport-operator is not there".into());
    };
    let wanted = deployment.spec.as_ref().and_then(|s| s.replicas).unwrap_or(1);
    let ready = deployment.status.as_ref().and_then(|s| s.ready_replicas).unwrap_or(0);
    let text = format!("{ready} of {wanted} replicas are ready");
    match ready {
        0 => Found::Fail(text),
        n if n < wanted => Found::Warn(text),
        _ => Found::Ok(text),
    }
}

pub(super) fn operator_version(s: &Snapshot) -> Found {
    const OURS: &str = env!("CARGO_PKG_VERSION");
    let label = "app.kubernetes.io/version";
    match s.deployment.as_ref().and_then(|d| d.labels().get(label)) {
        Some(version) if version == OURS => Found::Ok(OURS.into()),
        Some(version) => Found::Warn(format!("operator {version}, this command {OURS}")),
        None => Found::Unknown(format!("the deployment has no label {label}")),
    }
}

pub(super) fn leader(s: &Snapshot) -> Found {
    let Some(spec) = s.lease.as_ref().and_then(|l| l.spec.as_ref()) else {
        return Found::Fail("lease sallyport-operator is not there".into());
    };
    let holder = spec.holder_identity.clone().unwrap_or_default();
    let age = spec.renew_time.as_ref().map(|t| Timestamp::now().as_second() - t.0.as_second());
    let limit = i64::from(spec.lease_duration_seconds.unwrap_or(15)) + MOST_SKEW_SECONDS;
    match age {
        Some(age) if !holder.is_empty() && age <= limit => {
            Found::Ok(format!("{holder}, renewed {age} s ago"))
        }
        Some(age) => Found::Fail(format!("holder {holder:?}, renewed {age} s ago")),
        None => Found::Fail("nobody ever led".into()),
    }
}

/// Name, failure policy and caBundle of every webhook.
fn webhooks(s: &Snapshot) -> Vec<(String, Option<String>, Vec<u8>)> {
    let bundle = |c: &k8s_openapi::api::admissionregistration::v1::WebhookClientConfig| {
        c.ca_bundle.as_ref().map(|b| b.0.clone()).unwrap_or_default()
    };
    let mutating = s.mutating.iter().flat_map(|c| c.webhooks.iter().flatten());
    let validating = s.validating.iter().flat_map(|c| c.webhooks.iter().flatten());
    mutating
        .map(|w| (w.name.clone(), w.failure_policy.clone(), bundle(&w.client_config)))
        .chain(validating.map(|w| (w.name.clone(), w.failure_policy.clone(), bundle(&w.client_config))))
        .collect()
}

pub(super) fn webhook_configuration(s: &Snapshot) -> Found {
    if s.mutating.is_none() || s.validating.is_none() {
        return Found::Fail("webhook configuration `sallyport` is not there".into());
    }
    let all = webhooks(s);
    let open: Vec<_> = all
        .iter()
        .filter(|(_, policy, _)| policy.as_deref().is_some_and(|p| p != "Fail"))
        .map(|(name, ..)| format!("{name} lets pass when it fails"))
        .collect();
    none(&open, &format!("{} webhooks", all.len()), Found::Warn)
}

pub(super) fn ca_bundle(s: &Snapshot) -> Found {
    let all = webhooks(s);
    if all.is_empty() {
        return Found::Unknown("there are no webhooks".into());
    }
    let empty: Vec<_> = all.iter().filter(|w| w.2.is_empty()).map(|w| format!("{} has none", w.0)).collect();
    if !empty.is_empty() {
        return Found::Fail(listed(&empty));
    }
    let differ = all.iter().any(|w| w.2 != all[0].2);
    let foreign = s.trust.iter().find(|(_, bundle)| bundle.trim().as_bytes() != all[0].2.trim_ascii());
    match (differ, foreign) {
        (true, _) => Found::Fail("the webhooks have different ones".into()),
        (_, Some((namespace, _))) => {
            Found::Warn(format!("the trust bundle of namespace {namespace} differs"))
        }
        _ => Found::Ok("the same in every webhook and namespace".into()),
    }
}

pub(super) fn webhook(s: &Snapshot) -> Found {
    match &s.webhook {
        Some(Ok(_)) => Found::Ok("a bad policy was refused".into()),
        Some(Err(e)) => Found::Fail(e.clone()),
        None => Found::Unknown("there is no CRD to try it with".into()),
    }
}

pub(super) fn certificates(s: &Snapshot) -> Found {
    let all = match answers(&s.operators) {
        Ok(all) => all,
        Err(found) => return found,
    };
    // The metric is the instant of the end, in seconds since 1970.
    let now = Timestamp::now().as_second() as f64;
    let mut near = Vec::new();
    let mut least = f64::INFINITY;
    for (pod, metrics) in all {
        for (kind, limit) in [("ca", LEAST_CA_SECONDS), ("serving", LEAST_SERVING_SECONDS)] {
            let label = format!("certificate=\"{kind}\"");
            let end = metrics.least("sallyport_operator_certificate_expiry_seconds", &label);
            match end.map(|end| end - now) {
                Some(left) if left < limit => near.push(format!("{pod}: {kind} ends in {left:.0} s")),
                Some(left) => least = least.min(left),
                None => near.push(format!("{pod} says nothing of {kind}")),
            }
        }
    }
    none(&near, &format!("the next ends in {:.0} h", least / 3600.0), Found::Fail)
}

pub(super) fn clock(s: &Snapshot) -> Found {
    let skews: Vec<_> =
        s.operators.iter().chain(&s.sidecars).filter_map(|o| Some((o.pod.clone(), o.skew?))).collect();
    if skews.is_empty() {
        return Found::Unknown("nobody told the time".into());
    }
    let off: Vec<_> = skews
        .iter()
        .filter(|(_, skew)| skew.abs() > MOST_SKEW_SECONDS)
        .map(|(pod, skew)| format!("{pod} is {skew} s ahead"))
        .collect();
    none(&off, &format!("{} within {MOST_SKEW_SECONDS} s", skews.len()), Found::Fail)
}

pub(super) fn trust(s: &Snapshot) -> Found {
    let missing: Vec<_> = s
        .namespaces
        .iter()
        .filter(|n| opted_in(n) && s.trust.get(&n.name_any()).is_none_or(String::is_empty))
        .map(kube::ResourceExt::name_any)
        .collect();
    none(&missing, "all have them", Found::Fail)
}

pub(super) fn cni(s: &Snapshot) -> Found {
    let relying = s.policies.iter().filter(|p| p.spec.capture.mode == CaptureMode::Cni).count();
    let status = s.cni.as_ref().and_then(|d| d.status.as_ref());
    match (relying, status) {
        (0, None) => Found::Ok("no policy relies on it".into()),
        (n, None) => Found::Fail(format!("DaemonSet sallyport-cni is not there; {n} policies rely on it")),
        (n, Some(status)) => {
            let nodes = status.desired_number_scheduled;
            let said = format!("ready on {} of {nodes} nodes", status.number_ready);
            match n {
                _ if status.number_ready >= nodes => Found::Ok(said),
                0 => Found::Warn(said),
                _ => Found::Fail(said),
            }
        }
    }
}
