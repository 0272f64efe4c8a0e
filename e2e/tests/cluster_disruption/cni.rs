//! The CNI plugin while its daemon is away, while others write into the node's configuration, and at its end.

use std::path::PathBuf;

use sallyport_e2e::agent::{Outcome, Task};
use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{
    CNI, Namespace, SYSTEM, await_cni, await_condition, cni_spec, kubectl, node_root, pods_of, upgrade_with,
};
use serde_json::{Value, json};

use crate::alone;

const LIST: &str = "etc/cni/net.d/10-pods.conflist";
const PLUGIN: &str = "opt/cni/bin/sallyport-cni";

/// A file of the node.
fn on_node(path: &str) -> PathBuf {
    node_root().expect("the cluster of e2e/node").join(path)
}

fn types() -> Vec<String> {
    let list: Value = serde_json::from_str(&std::fs::read_to_string(on_node(LIST)).unwrap()).unwrap();
    list["plugins"].as_array().unwrap().iter().map(|p| p["type"].as_str().unwrap().to_owned()).collect()
}

/// What the network's own installer writes.
fn write_list_anew() {
    let mut list: Value = serde_json::from_str(&std::fs::read_to_string(on_node(LIST)).unwrap()).unwrap();
    list["plugins"].as_array_mut().unwrap().retain(|p| p["type"] != "sallyport-cni");
    std::fs::write(on_node(LIST), list.to_string()).unwrap();
}

/// The node's daemon goes to no node, or back to all of them.
fn daemon(there: bool) {
    let on = if there { Value::Null } else { json!("nowhere") };
    let patch = json!({"spec": {"template": {"spec": {"nodeSelector": {"sallyport.test/on": on}}}}});
    kubectl(&["patch", "daemonset", "sallyport-cni", "-n", SYSTEM, "-p", &patch.to_string()]).unwrap();
    if there {
        await_cni();
        return;
    }
    await_condition("the daemon is away", || pods_of(SYSTEM, CNI).ok()?.is_empty().then_some(()));
}

fn events(namespace: &Namespace, pod: &str) -> String {
    let field = format!("involvedObject.name={pod}");
    namespace.kubectl(&["get", "events", "--field-selector", &field]).map(|o| o.stdout).unwrap_or_default()
}

fn plain(name: &str) -> Value {
    let mut manifest = Namespace::agent_manifest(name);
    manifest["metadata"]["annotations"] = json!({"sallyport.dev/inject": "false"});
    manifest
}

#[test]
fn the_plugin_is_repaired_waited_for_checked_from_inside_and_taken_out() {
    let _alone = alone();
    upgrade_with(&["--set", "cni.enabled=true"]);
    await_cni();
    let namespace = Namespace::restricted("cni");
    namespace.policy("usual", &cni_spec()).unwrap();
    let host = namespace.upstream();
    let calls = |name: &str| {
        let url = format!("http://{host}/api/orders");
        let pod = namespace.agent(name);
        let _ = pod.agent.call(&Call::get(url)).unwrap().expect_status(200);
        let _ = pod.agent.call(&Call::get("http://192.0.2.9/")).unwrap().expect_refusal(403, "egress_denied");
        pod
    };
    let first = calls("first");

    // Others write into the node's folders.
    let installed = |what: &str| {
        await_condition(what, || {
            (types() == ["bridge", "sallyport-cni"] && on_node(PLUGIN).exists()).then_some(())
        });
    };
    installed("the plugin is installed");
    write_list_anew();
    installed("the list is repaired");
    std::fs::remove_file(on_node(PLUGIN)).unwrap();
    installed("the plugin is repaired");
    std::fs::write(on_node(PLUGIN), "no program").unwrap();
    await_condition("the plugin is itself again", || {
        (std::fs::metadata(on_node(PLUGIN)).ok()?.len() > 10_000).then_some(())
    });

    // No daemon: unguarded pods start, guarded ones wait, and what runs goes on.
    daemon(false);
    assert_eq!(types(), ["bridge", "sallyport-cni"], "a daemon that will be back leaves the plugin");
    namespace.run(&plain("unguarded"));
    namespace.apply(&Namespace::agent_manifest("waiting")).unwrap();
    await_condition("the kubelet says why the guarded pod waits", || {
        events(&namespace, "waiting").contains("the daemon that captures it does not answer").then_some(())
    });
    let running = |pod: &str, container: &str| {
        let pod = namespace.pod(pod).unwrap();
        let all = pod["status"]["initContainerStatuses"].as_array().into_iter().flatten();
        let all = all.chain(pod["status"]["containerStatuses"].as_array().into_iter().flatten());
        all.clone().any(|c| c["name"] == container && c["state"]["running"].is_object())
    };
    assert!(!running("waiting", "sallyport-extproc"), "nothing of it runs");
    assert!(matches!(first.agent.run(&Task::Resolve(host.clone())).unwrap(), Outcome::Text(_)));
    daemon(true);
    namespace.await_ready("waiting");

    // A pod that comes to be without its rules, because the plugin is not in the list for a moment.
    daemon(false);
    write_list_anew();
    namespace.apply(&Namespace::agent_manifest("uncaptured")).unwrap();
    await_condition("the check from inside says what is missing", || {
        let said = events(&namespace, "uncaptured");
        (said.contains("this pod is not captured") && said.contains("delete the pod")).then_some(())
    });
    assert!(running("uncaptured", "sallyport-extproc"));
    assert!(!running("uncaptured", "agent"), "the agent of a pod that is not captured was started");
    daemon(true);
    installed("the daemon puts the plugin back");
    namespace.kubectl(&["delete", "pod", "uncaptured", "--now"]).unwrap();
    let _ = calls("uncaptured");

    // Its end: nothing is left on the node, and a policy that relies on it is told.
    upgrade_with(&["--set", "cni.enabled=false"]);
    await_condition("the plugin is taken out", || {
        (types() == ["bridge"] && !on_node(PLUGIN).exists()).then_some(())
    });
    let error = await_condition("a pod that relies on it is refused", || {
        namespace.kubectl(&["delete", "pod", "late", "--now", "--ignore-not-found"]).ok()?;
        namespace.apply(&Namespace::agent_manifest("late")).err().map(|e| e.to_string())
    });
    assert!(error.contains("CNI plugin") && error.contains("cni.enabled=true"), "{error}");
    // Those that run keep their rules.
    let _ = first.agent.call(&Call::get("http://192.0.2.9/")).unwrap().expect_refusal(403, "egress_denied");
    upgrade_with(&["--reset-values"]);
}
