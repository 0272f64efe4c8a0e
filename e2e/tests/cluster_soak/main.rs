//! The operator under many subscribers, a sidecar under long traffic, and what both do while others are away
//! for long: what `make soak` runs.
//!
//! One test at a time has the cluster; only one that does nothing but wait lets others have it meanwhile.
//!
//! The subscribers are real processes with a TLS connection for each stream, and with tokens that are bound
//! to guarded pods. The pods run nowhere. The numbers printed are what the record in `docs/benchmarks` holds;
//! what is asserted are deadlines at five times the target, because machines differ.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod api;
mod cert_manager;
mod fleet;
mod measure;
mod outages;
mod traffic;
mod watch;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sallyport_e2e::cluster::{Namespace, OPERATOR, SYSTEM, await_within, kubectl, resident_kib};
use sallyport_e2e::subscribers::micros;
use serde_json::json;

use api::Api;
use fleet::Fleet;
use measure::{
    ack_seconds, metrics, mib, millis_since, operator_memory, operators, percentile, slope_a_minute,
};
use traffic::Traffic;

/// A change is acknowledged by all within this at the 99th percentile.
const ACK_TARGET: Duration = Duration::from_secs(1);
/// After a restart of all replicas, everyone has acknowledged within this.
const RETURN_TARGET: Duration = Duration::from_secs(60);
/// Resident memory of a replica, for 5,000 subscribers.
const MEMORY_TARGET_MIB: f64 = 150.0;
/// What is asserted is this many times the target.
const SLACK: u32 = 5;
/// For everything that has no target.
const DEADLINE: Duration = Duration::from_secs(300);

const CHANGES: u32 = 5;
/// Samples of memory are taken so often, and those of the first minute are not counted: caches fill.
const SAMPLE: Duration = Duration::from_secs(10);
const WARM_UP: f64 = 60.0;
/// A sidecar or operator that grows by more than this over the counted samples leaks. What is below can't be
/// told from noise in a run of minutes.
const MOST_GROWTH_MIB: f64 = 16.0;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// The policy of the fleet, and changes to it.
struct Policy<'a> {
    api: &'a Api,
    path: String,
}

/// A change that the API server took: the moments before it was asked and after it answered.
struct Change {
    before: u128,
    after: u128,
}

impl<'a> Policy<'a> {
    fn new(api: &'a Api, namespace: &Namespace) -> Self {
        namespace.usual_policy();
        let path = format!("/apis/sallyport.dev/v1alpha1/namespaces/{}/agentpolicies/usual", namespace.name);
        Self { api, path }
    }

    /// Changes the policy, as often as it takes: with every replica away, policies can't be changed.
    fn change(&self, to: u32) -> Change {
        let patch = json!({"spec": {"limits": {"maxBodyBytes": to}}});
        await_within(DEADLINE, "the policy can be changed", || {
            let before = micros();
            let answer = self.api.patch(&self.path, &patch).ok()?;
            (answer.status == 200).then(|| Change { before, after: micros() })
        })
    }

    /// Waits until the status says that every subscriber enforces the newest generation.
    fn await_enforced(&self, pods: usize) {
        await_within(DEADLINE, "the status counts everyone", || {
            let object = self.api.get(&self.path);
            let newest = object["status"]["observedGeneration"] == object["metadata"]["generation"];
            (newest && object["status"]["enforced"] == format!("{pods}/{pods}")).then_some(())
        });
    }
}

/// Waits until everyone got a bundle that was not known before, and gives its digest.
fn await_bundle(fleet: &Fleet, known: &[String]) -> String {
    await_within(DEADLINE, "everyone got the new bundle", || {
        fleet.digests().into_iter().find(|d| !known.contains(d) && fleet.count(d) >= fleet.size)
    })
}

#[test]
fn a_thousand_subscribers_acknowledge_changes_and_come_back_after_a_restart() {
    let _alone = alone();
    let size = setting("SALLYPORT_SOAK_SUBSCRIBERS", 1000);
    let namespace = Namespace::enabled("fleet");
    let api = Api::start();
    let policy = Policy::new(&api, &namespace);
    println!("fleet: operator {:?} MiB before any subscriber", operator_memory());
    let start = Instant::now();
    fleet::pods(&api, &namespace, size);
    println!("fleet: {size} guarded pods that run nowhere after {:.1?}", start.elapsed());
    let start = Instant::now();
    let tokens = fleet::tokens(&api, &namespace, size);
    println!("fleet: {size} tokens bound to them after {:.1?}", start.elapsed());
    println!("fleet: operator {:?} MiB", operator_memory());

    let (begun, start) = (micros(), Instant::now());
    let fleet = Fleet::start(&namespace, &tokens);
    let first = await_bundle(&fleet, &[]);
    let last = *millis_since(&fleet.times(&first), begun).last().unwrap();
    policy.await_enforced(size);
    println!(
        "fleet: all {size} have their first bundle after {last} ms, counted in the status after {:.1?}; \
         turned away meanwhile {:?}; operator {:?} MiB",
        start.elapsed(),
        fleet.ended(),
        operator_memory()
    );

    changes(&policy, &fleet);
    restart(&policy, &fleet);
    let memory = operator_memory();
    assert!(memory.iter().all(|m| *m < MEMORY_TARGET_MIB * f64::from(SLACK)), "{memory:?} MiB");
    long_run(&fleet);
}

/// Changes of the policy, one after the other.
fn changes(policy: &Policy<'_>, fleet: &Fleet) {
    let counted = metrics();
    for round in 1..=CHANGES {
        let known = fleet.digests();
        let change = policy.change((1 << 20) + round);
        let times = fleet.times(&await_bundle(fleet, &known));
        let (asked, taken) = (millis_since(&times, change.before), millis_since(&times, change.after));
        println!(
            "change {round}: p50 {}, p99 {}, last {} ms after it was asked of the API server; \
             p50 {}, p99 {}, last {} ms after it answered",
            percentile(&asked, 50),
            percentile(&asked, 99),
            percentile(&asked, 100),
            percentile(&taken, 50),
            percentile(&taken, 99),
            percentile(&taken, 100),
        );
        let p99 = percentile(&asked, 99);
        assert!(p99 < (ACK_TARGET * SLACK).as_millis(), "p99 {p99} ms");
        policy.await_enforced(fleet.size);
    }
    println!(
        "changes: the operator counts half of the acks within {:?} s of sending, 99 % within {:?} s; \
         operator {:?} MiB",
        ack_seconds(&counted, 0.5),
        ack_seconds(&counted, 0.99),
        operator_memory()
    );
}

/// Every replica at once, with one second to say goodbye. Only once all are gone is the policy changed: an old
/// one would still tell its streams.
fn restart(policy: &Policy<'_>, fleet: &Fleet) {
    let known = fleet.digests();
    let since = micros();
    kubectl(&["delete", "pods", "-n", SYSTEM, "-l", OPERATOR, "--now"]).unwrap();
    let change = policy.change(2 << 20);
    let new = await_bundle(fleet, &known);
    let took = millis_since(&fleet.times(&new), since);
    let back = millis_since(&fleet.back(since), since);
    policy.await_enforced(fleet.size);
    println!(
        "restart: every replica deleted; policies can be changed again after {} ms; streams back: half after \
         {} ms, all after {} ms; a new policy acknowledged by half after {} ms, by all after {} ms",
        (change.after - since) / 1000,
        percentile(&back, 50),
        percentile(&back, 100),
        percentile(&took, 50),
        percentile(&took, 100),
    );
    let now = metrics();
    println!(
        "restart: TokenReviews {}, turned away to come again {}; what the subscribers saw: {:?}; operator {:?} MiB",
        now.get("sallyport_operator_token_reviews_total{result=\"authenticated\"}").unwrap_or(&0.0),
        now.get("sallyport_operator_streams_refused_total{reason=\"too_many\"}").unwrap_or(&0.0),
        fleet.ended(),
        operator_memory()
    );
    let all = percentile(&took, 100);
    assert!(all < (RETURN_TARGET * SLACK).as_millis(), "{all} ms");
}

/// A guarded pod under traffic, beside a fleet that is held: nothing fails, and nothing grows.
fn long_run(fleet: &Fleet) {
    let length = Duration::from_secs(setting("SALLYPORT_SOAK_SECONDS", 300) as u64);
    let namespace = Namespace::enabled("long");
    namespace.usual_policy();
    let host = namespace.upstream();
    let pod = namespace.agent("agent");
    namespace.await_enforced("usual", 1);
    let (agent, operators) = (namespace.pod("agent").unwrap(), operators());
    let processes: Vec<_> = ["sallyport-extproc", "sallyport-envoy"]
        .map(|container| (container.to_owned(), &agent, container))
        .into_iter()
        .chain(operators.iter().map(|o| (format!("operator {}", o["metadata"]["name"]), o, "operator")))
        .collect();
    let mut samples = vec![Vec::new(); processes.len()];

    let traffic = Traffic::start(&pod, &host);
    let start = Instant::now();
    while start.elapsed() < length {
        std::thread::sleep(SAMPLE.min(length.saturating_sub(start.elapsed())));
        for (all, (name, pod, container)) in samples.iter_mut().zip(&processes) {
            let now = resident_kib(pod, container).unwrap_or_else(|| panic!("{name} is gone"));
            all.push((start.elapsed().as_secs_f64(), mib(now)));
        }
    }
    let (counts, wrong) = traffic.stop();
    println!("long run: {length:?}, {counts:?} calls, {} of them wrong", wrong.len());
    for ((name, ..), samples) in processes.iter().zip(&samples) {
        let counted: Vec<_> =
            samples.iter().copied().filter(|s| s.0 > WARM_UP.min(length.as_secs_f64() / 2.0)).collect();
        let (first, last) = (counted.first().unwrap().1, counted.last().unwrap().1);
        println!(
            "long run: {name}: {:.1} MiB at first, {first:.1} MiB warm, {last:.1} MiB at the end, {:+.2} MiB a minute",
            samples[0].1,
            slope_a_minute(&counted)
        );
        assert!(last - first < MOST_GROWTH_MIB, "{name} grew: {samples:?}");
    }
    println!("long run: streams of the {} that ended meanwhile: {:?}", fleet.size, fleet.ended());
    let shown: Vec<_> = wrong.iter().take(5).collect();
    assert!(wrong.is_empty(), "{} wrong, such as {shown:?}", wrong.len());
}
