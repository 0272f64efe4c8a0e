//! The checks, in the order in which things break.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use sallyport_api::names::{self, conditions, reasons};
use sallyport_api::{AgentPolicyObject, CaptureMode};

use super::snapshot::{Scrape, Snapshot, guarded_and_running, is_guarded, opted_in};
use super::{Check, Found};

/// The CRD's version that this build was made with.
const CRD_VERSION: &str = "2";
/// A clock that is further off makes certificates and exceptions hold at the wrong time.
const MOST_SKEW_SECONDS: i64 = 30;
/// Below this the own authority should long have been renewed.
const LEAST_CA_SECONDS: f64 = 30.0 * 86_400.0;
/// Below this a serving certificate should long have been renewed.
const LEAST_SERVING_SECONDS: f64 = 3_600.0;

macro_rules! checks {
    ($($id:literal, $look:path, $title:literal, $hint:literal;)*) => {
        /// Every check.
        pub(crate) const ALL: &[Check] = &[$(Check { id: $id, title: $title, hint: $hint, look: $look }),*];
    };
}

checks! {
    "kubernetes-version", kubernetes_version, "Kubernetes is 1.33 or newer",
        "native sidecars are taken for granted: upgrade the cluster";
    "crd", crd, "the AgentPolicy CRD is installed and of this version",
        "helm upgrade --install sallyport-crds charts/sallyport-crds, before the main chart";
    "operator", operator, "the operator runs with every replica",
        "kubectl describe deploy/sallyport-operator -n sallyport-system";
    "operator-version", operator_version, "operator and this command are of one version",
        "helm upgrade sallyport, or take the command of the operator's version";
    "leader", leader, "a replica leads",
        "status is not written without a leader: look at the operator's logs and its Lease";
    "webhook-configuration", webhook_configuration, "the webhook configurations are there and fail closed",
        "helm upgrade sallyport: they are objects of the chart";
    "ca-bundle", ca_bundle, "every webhook trusts what the operator serves",
        "the operator's leader writes caBundle within seconds; its logs say why it could not";
    "webhook", webhook, "the webhook is reached and refuses what it must",
        "kubectl get endpointslices -n sallyport-system; a network policy may be in the way of the API server";
    "certificates", certificates, "certificates are far from their end",
        "the operator renews by itself; its logs say why it did not, and a restart renews at once";
    "clock", clock, "the operator's and the sidecars' clocks agree with this one",
        "set the clock of the node, or of this machine: exceptions and certificates go by it";
    "trust", trust, "every namespace with guarded pods has the operator's authorities",
        "the leader writes ConfigMap sallyport-trust; look at its logs";
    "policies", policies, "every policy is accepted",
        "kubectl describe agentpolicy; the condition Accepted names the place";
    "acks", acks, "every guarded pod enforces the newest generation",
        "sallyport status --stale names the pods";
    "unguarded-pods", unguarded_pods, "every pod that asked for it is guarded",
        "such a pod was made before the namespace was labelled: restart it";
    "sidecar-version", sidecar_version, "sidecars are of the operator's version",
        "restart the pods when it suits: kubectl rollout restart";
    "extproc", extproc, "every sidecar's filter serves, with a bundle in force",
        "kubectl logs POD -c sallyport-extproc";
    "envoy", envoy, "every sidecar's Envoy serves",
        "kubectl logs POD -c sallyport-envoy";
    "failed-open", failed_open, "nothing passed uninspected because a filter failed",
        "failurePolicy Open let calls pass: find out why the filter failed, or set Closed";
    "rollout", rollout, "no pod runs with older pod fields than its policy",
        "restart the pods: capture, isolation and capacity hold from a pod's start";
    "bench-record", bench_record, "sidecars are sized from a bench record",
        "sallyport bench --out policies/capacity/NAME.json on a node like yours";
    "advisory", advisory, "no policy relies on Explicit capture",
        "an agent can ignore proxy variables: use capture.mode CNI or Init";
    "privileged-pods", privileged_pods, "no privileged pod stands beside guarded ones",
        "whoever controls such a pod controls the node: move it to another namespace";
    "pod-security", pod_security, "pod security admits the capture container where it is needed",
        "kubectl label ns NAME pod-security.kubernetes.io/enforce=privileged";
    "cni", cni, "the CNI plugin is on every node, where a policy relies on it",
        "helm upgrade with --set cni.enabled=true; then kubectl describe daemonset/sallyport-cni -n sallyport-system";
    "captured", captured, "no sidecar waits for its pod to be captured, or for its policy",
        "kubectl describe pod names the reason; a pod that is not captured must be deleted";
    "killed", killed, "no kill switch is on",
        "kubectl annotate ns|agentpolicy NAME sallyport.dev/kill-";
}

/// `Ok` with this text where nothing is wrong, else the other with the list.
fn none(wrong: &[String], fine: &str, bad: fn(String) -> Found) -> Found {
    if wrong.is_empty() { Found::Ok(fine.into()) } else { bad(listed(wrong)) }
}

/// The first few, and how many more.
fn listed(all: &[String]) -> String {
    const MOST: usize = 5;
    let mut text = all.iter().take(MOST).cloned().collect::<Vec<_>>().join(", ");
    if all.len() > MOST {
        text = format!("{text} and {} more", all.len() - MOST);
    }
    text
}

fn full_name(object: &impl kube::ResourceExt) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

fn kubernetes_version(s: &Snapshot) -> Found {
    match s.version {
        Some((major, minor)) if (major, minor) >= (1, 33) => Found::Ok(format!("{major}.{minor}")),
        Some((major, minor)) => Found::Fail(format!("this one is {major}.{minor}")),
        None => Found::Unknown("the API server did not say".into()),
    }
}

fn crd(s: &Snapshot) -> Found {
    let Some(crd) = &s.crd else { return Found::Fail("agentpolicies.sallyport.dev is not there".into()) };
    match crd.annotations().get(names::CRD_VERSION).map(String::as_str) {
        Some(CRD_VERSION) => Found::Ok(format!("version {CRD_VERSION}")),
        Some(other) => Found::Fail(format!("version {other}, expected {CRD_VERSION}")),
        None => Found::Fail(format!("no version, expected {CRD_VERSION}")),
    }
}

fn operator(s: &Snapshot) -> Found {
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

fn operator_version(s: &Snapshot) -> Found {
    const OURS: &str = env!("CARGO_PKG_VERSION");
    let label = "app.kubernetes.io/version";
    match s.deployment.as_ref().and_then(|d| d.labels().get(label)) {
        Some(version) if version == OURS => Found::Ok(OURS.into()),
        Some(version) => Found::Warn(format!("operator {version}, this command {OURS}")),
        None => Found::Unknown(format!("the deployment has no label {label}")),
    }
}

fn leader(s: &Snapshot) -> Found {
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

fn webhook_configuration(s: &Snapshot) -> Found {
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

fn ca_bundle(s: &Snapshot) -> Found {
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

fn webhook(s: &Snapshot) -> Found {
    match &s.webhook {
        Some(Ok(_)) => Found::Ok("a bad policy was refused".into()),
        Some(Err(e)) => Found::Fail(e.clone()),
        None => Found::Unknown("there is no CRD to try it with".into()),
    }
}

/// What answered, or why nothing can be said.
fn answers(scrapes: &[Scrape]) -> Result<Vec<(&str, &super::metrics::Metrics)>, Found> {
    let all: Vec<_> =
        scrapes.iter().filter_map(|o| o.metrics.as_ref().ok().map(|m| (o.pod.as_str(), m))).collect();
    if all.is_empty() {
        let why = scrapes.iter().find_map(|o| o.metrics.as_ref().err()).cloned();
        return Err(Found::Unknown(why.unwrap_or_else(|| "nobody to ask".into())));
    }
    Ok(all)
}

fn certificates(s: &Snapshot) -> Found {
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

fn clock(s: &Snapshot) -> Found {
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

fn trust(s: &Snapshot) -> Found {
    let missing: Vec<_> = s
        .namespaces
        .iter()
        .filter(|n| opted_in(n) && s.trust.get(&n.name_any()).is_none_or(String::is_empty))
        .map(kube::ResourceExt::name_any)
        .collect();
    none(&missing, "all have them", Found::Fail)
}

fn condition<'p>(
    policy: &'p AgentPolicyObject,
    kind: &str,
) -> Option<&'p k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    policy.status.as_ref()?.conditions.iter().find(|c| c.type_ == kind)
}

fn policies(s: &Snapshot) -> Found {
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

fn acks(s: &Snapshot) -> Found {
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

fn unguarded_pods(s: &Snapshot) -> Found {
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

fn sidecar_version(s: &Snapshot) -> Found {
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

fn extproc(s: &Snapshot) -> Found {
    let mut wrong = not_ready(s, names::EXTPROC_CONTAINER);
    let silent = s.sidecars.iter().filter_map(|o| Some(format!("{}: {}", o.pod, o.metrics.as_ref().err()?)));
    wrong.extend(silent);
    none(&wrong, &format!("{} sidecars", s.sidecars.len()), Found::Fail)
}

fn envoy(s: &Snapshot) -> Found {
    none(&not_ready(s, names::ENVOY_CONTAINER), &format!("{} sidecars", s.sidecars.len()), Found::Fail)
}

fn failed_open(s: &Snapshot) -> Found {
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

fn rollout(s: &Snapshot) -> Found {
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

fn bench_record(s: &Snapshot) -> Found {
    let without: Vec<_> = s
        .policies
        .iter()
        .filter(|p| p.status.as_ref().is_some_and(|s| s.capacity.record.is_empty()))
        .map(full_name)
        .collect();
    none(&without, "all of them", Found::Warn)
}

fn advisory(s: &Snapshot) -> Found {
    let explicit: Vec<_> =
        s.policies.iter().filter(|p| p.spec.capture.mode == CaptureMode::Explicit).map(full_name).collect();
    none(&explicit, "none does", Found::Warn)
}

fn privileged_pods(s: &Snapshot) -> Found {
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

fn pod_security(s: &Snapshot) -> Found {
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

fn cni(s: &Snapshot) -> Found {
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

/// Pods whose sidecar runs and has not become ready for a minute.
fn captured(s: &Snapshot) -> Found {
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

fn killed(s: &Snapshot) -> Found {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;

    fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn state(id: &str, s: &Snapshot) -> &'static str {
        (ALL.iter().find(|c| c.id == id).unwrap().look)(s).state()
    }

    #[test]
    fn ids_are_unique_and_every_check_says_what_to_do() {
        let ids: BTreeSet<_> = ALL.iter().map(|c| c.id).collect();
        assert_eq!(ids.len(), ALL.len());
        assert!(ALL.len() >= 12);
        assert!(ALL.iter().all(|c| !c.hint.is_empty() && !c.title.is_empty()));
        let documented: Vec<_> = include_str!("../../../../docs/checks.md")
            .lines()
            .filter_map(|l| l.strip_prefix("### "))
            .collect();
        assert_eq!(documented, ALL.iter().map(|c| c.id).collect::<Vec<_>>());
    }

    #[test]
    fn an_empty_cluster_fails_where_something_is_missing() {
        let s = Snapshot::default();
        for id in ["crd", "operator", "leader", "webhook-configuration"] {
            assert_eq!(state(id, &s), "failed", "{id}");
        }
        for id in ["acks", "killed", "advisory", "failed-open", "privileged-pods"] {
            assert_eq!(state(id, &s), "ok", "{id}");
        }
    }

    #[test]
    fn capture_by_cni_needs_its_daemon_and_pods_that_wait_for_it_are_seen() {
        let mut s = Snapshot::default();
        assert_eq!((state("cni", &s), state("captured", &s)), ("ok", "ok"));
        s.policies = vec![from(json!({"metadata": {"name": "p", "namespace": "agents"},
            "spec": {"capture": {"mode": "CNI"}}}))];
        assert_eq!(state("cni", &s), "failed", "there is no daemon");
        for (ready, want) in [(1, "failed"), (2, "ok")] {
            s.cni = Some(from(json!({"metadata": {}, "status": {"desiredNumberScheduled": 2,
                "currentNumberScheduled": 2, "numberMisscheduled": 0, "numberReady": ready}})));
            assert_eq!(state("cni", &s), want, "{ready} of 2");
        }
        for (started, since, want) in [
            (false, "2026-01-01T00:00:00Z", "failed"),
            (true, "2026-01-01T00:00:00Z", "ok"),
            (false, "9999-01-01T00:00:00Z", "ok"),
        ] {
            s.pods = vec![from(json!({
                "metadata": {"name": "guarded", "namespace": "agents", "labels": {"sallyport.dev/guarded": "true"}},
                "status": {"phase": "Pending", "initContainerStatuses": [{
                    "name": "sallyport-extproc", "image": "x", "imageID": "x", "ready": false, "restartCount": 0,
                    "started": started, "state": {"running": {"startedAt": since}}}]},
            }))];
            assert_eq!(state("captured", &s), want, "started {started} since {since}");
        }
    }

    #[test]
    fn what_is_wrong_is_seen() {
        let mut s = Snapshot { version: Some((1, 32)), ..Snapshot::default() };
        s.namespaces = vec![from(json!({"metadata": {"name": "agents",
            "labels": {"sallyport.dev/inject": "required", "pod-security.kubernetes.io/enforce": "restricted"},
            "annotations": {"sallyport.dev/kill": "true"}}}))];
        s.policies = vec![from(json!({"metadata": {"name": "p", "namespace": "agents"}, "spec": {},
            "status": {"enforced": "1/2", "conditions": [
                {"type": "Accepted", "status": "False", "reason": "Invalid", "message": "line 3",
                 "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}))];
        s.pods = vec![
            from(json!({"metadata": {"name": "plain", "namespace": "agents"},
                "spec": {"hostPID": true, "containers": []}})),
            from(json!({"metadata": {"name": "guarded", "namespace": "agents",
                "labels": {"sallyport.dev/guarded": "true"}}, "status": {"phase": "Running"}})),
        ];
        for id in [
            "kubernetes-version",
            "policies",
            "acks",
            "unguarded-pods",
            "trust",
            "extproc",
            "envoy",
            "pod-security",
        ] {
            assert_eq!(state(id, &s), "failed", "{id}");
        }
        for id in ["killed", "privileged-pods", "bench-record"] {
            assert_eq!(state(id, &s), "warning", "{id}");
        }
        let found = super::policies(&s);
        assert!(matches!(found, Found::Fail(text) if text.contains("agents/p") && text.contains("line 3")));
    }

    #[test]
    fn an_open_filter_and_a_near_end_are_seen_in_metrics() {
        let scrape = |text: &str, skew| Scrape {
            pod: "a/b".into(),
            metrics: Ok(super::super::metrics::Metrics::parse(text)),
            skew: Some(skew),
        };
        let now = Timestamp::now().as_second();
        let ends = |ca: i64, serving: i64| {
            format!(
                "sallyport_operator_certificate_expiry_seconds{{certificate=\"ca\"}} {}\n\
                 sallyport_operator_certificate_expiry_seconds{{certificate=\"serving\"}} {}\n",
                now + ca,
                now + serving
            )
        };
        let year = 365 * 86_400;
        let fine = Snapshot { operators: vec![scrape(&ends(year, 80_000), 0)], ..Snapshot::default() };
        assert_eq!(state("certificates", &fine), "ok");
        let s = Snapshot {
            operators: vec![scrape(&ends(100, 80_000), 90)],
            sidecars: vec![scrape("envoy_http_transparent_ext_proc_failure_mode_allowed 2\n", 0)],
            ..Snapshot::default()
        };
        assert_eq!(state("certificates", &s), "failed");
        assert_eq!(state("failed-open", &s), "warning");
        assert_eq!(state("clock", &s), "failed");
    }
}
