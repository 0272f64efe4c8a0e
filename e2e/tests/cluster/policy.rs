//! Policies over their life: edited, wrong, deleted, observed, killed.

use std::time::{Duration, Instant};

use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{Namespace, await_within, usual_spec};
use sallyport_e2e::messages::chat;
use sallyport_e2e::upstream::fake_key;
use serde_json::{Value, json};

/// Five times what section 4 of the design promises, and room for kubectl's own start.
const SOON: Duration = Duration::from_secs(10);

fn with(patch: &Value) -> Value {
    let mut spec = usual_spec();
    for (field, value) in patch.as_object().unwrap() {
        spec[field] = value.clone();
    }
    spec
}

#[test]
fn an_edit_is_enforced_in_running_pods_without_a_restart() {
    let namespace = Namespace::enabled("edit");
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    namespace.await_enforced("usual", 1);
    let get = Call::get(format!("http://{host}/api/orders"));
    let _ = pod.agent.call(&get).unwrap().expect_status(200);
    let deny = json!({"egress": {"default": "Deny", "rules": [
        {"hosts": ["*.svc"], "paths": ["/api/*"], "action": "Deny"},
        {"hosts": ["*.svc"], "action": "Allow"},
    ]}});
    namespace.policy("usual", &with(&deny)).unwrap();
    let start = Instant::now();
    let answer = await_within(SOON, "the edit holds", || {
        let answer = pod.agent.call(&get).unwrap();
        (answer.status == 403).then_some(answer)
    });
    println!("an edit was enforced {} ms after kubectl came back", start.elapsed().as_millis());
    let _ = answer.expect_refusal(403, "egress_denied");
    namespace.await_enforced("usual", 1);
    let now = namespace.pod("agent").unwrap();
    let restarts = &now["status"]["initContainerStatuses"];
    assert!(restarts.as_array().unwrap().iter().all(|c| c["restartCount"] == 0), "{restarts}");
}

#[test]
fn a_listener_field_is_enforced_in_running_pods_without_a_restart() {
    let namespace = Namespace::enabled("listener");
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    let post = Call::new("POST", format!("http://{host}/echo"))
        .body(sallyport_e2e::client::Body::Sized(sallyport_e2e::upstream::pattern(100_000)));
    let _ = pod.agent.call(&post).unwrap().expect_status(200);
    namespace.policy("usual", &with(&json!({"limits": {"maxBodyBytes": 65536}}))).unwrap();
    await_within(SOON, "the smaller body limit holds", || {
        (pod.agent.call(&post).unwrap().status == 413).then_some(())
    });
    namespace.await_enforced("usual", 1);
}

#[test]
fn observe_passes_and_records() {
    let namespace = Namespace::enabled("observe");
    namespace.policy("usual", &with(&json!({"mode": "Observe"}))).unwrap();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    let body = chat("demo", &format!("my key is {}", fake_key()), false);
    let post = Call::post_json(format!("http://{host}/v1/chat/completions"), &body);
    let _ = pod.agent.call(&post).unwrap().expect_status(200);
    await_within(SOON, "the record", || {
        let logs = namespace.logs("agent", "sallyport-extproc");
        assert!(!logs.contains(&fake_key()), "the log holds the key");
        logs.contains("SLP-SEC").then_some(())
    });
}

#[test]
fn a_bad_policy_is_refused_at_apply_with_its_place() {
    let namespace = Namespace::plain("bad");
    for (spec, place) in [
        (
            json!({"cedar": {"inline": "forbid (principal, action, resource) when {\n  context.nonsense == 1\n};"}}),
            "2",
        ),
        (json!({"egress": {"rules": [{"hosts": ["https://a.b"], "action": "Allow"}]}}), "hosts"),
        (json!({"detection": {"packs": ["no-such-pack"]}}), "no-such-pack"),
        (json!({"mode": "Sometimes"}), "spec.mode"),
        (json!({"egres": {}}), "egres"),
    ] {
        let error = namespace.policy("bad", &spec).map(|o| o.stdout).expect_err("a bad policy").to_string();
        assert!(error.contains(place), "{spec}: {error}");
    }
}

#[test]
fn running_pods_enforce_on_when_their_policy_is_deleted() {
    let namespace = Namespace::enabled("deleted");
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    namespace.await_enforced("usual", 1);
    namespace.kubectl(&["delete", "agentpolicy", "usual"]).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    let key = chat("demo", &format!("my key is {}", fake_key()), false);
    let post = Call::post_json(format!("http://{host}/v1/chat/completions"), &key);
    let _ = pod.agent.call(&post).unwrap().expect_refusal(403, "policy_denied");
    let _ = pod.agent.call(&Call::get(format!("http://{host}/api/orders"))).unwrap().expect_status(200);
    // A new pod has no policy, and is told so.
    let error =
        namespace.apply(&Namespace::agent_manifest("late")).map(|o| o.stdout).unwrap_err().to_string();
    assert!(error.contains("kubectl apply"), "{error}");
}

#[test]
fn the_kill_switch_blocks_everything_and_can_be_taken_back() {
    for (what, name) in [("namespace", None), ("agentpolicy", Some("usual"))] {
        let namespace = Namespace::enabled("kill");
        // Observe, where nothing else is ever blocked.
        namespace.policy("usual", &with(&json!({"mode": "Observe"}))).unwrap();
        let host = namespace.upstream();
        let pod = namespace.agent("agent");
        let get = Call::get(format!("http://{host}/api/orders"));
        let _ = pod.agent.call(&get).unwrap().expect_status(200);
        let name = name.unwrap_or(&namespace.name).to_owned();
        namespace.kubectl(&["annotate", what, &name, "sallyport.dev/kill=true"]).unwrap();
        let start = Instant::now();
        let answer = await_within(SOON, "the kill switch holds", || {
            let answer = pod.agent.call(&get).unwrap();
            (answer.status == 403).then_some(answer)
        });
        println!("{what}: killed {} ms after kubectl came back", start.elapsed().as_millis());
        let _ = answer.expect_refusal(403, "killed");
        namespace.kubectl(&["annotate", what, &name, "sallyport.dev/kill-"]).unwrap();
        await_within(SOON, "calls pass again", || {
            (pod.agent.call(&get).unwrap().status == 200).then_some(())
        });
    }
}
