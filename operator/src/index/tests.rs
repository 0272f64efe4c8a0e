#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::error_boundary::InvalidObject;
use sallyport_api::{AgentPolicyObject, AgentPolicySpec, names};
use sallyport_plan::inject::InjectSettings;
use sallyport_proto::discovery::{POLICY_PART, SCHEMA, bundle_digest, part_digest};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::bundle::compile;
use super::state::PolicyFacts;
use super::{Index, Notice, Packed};

type Receiver = watch::Receiver<Option<Arc<Packed>>>;

pub(crate) fn settings() -> InjectSettings {
    serde_json::from_value(json!({
        "images": {"extproc": "e", "envoy": "v", "capture": "c"},
        "discovery": "https://sallyport-operator.sallyport-system.svc:8443",
    }))
    .unwrap()
}

/// An index that is fed by hand, in namespace `agents`.
pub(crate) struct Cluster {
    pub(crate) index: Index,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let cluster = Self { index: Index::new(settings()) };
        cluster.namespace(&json!({}));
        cluster.index.all_listed();
        cluster
    }

    pub(crate) fn namespace(&self, annotations: &Value) {
        let meta = json!({"name": "agents", "uid": "n", "annotations": annotations});
        self.index.apply_namespace(&serde_json::from_value(meta).unwrap());
    }

    /// Applies a policy; `age` orders by creation. What is to be compiled is compiled.
    pub(crate) fn policy(&self, name: &str, age: u32, generation: i64, spec: &Value) {
        self.annotated(name, age, generation, spec, &json!({}));
    }

    fn annotated(&self, name: &str, age: u32, generation: i64, spec: &Value, annotations: &Value) {
        if let Some(job) = self.index.apply_policy(policy(name, age, generation, spec, annotations)) {
            self.index.compiled(compile(job, self.index.settings()));
        }
    }

    pub(crate) fn pod(&self, name: &str, uid: &str, labels: &Value) -> Receiver {
        self.index.apply_pod(&pod(name, uid, labels, &json!({})));
        self.index.watch("agents", name, uid).unwrap()
    }

    fn facts(&self, policy: &str) -> PolicyFacts {
        self.index.read(super::state::State::facts)[&("agents".to_owned(), policy.to_owned())].clone()
    }
}

fn policy(name: &str, age: u32, generation: i64, spec: &Value, annotations: &Value) -> AgentPolicyObject {
    serde_json::from_value(json!({
        "apiVersion": "sallyport.dev/v1alpha1",
        "kind": "AgentPolicy",
        "metadata": {
            "name": name, "namespace": "agents", "uid": format!("uid-{name}"), "generation": generation,
            "creationTimestamp": format!("2026-01-01T00:00:{age:02}Z"), "annotations": annotations,
        },
        "spec": spec,
    }))
    .unwrap()
}

fn pod(name: &str, uid: &str, labels: &Value, annotations: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {
            "name": name, "namespace": "agents", "uid": uid, "labels": labels, "annotations": annotations,
        },
        "status": {"phase": "Running"},
    }))
    .unwrap()
}

pub(crate) fn selecting(app: &str) -> Value {
    json!({"selector": {"matchLabels": {"app": app}}})
}

fn broken(app: &str) -> Value {
    json!({"selector": {"matchLabels": {"app": app}}, "cedar": {"inline": "forbid ("}})
}

/// Which policy and generation a pod has.
fn has(bundles: &Receiver) -> Option<(String, i64)> {
    let bundle = bundles.borrow();
    bundle.as_ref().and_then(|b| b.policy.as_ref()).map(|p| (p.name.clone(), p.generation))
}

fn killed(bundles: &Receiver) -> Option<String> {
    bundles.borrow().as_ref().unwrap().kill.as_ref().map(|k| k.by.clone())
}

#[test]
fn a_bundle_holds_the_policy_and_names_its_content() {
    let cluster = Cluster::new();
    let pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    assert_eq!(has(&pod), None);
    cluster.policy("p", 1, 1, &selecting("bot"));
    let bundle = pod.borrow().clone().unwrap();
    assert_eq!(bundle.schema, SCHEMA);
    assert_eq!(bundle.digest, bundle_digest(&bundle));
    for part in &bundle.parts {
        assert_eq!(part.digest, part_digest(part.content.as_ref().unwrap()));
    }
    let policy = bundle.parts.iter().find(|p| p.name == POLICY_PART).unwrap();
    let spec: AgentPolicySpec = serde_json::from_slice(policy.content.as_ref().unwrap()).unwrap();
    assert_eq!(spec.selector.match_labels["app"], "bot");
}

#[test]
fn pods_of_one_policy_share_one_bundle() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    let (a, b) =
        (cluster.pod("a", "1", &json!({"app": "bot"})), cluster.pod("b", "2", &json!({"app": "bot"})));
    assert!(Arc::ptr_eq(a.borrow().as_ref().unwrap(), b.borrow().as_ref().unwrap()));
}

#[test]
fn the_oldest_policy_wins_and_the_loser_says_so() {
    let cluster = Cluster::new();
    cluster.policy("young", 2, 1, &selecting("bot"));
    let pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    assert_eq!(has(&pod).unwrap().0, "young");
    assert_eq!(cluster.facts("young").conflict, None);
    cluster.policy("old", 1, 1, &json!({}));
    assert_eq!(has(&pod).unwrap().0, "old");
    assert_eq!(cluster.facts("young").conflict.as_deref(), Some("old"));
    assert_eq!((cluster.facts("young").pods, cluster.facts("old").pods), (0, 1));
    assert_eq!(cluster.facts("old").conflict, None);
}

#[test]
fn without_pods_the_younger_of_two_equal_selectors_is_conflicted() {
    let cluster = Cluster::new();
    cluster.policy("b", 1, 1, &selecting("bot"));
    cluster.policy("a", 2, 1, &selecting("bot"));
    cluster.policy("other", 3, 1, &selecting("else"));
    assert_eq!(cluster.facts("a").conflict.as_deref(), Some("b"));
    assert_eq!(cluster.facts("b").conflict, None);
    assert_eq!(cluster.facts("other").conflict, None);
}

#[test]
fn a_pods_annotation_chooses_and_lifts_the_conflict() {
    let cluster = Cluster::new();
    cluster.policy("old", 1, 1, &selecting("bot"));
    cluster.policy("young", 2, 1, &selecting("bot"));
    let wanting = pod("bot", "1", &json!({"app": "bot"}), &json!({names::POLICY: "young"}));
    cluster.index.apply_pod(&wanting);
    assert_eq!(has(&cluster.index.watch("agents", "bot", "1").unwrap()).unwrap().0, "young");
    assert_eq!(cluster.facts("young").conflict, None);
}

#[test]
fn a_bad_generation_keeps_the_last_good_one_and_a_good_one_replaces_it() {
    let cluster = Cluster::new();
    let mut pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    cluster.policy("p", 1, 1, &selecting("bot"));
    let digest = pod.borrow_and_update().as_ref().unwrap().digest.clone();
    cluster.policy("p", 1, 2, &broken("bot"));
    assert!(!pod.has_changed().unwrap());
    let facts = cluster.facts("p");
    assert_eq!((facts.generation, facts.good.as_ref().unwrap().generation), (2, 1));
    assert_eq!(facts.good.unwrap().digest, digest);
    assert!(facts.error.unwrap().contains("line"), "the error has a place");
    cluster.policy("p", 1, 3, &json!({"selector": {"matchLabels": {"app": "bot"}}, "mode": "Observe"}));
    assert_eq!(has(&pod).unwrap(), ("p".into(), 3));
    assert_eq!(cluster.facts("p").error, None);
}

#[test]
fn an_object_of_the_wrong_shape_keeps_the_last_good_one() {
    let cluster = Cluster::new();
    let pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    cluster.policy("p", 1, 1, &selecting("bot"));
    let mut metadata = policy("p", 1, 2, &json!({}), &json!({})).metadata;
    metadata.annotations = Some([(names::KILL.to_owned(), "true".to_owned())].into());
    cluster.index.apply_invalid_policy(InvalidObject { error: "unknown field `x`".into(), metadata });
    assert_eq!(has(&pod).unwrap(), ("p".into(), 1));
    assert_eq!(cluster.facts("p").error.as_deref(), Some("unknown field `x`"));
    assert_eq!(killed(&pod).as_deref(), Some("agentpolicy agents/p"), "its kill switch works all the same");
}

#[test]
fn an_invalid_policy_guards_nothing_and_takes_no_pod() {
    let cluster = Cluster::new();
    cluster.policy("broken", 1, 1, &broken("bot"));
    cluster.policy("good", 2, 1, &selecting("bot"));
    assert_eq!(has(&cluster.pod("bot", "1", &json!({"app": "bot"}))).unwrap().0, "good");
    let names: Vec<_> =
        cluster.index.policies("agents").into_iter().filter_map(|p| p.metadata.name).collect();
    assert_eq!(names, ["good"]);
}

#[test]
fn a_late_compilation_of_an_older_generation_changes_nothing() {
    let cluster = Cluster::new();
    let pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    let first = cluster.index.apply_policy(policy("p", 1, 1, &selecting("bot"), &json!({}))).unwrap();
    let second = cluster.index.apply_policy(policy("p", 1, 2, &selecting("bot"), &json!({}))).unwrap();
    cluster.index.compiled(compile(second, cluster.index.settings()));
    cluster.index.compiled(compile(first, cluster.index.settings()));
    assert_eq!(has(&pod).unwrap(), ("p".into(), 2));
}

#[test]
fn deleting_a_policy_leaves_its_pods_what_they_had() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    let pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    let mut notices = cluster.index.notices();
    cluster.index.delete_policy("agents", "p");
    assert_eq!(has(&pod).unwrap().0, "p");
    let again = cluster.index.watch("agents", "bot", "1").unwrap();
    assert_eq!(has(&again).unwrap().0, "p", "also for a pod that comes again");
    assert!(matches!(notices.try_recv().unwrap(), Notice::PolicyDeleted { pods: 1, .. }));
    // The namespace's kill switch reaches it still, and another policy takes it over.
    cluster.namespace(&json!({names::KILL: "true"}));
    assert_eq!(killed(&pod).as_deref(), Some("namespace agents"));
    cluster.namespace(&json!({}));
    cluster.policy("q", 2, 1, &json!({}));
    assert_eq!(has(&pod).unwrap().0, "q");
}

#[test]
fn the_namespaces_kill_switch_reaches_every_pod_at_once_and_goes_again() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    let pod = cluster.pod("bot", "1", &json!({"app": "bot"}));
    let digest = pod.borrow().as_ref().unwrap().digest.clone();
    let mut notices = cluster.index.notices();
    cluster.namespace(&json!({names::KILL: "true"}));
    assert_eq!(killed(&pod).as_deref(), Some("namespace agents"));
    assert_ne!(pod.borrow().as_ref().unwrap().digest, digest);
    assert_eq!(cluster.facts("p").killed.as_deref(), Some("namespace agents"));
    cluster.namespace(&json!({names::KILL: "true"}));
    cluster.namespace(&json!({names::KILL: "false"}));
    assert_eq!(killed(&pod), None);
    assert_eq!(pod.borrow().as_ref().unwrap().digest, digest);
    let flips: Vec<bool> = std::iter::from_fn(|| notices.try_recv().ok())
        .map(|n| matches!(n, Notice::Kill { on: true, .. }))
        .collect();
    assert_eq!(flips, [true, false], "one notice for each flip");
}

#[test]
fn a_policys_kill_switch_reaches_its_pods_only() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    cluster.policy("q", 2, 1, &selecting("other"));
    let (mine, other) = (
        cluster.pod("bot", "1", &json!({"app": "bot"})),
        cluster.pod("other", "2", &json!({"app": "other"})),
    );
    cluster.annotated("p", 1, 1, &selecting("bot"), &json!({names::KILL: "true"}));
    assert_eq!(killed(&mine).as_deref(), Some("agentpolicy agents/p"));
    assert_eq!(killed(&other), None);
}

#[test]
fn every_value_but_false_kills() {
    for (value, dead) in [
        ("true", true),
        ("True", true),
        ("yes", true),
        ("1", true),
        ("false", false),
        ("False", false),
        ("", false),
        (" ", false),
    ] {
        let annotations = [(names::KILL.to_owned(), value.to_owned())].into();
        assert_eq!(super::kill::is_killed(Some(&annotations)), dead, "{value:?}");
    }
    assert!(!super::kill::is_killed(None));
}

#[test]
fn who_turned_the_switch_is_read_from_the_managed_fields() {
    let meta =
        |fields: Value| -> ObjectMeta { serde_json::from_value(json!({"managedFields": fields})).unwrap() };
    let field = |manager: &str, at: &str, key: &str| json!({"manager": manager, "time": at, "fieldsV1": {"f:metadata": {"f:annotations": {format!("f:{key}"): {}}}}});
    let both = meta(json!([
        field("kubectl-annotate", "2026-01-01T00:00:00Z", names::KILL),
        field("argocd", "2026-01-02T00:00:00Z", "x"),
    ]));
    assert_eq!(super::kill::who(&both).unwrap(), "kubectl-annotate at 2026-01-01T00:00:00Z");
    let gone = meta(json!([field("argocd", "2026-01-02T00:00:00Z", "x")]));
    assert_eq!(super::kill::who(&gone), None, "the last writer need not be the one that removed it");
    assert_eq!(super::kill::who(&ObjectMeta::default()), None);
}

#[test]
fn a_pods_new_label_moves_it_to_another_policy() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    cluster.policy("q", 2, 1, &selecting("other"));
    let bundles = cluster.pod("bot", "1", &json!({"app": "bot"}));
    cluster.index.apply_pod(&pod("bot", "1", &json!({"app": "other"}), &json!({})));
    assert_eq!(has(&bundles).unwrap().0, "q");
    cluster.index.apply_pod(&pod("bot", "1", &json!({"app": "nobody's"}), &json!({})));
    assert_eq!(has(&bundles).unwrap().0, "q", "a pod that was guarded is never let go");
    assert_eq!(cluster.facts("q").pods, 0);
}

#[test]
fn a_pod_made_again_is_another_pod() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    let first = cluster.pod("bot", "1", &json!({"app": "bot"}));
    let second = cluster.pod("bot", "2", &json!({"app": "bot"}));
    assert!(first.has_changed().is_err(), "the first one's stream ends");
    assert!(second.has_changed().is_ok());
    assert!(cluster.index.watch("agents", "bot", "1").is_none());
    cluster.index.delete_pod("agents", "bot");
    assert!(second.has_changed().is_err());
}

#[test]
fn a_policy_made_again_under_its_name_is_another_policy() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &selecting("bot"));
    let bundles = cluster.pod("bot", "1", &json!({"app": "bot"}));
    let mut again = policy("p", 5, 1, &json!({"mode": "Observe"}), &json!({}));
    again.metadata.uid = Some("another".into());
    let job = cluster.index.apply_policy(again).unwrap();
    assert_eq!(has(&bundles).unwrap().0, "p");
    let before = bundles.borrow().as_ref().unwrap().digest.clone();
    cluster.index.compiled(compile(job, cluster.index.settings()));
    assert_ne!(bundles.borrow().as_ref().unwrap().digest, before);
}

#[test]
fn pods_that_do_not_run_are_not_counted_and_pods_with_older_fields_are_stale() {
    let cluster = Cluster::new();
    cluster.policy("p", 1, 1, &json!({}));
    cluster.pod("running", "1", &json!({}));
    let mut pending = pod("pending", "2", &json!({}), &json!({}));
    pending.status = None;
    cluster.index.apply_pod(&pending);
    let mut leaving: Pod = pod("leaving", "3", &json!({}), &json!({}));
    leaving.metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    cluster.index.apply_pod(&leaving);
    let status = json!({"digest": sallyport_plan::inject::pod_fields_digest(&AgentPolicySpec::default(), &settings())});
    cluster.index.apply_pod(&pod("fresh", "4", &json!({}), &json!({names::STATUS: status.to_string()})));
    let facts = cluster.facts("p");
    assert_eq!((facts.pods, facts.stale), (2, 1));
}

#[test]
fn guarded_namespaces_are_those_with_the_label_or_with_pods() {
    let index = Index::new(settings());
    let namespace = |name: &str, inject: Option<&str>| {
        let labels = inject.map_or_else(|| json!({}), |v| json!({names::INJECT: v}));
        index.apply_namespace(&serde_json::from_value(json!({"name": name, "labels": labels})).unwrap());
    };
    let guarded = index.guarded_namespaces();
    let now = || guarded.borrow().iter().cloned().collect::<Vec<_>>();
    namespace("a", Some("enabled"));
    namespace("b", Some("required"));
    namespace("c", Some("disabled"));
    namespace("agents", None);
    assert_eq!(now(), ["a", "b"]);
    index.apply_pod(&pod("bot", "1", &json!({}), &json!({})));
    assert_eq!(now(), ["a", "agents", "b"]);
    namespace("a", None);
    index.delete_pod("agents", "bot");
    assert_eq!(now(), ["b"]);
    index.delete_namespace("b");
    assert!(now().is_empty());
    assert_eq!(index.namespace("b"), None);
}

#[test]
fn an_index_is_synced_once_every_first_policy_is_compiled() {
    let index = Index::new(settings());
    let job = index.apply_policy(policy("p", 1, 1, &json!({}), &json!({}))).unwrap();
    index.all_listed();
    assert!(!index.synced());
    index.compiled(compile(job, index.settings()));
    assert!(index.synced());
    let _ = index.apply_policy(policy("q", 1, 1, &json!({}), &json!({}))).unwrap();
    assert!(index.synced());
}
