//! `sallyport inject` and `sallyport explain pod`, from outside.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::{Command, Output};

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: bot, namespace: agents, labels: {app: bot}, annotations: {sallyport.dev/inject: \"true\"}}
spec: {containers: [{name: agent, image: agent}]}
";
const DEPLOYMENT: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: bot, namespace: agents}
spec:
  template:
    metadata: {labels: {app: bot}, annotations: {sallyport.dev/inject: \"true\"}}
    spec: {hostNetwork: true, containers: [{name: agent, image: agent}]}
";
const POLICY: &str = "
apiVersion: sallyport.dev/v1alpha1
kind: AgentPolicy
metadata: {name: support-bot}
spec: {selector: {matchLabels: {app: bot}}}
";

/// Runs the command in a directory with the three files.
fn run(args: &str) -> (Output, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("pod.yaml", POD), ("deployment.yaml", DEPLOYMENT), ("policy.yaml", POLICY)] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let out = Command::new(Path::new(env!("CARGO_BIN_EXE_sallyport")))
        .args(args.split_whitespace())
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out, said)
}

#[test]
fn a_dry_run_of_inject_prints_the_guarded_pod() {
    let (out, said) = run("inject --dry-run -f pod.yaml --policy policy.yaml");
    assert!(out.status.success(), "{said}");
    let pod: serde_json::Value = serde_saphyr::from_str(&String::from_utf8(out.stdout).unwrap()).unwrap();
    assert_eq!(pod["metadata"]["labels"]["sallyport.dev/guarded"], "true");
    assert_eq!(pod["spec"]["initContainers"][0]["name"], "sallyport-capture");
}

#[test]
fn inject_without_a_dry_run_says_who_injects() {
    let (out, said) = run("inject -f pod.yaml --policy policy.yaml");
    assert_eq!(out.status.code(), Some(2));
    assert!(said.contains("webhook"), "{said}");
}

#[test]
fn inject_refuses_with_the_reason_and_the_way_out() {
    let (out, said) = run("inject --dry-run -f deployment.yaml --policy policy.yaml");
    assert_eq!(out.status.code(), Some(1));
    assert!(said.contains("agents/bot-") && said.contains("HostNamespace"), "{said}");
    assert!(said.contains("spec.hostNetwork") && out.stdout.is_empty(), "{said}");
}

#[test]
fn explain_names_the_policy_and_what_the_sidecar_gets() {
    let (out, said) = run("explain pod -f pod.yaml --policy policy.yaml");
    assert!(out.status.success(), "{said}");
    for part in ["agents/bot", "`support-bot`", "extproc", "envoy", "the only one"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn explain_says_why_a_pod_to_inject_is_skipped_or_refused() {
    let (out, said) = run("explain pod -f pod.yaml --policy policy.yaml --namespace-label disabled");
    assert!(out.status.success() && said.contains("NamespaceDisabled"), "{said}");
    let (out, said) = run("explain pod -f pod.yaml");
    assert_eq!(out.status.code(), Some(1));
    assert!(said.contains("NoPolicy") && said.contains("kubectl apply"), "{said}");
}

#[test]
fn explain_wants_a_pod_of_the_cluster_or_a_file_and_not_both() {
    for args in ["explain pod", "explain pod bot -f pod.yaml", "explain pod bot --policy policy.yaml"] {
        let (out, said) = run(args);
        assert_eq!(out.status.code(), Some(2), "{args}: {said}");
    }
}
