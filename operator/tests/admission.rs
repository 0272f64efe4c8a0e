//! The webhook's paths in process, with a fake index and a fake API server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use common::{FakeApi, Ill};
use k8s_openapi::ByteString;
use sallyport_api::{AgentPolicyObject, names};
use sallyport_operator::metrics::Metrics;
use sallyport_operator::webhook::{Admission, Cluster, Known, MOST_BYTES, Reports, router};
use sallyport_plan::inject::{Images, InjectSettings};
use serde_json::{Value, json};
use tower::ServiceExt;

/// What the index knows.
#[derive(Default)]
struct Index {
    unsynced: bool,
    panics: bool,
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    policies: Vec<AgentPolicyObject>,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Index>>);

impl Known for Shared {
    fn synced(&self) -> bool {
        !self.0.lock().unwrap().unsynced
    }

    fn policies(&self, _: &str) -> Vec<AgentPolicyObject> {
        let panics = self.0.lock().unwrap().panics;
        assert!(!panics, "no such luck");
        self.0.lock().unwrap().policies.clone()
    }

    fn namespace(&self, name: &str) -> Option<BTreeMap<String, String>> {
        self.0.lock().unwrap().namespaces.get(name).cloned()
    }
}

struct World {
    api: FakeApi,
    index: Shared,
    metrics: Metrics,
    router: Router,
}

fn world() -> World {
    let (api, index, metrics) = (FakeApi::default(), Shared::default(), Metrics::new().unwrap());
    let (cluster, watching) = Cluster::new(api.client(), Arc::new(index.clone()));
    let (reports, reporting) = Reports::new(api.client(), "op-0".into(), metrics.clone());
    tokio::spawn(watching);
    tokio::spawn(reporting);
    let images = Images { extproc: "e:1".into(), envoy: "v:1".into(), capture: "c:1".into() };
    let settings = InjectSettings {
        images,
        image_pull_policy: None,
        image_pull_secrets: Vec::new(),
        cni: true,
        discovery: "https://op.ns.svc:8443".into(),
    };
    let router = router(Admission::new(cluster, settings, reports, metrics.clone()));
    let world = World { api, index, metrics, router };
    world.namespace("enabled");
    world
}

impl World {
    fn namespace(&self, inject: &str) {
        self.namespace_in_api(inject);
        let labels = BTreeMap::from([(names::INJECT.to_owned(), inject.to_owned())]);
        self.index.0.lock().unwrap().namespaces.insert("agents".into(), labels);
    }

    fn namespace_in_api(&self, inject: &str) {
        let metadata = json!({"name": "agents", "labels": {names::INJECT: inject}});
        self.api.put("/api/v1/namespaces/agents", json!({"metadata": metadata}));
    }

    fn policy(&self, name: &str, spec: &Value) -> AgentPolicyObject {
        let metadata = json!({"name": name, "namespace": "agents", "uid": name, "generation": 1});
        let object = json!({"apiVersion": sallyport_api::API_VERSION, "kind": "AgentPolicy", "metadata": metadata, "spec": spec});
        self.api.put(
            &format!("/apis/sallyport.dev/v1alpha1/namespaces/agents/agentpolicies/{name}"),
            object.clone(),
        );
        serde_json::from_value(object).unwrap()
    }

    fn known_policy(&self, name: &str, spec: &Value) {
        let policy = self.policy(name, spec);
        self.index.0.lock().unwrap().policies.push(policy);
    }

    async fn post(&self, path: &str, body: impl Into<Body>) -> (StatusCode, String) {
        let request =
            Request::post(path).header("content-type", "application/json").body(body.into()).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    /// The response of a review that was answered.
    async fn review(&self, path: &str, request: Value) -> Value {
        let (status, body) = self.post(path, review(request).to_string()).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let review: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(review["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(review["kind"], "AdmissionReview");
        assert_eq!(review["response"]["uid"], "u-1");
        review["response"].clone()
    }

    /// Events that were written, once some were.
    async fn events(&self) -> Vec<String> {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        self.api.writes().into_iter().filter(|w| w.contains("/events")).collect()
    }
}

fn review(mut request: Value) -> Value {
    let base = json!({
        "uid": "u-1", "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "agents", "operation": "CREATE", "userInfo": {"username": "kim"}, "dryRun": false,
        "object": null, "oldObject": null,
    });
    for (key, value) in base.as_object().unwrap() {
        if request.get(key).is_none() {
            request[key] = value.clone();
        }
    }
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
}

fn pod(asks: bool) -> Value {
    let annotations = if asks { json!({names::INJECT: "true"}) } else { json!({}) };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "bot-", "annotations": annotations, "labels": {"app": "bot"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "bot", "uid": "9", "controller": true}]},
        "spec": {"containers": [{"name": "c", "image": "x"}], "fieldOfANewerServer": {"a": 1}},
    })
}

fn agent_policy(spec: &Value) -> Value {
    json!({"apiVersion": sallyport_api::API_VERSION, "kind": "AgentPolicy",
        "metadata": {"name": "p", "namespace": "agents"}, "spec": spec})
}

/// The object after the answer's patch.
fn patched(object: &Value, response: &Value) -> Value {
    let patch: ByteString = serde_json::from_value(response["patch"].clone()).unwrap();
    let patch: json_patch::Patch = serde_json::from_slice(&patch.0).unwrap();
    let mut object = object.clone();
    json_patch::patch(&mut object, &patch).unwrap();
    object
}

#[tokio::test]
async fn a_pod_that_asks_is_guarded_and_loses_nothing() {
    let world = world();
    world.known_policy("p", &json!({}));
    let response = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    assert_eq!(response["allowed"], true, "{response}");
    assert_eq!(response["patchType"], "JSONPatch");
    assert!(response["patch"].is_string(), "base64");
    let after = patched(&pod(true), &response);
    assert_eq!(after["metadata"]["labels"][names::GUARDED], "true");
    assert_eq!(after["metadata"]["generateName"], "bot-");
    assert_eq!(after["spec"]["fieldOfANewerServer"], json!({"a": 1}));
    let init = after["spec"]["initContainers"].as_array().unwrap();
    assert!(init.iter().any(|c| c["name"] == names::EXTPROC_CONTAINER), "{init:?}");
    assert_eq!(world.events().await, ["POST /apis/events.k8s.io/v1/namespaces/agents/events"]);
    let text = world.metrics.text().unwrap();
    let line = r#"sallyport_operator_admission_requests_total{outcome="injected",reason="Injected",webhook="mutate-pods"} 1"#;
    assert!(text.contains(line), "{text}");

    let again = world.review("/mutate-pods", json!({"object": after})).await;
    assert!(again.get("patch").is_none(), "what is injected stays as it is: {again}");
    assert_eq!(world.events().await.len(), 1);
}

#[tokio::test]
async fn a_dry_run_is_answered_alike_and_leaves_no_event() {
    let world = world();
    world.known_policy("p", &json!({}));
    let response = world.review("/mutate-pods", json!({"object": pod(true), "dryRun": true})).await;
    assert_eq!(patched(&pod(true), &response)["metadata"]["labels"][names::GUARDED], "true");
    assert!(world.events().await.is_empty());
}

#[tokio::test]
async fn a_pod_that_no_policy_selects_is_refused_with_the_way_out() {
    let world = world();
    let response = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    assert_eq!(response["allowed"], false);
    assert_eq!(response["status"]["code"], 403);
    let message = response["status"]["message"].as_str().unwrap();
    assert!(message.starts_with("sallyport: NoPolicy: "), "{message}");
    assert!(message.contains("kubectl"), "{message}");
    assert_eq!(world.events().await.len(), 1);
}

#[tokio::test]
async fn a_policy_that_the_index_has_not_seen_yet_counts_unless_it_is_invalid() {
    let world = world();
    world.policy("bad", &json!({"detection": {"packs": ["nope"]}}));
    let response = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    assert_eq!(response["allowed"], false, "{response}");
    world.policy("late", &json!({}));
    let response = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    assert_eq!(response["allowed"], true, "{response}");
    assert!(response.get("patch").is_some());
}

#[tokio::test]
async fn a_namespace_that_became_required_a_moment_ago_is_required() {
    let world = world();
    world.known_policy("p", &json!({}));
    world.namespace_in_api("required");
    let response = world.review("/mutate-pods", json!({"object": pod(false)})).await;
    assert_eq!(patched(&pod(false), &response)["metadata"]["labels"][names::GUARDED], "true");
}

#[tokio::test]
async fn a_pod_that_does_not_ask_is_left_alone() {
    let world = world();
    let response = world.review("/mutate-pods", json!({"object": pod(false)})).await;
    assert_eq!(response["allowed"], true);
    assert!(response.get("patch").is_none() && response.get("warnings").is_none(), "{response}");
    assert!(world.events().await.is_empty());
}

#[tokio::test]
async fn nothing_is_skipped_on_stale_knowledge() {
    let world = world();
    world.api.be(Ill::Not);
    world.review("/mutate-pods", json!({"object": pod(false)})).await;
    world.api.be(Ill::Failing);
    let (status, body) = world.post("/mutate-pods", review(json!({"object": pod(false)})).to_string()).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(body.contains("Unanswered"), "{body}");
}

#[tokio::test]
async fn before_the_index_is_synced_nothing_is_decided() {
    let world = world();
    world.index.0.lock().unwrap().unsynced = true;
    for path in ["/mutate-pods", "/validate-pods"] {
        let request = json!({"object": pod(true), "oldObject": pod(true)});
        let (status, body) = world.post(path, review(request).to_string()).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(body.contains("has not read policies"), "{body}");
    }
}

#[tokio::test]
async fn a_panic_is_a_denied_answer() {
    let world = world();
    world.index.0.lock().unwrap().panics = true;
    let response = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    assert_eq!(response["allowed"], false);
    assert!(response["status"]["message"].as_str().unwrap().contains("no such luck"), "{response}");
}

#[tokio::test]
async fn malformed_reviews_are_told_where() {
    let world = world();
    let (status, body) = world.post("/mutate-pods", "{").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
    for (change, place) in [
        (json!({"operation": "EAT"}), "request.operation"),
        (json!({"kind": 7}), "request.kind"),
        (json!({"uid": []}), "request.uid"),
    ] {
        let (status, body) = world.post("/mutate-pods", review(change).to_string()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(body.contains(place), "{body}");
    }
    for (body, place) in [
        (
            json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1", "request": null}),
            "apiVersion",
        ),
        (json!({"kind": "Pod", "apiVersion": "admission.k8s.io/v1"}), "kind"),
        (json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}), "request"),
    ] {
        let (status, answer) = world.post("/validate-pods", body.to_string()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(answer.contains(place), "{answer}");
    }
}

#[tokio::test]
async fn an_object_that_is_no_pod_is_denied_with_the_field() {
    let world = world();
    for (request, place) in [
        (
            json!({"object": {"metadata": {}, "spec": {"containers": "many"}}}),
            "request.object.spec.containers",
        ),
        (json!({}), "request.object"),
        (json!({"object": pod(true), "namespace": ""}), "request.namespace"),
    ] {
        let response = world.review("/mutate-pods", request).await;
        assert_eq!(response["allowed"], false);
        assert!(response["status"]["message"].as_str().unwrap().contains(place), "{response}");
    }
}

#[tokio::test]
async fn a_review_that_is_too_large_is_turned_away() {
    let world = world();
    let (status, _) = world.post("/mutate-pods", vec![b' '; MOST_BYTES + 1]).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let chunks = futures_util::stream::iter((0..4).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1 << 20])));
    let (status, _) = world.post("/mutate-pods", Body::from_stream(chunks)).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "without a length too");
}

#[tokio::test]
async fn a_guarded_pod_stays_guarded() {
    let world = world();
    world.known_policy("p", &json!({}));
    let created = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    let guarded = patched(&pod(true), &created);
    let update = |new: &Value, sub: &str| json!({"operation": "UPDATE", "object": new, "oldObject": guarded, "subResource": sub});
    let same = world.review("/validate-pods", update(&guarded, "")).await;
    assert_eq!(same["allowed"], true, "{same}");
    let mut bare = guarded.clone();
    bare["metadata"]["labels"].as_object_mut().unwrap().remove(names::GUARDED);
    let response = world.review("/validate-pods", update(&bare, "")).await;
    assert_eq!(response["allowed"], false);
    assert_eq!(response["status"]["code"], 403);
    assert!(response["status"]["message"].as_str().unwrap().starts_with("sallyport: "), "{response}");
    let mut debugged = guarded.clone();
    let context = json!({"runAsUser": names::SIDECAR_UID});
    debugged["spec"]["ephemeralContainers"] =
        json!([{"name": "d", "image": "d", "securityContext": context}]);
    let response = world.review("/validate-pods", update(&debugged, "ephemeralcontainers")).await;
    assert_eq!(response["allowed"], false, "the sidecar's user: {response}");
}

#[tokio::test]
async fn a_pod_that_another_webhook_altered_after_injection_is_refused() {
    let world = world();
    world.known_policy("p", &json!({}));
    let created = world.review("/mutate-pods", json!({"object": pod(true)})).await;
    let guarded = patched(&pod(true), &created);
    let response = world.review("/validate-pods", json!({"object": guarded})).await;
    assert_eq!(response["allowed"], true, "{response}");
    let mut altered = guarded.clone();
    altered["spec"]["initContainers"]
        .as_array_mut()
        .unwrap()
        .insert(0, json!({"name": "first", "image": "x"}));
    let response = world.review("/validate-pods", json!({"object": altered})).await;
    assert_eq!(response["allowed"], false, "{response}");
}

#[tokio::test]
async fn a_policy_is_refused_where_no_sidecar_could_load_it() {
    let world = world();
    let cedar =
        "@id(\"x\") @action(\"block\")\nforbid (principal, action, resource) when { context.nope == 1 };";
    for (spec, part) in [
        (json!({"detection": {"packs": ["nope"]}}), "spec.detection.packs[0]"),
        (json!({"detection": {"overrides": [{"rule": "SLP-NOPE-1", "action": "Flag"}]}}), "SLP-NOPE-1"),
        (json!({"cedar": {"inline": cedar}}), "line 2"),
        (
            json!({"egress": {"rules": [{"hosts": ["A.b"], "action": "Allow"}]}}),
            "spec.egress.rules[0].hosts[0]",
        ),
        (json!({"limits": {"maxBodyBytes": 1}}), "spec.limits.maxBodyBytes"),
        (json!({"mode": "Maybe"}), "request.object.spec.mode"),
        (json!({"egres": {}}), "egres"),
    ] {
        let response = world.review("/validate-policies", json!({"object": agent_policy(&spec)})).await;
        assert_eq!(response["allowed"], false, "{spec}");
        let message = response["status"]["message"].as_str().unwrap();
        assert!(message.starts_with("sallyport: ") && message.contains(part), "{spec}: {message}");
    }
}

#[tokio::test]
async fn a_policy_that_may_not_mean_what_it_says_is_let_in_with_warnings() {
    let world = world();
    let plain = json!({"egress": {"rules": [{"hosts": ["a.b"], "action": "Allow"}]}});
    let response = world.review("/validate-policies", json!({"object": agent_policy(&plain)})).await;
    assert_eq!(response["allowed"], true);
    assert!(response.get("warnings").is_none(), "{response}");
    let spec = json!({
        "mode": "Observe", "failurePolicy": "Open",
        "capture": {"mode": "Explicit", "excludePorts": [5432]},
        "egress": {"default": "Allow", "rules": [{"hosts": ["*"], "action": "Allow"}]},
        "exceptions": [{"id": "egress", "until": "2020-01-01T00:00:00Z", "reason": "migration"}],
    });
    let response = world.review("/validate-policies", json!({"object": agent_policy(&spec)})).await;
    assert_eq!(response["allowed"], true, "{response}");
    let warnings = response["warnings"].to_string();
    for part in ["Observe", "Open", "advisory", "excludes", "default is Allow", "rules[0]", "exceptions[0]"] {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
}

#[tokio::test]
async fn annotations_of_a_policy_that_became_invalid_can_change() {
    let world = world();
    let old = agent_policy(&json!({"detection": {"packs": ["nope"]}}));
    let mut new = old.clone();
    new["metadata"]["annotations"] = json!({names::KILL: "true"});
    let request = json!({"operation": "UPDATE", "object": new, "oldObject": old});
    let response = world.review("/validate-policies", request).await;
    assert_eq!(response["allowed"], true, "{response}");
}

#[test]
fn bent_reviews_are_answered_without_a_panic() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let world = runtime.block_on(async { world() });
    world.known_policy("bot", &json!({"selector": {"matchLabels": {"app": "bot"}}}));
    let spec =
        json!({"selector": {"matchLabels": {"app": "bot"}}, "egress": {"rules": [{"hosts": ["a.test"]}]}});
    let guarded = {
        let response = runtime.block_on(world.review("/mutate-pods", json!({"object": pod(true)})));
        patched(&pod(true), &response)
    };
    let seeds: Vec<Vec<u8>> = [
        json!({"object": pod(true)}),
        json!({"object": pod(false), "operation": "UPDATE", "oldObject": pod(true)}),
        json!({"object": guarded}),
        json!({"object": agent_policy(&spec)}),
    ]
    .into_iter()
    .map(|request| review(request).to_string().into_bytes())
    .collect();
    let words = [names::INJECT, names::POLICY, "\"initContainers\":", "null", "[]", "{}"];
    let words = words.map(|word| word.as_bytes().to_vec());
    sallyport_fuzz::fuzz("admission", &seeds, &words, |body| {
        for path in ["/mutate-pods", "/validate-pods", "/validate-policies"] {
            let (status, answer) = runtime.block_on(world.post(path, body.to_vec()));
            if !(status == StatusCode::OK || status == StatusCode::BAD_REQUEST)
                || answer.contains("the operator has a fault")
            {
                return Err(format!("{path}: {status} {answer}"));
            }
        }
        Ok(())
    });
}
