//! What happens to guarded pods, and to the rest of the cluster, while the operator is gone, upgraded or
//! uninstalled. These tests take the operator away from everybody, so they run one at a time, after all
//! others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod certificates;
mod cni;
mod operations;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::Signal;
use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{
    Namespace, OPERATOR, Pod, SYSTEM, await_condition, await_operator, helm, install, kubectl, pods_of,
    signal, upgrade, usual_spec,
};
use sallyport_e2e::messages::chat;
use sallyport_e2e::upstream::fake_key;

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A guarded agent, and its upstream's name.
fn guarded(name: &str) -> (Namespace, Pod, String) {
    let namespace = Namespace::enabled(name);
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    namespace.await_enforced("usual", 1);
    (namespace, pod, host)
}

fn enforces(pod: &Pod, host: &str) {
    let body = chat("demo", &format!("my key is {}", fake_key()), false);
    let post = Call::post_json(format!("http://{host}/v1/chat/completions"), &body);
    let _ = pod.agent.call(&post).unwrap().expect_refusal(403, "policy_denied");
    let _ = pod.agent.call(&Call::get(format!("http://{host}/api/orders"))).unwrap().expect_status(200);
}

/// Calls one after the other, until it is stopped and there were some; every answer must be 200.
struct Traffic {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u32, Vec<String>)>,
}

impl Traffic {
    /// What goes on meanwhile may take less time than a few calls.
    const LEAST: u32 = 20;

    fn start(pod: &Pod, host: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, agent) = (Arc::clone(&stop), pod.agent.clone());
        let get = Call::get(format!("http://{host}/api/orders"));
        let thread = std::thread::spawn(move || {
            let (mut calls, mut wrong) = (0, Vec::new());
            while !stopped.load(Ordering::Relaxed) || calls < Self::LEAST {
                match agent.call(&get) {
                    Ok(answer) if answer.status == 200 => {}
                    Ok(answer) => wrong.push(format!("{} {}", answer.status, answer.text())),
                    Err(e) => wrong.push(e.to_string()),
                }
                calls += 1;
                std::thread::sleep(Duration::from_millis(20));
            }
            (calls, wrong)
        });
        Self { stop, thread }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        let (calls, wrong) = self.thread.join().unwrap();
        println!("{calls} calls meanwhile, {} not answered with 200", wrong.len());
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

fn operators(count: u32) {
    kubectl(&["scale", "deploy/sallyport-operator", "-n", SYSTEM, &format!("--replicas={count}")]).unwrap();
    await_condition("the operator's pods", || {
        (pods_of(SYSTEM, OPERATOR).ok()?.len() == count as usize).then_some(())
    });
    if count > 0 {
        await_operator();
    }
}

#[test]
fn pods_enforce_on_without_any_operator_and_after_their_filter_restarts() {
    let _alone = alone();
    let (namespace, pod, host) = guarded("orphan");
    let traffic = Traffic::start(&pod, &host);
    operators(0);
    enforces(&pod, &host);
    traffic.stop();
    signal(&namespace.pod("agent").unwrap(), "sallyport-extproc", Signal::KILL);
    await_condition("the filter is back, without an operator", || {
        let answer = pod.agent.call(&Call::get(format!("http://{host}/api/orders"))).ok()?;
        (answer.status == 200).then_some(())
    });
    enforces(&pod, &host);
    // A pod that asks to be guarded is not let in unguarded; everybody else is not held up.
    let error =
        namespace.apply(&Namespace::agent_manifest("late")).map(|o| o.stdout).unwrap_err().to_string();
    assert!(error.contains("sallyport"), "{error}");
    let plain = Namespace::plain("bystanders");
    plain.agent("bystander");
    operators(2);
    namespace.agent("late");
}

#[test]
fn the_operator_comes_back_when_all_its_pods_are_deleted() {
    let _alone = alone();
    let (namespace, pod, host) = guarded("return");
    kubectl(&["delete", "pods", "-n", SYSTEM, "-l", OPERATOR, "--now"]).unwrap();
    enforces(&pod, &host);
    kubectl(&["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=120s"]).unwrap();
    await_condition("a pod is guarded again", || namespace.apply(&Namespace::agent_manifest("late")).ok());
    namespace.await_ready("late");
    namespace.await_enforced("usual", 2);
}

#[test]
fn traffic_goes_on_through_an_upgrade_and_an_uninstall_and_nothing_is_left_stuck() {
    let _alone = alone();
    let (namespace, pod, host) = guarded("upgrade");
    let traffic = Traffic::start(&pod, &host);
    kubectl(&["rollout", "restart", "deploy/sallyport-operator", "-n", SYSTEM]).unwrap();
    upgrade();
    kubectl(&["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=120s"]).unwrap();
    namespace.await_enforced("usual", 1);
    traffic.stop();

    let traffic = Traffic::start(&pod, &host);
    helm(&["uninstall", "sallyport", "-n", SYSTEM, "--wait"]).unwrap();
    enforces(&pod, &host);
    traffic.stop();
    // Pods, policies and namespaces can be made, changed and deleted: nothing of ours is in the way.
    let free = Namespace::plain("free");
    kubectl(&["label", "namespace", &free.name, "sallyport.dev/inject=enabled"]).unwrap();
    free.usual_policy();
    let mut edited = usual_spec();
    edited["mode"] = "Observe".into();
    free.policy("usual", &edited).unwrap();
    free.kubectl(&["delete", "agentpolicy", "usual", "--timeout=30s"]).unwrap();
    free.agent("agent");
    free.kubectl(&["delete", "pod", "agent", "--timeout=30s"]).unwrap();
    kubectl(&["delete", "namespace", &free.name, "--timeout=60s"]).unwrap();
    namespace.kubectl(&["delete", "agentpolicy", "usual", "--timeout=30s"]).unwrap();
    namespace.kubectl(&["delete", "pod", "agent", "--timeout=60s"]).unwrap();
    install();
}
