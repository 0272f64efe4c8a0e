//! What the leader keeps right: the Secret of authorities, caBundle, the trust ConfigMaps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use common::FakeApi;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use sallyport_api::names::{ROTATE, TRUST_CONFIG_MAP, TRUST_KEY};
use sallyport_operator::certs::own::{LIST_KEY, Own, SECRET};
use sallyport_operator::certs::{Certificates, bundles, own};
use sallyport_operator::metrics::Metrics;
use sallyport_operator::trust;
use serde_json::{Value, json};
use tokio::sync::watch;

const SECRET_PATH: &str = "/api/v1/namespaces/ns/secrets/sallyport-ca";
const HOOKS: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/sallyport";

struct Replica {
    certificates: Certificates,
    leader: watch::Sender<bool>,
}

fn replica(api: &FakeApi, identity: &str) -> Replica {
    let certificates = Certificates::new(Metrics::new().unwrap());
    let leader = watch::Sender::new(false);
    let own =
        Own { namespace: "ns".into(), names: own::service_names("op", "ns"), identity: identity.into() };
    tokio::spawn(own::run(api.client(), own, certificates.clone(), leader.subscribe()));
    Replica { certificates, leader }
}

/// Waits until it holds, for at most some seconds.
async fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("in vain: {what}");
}

fn authorities(api: &FakeApi) -> Vec<Value> {
    let Some(secret) = api.get(SECRET_PATH) else { return Vec::new() };
    let data: ByteString = serde_json::from_value(secret["data"][LIST_KEY].clone()).unwrap();
    serde_json::from_slice(&data.0).unwrap_or_default()
}

fn bundle(replica: &Replica) -> Option<Arc<str>> {
    replica.certificates.bundle().borrow().clone()
}

#[tokio::test]
async fn replicas_that_start_together_without_a_leader_agree_on_one_authority() {
    let api = FakeApi::default();
    let replicas: Vec<Replica> = (0..5).map(|i| replica(&api, &format!("op-{i}"))).collect();
    until("every replica serves", || replicas.iter().all(|r| r.certificates.leaf().is_some())).await;
    until("one bundle", || replicas.iter().all(|r| bundle(r) == bundle(&replicas[0]))).await;
    assert_eq!(authorities(&api).len(), 1);
    assert_eq!(api.get(SECRET_PATH).unwrap()["metadata"]["name"], SECRET);
}

#[tokio::test]
async fn a_rotation_that_is_asked_for_is_the_leaders_work_and_everybody_trusts_both() {
    let api = FakeApi::default();
    let (a, b) = (replica(&api, "a"), replica(&api, "b"));
    until("both serve", || a.certificates.leaf().is_some() && b.certificates.leaf().is_some()).await;
    let mut secret = api.get(SECRET_PATH).unwrap();
    secret["metadata"]["annotations"] = json!({ROTATE: "now"});
    api.put(SECRET_PATH, secret);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(authorities(&api).len(), 1, "nobody leads");
    a.leader.send_replace(true);
    let two = |r: &Replica| bundle(r).is_some_and(|b| b.matches("BEGIN").count() == 2);
    until("both trust two", || two(&a) && two(&b)).await;
    assert_eq!(authorities(&api).len(), 2);
    let left = api.get(SECRET_PATH).unwrap()["metadata"]["annotations"].clone();
    assert!(left.get(ROTATE).is_none(), "asked once, done once: {left}");
}

#[tokio::test]
async fn a_secret_that_is_deleted_or_damaged_is_restored_from_memory() {
    let api = FakeApi::default();
    let a = replica(&api, "a");
    a.leader.send_replace(true);
    until("it serves", || a.certificates.leaf().is_some()).await;
    let before = (authorities(&api), bundle(&a));
    api.delete(SECRET_PATH);
    until("it is back", || authorities(&api) == before.0).await;
    let mut secret = api.get(SECRET_PATH).unwrap();
    secret["data"] = json!({LIST_KEY: ByteString(b"oops".to_vec())});
    api.put(SECRET_PATH, secret);
    until("it is right again", || authorities(&api) == before.0).await;
    assert_eq!(bundle(&a), before.1);
}

#[tokio::test]
async fn a_wiped_ca_bundle_is_written_again_by_the_leader_alone() {
    let api = FakeApi::default();
    let hooks = json!({
        "metadata": {"name": "sallyport"},
        "webhooks": [{"name": "a", "clientConfig": {}, "sideEffects": "None", "admissionReviewVersions": ["v1"]},
                     {"name": "b", "clientConfig": {}, "sideEffects": "None", "admissionReviewVersions": ["v1"]}],
    });
    api.put(HOOKS, hooks.clone());
    let leader = watch::Sender::new(false);
    let trusted = watch::Sender::new(Some(Arc::from("one")));
    let task = bundles::run::<MutatingWebhookConfiguration>(
        api.client(),
        "sallyport".into(),
        trusted.subscribe(),
        leader.subscribe(),
        Metrics::new().unwrap(),
    );
    tokio::spawn(task);
    let written = |text: &str| {
        let bytes = json!(ByteString(text.into()));
        let object = api.get(HOOKS).unwrap();
        let all = object["webhooks"].as_array().unwrap();
        all.len() == 2 && all.iter().all(|w| w["clientConfig"]["caBundle"] == bytes)
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(api.writes().is_empty(), "it does not lead");
    leader.send_replace(true);
    until("written", || written("one")).await;
    api.put(HOOKS, hooks);
    until("written again", || written("one")).await;
    trusted.send_replace(Some(Arc::from("two")));
    until("the new one", || written("two")).await;
    let writes = api.writes().len();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(api.writes().len(), writes, "what is right is left alone");
}

#[tokio::test]
async fn every_guarded_namespace_has_the_bundle_and_gets_it_back() {
    let api = FakeApi::default();
    let path = |namespace: &str| format!("/api/v1/namespaces/{namespace}/configmaps/{TRUST_CONFIG_MAP}");
    let guarded = watch::Sender::new(BTreeSet::from(["a".to_owned()]));
    let trusted = watch::Sender::new(Some(Arc::from("one")));
    let leader = watch::Sender::new(true);
    let metrics = Metrics::new().unwrap();
    tokio::spawn(trust::run(
        api.client(),
        guarded.subscribe(),
        trusted.subscribe(),
        leader.subscribe(),
        metrics,
    ));
    let has = |namespace: &str, text: &str| {
        api.get(&path(namespace)).is_some_and(|map| map["data"][TRUST_KEY] == text)
    };
    until("a has it", || has("a", "one")).await;
    assert_eq!(
        api.get(&path("a")).unwrap()["metadata"]["labels"]["app.kubernetes.io/managed-by"],
        "sallyport-operator"
    );
    guarded.send_modify(|all| {
        all.insert("b".into());
    });
    until("b has it", || has("b", "one")).await;
    api.delete(&path("a"));
    until("a has it again", || has("a", "one")).await;
    let mut edited = api.get(&path("b")).unwrap();
    edited["data"][TRUST_KEY] = json!("evil");
    api.put(&path("b"), edited);
    until("b has it again", || has("b", "one")).await;
    trusted.send_replace(Some(Arc::from("two")));
    until("both have the new one", || has("a", "two") && has("b", "two")).await;
}
