//! The commands by which an installation is looked at: `sallyport check`, `status`, `size`, `inject`,
//! `explain`, and `helm test`; on a healthy cluster and on broken ones. They look at everything, so nobody
//! else may be at work.

use std::process::Command;

use sallyport_e2e::cluster::{
    Namespace, SYSTEM, await_condition, helm, kubectl, kubectl_input, upgrade_with, usual_spec,
};
use serde_json::{Value, json};

use crate::{alone, enforces, guarded, operators};

/// What the command said, and its exit status. It is built beside this test, or named by SALLYPORT_BIN.
fn sallyport(args: &[&str]) -> (i32, String) {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/debug/sallyport");
    let program = std::env::var("SALLYPORT_BIN").unwrap_or_else(|_| beside.into());
    let output = Command::new(&program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap_or(-1), said)
}

/// `sallyport check -o json`: its exit status, and each check's line by its id.
fn check() -> (i32, Value) {
    let (code, said) = sallyport(&["check", "-o", "json"]);
    let all: Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
    let lines = all["checks"].as_array().unwrap();
    assert_eq!(all["failed"], lines.iter().filter(|l| l["state"] == "failed").count());
    for line in lines {
        assert_eq!(line["state"] != "ok", line["hint"].is_string(), "{line}");
    }
    let by_id = lines.iter().map(|l| (l["id"].as_str().unwrap().to_owned(), l.clone())).collect();
    (code, Value::Object(by_id))
}

/// Waits until a check is in this state, and gives its line.
fn becomes(id: &str, state: &str) -> (i32, Value) {
    await_condition(&format!("check {id} is {state}"), || {
        let (code, lines) = check();
        (lines[id]["state"] == state).then(|| (code, lines[id].clone()))
    })
}

/// Takes away what other tests left: some share a namespace until their process ends, and nobody drops it.
fn nobody_else() {
    let all = kubectl(&["get", "namespaces", "-o", "name"]).unwrap().stdout;
    let left: Vec<_> = all.lines().filter(|l| l.starts_with("namespace/t-")).collect();
    if !left.is_empty() {
        let args = [&["delete", "--wait=false", "--now", "--ignore-not-found"], &left[..]].concat();
        kubectl(&args).unwrap();
    }
    await_condition("the other tests' namespaces are gone", || {
        let all = kubectl(&["get", "namespaces", "-o", "name"]).ok()?.stdout;
        (!all.lines().any(|l| l.starts_with("namespace/t-"))).then_some(())
    });
}

#[test]
fn a_healthy_cluster_is_called_healthy_and_shown() {
    let _alone = alone();
    nobody_else();
    let (namespace, _pod, _host) = guarded("healthy");
    let (code, said) = await_condition("check finds nothing wrong", || {
        let (code, said) = sallyport(&["check"]);
        let unfit = |l: &&str| l.starts_with("failed") || l.starts_with("unknown");
        let wrong: Vec<_> = said.lines().filter(unfit).collect();
        if !wrong.is_empty() {
            println!("{wrong:?}");
        }
        wrong.is_empty().then_some((code, said))
    });
    println!("{said}");
    assert_eq!(code, 0, "{said}");

    let (code, said) = sallyport(&["status", "-n", &namespace.name]);
    println!("{said}");
    assert_eq!(code, 0, "{said}");
    let row = said.lines().find(|l| l.contains(" agent ")).unwrap_or_else(|| panic!("{said}"));
    assert!(row.contains("usual") && row.contains("newest"), "{row}");
    let (_, said) = sallyport(&["status", "-n", &namespace.name, "-o", "json"]);
    let status: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(status["policies"][0]["enforced"], "1/1", "{status}");
    assert_eq!(status["pods"][0]["acked"], true, "{status}");
    let (_, said) = sallyport(&["status", "-n", &namespace.name, "--stale"]);
    assert!(!said.contains(" agent "), "{said}");

    let shown = helm(&["test", "sallyport", "-n", SYSTEM, "--timeout", "120s"]);
    let shown = shown.unwrap_or_else(|e| panic!("{e}")).stdout;
    assert!(shown.contains("Succeeded"), "{shown}");
}

#[test]
fn what_a_command_says_of_a_pod_is_what_the_cluster_does() {
    let _alone = alone();
    let (namespace, _pod, _host) = guarded("explained");
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        let path = dir.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path.display().to_string()
    };
    let policy = write(
        "policy.yaml",
        &json!({"apiVersion": "sallyport.dev/v1alpha1", "kind": "AgentPolicy", "metadata": {"name": "usual"},
            "spec": usual_spec()}),
    );
    let pod = write("pod.yaml", &Namespace::agent_manifest("agent"));
    let object = namespace.pod("agent").unwrap();
    let requests = |name: &str| {
        let all = object["spec"]["initContainers"].as_array().unwrap();
        all.iter().find(|c| c["name"] == name).unwrap()["resources"]["requests"].clone()
    };

    let (code, said) = sallyport(&["size", "-f", &policy, "-o", "json"]);
    assert_eq!(code, 0, "{said}");
    let sizing: Value = serde_json::from_str(&said).unwrap();
    let millis = format!("{}m", sizing["extproc"]["cpuMillis"]);
    assert_eq!(requests("sallyport-extproc")["cpu"], millis, "{sizing}");
    assert_eq!(namespace.status("usual")["capacity"]["summary"], sizing["summary"]);

    let (code, said) = sallyport(&["inject", "--dry-run", "-f", &pod, "--policy", &policy]);
    assert_eq!(code, 0, "{said}");
    for name in ["sallyport-capture", "sallyport-extproc", "sallyport-envoy"] {
        assert!(said.contains(name), "{name}: {said}");
    }
    let (code, said) = sallyport(&["explain", "pod", "-f", &pod, "--policy", &policy]);
    assert!(code == 0 && said.contains("would be guarded by AgentPolicy `usual`"), "{said}");

    let explain = |name: &str| sallyport(&["explain", "pod", name, "-n", &namespace.name]);
    let (code, said) = explain("agent");
    println!("{said}");
    assert_eq!(code, 0, "{said}");
    for words in [
        "is guarded by AgentPolicy `usual`",
        "are the policy's of now",
        "would be guarded by AgentPolicy `usual`",
        &millis,
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let mut spec = usual_spec();
    spec["capacity"] = json!({"requestsPerSecond": 300});
    namespace.policy("usual", &spec).unwrap();
    let (_, said) = explain("agent");
    assert!(said.contains("restart it") && said.contains("for 300 requests per second"), "{said}");
    let mut plain = Namespace::agent_manifest("plain");
    plain["metadata"]["annotations"] = json!({});
    namespace.apply(&plain).unwrap();
    let (code, said) = explain("plain");
    assert!(code == 0 && said.contains("is not guarded") && said.contains("NotOptedIn"), "{said}");
    namespace.kubectl(&["delete", "agentpolicy", "usual"]).unwrap();
    let (code, said) = explain("agent");
    assert!(code == 1 && said.contains("the policy is gone") && said.contains("NoPolicy"), "{said}");
    let (code, said) = explain("nobody");
    assert!(code == 1 && said.contains("has no pod nobody"), "{said}");
}

#[test]
fn check_names_what_is_broken_and_what_to_do() {
    let _alone = alone();
    let (namespace, pod, host) = guarded("broken");
    // Warnings leave the exit status alone.
    namespace.kubectl(&["annotate", "agentpolicy", "usual", "sallyport.dev/kill=true"]).unwrap();
    let (_, line) = becomes("killed", "warning");
    assert!(line["message"].as_str().unwrap().contains(&format!("{}/usual", namespace.name)), "{line}");
    assert!(line["hint"].as_str().unwrap().contains("sallyport.dev/kill-"), "{line}");
    namespace.kubectl(&["annotate", "agentpolicy", "usual", "sallyport.dev/kill-"]).unwrap();
    becomes("killed", "ok");

    // A pod that was there before its namespace was labelled.
    let late = Namespace::plain("late");
    late.apply(&Namespace::agent_manifest("missed")).unwrap();
    late.usual_policy();
    kubectl(&["label", "namespace", &late.name, "sallyport.dev/inject=required"]).unwrap();
    let (code, line) = becomes("unguarded-pods", "failed");
    assert!(line["message"].as_str().unwrap().contains(&format!("{}/missed", late.name)), "{line}");
    assert_eq!(code, 1, "{line}");
    late.kubectl(&["delete", "pod", "missed", "--now"]).unwrap();
    becomes("unguarded-pods", "ok");

    operators(0);
    let (code, line) = becomes("operator", "failed");
    assert_eq!(code, 1);
    assert!(line["message"].as_str().unwrap().contains("0 of 0"), "{line}");
    assert!(line["hint"].as_str().unwrap().contains("kubectl"), "{line}");
    let (_, lines) = check();
    assert_eq!(lines["webhook"]["state"], "failed", "{}", lines["webhook"]);
    // Nobody is there to repair it.
    let bundles = |value: Value| {
        for kind in ["mutatingwebhookconfiguration", "validatingwebhookconfiguration"] {
            let object = kubectl(&["get", kind, "sallyport", "-o", "json"]).unwrap().json();
            let patches: Vec<_> = (0..object["webhooks"].as_array().unwrap().len())
                .map(|i| json!({"op": "replace", "path": format!("/webhooks/{i}/clientConfig/caBundle"), "value": value}))
                .collect();
            kubectl_input(
                &["patch", kind, "sallyport", "--type=json", "--patch-file", "/dev/stdin"],
                &json!(patches).to_string(),
            )
            .unwrap_or_else(|e| panic!("{e}"));
        }
    };
    bundles(json!(""));
    let (code, line) = becomes("ca-bundle", "failed");
    assert_eq!(code, 1);
    assert!(line["message"].as_str().unwrap().contains("has none"), "{line}");
    enforces(&pod, &host);
    // The operator that comes back repairs it by itself.
    operators(2);
    for id in ["operator", "ca-bundle", "webhook", "leader"] {
        becomes(id, "ok");
    }
    enforces(&pod, &host);
}

#[test]
fn pull_secrets_of_the_chart_reach_guarded_pods() {
    let _alone = alone();
    upgrade_with(&["--set", "imagePullSecrets={registry}"]);
    kubectl(&["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=120s"]).unwrap();
    let namespace = Namespace::enabled("pull");
    namespace.usual_policy();
    let mut manifest = Namespace::agent_manifest("agent");
    manifest["spec"]["imagePullSecrets"] = json!([{"name": "own"}]);
    let made = await_condition("a pod with both", || {
        let pod = kubectl_input(
            &["create", "--dry-run=server", "-o", "json", "-n", &namespace.name, "-f", "-"],
            &manifest.to_string(),
        );
        let secrets = pod.ok()?.json()["spec"]["imagePullSecrets"].clone();
        (secrets.as_array()?.len() == 2).then_some(secrets)
    });
    assert_eq!(made, json!([{"name": "own"}, {"name": "registry"}]));
    // Without this Helm keeps what was set.
    upgrade_with(&["--reset-values"]);
    kubectl(&["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=120s"]).unwrap();
}
