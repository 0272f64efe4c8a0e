//! Index, discovery and status against a real API server, without a kubelet: pods are written by hand. Run
//! it with `KUBECONFIG` of a cluster that may be thrown away:
//! `cargo test -p sallyport-operator --test api_server -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, CustomResourceExt as _, ResourceExt as _};
use sallyport_api::{AgentPolicyObject, names};
use sallyport_operator::{discovery, index, status};
use sallyport_proto::discovery::{
    Ack, Bundle, DiscoveryClient, Hello, Request, Response, SubscribeRequest, SubscribeResponse,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Channel, Server};

const NAMESPACE: &str = "agents";
const OPERATOR: &str = "sallyport-system";

async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(30) {
        if let Some(found) = look().await {
            println!("{what}: after {:?}", begin.elapsed());
            return found;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never: {what}");
}

async fn put<K>(api: &Api<K>, name: &str, object: Value)
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(object)).await.unwrap();
}

fn condition(status: &Value, kind: &str) -> Option<(String, String)> {
    let found = status["conditions"].as_array()?.iter().find(|c| c["type"] == kind)?;
    Some((found["status"].as_str()?.into(), found["reason"].as_str()?.into()))
}

fn is(status: &Value, kind: &str, wanted: (&str, &str)) -> bool {
    condition(status, kind).is_some_and(|(s, r)| (s.as_str(), r.as_str()) == wanted)
}

async fn next(hear: &mut tonic::Streaming<SubscribeResponse>) -> Bundle {
    let message = tokio::time::timeout(Duration::from_secs(5), hear.message()).await.expect("no bundle came");
    match message.unwrap().unwrap().kind.unwrap() {
        Response::Bundle(bundle) => bundle,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an API server: KUBECONFIG"]
async fn a_policy_reaches_a_pod_and_its_status_says_so() {
    tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_test_writer().init();
    let client = Client::try_default().await.unwrap();
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut crd = serde_json::to_value(AgentPolicyObject::crd()).unwrap();
    crd["status"] = Value::Null;
    put(&crds, "agentpolicies.sallyport.dev", crd).await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    for name in [NAMESPACE, OPERATOR] {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": name, "labels": {names::INJECT: "enabled"},
        }});
        put(&namespaces, name, object).await;
    }
    let kind = kube::api::ApiResource::erase::<AgentPolicyObject>(&());
    let policies: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kind);
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    eventually("the kind is served", async || policies.list(&ListParams::default()).await.ok()).await;
    let policy = |spec: Value| json!({"apiVersion": "sallyport.dev/v1alpha1", "kind": "AgentPolicy", "metadata": {"name": "bot"}, "spec": spec});
    let selector = json!({"matchLabels": {"app": "bot"}});
    put(&policies, "bot", policy(json!({"selector": selector}))).await;
    let status_of = async || policies.get("bot").await.ok().map(|p| p.data["status"].clone());

    // The operator.
    let settings = serde_json::from_value(json!({
        "images": {"extproc": "e", "envoy": "v", "capture": "c"}, "discovery": "https://operator:8443",
    }));
    let registry = prometheus::Registry::new();
    let (index, watching) = index::start(client.clone(), settings.unwrap());
    tokio::spawn(watching);
    let (_leads, leader) = watch::channel(true);
    let identity = status::Identity { namespace: OPERATOR.into(), pod_name: "operator-0".into() };
    tokio::spawn(status::run(client.clone(), index.clone(), leader, identity));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let service = discovery::service(client.clone(), index.clone(), &registry);
    tokio::spawn(
        Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)),
    );
    eventually("synced", async || index.synced().then_some(())).await;
    eventually("Enforced=Unknown/NoPods", async || {
        status_of().await.filter(|s| is(s, "Enforced", ("Unknown", "NoPods")))
    })
    .await;

    // A guarded pod, and its sidecar.
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "bot"}});
    put(&accounts, "bot", account).await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "bot-0", "labels": {"app": "bot", names::GUARDED: "true"}},
        "spec": {"serviceAccountName": "bot", "containers": [{"name": "a", "image": "a"}]},
    });
    put(&pods, "bot-0", pod).await;
    let running = json!({"status": {"phase": "Running"}});
    pods.patch_status("bot-0", &PatchParams::default(), &Patch::Merge(running)).await.unwrap();
    let uid = pods.get("bot-0").await.unwrap().uid().unwrap();
    let ask: TokenRequest = serde_json::from_value(json!({"metadata": {}, "spec": {
        "audiences": [names::AUDIENCE],
        "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "bot-0", "uid": uid},
    }}))
    .unwrap();
    let token = accounts.create_token_request("bot", &PostParams::default(), &ask).await.unwrap();
    let token = token.status.unwrap().token;
    let (say, said) = mpsc::channel(8);
    let hello = Hello { version: "0.1.0".into(), schema_least: 1, schema_most: 1, ..Hello::default() };
    say.send(SubscribeRequest { kind: Some(Request::Hello(hello)) }).await.unwrap();
    let mut request = tonic::Request::new(ReceiverStream::new(said));
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    let channel = Channel::from_shared(url).unwrap().connect().await.unwrap();
    let mut hear = DiscoveryClient::new(channel).subscribe(request).await.unwrap().into_inner();
    let ack = async |bundle: &Bundle| {
        let ack = Ack { digest: bundle.digest.clone() };
        say.send(SubscribeRequest { kind: Some(Request::Ack(ack)) }).await.unwrap();
    };
    let first = next(&mut hear).await;
    eventually("0/1", async || {
        status_of().await.filter(|s| s["enforced"] == "0/1" && is(s, "Enforced", ("False", "SomePods")))
    })
    .await;
    ack(&first).await;
    let standing = eventually("1/1", async || {
        status_of().await.filter(|s| s["enforced"] == "1/1" && is(s, "Enforced", ("True", "AllPods")))
    })
    .await;
    println!("{}", serde_json::to_string_pretty(&standing).unwrap());
    assert_eq!(standing["digest"], first.digest);

    // The kill switch, from the annotation to the sidecar.
    let kill = |value: Value| Patch::Merge(json!({"metadata": {"annotations": {names::KILL: value}}}));
    let switch = PatchParams { field_manager: Some("on-call".into()), ..PatchParams::default() };
    let begin = Instant::now();
    namespaces.patch(NAMESPACE, &switch, &kill(json!("true"))).await.unwrap();
    let killed = next(&mut hear).await;
    println!("killed after {:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(1) && killed.kill.is_some());
    ack(&killed).await;
    eventually("Enforced=True/Killed", async || {
        status_of().await.filter(|s| is(s, "Enforced", ("True", "Killed")))
    })
    .await;
    namespaces.patch(NAMESPACE, &switch, &kill(Value::Null)).await.unwrap();
    let again = next(&mut hear).await;
    assert_eq!(again.digest, first.digest);
    ack(&again).await;

    // A generation that does not load.
    put(&policies, "bot", policy(json!({"selector": selector, "cedar": {"inline": "forbid ("}}))).await;
    let bad = eventually("Accepted=False/Invalid", async || {
        status_of().await.filter(|s| is(s, "Accepted", ("False", "Invalid")))
    })
    .await;
    println!("{}", serde_json::to_string_pretty(&bad).unwrap());
    assert_eq!(bad["digest"], first.digest);

    // The shard, the Events, and what is left of a deleted policy.
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), OPERATOR);
    println!("shard: {:?}", maps.get("sallyport-shard-operator-0").await.unwrap().data);
    policies.delete("bot", &DeleteParams::default()).await.unwrap();
    let events: Api<Event> = Api::all(client.clone());
    eventually("Event PolicyDeleted", async || {
        let all = events.list(&ListParams::default()).await.unwrap();
        all.items.iter().any(|e| e.reason.as_deref() == Some("PolicyDeleted")).then_some(())
    })
    .await;
    eventually("Event Killed says who", async || {
        let all = events.list(&ListParams::default()).await.unwrap();
        let note = |e: &Event| e.note.clone().unwrap_or_default();
        all.items.iter().any(|e| note(e).contains("blocked; written by on-call at 2")).then_some(())
    })
    .await;
    for event in events.list(&ListParams::default()).await.unwrap() {
        if event.reporting_controller.as_deref() == Some(names::FIELD_MANAGER) {
            println!("event: {:?} {:?} {:?}", event.type_, event.reason, event.note);
        }
    }
    let seen = discovery::subscribers(&index);
    assert_eq!((seen.len(), seen[0].acked), (1, true));
    for family in registry.gather() {
        println!("metric: {} {:?}", family.name(), family.get_metric().first());
    }

    // A pod that goes ends its stream.
    let now = DeleteParams::default().grace_period(0);
    pods.delete("bot-0", &now).await.unwrap();
    let end = tokio::time::timeout(Duration::from_secs(5), hear.message()).await.unwrap();
    assert_eq!(end.unwrap_err().code(), tonic::Code::NotFound);
}
