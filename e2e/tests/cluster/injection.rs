//! What injection does beside what is in the cluster already: quality of service, limits, quotas, several
//! policies, Events, pod security, dry runs.

use sallyport_e2e::agent::{Outcome, Task};
use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{Namespace, await_condition, kubectl, kubectl_input, usual_spec};
use sallyport_e2e::messages::chat;
use sallyport_e2e::upstream::fake_key;
use serde_json::{Value, json};

fn refused(namespace: &Namespace, manifest: &Value) -> String {
    match namespace.apply(manifest) {
        Ok(o) => panic!("admitted: {}", o.stdout),
        Err(e) => e.to_string(),
    }
}

fn condition(namespace: &Namespace, policy: &str, kind: &str) -> Value {
    let status = namespace.status(policy);
    let all = status["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or_default()
}

/// The messages of a namespace's Events with this reason.
fn events(namespace: &Namespace, reason: &str) -> Vec<String> {
    let selector = format!("reason={reason}");
    let all =
        namespace.kubectl(&["get", "events", "--field-selector", &selector, "-o", "json"]).unwrap().json();
    let items = all["items"].as_array().unwrap();
    items.iter().map(|e| e["message"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn a_guaranteed_pod_stays_guaranteed_and_a_burstable_one_burstable() {
    let namespace = Namespace::enabled("qos");
    namespace.usual_policy();
    let mut manifest = Namespace::agent_manifest("guaranteed");
    let limits = json!({"cpu": "100m", "memory": "64Mi"});
    manifest["spec"]["containers"][0]["resources"] = json!({"limits": limits, "requests": limits});
    let warned = namespace.apply(&manifest).unwrap().stderr;
    assert!(warned.contains("Guaranteed"), "{warned}");
    namespace.await_ready("guaranteed");
    assert_eq!(namespace.pod("guaranteed").unwrap()["status"]["qosClass"], "Guaranteed");
    namespace.agent("burstable");
    assert_eq!(namespace.pod("burstable").unwrap()["status"]["qosClass"], "Burstable");
}

#[test]
fn a_limit_range_that_the_sidecar_does_not_fit_is_named_with_its_field() {
    let namespace = Namespace::enabled("limits");
    namespace.usual_policy();
    let range = |max: Value| {
        json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"},
            "spec": {"limits": [{"type": "Container", "max": max}]}})
    };
    namespace.apply(&range(json!({"memory": "8Mi"}))).unwrap();
    // The API server defaults the agent's own limits by it, the sidecar's are ours.
    let error = await_condition("the operator knows the LimitRange", || {
        let dry = kubectl_input(
            &["apply", "--dry-run=server", "-n", &namespace.name, "-f", "-"],
            &Namespace::agent_manifest("agent").to_string(),
        );
        dry.err().map(|e| e.to_string())
    });
    for word in ["sallyport", "LimitRange `small`", "max.memory 8Mi", "spec.capacity", "`usual`"] {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn a_quota_that_the_sidecar_exceeds_is_the_api_servers_own_refusal() {
    let namespace = Namespace::enabled("quota");
    namespace.usual_policy();
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"},
        "spec": {"hard": {"requests.memory": "70Mi"}}});
    namespace.apply(&quota).unwrap();
    await_condition("the quota is counted", || {
        let quota = namespace.kubectl(&["get", "resourcequota", "tight", "-o", "json"]).ok()?.json();
        quota["status"]["hard"]["requests.memory"].is_string().then_some(())
    });
    let mut manifest = Namespace::agent_manifest("agent");
    manifest["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": "64Mi"}});
    let error = refused(&namespace, &manifest);
    assert!(error.contains("exceeded quota: tight") && error.contains("requests.memory"), "{error}");
    manifest["metadata"]["annotations"] = json!({});
    namespace.apply(&manifest).unwrap();
}

#[test]
fn of_two_policies_the_oldest_holds_unless_the_annotation_names_the_other() {
    let namespace = Namespace::enabled("two");
    namespace.policy("zz-first", &usual_spec()).unwrap();
    // Creation is told by the second.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    namespace.policy("aa-second", &usual_spec()).unwrap();
    namespace.agent("default");
    let status = |pod: &str| {
        let pod = namespace.pod(pod).unwrap();
        let text = pod["metadata"]["annotations"]["sallyport.dev/status"].as_str().unwrap().to_owned();
        serde_json::from_str::<Value>(&text).unwrap()["policy"].clone()
    };
    assert_eq!(status("default"), "zz-first");
    let conflicted = await_condition("the loser says so", || {
        Some(condition(&namespace, "aa-second", "Accepted")).filter(|c| c["status"] == "False")
    });
    assert_eq!(conflicted["reason"], "Conflicted", "{conflicted}");
    assert!(conflicted["message"].as_str().unwrap().contains("zz-first"), "{conflicted}");
    assert_eq!(condition(&namespace, "zz-first", "Accepted")["status"], "True");

    let mut manifest = Namespace::agent_manifest("chosen");
    manifest["metadata"]["annotations"]["sallyport.dev/policy"] = json!("aa-second");
    namespace.run(&manifest);
    assert_eq!(status("chosen"), "aa-second");
    namespace.await_enforced("aa-second", 1);
    namespace.await_enforced("zz-first", 1);
    await_condition("nobody loses any more", || {
        (condition(&namespace, "aa-second", "Accepted")["status"] == "True").then_some(())
    });
    manifest["metadata"]["name"] = json!("lost");
    manifest["metadata"]["annotations"]["sallyport.dev/policy"] = json!("no-such");
    let error = refused(&namespace, &manifest);
    assert!(error.contains("no-such") && error.contains("kubectl get agentpolicy"), "{error}");
}

#[test]
fn a_deployments_refused_pods_show_in_its_events_and_ours_tell_what_was_done() {
    let namespace = Namespace::enabled("events");
    namespace.usual_policy();
    let deployment = |name: &str, spec: Value| {
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
            "replicas": 1, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}, "annotations": {"sallyport.dev/inject": "true"}},
                         "spec": spec}}})
    };
    let good = Namespace::agent_manifest("x")["spec"].clone();
    let mut bad = good.clone();
    bad["hostNetwork"] = json!(true);
    namespace.apply(&deployment("good", good)).unwrap();
    namespace.apply(&deployment("bad", bad)).unwrap();
    let has = |reason: &str, word: &str| {
        await_condition(&format!("an Event {reason} with {word:?}"), || {
            events(&namespace, reason).into_iter().find(|m| m.contains(word))
        })
    };
    let failed = has("FailedCreate", "hostNetwork");
    assert!(failed.contains("sallyport") && failed.contains("remove it"), "{failed}");
    has("InjectionSkipped", "HostNamespace");
    has("Injected", "AgentPolicy usual");
}

#[test]
fn a_pods_label_asks_as_its_annotation_does() {
    let namespace = Namespace::enabled("label");
    namespace.usual_policy();
    let mut manifest = Namespace::agent_manifest("labelled");
    manifest["metadata"]["annotations"] = json!({});
    manifest["metadata"]["labels"]["sallyport.dev/inject"] = json!("true");
    namespace.run(&manifest);
    assert_eq!(namespace.pod("labelled").unwrap()["metadata"]["labels"]["sallyport.dev/guarded"], "true");
    manifest["metadata"]["name"] = json!("both");
    manifest["metadata"]["annotations"] = json!({"sallyport.dev/inject": "false"});
    let error = refused(&namespace, &manifest);
    assert!(error.contains("contradict"), "{error}");
}

#[test]
fn a_dry_run_shows_the_sidecar_and_leaves_nothing() {
    let namespace = Namespace::enabled("dry");
    namespace.usual_policy();
    let dry = |manifest: &Value| {
        kubectl_input(
            &["create", "--dry-run=server", "-o", "json", "-n", &namespace.name, "-f", "-"],
            &manifest.to_string(),
        )
    };
    // A busy operator says so, and is asked again.
    let pod = await_condition("a dry run", || dry(&Namespace::agent_manifest("agent")).ok()).json();
    assert_eq!(pod["spec"]["initContainers"].as_array().unwrap().len(), 3, "{pod}");
    let mut bad = Namespace::agent_manifest("bad");
    bad["spec"]["hostPID"] = json!(true);
    assert!(dry(&bad).unwrap_err().to_string().contains("hostPID"));
    // An Event would be there within a moment.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(namespace.pod("agent").is_none());
    assert_eq!(events(&namespace, "Injected"), [""; 0]);
    assert_eq!(events(&namespace, "InjectionSkipped"), [""; 0]);
}

#[test]
fn a_restricted_namespace_takes_explicit_capture_and_refuses_init_with_its_own_words() {
    let namespace = Namespace::enabled("restricted");
    kubectl(&["label", "namespace", &namespace.name, "pod-security.kubernetes.io/enforce=restricted"])
        .unwrap();
    let mut spec = usual_spec();
    spec["capture"] = json!({"mode": "Explicit"});
    namespace.policy("usual", &spec).unwrap();
    let restricted = |name: &str| {
        let mut manifest = Namespace::agent_manifest(name);
        manifest["spec"]["containers"][0]["securityContext"] = json!({
            "runAsUser": 1000, "runAsNonRoot": true, "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
        });
        manifest
    };
    let mut upstream = restricted("upstream");
    upstream["metadata"]["annotations"] = json!({});
    upstream["spec"]["containers"][0]["args"] = json!(["upstream"]);
    upstream["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"] = json!(8080);
    namespace.run(&upstream);
    let pod = namespace.run(&restricted("agent"));
    let object = namespace.pod("agent").unwrap();
    let names: Vec<_> =
        object["spec"]["initContainers"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
    assert_eq!(names, ["sallyport-extproc", "sallyport-envoy"]);

    // The agent is told of the proxy, and by it is guarded; nothing makes it use it.
    let Outcome::Text(environment) = pod.agent.run(&Task::Environment).unwrap() else { panic!() };
    let proxy = environment.lines().find_map(|l| l.strip_prefix("http_proxy=http://")).expect(&environment);
    let proxy = proxy.trim_end_matches('/').parse().unwrap();
    assert!(environment.contains("HTTP_PROXY=") && environment.contains("NO_PROXY="), "{environment}");
    let address = namespace.pod("upstream").unwrap()["status"]["podIP"].as_str().unwrap().to_owned();
    let url = format!("http://{address}:8080/api/orders");
    let _ = pod.agent.call(&Call::get(url.as_str()).via(proxy)).unwrap().expect_refusal(403, "egress_denied");
    spec["egress"] = json!({"default": "Allow"});
    namespace.policy("usual", &spec).unwrap();
    await_condition("the edit holds", || {
        (pod.agent.call(&Call::get(url.as_str()).via(proxy)).unwrap().status == 200).then_some(())
    });
    let key = chat("demo", &format!("my key is {}", fake_key()), false);
    let post = Call::post_json(format!("http://{address}:8080/v1/chat/completions"), &key);
    let _ = pod.agent.call(&post.clone().via(proxy)).unwrap().expect_refusal(403, "policy_denied");
    let _ = pod.agent.call(&post).unwrap().expect_status(200);
    let enforced = await_condition("the status says that it is advice", || {
        Some(condition(&namespace, "usual", "Enforced")).filter(|c| c["reason"] == "Advisory")
    });
    assert_eq!(enforced["status"], "False", "{enforced}");

    spec["capture"] = json!({"mode": "Init"});
    namespace.policy("usual", &spec).unwrap();
    let error = await_condition("Init is refused", || {
        kubectl_input(
            &["create", "--dry-run=server", "-n", &namespace.name, "-f", "-"],
            &restricted("late").to_string(),
        )
        .err()
        .map(|e| e.to_string())
    });
    println!("{error}");
    for word in ["PodSecurity", "restricted", "sallyport-capture", "NET_ADMIN"] {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn a_change_of_capacity_asks_for_a_restart_until_there_was_one() {
    let namespace = Namespace::enabled("rollout");
    namespace.usual_policy();
    for name in ["one", "two"] {
        namespace.agent(name);
    }
    namespace.await_enforced("usual", 2);
    let rollout = |status: &str, text: &str| {
        await_condition(&format!("RolloutRequired {status} with {text:?}"), || {
            let c = condition(&namespace, "usual", "RolloutRequired");
            (c["status"] == status && c["message"].as_str()?.contains(text)).then_some(c)
        })
    };
    rollout("False", "no pod");
    let mut spec = usual_spec();
    spec["capacity"] = json!({"requestsPerSecond": 400});
    namespace.policy("usual", &spec).unwrap();
    assert_eq!(rollout("True", "2 of 2")["reason"], "StalePods");
    // The rest of the policy is in force all the same.
    namespace.await_enforced("usual", 2);
    for (name, status, text) in [("one", "True", "1 of 2"), ("two", "False", "no pod")] {
        namespace.kubectl(&["delete", "pod", name, "--now"]).unwrap();
        namespace.agent(name);
        rollout(status, text);
    }
}
