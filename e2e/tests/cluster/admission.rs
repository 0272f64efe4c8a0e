//! Which pods are guarded, which are refused, and what is said.

use sallyport_e2e::cluster::Namespace;
use serde_json::{Value, json};

#[test]
fn a_pod_that_does_not_ask_is_untouched() {
    let namespace = Namespace::enabled("untouched");
    let mut manifest = Namespace::agent_manifest("bystander");
    manifest["metadata"]["annotations"] = json!({});
    namespace.run(&manifest);
    let pod = namespace.pod("bystander").unwrap();
    assert!(pod["spec"]["initContainers"].is_null(), "{pod}");
    assert!(pod["metadata"]["labels"]["sallyport.dev/guarded"].is_null(), "{pod}");
}

#[test]
fn every_pod_of_a_required_namespace_is_guarded_and_none_can_opt_out() {
    let namespace = Namespace::required("required");
    namespace.usual_policy();
    let mut manifest = Namespace::agent_manifest("agent");
    manifest["metadata"]["annotations"] = json!({});
    namespace.run(&manifest);
    assert_eq!(namespace.pod("agent").unwrap()["metadata"]["labels"]["sallyport.dev/guarded"], "true");
    manifest["metadata"]["name"] = json!("runaway");
    manifest["metadata"]["annotations"] = json!({"sallyport.dev/inject": "false"});
    let error = namespace.apply(&manifest).map(|o| o.stdout).unwrap_err().to_string();
    assert!(error.contains("required"), "{error}");
}

#[test]
fn a_guarded_pod_has_the_sidecar_before_everything_else() {
    let namespace = Namespace::enabled("order");
    namespace.usual_policy();
    let mut manifest = Namespace::agent_manifest("agent");
    manifest["spec"]["initContainers"] = json!([{
        "name": "prepare", "image": sallyport_e2e::cluster::agent_image(), "imagePullPolicy": "Never",
        "command": ["/sallyport-e2e-agent"], "args": ["once", "403", "http://example.com/"],
        "securityContext": {"runAsUser": 1000},
    }]);
    namespace.run(&manifest);
    let pod = namespace.pod("agent").unwrap();
    let names: Vec<_> =
        pod["spec"]["initContainers"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
    assert_eq!(names, ["sallyport-capture", "sallyport-extproc", "sallyport-envoy", "prepare"]);
}

#[test]
fn a_job_completes_beside_the_sidecar() {
    let namespace = Namespace::enabled("job");
    namespace.usual_policy();
    let host = namespace.upstream();
    let mut pod = Namespace::agent_manifest("unused");
    pod["spec"]["containers"][0]["args"] = json!(["once", "200", format!("http://{host}/api/orders")]);
    pod["spec"]["containers"][0].as_object_mut().unwrap().remove("readinessProbe");
    pod["spec"]["restartPolicy"] = json!("Never");
    let template = json!({"metadata": {"annotations": pod["metadata"]["annotations"]}, "spec": pod["spec"]});
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"},
        "spec": {"backoffLimit": 0, "template": template}});
    namespace.apply(&job).unwrap();
    namespace.kubectl(&["wait", "--for=condition=complete", "job/job", "--timeout=90s"]).unwrap();
}

/// What would get round the sidecar, one change to an ordinary pod each, and a word of the refusal.
fn bypasses() -> Vec<(&'static str, Value, &'static str)> {
    let container = |patch: Value| json!([{"path": "/spec/containers/0/securityContext", "value": patch}]);
    let spec = |field: &str, value: Value| json!([{"path": format!("/spec/{field}"), "value": value}]);
    vec![
        ("sidecar uid", container(json!({"runAsUser": 14337})), "14337"),
        ("sidecar fsGroup", spec("securityContext", json!({"fsGroup": 14337})), "14337"),
        ("root", container(json!({"runAsUser": 0})), "allowRoot"),
        ("privileged", container(json!({"runAsUser": 1000, "privileged": true})), "privileged"),
        (
            "NET_ADMIN",
            container(json!({"runAsUser": 1000, "capabilities": {"add": ["NET_ADMIN"]}})),
            "NET_ADMIN",
        ),
        ("unmasked proc", container(json!({"runAsUser": 1000, "procMount": "Unmasked"})), "procMount"),
        ("host network", spec("hostNetwork", json!(true)), "hostNetwork"),
        ("host pid", spec("hostPID", json!(true)), "hostPID"),
        ("host ipc", spec("hostIPC", json!(true)), "hostIPC"),
        ("shared process namespace", spec("shareProcessNamespace", json!(true)), "shareProcessNamespace"),
        ("hostPath", spec("volumes", json!([{"name": "h", "hostPath": {"path": "/"}}])), "hostPath"),
    ]
}

#[test]
fn a_pod_that_would_get_round_the_sidecar_is_refused() {
    let namespace = Namespace::enabled("bypass");
    namespace.usual_policy();
    for (what, patch, word) in bypasses() {
        let mut manifest = Namespace::agent_manifest("agent");
        for change in patch.as_array().unwrap() {
            let mut at = &mut manifest;
            for key in change["path"].as_str().unwrap().split('/').skip(1) {
                at = match key.parse::<usize>() {
                    Ok(index) => &mut at[index],
                    Err(_) => &mut at[key],
                };
            }
            *at = change["value"].clone();
        }
        match namespace.apply(&manifest) {
            Ok(_) => panic!("{what}: the pod was admitted"),
            Err(e) => {
                assert!(e.to_string().contains("sallyport") && e.to_string().contains(word), "{what}: {e}");
            }
        }
    }
}

#[test]
fn a_guarded_pod_can_not_be_changed_through_the_back_door() {
    let namespace = Namespace::enabled("backdoor");
    namespace.usual_policy();
    namespace.agent("agent");
    for (what, args) in [
        ("guarded label", &["label", "pod", "agent", "sallyport.dev/guarded-"][..]),
        ("inject annotation", &["annotate", "pod", "agent", "sallyport.dev/inject=false", "--overwrite"]),
        ("status annotation", &["annotate", "pod", "agent", "sallyport.dev/status={}", "--overwrite"]),
        ("sidecar image", &["set", "image", "pod/agent", "sallyport-extproc=localhost/sallyport-agent:dev"]),
    ] {
        match namespace.kubectl(args) {
            Ok(o) => panic!("{what}: {}", o.stdout),
            Err(e) => assert!(e.to_string().contains("sallyport"), "{what}: {e}"),
        }
    }
    // What is the owner's own may change.
    namespace.kubectl(&["label", "pod", "agent", "team=support"]).unwrap();
}
