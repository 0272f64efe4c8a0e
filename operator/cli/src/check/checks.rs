//! The checks, in the order in which things break.

mod installation;
mod pods;
mod policies;

use super::metrics::Metrics;
use super::snapshot::Scrape;
use super::{Check, Found};

macro_rules! checks {
    ($($id:literal, $look:path, $title:literal, $hint:literal;)*) => {
        /// Every check.
        pub(crate) const ALL: &[Check] = &[$(Check { id: $id, title: $title, hint: $hint, look: $look }),*];
    };
}

checks! {
    "kubernetes-version", installation::kubernetes_version, "Kubernetes is 1.33 or newer",
        "native sidecars are taken for granted: upgrade the cluster";
    "crd", installation::crd, "the AgentPolicy CRD is installed and of this version",
        "helm upgrade --install sallyport-crds charts/sallyport-crds, before the main chart";
    "operator", installation::operator, "the operator runs with every replica",
        "kubectl describe deploy/sallyport-operator -n sallyport-system";
    "operator-version", installation::operator_version, "operator and this command are of one version",
        "helm upgrade sallyport, or take the command of the operator's version";
    "leader", installation::leader, "a replica leads",
        "status is not written without a leader: look at the operator's logs and its Lease";
    "webhook-configuration", installation::webhook_configuration, "the webhook configurations are there and fail closed",
        "helm upgrade sallyport: they are objects of the chart";
    "ca-bundle", installation::ca_bundle, "every webhook trusts what the operator serves",
        "the operator's leader writes caBundle within seconds; its logs say why it could not";
    "webhook", installation::webhook, "the webhook is reached and refuses what it must",
        "kubectl get endpointslices -n sallyport-system; a network policy may be in the way of the API server";
    "certificates", installation::certificates, "certificates are far from their end",
        "the operator renews by itself; its logs say why it did not, and a restart renews at once";
    "clock", installation::clock, "the operator's and the sidecars' clocks agree with this one",
        "set the clock of the node, or of this machine: exceptions and certificates go by it";
    "trust", installation::trust, "every namespace with guarded pods has the operator's authorities",
        "the leader writes ConfigMap sallyport-trust; look at its logs";
    "policies", policies::policies, "every policy is accepted",
        "kubectl describe agentpolicy; the condition Accepted names the place";
    "acks", policies::acks, "every guarded pod enforces the newest generation",
        "sallyport status --stale names the pods";
    "unguarded-pods", pods::unguarded_pods, "every pod that asked for it is guarded",
        "such a pod was made before the namespace was labelled: restart it";
    "sidecar-version", pods::sidecar_version, "sidecars are of the operator's version",
        "restart the pods when it suits: kubectl rollout restart";
    "extproc", pods::extproc, "every sidecar's filter serves, with a bundle in force",
        "kubectl logs POD -c sallyport-extproc";
    "envoy", pods::envoy, "every sidecar's Envoy serves",
        "kubectl logs POD -c sallyport-envoy";
    "failed-open", pods::failed_open, "nothing passed uninspected because a filter failed",
        "failurePolicy Open let calls pass: find out why the filter failed, or set Closed";
    "rollout", policies::rollout, "no pod runs with older pod fields than its policy",
        "restart the pods: capture, isolation and capacity hold from a pod's start";
    "bench-record", policies::bench_record, "sidecars are sized from a bench record",
        "sallyport bench --out policies/capacity/NAME.json on a node like yours";
    "advisory", policies::advisory, "no policy relies on Explicit capture",
        "an agent can ignore proxy variables: use capture.mode CNI or Init";
    "privileged-pods", pods::privileged_pods, "no privileged pod stands beside guarded ones",
        "whoever controls such a pod controls the node: move it to another namespace";
    "pod-security", pods::pod_security, "pod security admits the capture container where it is needed",
        "kubectl label ns NAME pod-security.kubernetes.io/enforce=privileged";
    "cni", installation::cni, "the CNI plugin is on every node, where a policy relies on it",
        "helm upgrade with --set cni.enabled=true; then kubectl describe daemonset/sallyport-cni -n sallyport-system";
    "captured", pods::captured, "no sidecar waits for its pod to be captured, or for its policy",
        "kubectl describe pod names the reason; a pod that is not captured must be deleted";
    "killed", policies::killed, "no kill switch is on",
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

/// What answered, or why nothing can be said.
fn answers(scrapes: &[Scrape]) -> Result<Vec<(&str, &Metrics)>, Found> {
    let all: Vec<_> =
        scrapes.iter().filter_map(|o| o.metrics.as_ref().ok().map(|m| (o.pod.as_str(), m))).collect();
    if all.is_empty() {
        let why = scrapes.iter().find_map(|o| o.metrics.as_ref().err()).cloned();
        return Err(Found::Unknown(why.unwrap_or_else(|| "nobody to ask".into())));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;
    use crate::check::snapshot::Snapshot;

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
        let found = policies::policies(&s);
        assert!(matches!(found, Found::Fail(text) if text.contains("agents/p") && text.contains("line 3")));
    }

    #[test]
    fn an_open_filter_and_a_near_end_are_seen_in_metrics() {
        let scrape = |text: &str, skew| Scrape {
            pod: "a/b".into(),
            metrics: Ok(Metrics::parse(text)),
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
