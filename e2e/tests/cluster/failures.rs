//! A guarded pod whose filter dies, hangs or restarts.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::process::Signal;
use sallyport_e2e::agent::{Outcome, Task};
use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{Namespace, Pod, await_condition, signal, usual_spec};
use sallyport_e2e::messages::chat;
use sallyport_e2e::upstream::fake_key;
use serde_json::json;

struct Guarded {
    namespace: Namespace,
    pod: Pod,
    host: String,
    /// The host's, since the filter's process is also the one that resolves it.
    address: SocketAddr,
}

fn guarded(name: &str, failure_policy: &str) -> Guarded {
    let namespace = Namespace::enabled(name);
    let mut spec = usual_spec();
    spec["failurePolicy"] = json!(failure_policy);
    namespace.policy("usual", &spec).unwrap();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    let ip = await_condition("the upstream's name resolves", || {
        let Outcome::Text(addresses) = pod.agent.run(&Task::Resolve(host.clone())).unwrap() else {
            return None;
        };
        addresses.split_whitespace().next()?.parse().ok()
    });
    Guarded { namespace, pod, host, address: SocketAddr::new(ip, 80) }
}

impl Guarded {
    fn get(&self) -> Call {
        Call::get(format!("http://{}/api/orders", self.host)).connect_to(self.address)
    }

    fn extproc(&self, with: Signal) {
        signal(&self.namespace.pod("agent").unwrap(), "sallyport-extproc", with);
    }

    fn call(&self) -> sallyport_e2e::client::Answer {
        self.pod.agent.call(&self.get()).unwrap()
    }

    fn refuses_keys(&self) {
        let body = chat("demo", &format!("my key is {}", fake_key()), false);
        let post = Call::post_json(format!("http://{}/v1/chat/completions", self.host), &body);
        let post = post.connect_to(self.address);
        let _ = self.pod.agent.call(&post).unwrap().expect_refusal(403, "policy_denied");
    }
}

#[test]
fn a_killed_filter_refuses_at_once_and_is_back_by_itself() {
    let guarded = guarded("killed", "Closed");
    let _ = guarded.call().expect_status(200);
    guarded.extproc(Signal::KILL);
    let answer = guarded.call().expect_refusal(503, "filter_unavailable");
    assert!(answer.took < Duration::from_secs(5), "{:?}", answer.took);
    await_condition("the filter is back", || (guarded.call().status == 200).then_some(()));
    guarded.refuses_keys();
}

#[test]
fn a_stopped_filter_refuses_after_the_message_timeout() {
    let guarded = guarded("stopped", "Closed");
    let _ = guarded.call().expect_status(200);
    guarded.extproc(Signal::STOP);
    let _ = guarded.call().expect_refusal(504, "filter_unavailable");
    guarded.extproc(Signal::CONT);
    await_condition("the filter answers", || (guarded.call().status == 200).then_some(()));
}

#[test]
fn a_stopped_filter_lets_pass_where_the_policy_says_open() {
    let guarded = guarded("open", "Open");
    let _ = guarded.call().expect_status(200);
    guarded.extproc(Signal::STOP);
    let _ = guarded.call().expect_status(200);
    guarded.extproc(Signal::CONT);
}
