//! Elections on a fake API server, in paused time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{FakeApi, Ill};
use sallyport_operator::lease::{self, Settings};
use sallyport_operator::metrics::Metrics;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;

const PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/op";

struct Replica {
    leads: watch::Receiver<bool>,
    stop: watch::Sender<bool>,
    task: JoinHandle<anyhow::Result<()>>,
}

fn replica(api: &FakeApi, identity: &str) -> Replica {
    let settings = Settings {
        namespace: "ns".into(),
        name: "op".into(),
        identity: identity.into(),
        duration: Duration::from_secs(15),
    };
    let (leader, leads) = watch::channel(false);
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(lease::run(api.client(), settings, leader, stopped, Metrics::new().unwrap()));
    Replica { leads, stop, task }
}

async fn after(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

fn holder(api: &FakeApi) -> Option<String> {
    api.get(PATH)?["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

#[tokio::test(start_paused = true)]
async fn one_of_two_leads_and_renews() {
    let api = FakeApi::default();
    let (a, b) = (replica(&api, "a"), replica(&api, "b"));
    for _ in 0..100 {
        after(1).await;
        assert!(*a.leads.borrow() != *b.leads.borrow());
    }
    assert!(api.writes().len() > 15, "{:?}", api.writes());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_given_back_is_taken_at_once() {
    let api = FakeApi::default();
    let a = replica(&api, "a");
    after(1).await;
    let b = replica(&api, "b");
    after(20).await;
    assert!(*a.leads.borrow() && !*b.leads.borrow());
    a.stop.send(true).unwrap();
    a.task.await.unwrap().unwrap();
    assert_eq!(holder(&api), None);
    after(6).await;
    assert!(*b.leads.borrow());
    assert_eq!(api.get(PATH).unwrap()["spec"]["leaseTransitions"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_dead_leader_is_followed_when_its_lease_was_seen_unchanged_for_its_whole_duration() {
    let api = FakeApi::default();
    let a = replica(&api, "a");
    after(1).await;
    let b = replica(&api, "b");
    after(14).await;
    a.task.abort();
    after(9).await;
    assert!(!*b.leads.borrow(), "the lease holds still");
    after(13).await;
    assert!(*b.leads.borrow());
    assert_eq!(holder(&api).unwrap(), "b");
}

#[tokio::test(start_paused = true)]
async fn the_holders_clock_does_not_matter() {
    for renewed in ["2001-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"] {
        let api = FakeApi::default();
        let spec = json!({"holderIdentity": "ghost", "leaseDurationSeconds": 15, "renewTime": renewed});
        api.put(PATH, json!({"metadata": {"name": "op", "namespace": "ns"}, "spec": spec}));
        let a = replica(&api, "a");
        after(14).await;
        assert!(!*a.leads.borrow(), "{renewed}: a living holder may have a wrong clock");
        after(12).await;
        assert!(*a.leads.borrow(), "{renewed}: a dead holder may have had a wrong clock");
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_can_not_renew_stops_before_another_may_begin() {
    for ill in [Ill::Failing, Ill::Silent] {
        let api = FakeApi::default();
        let mut a = replica(&api, "a");
        a.leads.wait_for(|l| *l).await.unwrap();
        let held = tokio::time::Instant::now();
        api.be(ill);
        a.leads.wait_for(|l| !*l).await.unwrap();
        let led = held.elapsed();
        assert!(led <= Duration::from_secs(10), "{led:?}");
        assert!(led >= Duration::from_secs(9), "one failure is not the end: {led:?}");
        api.be(Ill::Not);
        after(8).await;
        assert!(*a.leads.borrow(), "it leads again once it can renew");
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_costs_no_leadership() {
    let api = FakeApi::default();
    let a = replica(&api, "a");
    after(1).await;
    for _ in 0..20 {
        api.be(Ill::Failing);
        after(6).await;
        assert!(*a.leads.borrow());
        api.be(Ill::Not);
        after(6).await;
        assert!(*a.leads.borrow());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_somebody_deletes_is_made_again() {
    let api = FakeApi::default();
    let a = replica(&api, "a");
    after(1).await;
    api.delete(PATH);
    after(6).await;
    assert_eq!(holder(&api).unwrap(), "a");
    assert!(*a.leads.borrow());
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_lease_was_taken_by_hand_stops() {
    let api = FakeApi::default();
    let a = replica(&api, "a");
    after(1).await;
    let spec = json!({"holderIdentity": "admin", "leaseDurationSeconds": 15});
    api.put(PATH, json!({"metadata": {"name": "op", "namespace": "ns"}, "spec": spec}));
    after(6).await;
    assert!(!*a.leads.borrow());
    assert_eq!(holder(&api).unwrap(), "admin");
}
