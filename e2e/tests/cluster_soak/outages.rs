//! The long rows of `docs/failure-modes.md`: what a guarded pod does while something it depends on is away
//! for long, or again and again.
//!
//! In all of them one client sends keys and another harmless pages. Whatever fails, no key is ever answered
//! as if it had passed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use sallyport_e2e::client::{Answer, Call, End};
use sallyport_e2e::cluster::{
    Namespace, Pod, SYSTEM, await_operator, await_within, kubectl, pods_of, resident_kib, restart_program,
    signal, signal_program, usual_spec,
};
use sallyport_e2e::upstream::fake_key;
use serde_json::{Value, json};

use crate::measure::operators;
use crate::watch::Watch;
use crate::{DEADLINE, alone};

const EXTPROC: &str = "sallyport-extproc";

/// A guarded agent in a namespace of its own, with an upstream.
pub(crate) struct Guarded {
    pub(crate) namespace: Namespace,
    pod: Pod,
    host: String,
    /// The upstream's. A dead filter resolves no name, so calls are made to the address.
    address: SocketAddr,
}

impl Guarded {
    pub(crate) fn new(name: &str) -> Self {
        let namespace = Namespace::enabled(name);
        namespace.usual_policy();
        let host = namespace.upstream();
        let pod = namespace.agent("agent");
        namespace.await_enforced("usual", 1);
        let service = namespace.kubectl(&["get", "service", "upstream", "-o", "json"]).unwrap().json();
        let address = format!("{}:80", service["spec"]["clusterIP"].as_str().unwrap()).parse().unwrap();
        let guarded = Self { namespace, pod, host, address };
        // From now on the address is bound to the name.
        guarded.await_served_by_name();
        guarded
    }

    fn page(&self) -> Call {
        self.page_by_name().connect_to(self.address)
    }

    fn page_by_name(&self) -> Call {
        Call::get(format!("http://{}/api/orders", self.host))
    }

    fn call(&self) -> Answer {
        self.pod.agent.call(&self.page()).unwrap()
    }

    fn await_served_by_name(&self) {
        await_within(DEADLINE, "a call that needs the name is served", || {
            (self.pod.agent.call(&self.page_by_name()).ok()?.status == 200).then_some(())
        });
    }

    fn await_served(&self) {
        await_within(DEADLINE, "a harmless call is served", || {
            (self.pod.agent.call(&self.page()).ok()?.status == 200).then_some(())
        });
    }

    /// Kills the filter, once it runs; the pod's status names a container only some time after its start.
    fn kill_filter(&self) {
        let object = await_within(DEADLINE, "the filter's process", || {
            let object = self.namespace.pod("agent")?;
            resident_kib(&object, EXTPROC)?;
            Some(object)
        });
        signal(&object, EXTPROC, Signal::KILL);
    }

    /// How often each container was started again.
    pub(crate) fn restarts(&self, container: &str) -> u64 {
        restarts(&self.namespace.pod("agent").unwrap(), container)
    }

    pub(crate) fn watch(&self) -> Watch {
        Watch::start(&self.pod, &self.host, self.address)
    }

    /// Has the policy refuse one path, waits until every pod is said to do so, and tries it.
    pub(crate) fn edit(&self, pods: u32, round: u32) -> Duration {
        let start = Instant::now();
        let path = format!("/page/{round}");
        let mut spec = usual_spec();
        spec["egress"]["rules"] = json!([
            {"hosts": ["*.svc"], "paths": [path], "action": "Deny"},
            {"hosts": ["*.svc"], "action": "Allow"},
        ]);
        await_within(DEADLINE, "the policy can be changed", || self.namespace.policy("usual", &spec).ok());
        self.await_counted(pods);
        let took = start.elapsed();
        let denied = Call::get(format!("http://{}{path}", self.host)).connect_to(self.address);
        let _ = self.pod.agent.call(&denied).unwrap().expect_refusal(403, "egress_denied");
        took
    }

    /// As `await_enforced`, with this suite's patience.
    pub(crate) fn await_counted(&self, pods: u32) {
        await_within(DEADLINE, "the status counts every pod", || {
            let object = self.namespace.kubectl(&["get", "agentpolicy", "usual", "-o", "json"]).ok()?.json();
            let newest = object["status"]["observedGeneration"] == object["metadata"]["generation"];
            (newest && object["status"]["enforced"] == format!("{pods}/{pods}")).then_some(())
        });
    }
}

/// How often a container was started again.
pub(crate) fn restarts(pod: &Value, container: &str) -> u64 {
    ["initContainerStatuses", "containerStatuses"]
        .iter()
        .filter_map(|list| pod["status"][list].as_array())
        .flatten()
        .find(|c| c["name"] == container)
        .and_then(|c| c["restartCount"].as_u64())
        .unwrap_or_else(|| panic!("no container {container}"))
}

#[test]
fn a_filter_that_hangs_for_good_ends_its_streams_and_delivers_nothing() {
    // Envoy's idle timeout of a stream, and what a busy machine adds.
    const MOST: Duration = Duration::from_secs(300 + 100);
    // Its minutes are idle ones: others may have the cluster meanwhile.
    let (guarded, stream, hung) = {
        let _alone = alone();
        let guarded = Guarded::new("hangs");
        let call = Call::get(format!("http://{}/sse/400", guarded.host))
            .header("x-demo-pause-ms", "20")
            .deadline(MOST);
        let agent = guarded.pod.agent.clone();
        let stream = std::thread::spawn(move || (Instant::now(), agent.call(&call)));
        // Some of it is through by then.
        std::thread::sleep(Duration::from_secs(5));
        signal(&guarded.namespace.pod("agent").unwrap(), EXTPROC, Signal::STOP);
        (guarded, stream, Instant::now())
    };
    let (start, answer) = stream.join().unwrap();
    let answer = answer.unwrap();
    println!("hang: {:?} {} s after the filter stopped", answer.end, hung.elapsed().as_secs());
    assert_eq!(answer.end, End::Cut, "{} bytes", answer.body.len());
    let stopped = hung.duration_since(start);
    let late = answer.pieces.iter().filter(|(at, _)| *at > stopped + Duration::from_secs(1)).count();
    assert_eq!(late, 0, "pieces came although nobody read them: {:?}", answer.pieces.last());
    assert!(!answer.pieces.is_empty(), "nothing came before");
    let _ = guarded.call().expect_refusal(504, "filter_unavailable");
    let _alone = alone();
    signal(&guarded.namespace.pod("agent").unwrap(), EXTPROC, Signal::CONT);
    guarded.await_served();
}

#[test]
fn a_filter_killed_again_and_again_refuses_at_once_and_lets_no_key_pass() {
    // kubelet waits longer each time: not, 10 s, 20 s, 40 s.
    const TIMES: u64 = 4;
    let _alone = alone();
    let guarded = Guarded::new("crashes");
    let watch = guarded.watch();
    let start = Instant::now();
    for round in 1..=TIMES {
        guarded.kill_filter();
        // What is answered meanwhile the watch sees: after the first time the filter may be back at once.
        guarded.await_served();
        println!("crash {round}: served again {} s after the start", start.elapsed().as_secs());
    }
    let seen = watch.stop();
    println!("crashes: {seen}");
    seen.no_key_passed();
    seen.pages_were_only(&[
        "200",
        "503 filter_unavailable",
        "503 no_bundle",
        "503 destination_unresolved",
        "504 filter_unavailable",
    ]);
    seen.pages_got("503 filter_unavailable");
    seen.refused_within(Duration::from_secs(5));
    await_within(DEADLINE, "kubelet counts them", || (guarded.restarts(EXTPROC) == TIMES).then_some(()));
    assert_eq!(guarded.restarts("agent") + guarded.restarts("sallyport-envoy"), 0);
    guarded.await_counted(1);
}

#[test]
fn leaders_killed_while_policies_change_leave_nobody_behind() {
    const TIMES: u32 = 4;
    const PODS: u32 = 3;
    let _alone = alone();
    let guarded = Guarded::new("leaders");
    for i in 1..PODS {
        guarded.namespace.agent(&format!("more{i}"));
    }
    let watch = guarded.watch();
    for round in 1..=TIMES {
        let lease = ["get", "lease", "sallyport-operator", "-n", SYSTEM, "-o", "json"];
        let leader = await_within(DEADLINE, "a leader that runs", || {
            let holder = kubectl(&lease).ok()?.json()["spec"]["holderIdentity"].as_str()?.to_owned();
            let leader = operators().into_iter().find(|o| o["metadata"]["name"] == *holder)?;
            resident_kib(&leader, "operator")?;
            Some(leader)
        });
        // In turn: its process alone, which comes back under its name, and its pod.
        if round % 2 == 1 {
            signal(&leader, "operator", Signal::KILL);
        } else {
            let name = leader["metadata"]["name"].as_str().unwrap();
            kubectl(&["delete", "pod", name, "-n", SYSTEM, "--force", "--grace-period=0"]).unwrap();
        }
        let took = guarded.edit(PODS, round);
        println!("leader {round}: a change is in force in {PODS} pods and in the status after {took:.1?}");
    }
    let seen = watch.stop();
    println!("leaders: {seen}");
    seen.no_key_passed();
    seen.pages_were_served();
    await_operator();
}

#[test]
fn guarded_pods_and_the_operator_outlive_a_minute_without_the_api_server() {
    const AWAY: Duration = Duration::from_secs(60);
    let _alone = alone();
    let guarded = Guarded::new("api");
    // Hanging is the worse half: nobody is told that the connection is of no use.
    for (round, how) in [(1, "hangs"), (2, "is gone")] {
        let watch = guarded.watch();
        if round == 1 {
            signal_program("kube-apiserver", Signal::STOP);
            std::thread::sleep(AWAY);
            signal_program("kube-apiserver", Signal::CONT);
        } else {
            restart_program("kube-apiserver", AWAY);
        }
        let start = Instant::now();
        await_within(DEADLINE, "the API server answers", || kubectl(&["get", "--raw", "/readyz"]).ok());
        await_operator();
        println!("api server {how}: the operator's webhook answers {:.1?} after", start.elapsed());
        let took = guarded.edit(round, round);
        println!("api server {how}: a change is in force and in the status after {took:.1?}");
        // A new pod is guarded.
        let late = format!("late{round}");
        await_within(DEADLINE, "a pod is guarded", || {
            guarded.namespace.apply(&Namespace::agent_manifest(&late)).ok()
        });
        guarded.namespace.await_ready(&late);
        guarded.await_counted(round + 1);
        let seen = watch.stop();
        println!("api server {how}: {seen}");
        seen.no_key_passed();
        seen.pages_were_served();
    }
    for container in ["agent", EXTPROC, "sallyport-envoy"] {
        assert_eq!(guarded.restarts(container), 0, "{container}");
    }
    let restarted: u64 = operators().iter().map(|o| restarts(o, "operator")).sum();
    println!("api server: operators were started again {restarted} times, since their pods were made");
}

#[test]
fn guarded_pods_enforce_on_without_kubelet_and_its_return_starts_what_died() {
    let _alone = alone();
    let guarded = Guarded::new("kubelet");
    let watch = guarded.watch();
    restart_program("kubelet", Duration::from_secs(20));
    node_is_ready();
    let seen = watch.stop();
    println!("kubelet away: {seen}");
    seen.no_key_passed();
    seen.pages_were_served();
    for container in ["agent", EXTPROC, "sallyport-envoy"] {
        assert_eq!(guarded.restarts(container), 0, "{container}");
    }

    // A filter that dies meanwhile stays dead until kubelet is back.
    let watch = guarded.watch();
    let returns = std::thread::spawn(|| restart_program("kubelet", Duration::from_secs(20)));
    std::thread::sleep(Duration::from_secs(2));
    guarded.kill_filter();
    std::thread::sleep(Duration::from_secs(10));
    let _ = guarded.call().expect_refusal(503, "filter_unavailable");
    returns.join().unwrap();
    guarded.await_served();
    node_is_ready();
    let seen = watch.stop();
    println!("kubelet away, filter killed: {seen}");
    seen.no_key_passed();
    seen.pages_were_only(&[
        "200",
        "503 filter_unavailable",
        "503 no_bundle",
        "503 destination_unresolved",
        "504 filter_unavailable",
    ]);
    await_within(DEADLINE, "kubelet counts it", || (guarded.restarts(EXTPROC) == 1).then_some(()));
    assert_eq!(guarded.restarts("agent") + guarded.restarts("sallyport-envoy"), 0);
}

fn node_is_ready() {
    kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s"]).unwrap();
}

/// CoreDNS is given back however the test ends.
struct WithoutNames;

impl WithoutNames {
    fn start() -> Self {
        scale_coredns(0);
        await_within(DEADLINE, "CoreDNS is gone", || {
            pods_of("kube-system", "k8s-app=kube-dns").ok()?.is_empty().then_some(())
        });
        Self
    }
}

impl Drop for WithoutNames {
    fn drop(&mut self) {
        scale_coredns(1);
    }
}

fn scale_coredns(to: u32) {
    kubectl(&["scale", "deploy/coredns", "-n", "kube-system", &format!("--replicas={to}")]).unwrap();
}

#[test]
fn without_dns_nothing_passes_uninspected_and_sidecars_come_back_with_it() {
    let _alone = alone();
    let guarded = Guarded::new("names");
    let watch = guarded.watch();
    let without = WithoutNames::start();
    // Streams that are open need no name.
    let took = guarded.edit(1, 1);
    println!("names: a change is in force without DNS after {took:.1?}");
    // A new one does.
    kubectl(&["rollout", "restart", "deploy/sallyport-operator", "-n", SYSTEM]).unwrap();
    kubectl(&["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=120s"]).unwrap();
    // Whoever gets round the missing resolver by the address meets the filter all the same.
    let key = Call::get(format!("http://{}/api/orders?key={}", guarded.host, fake_key()));
    let key = key.connect_to(guarded.address);
    let _ = guarded.pod.agent.call(&key).unwrap().expect_refusal(403, "policy_denied");
    drop(without);
    let start = Instant::now();
    guarded.await_served_by_name();
    let took = guarded.edit(1, 2);
    println!("names: served again after {:.1?}; a change is in force after {took:.1?}", start.elapsed());
    let seen = watch.stop();
    println!("names: {seen}");
    seen.no_key_passed();
    guarded.await_counted(1);
}
