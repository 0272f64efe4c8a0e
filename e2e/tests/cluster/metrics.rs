//! What is counted, and what is never written down.

use std::collections::BTreeSet;

use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{
    Namespace, OPERATOR, SYSTEM, await_condition, helm, installed, kubectl, name_of, pods_of,
};
use sallyport_e2e::messages::chat;
use sallyport_e2e::upstream::fake_key;
use serde_json::Value;

/// A scrape by way of the API server, as someone without a way to the pod makes it.
fn scrape(namespace: &str, pod: &str, port: u16) -> String {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics");
    kubectl(&["get", "--raw", &path]).unwrap_or_else(|e| panic!("{e}")).stdout
}

fn operators() -> String {
    let mut pods = pods_of(SYSTEM, OPERATOR).unwrap();
    pods.retain(|pod| pod["status"]["phase"] == "Running");
    pods.iter().map(|pod| scrape(SYSTEM, name_of(pod), 8080)).collect()
}

/// The sum of the samples whose line holds all of these.
fn sum(text: &str, name: &str, labels: &[&str]) -> f64 {
    text.lines()
        .filter(|l| l.split(['{', ' ']).next() == Some(name) && labels.iter().all(|w| l.contains(w)))
        .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// Every text under one of these keys, at any depth.
fn texts(value: &Value, keys: &[&str], into: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if keys.contains(&key.as_str()) => into.push(text.clone()),
                    other => texts(other, keys, into),
                }
            }
        }
        Value::Array(all) => all.iter().for_each(|v| texts(v, keys, into)),
        _ => {}
    }
}

fn dashboard() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/sallyport/dashboards/sallyport.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Every metric that an expression of the dashboard names.
fn named_by_the_dashboard() -> BTreeSet<String> {
    let mut all = Vec::new();
    texts(&dashboard(), &["expr", "query"], &mut all);
    all.iter()
        .flat_map(|text| text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')))
        .filter(|word| {
            word.starts_with("sallyport_")
                || word.starts_with("envoy_") && *word != "envoy_response_code_class"
        })
        .map(str::to_owned)
        .collect()
}

#[test]
fn calls_are_counted_with_their_reason_and_no_payload_is_written_down() {
    let namespace = Namespace::enabled("metrics");
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    namespace.await_enforced("usual", 1);
    let mark = "zebra-payload-7431";
    let chat_url = format!("http://{host}/v1/chat/completions?note={mark}");
    let _ = pod.agent.call(&Call::get(format!("http://{host}/api/orders"))).unwrap().expect_status(200);
    let clean = Call::post_json(chat_url.as_str(), &chat("demo", mark, false)).header("x-note", mark);
    let _ = pod.agent.call(&clean).unwrap().expect_status(200);
    let key = format!("{mark} my key is {}", fake_key());
    let bad = Call::post_json(chat_url.as_str(), &chat("demo", &key, false)).header("x-note", mark);
    let _ = pod.agent.call(&bad).unwrap().expect_refusal(403, "policy_denied");
    let _ = pod
        .agent
        .call(&Call::get("http://example.com/").connect_to("192.0.2.1:80".parse().unwrap()))
        .unwrap()
        .expect_refusal(403, "egress_denied");
    await_condition("everything is counted", || {
        let page = scrape(&namespace.name, "agent", 15_020);
        let decided = |labels: &[&str]| sum(&page, "sallyport_decisions_total", labels);
        (decided(&["decision=\"allow\"", "direction=\"request\""]) >= 2.0
            && decided(&["decision=\"block\"", "reason=\"policy_denied\""]) >= 1.0
            && decided(&["decision=\"block\"", "reason=\"egress_denied\""]) >= 1.0
            && sum(&page, "sallyport_findings_total", &["category=\"secret\""]) >= 1.0
            && sum(&page, "envoy_http_downstream_rq_xx", &["envoy_response_code_class=\"4\""]) >= 2.0)
            .then_some(())
    });
    let here = format!("namespace=\"{}\"", namespace.name);
    for (name, labels) in [
        ("sallyport_operator_admission_requests_total", &["outcome=\"injected\""][..]),
        ("sallyport_operator_subscribers", &[]),
        ("sallyport_operator_acks_total", &[]),
        ("sallyport_operator_policy_enforced_pods", &[here.as_str()]),
    ] {
        await_condition(&format!("{name} {labels:?}"), || {
            (sum(&operators(), name, labels) >= 1.0).then_some(())
        });
    }
    let operators = operators();
    for container in ["sallyport-extproc", "sallyport-envoy"] {
        let logs = namespace.logs("agent", container);
        for secret in [mark.to_owned(), fake_key()] {
            assert!(!logs.contains(&secret), "{container} wrote {secret} down:\n{logs}");
        }
    }
    assert!(namespace.logs("agent", "sallyport-extproc").contains("SLP-SEC"), "the finding itself is logged");
    for text in [scrape(&namespace.name, "agent", 15_020), operators] {
        assert!(!text.contains(mark) && !text.contains(&fake_key()));
    }
}

#[test]
fn every_metric_of_the_dashboard_is_served() {
    installed();
    let namespace = Namespace::enabled("dashboard");
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    let bad = chat("demo", &fake_key(), false);
    let bad = Call::post_json(format!("http://{host}/v1/chat/completions"), &bad);
    let _ = pod.agent.call(&bad).unwrap().expect_refusal(403, "policy_denied");
    namespace.await_enforced("usual", 1);
    // A switch is shown while it is on.
    namespace.kubectl(&["annotate", "agentpolicy", "usual", "sallyport.dev/kill=true"]).unwrap();
    let envoys = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/sallyport/envoy-metrics.txt");
    let envoys = std::fs::read_to_string(envoys).unwrap();
    let named = named_by_the_dashboard();
    assert!(named.len() > 20, "{named:?}");
    // A page is kept for a second, and a label's first value makes a family appear.
    let missing = |served: &str| -> Vec<String> {
        let families: BTreeSet<_> = served
            .lines()
            .map(|l| l.strip_prefix("# TYPE ").unwrap_or(l))
            .filter_map(|l| l.split(['{', ' ']).next())
            .collect();
        let known = |name: &str| families.contains(name) || envoys.lines().any(|l| l == name);
        named.iter().filter(|n| !known(n)).cloned().collect()
    };
    let mut last = Vec::new();
    for _ in 0..30 {
        last = missing(&(scrape(&namespace.name, "agent", 15_020) + &operators()));
        if last.is_empty() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    panic!("the dashboard names what nobody serves: {last:?}");
}

#[test]
fn every_expression_of_the_dashboard_and_of_the_alerts_is_promql() {
    let mut all = Vec::new();
    texts(&dashboard(), &["expr"], &mut all);
    let panels = all.len();
    let rules = helm(&[
        "template",
        "sallyport",
        "charts/sallyport",
        "--namespace",
        SYSTEM,
        "--api-versions=monitoring.coreos.com/v1",
        "--set=monitoring.prometheusRule.enabled=true",
        "--show-only=templates/alerts.yaml",
    ]);
    let rules: Value = serde_saphyr::from_str(&rules.unwrap_or_else(|e| panic!("{e}")).stdout).unwrap();
    texts(&rules, &["expr"], &mut all);
    assert!(panels > 20 && all.len() > panels + 10, "{panels} of {}", all.len());
    for text in &all {
        // Grafana puts a duration there.
        let text = text.replace("$__rate_interval", "5m");
        promql_parser::parser::parse(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    }
}
