//! The index itself: namespaces, policies and pods in memory, and for each pod the bundle it shall have.
//!
//! Pure: it is told of objects and of compiled policies, and answers. It has no client, no clock and no
//! task of its own, so that everything it promises is tested without a cluster.
//!
//! What it does *not* remember: anything across a restart of the operator. A pod whose policy was deleted
//! before the operator started gets no bundle from it, and keeps the one it holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::error_boundary::InvalidObject;
use sallyport_api::{AgentPolicyObject, AgentPolicyStatus, CapacityStatus, names};
use sallyport_plan::inject::choose;
use tokio::sync::watch;

use super::bundle::{Compiled, Good, Job};
use super::kill::{KilledBy, is_killed, who};
use super::notice::{Notice, Subject};
use super::packed::Packed;

/// A policy's namespace and name.
pub(crate) type PolicyKey = (String, String);

/// What is known of the cluster.
#[derive(Debug, Default)]
pub(crate) struct State {
    namespaces: BTreeMap<String, Namespace>,
    compiling: BTreeSet<PolicyKey>,
}

#[derive(Debug, Default)]
struct Namespace {
    /// None until the namespace itself was seen; its objects may come first.
    labels: Option<BTreeMap<String, String>>,
    killed: bool,
    policies: BTreeMap<String, Policy>,
    /// The policies that have a last good generation, with that generation's spec: what pods choose among.
    accepted: Vec<AgentPolicyObject>,
    pods: BTreeMap<String, GuardedPod>,
}

#[derive(Debug)]
struct Policy {
    meta: ObjectMeta,
    /// None where the object can't be read as a policy.
    status: Option<AgentPolicyStatus>,
    generation: i64,
    killed: bool,
    /// The newest generation that could be compiled.
    good: Option<Arc<Good>>,
    /// Why the newest generation could not be.
    error: Option<String>,
}

#[derive(Debug)]
struct GuardedPod {
    uid: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    running: bool,
    /// [`pod_fields_digest`](sallyport_plan::inject::pod_fields_digest) at the pod's admission.
    pod_fields: Option<String>,
    /// The policy in force; none where no policy selects the pod any more.
    policy: Option<String>,
    /// The last good of the last policy, kept when that policy is deleted.
    good: Option<Arc<Good>>,
    killed_by_policy: bool,
    bundle: watch::Sender<Option<Arc<Packed>>>,
}

/// What status says of a policy, before the sidecars' answers are added.
#[derive(Clone, Debug)]
pub(crate) struct PolicyFacts {
    pub(crate) uid: String,
    pub(crate) generation: i64,
    pub(crate) error: Option<String>,
    pub(crate) good: Option<GoodFacts>,
    /// What was annotated to block everything.
    pub(crate) killed: Option<String>,
    /// Guarded pods of this policy that run.
    pub(crate) pods: u32,
    /// Those of them that carry older pod fields.
    pub(crate) stale: u32,
    /// The policy that has the pods which this one selects.
    pub(crate) conflict: Option<String>,
    /// What the API server says the status is; none where the object can't be read.
    pub(crate) status: Option<AgentPolicyStatus>,
}

/// The last good generation.
#[derive(Clone, Debug)]
pub(crate) struct GoodFacts {
    pub(crate) generation: i64,
    pub(crate) digest: String,
    pub(crate) rules: u32,
    pub(crate) advisory: bool,
    pub(crate) capacity: CapacityStatus,
}

impl State {
    /// Takes in a namespace, new or changed.
    pub(crate) fn apply_namespace(&mut self, meta: &ObjectMeta) -> Vec<Notice> {
        let Some(name) = meta.name.clone() else { return Vec::new() };
        let namespace = self.namespaces.entry(name.clone()).or_default();
        namespace.labels = Some(meta.labels.clone().unwrap_or_default());
        let killed = is_killed(meta.annotations.as_ref());
        if killed == namespace.killed {
            return Vec::new();
        }
        namespace.killed = killed;
        namespace.place_all();
        vec![Notice::Kill { subject: Subject::namespace(meta), on: killed, who: who(meta) }]
    }

    /// Forgets a namespace. Its pods and policies are told of one by one.
    pub(crate) fn delete_namespace(&mut self, name: &str) {
        if let Some(namespace) = self.namespaces.get_mut(name) {
            namespace.labels = None;
            // Not `killed`: pods that are still there stay blocked.
            self.drop_if_empty(name);
        }
    }

    /// Takes in a policy, new or changed. A new generation has to be compiled before anything else changes.
    pub(crate) fn apply_policy(&mut self, object: AgentPolicyObject) -> (Option<Job>, Vec<Notice>) {
        let AgentPolicyObject { metadata, spec, status } = object;
        let Some((key, notices, changed)) = self.policy_seen(metadata, Some(status.unwrap_or_default()))
        else {
            return (None, Vec::new());
        };
        let Some(policy) = self.policy(&key).filter(|_| changed) else { return (None, notices) };
        let job = Job {
            namespace: key.0.clone(),
            name: key.1.clone(),
            uid: policy.meta.uid.clone().unwrap_or_default(),
            generation: policy.generation,
            spec,
        };
        self.compiling.insert(key);
        (Some(job), notices)
    }

    /// Takes in a policy that is not even of the right shape: its last good generation stays in force.
    pub(crate) fn apply_invalid_policy(&mut self, invalid: InvalidObject) -> Vec<Notice> {
        let Some((key, notices, _)) = self.policy_seen(invalid.metadata, None) else { return Vec::new() };
        self.compiling.remove(&key);
        if let Some(policy) = self.namespaces.get_mut(&key.0).and_then(|n| n.policies.get_mut(&key.1)) {
            policy.error = Some(invalid.error);
        }
        notices
    }

    /// Notes a policy's metadata; says whether its spec is new.
    fn policy_seen(
        &mut self,
        mut meta: ObjectMeta,
        status: Option<AgentPolicyStatus>,
    ) -> Option<(PolicyKey, Vec<Notice>, bool)> {
        let key = (meta.namespace.clone()?, meta.name.clone()?);
        let namespace = self.namespaces.entry(key.0.clone()).or_default();
        let killed = is_killed(meta.annotations.as_ref());
        let generation = meta.generation.unwrap_or_default();
        // What is made again under the same name is another policy.
        if namespace.policies.get(&key.1).is_some_and(|p| p.meta.uid != meta.uid) {
            namespace.policies.remove(&key.1);
            namespace.accepted_changed();
        }
        let known = namespace.policies.get(&key.1);
        let flipped = killed != known.is_some_and(|p| p.killed);
        let notice =
            flipped.then(|| Notice::Kill { subject: Subject::policy(&meta), on: killed, who: who(&meta) });
        // Both grow without bound and nothing reads them.
        meta.managed_fields = None;
        meta.annotations = None;
        let changed = if let Some(policy) = namespace.policies.get_mut(&key.1) {
            let changed = policy.generation != generation;
            policy.meta = meta;
            policy.generation = generation;
            policy.killed = killed;
            policy.status = status;
            changed
        } else {
            let policy = Policy { meta, status, generation, killed, good: None, error: None };
            namespace.policies.insert(key.1.clone(), policy);
            true
        };
        if flipped {
            namespace.place_all();
        }
        Some((key, notice.into_iter().collect(), changed))
    }

    /// Takes in what became of a generation. Only the newest one counts.
    pub(crate) fn compiled(&mut self, compiled: Compiled) {
        let Compiled { namespace, name, uid, generation, result } = compiled;
        let Some(entry) = self.namespaces.get_mut(&namespace) else { return };
        let Some(policy) = entry.policies.get_mut(&name) else { return };
        if policy.generation != generation || policy.meta.uid.as_deref().unwrap_or_default() != uid {
            return;
        }
        match result {
            Ok(good) => {
                policy.good = Some(Arc::new(good));
                policy.error = None;
                entry.accepted_changed();
            }
            Err(error) => policy.error = Some(error),
        }
        self.compiling.remove(&(namespace, name));
    }

    /// Forgets a policy; its pods keep its last good generation until another policy selects them.
    pub(crate) fn delete_policy(&mut self, key: &PolicyKey) -> Vec<Notice> {
        self.compiling.remove(key);
        let Some(namespace) = self.namespaces.get_mut(&key.0) else { return Vec::new() };
        let Some(policy) = namespace.policies.remove(&key.1) else { return Vec::new() };
        namespace.accepted_changed();
        let orphans = namespace.pods.values().filter(|p| p.policy.is_none() && p.bundle_is_of(&key.1));
        let notice = Notice::PolicyDeleted { subject: Subject::policy(&policy.meta), pods: orphans.count() };
        self.drop_if_empty(&key.0);
        vec![notice]
    }

    /// Takes in a guarded pod, new or changed.
    pub(crate) fn apply_pod(&mut self, pod: &Pod) {
        let meta = &pod.metadata;
        let (Some(namespace), Some(name), Some(uid)) = (&meta.namespace, &meta.name, &meta.uid) else {
            return;
        };
        let namespace = self.namespaces.entry(namespace.clone()).or_default();
        // A pod made again under the same name is another pod: the streams of the old one end, as the
        // sender goes with it.
        if namespace.pods.get(name).is_some_and(|p| p.uid != *uid) {
            namespace.pods.remove(name);
        }
        let annotation = |key: &str| meta.annotations.as_ref().and_then(|a| a.get(key));
        let entry = namespace.pods.entry(name.clone()).or_insert_with(|| GuardedPod::new(uid));
        entry.labels = meta.labels.clone().unwrap_or_default();
        entry.annotations = annotation(names::POLICY)
            .map(|policy| (names::POLICY.to_owned(), policy.clone()))
            .into_iter()
            .collect();
        entry.running = meta.deletion_timestamp.is_none()
            && pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        entry.pod_fields = annotation(names::STATUS)
            .and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok())
            .and_then(|status| Some(status.get("digest")?.as_str()?.to_owned()));
        entry.place(&namespace.accepted, &namespace.policies, namespace.killed);
    }

    /// Forgets a pod; its streams end.
    pub(crate) fn delete_pod(&mut self, namespace: &str, name: &str) {
        if let Some(entry) = self.namespaces.get_mut(namespace) {
            entry.pods.remove(name);
            self.drop_if_empty(namespace);
        }
    }

    fn drop_if_empty(&mut self, name: &str) {
        let empty = |n: &Namespace| n.labels.is_none() && n.policies.is_empty() && n.pods.is_empty();
        if self.namespaces.get(name).is_some_and(empty) {
            self.namespaces.remove(name);
        }
    }

    // === What is asked of it ===

    fn policy(&self, key: &PolicyKey) -> Option<&Policy> {
        self.namespaces.get(&key.0)?.policies.get(&key.1)
    }

    /// The policies that pods choose among, each with the spec that is in force.
    pub(crate) fn policies(&self, namespace: &str) -> Vec<AgentPolicyObject> {
        self.namespaces.get(namespace).map(|n| n.accepted.clone()).unwrap_or_default()
    }

    /// A namespace's labels; none where there is no such namespace.
    pub(crate) fn labels(&self, namespace: &str) -> Option<&BTreeMap<String, String>> {
        self.namespaces.get(namespace)?.labels.as_ref()
    }

    /// Whether sidecars run in the namespace, or may at any moment.
    pub(crate) fn is_guarded(&self, namespace: &str) -> bool {
        self.namespaces.get(namespace).is_some_and(|n| {
            let inject = n.labels.as_ref().and_then(|l| l.get(names::INJECT)).map(String::as_str);
            n.labels.is_some() && (!n.pods.is_empty() || matches!(inject, Some("enabled" | "required")))
        })
    }

    /// Whether every policy that was seen is compiled.
    pub(crate) fn is_settled(&self) -> bool {
        self.compiling.is_empty()
    }

    /// The bundles of one pod, newest only; none where there is no such guarded pod.
    pub(crate) fn watch(
        &self,
        namespace: &str,
        pod: &str,
        uid: &str,
    ) -> Option<watch::Receiver<Option<Arc<Packed>>>> {
        let pod = self.namespaces.get(namespace)?.pods.get(pod)?;
        (pod.uid == uid).then(|| pod.bundle.subscribe())
    }

    /// Every guarded pod that runs and has a policy: the policy and the pod's uid.
    pub(crate) fn running_pods(&self) -> impl Iterator<Item = (PolicyKey, &str)> {
        self.namespaces.iter().flat_map(|(namespace, n)| {
            n.pods
                .values()
                .filter(|p| p.running)
                .filter_map(move |p| Some(((namespace.clone(), p.policy.clone()?), p.uid.as_str())))
        })
    }

    /// Namespaces that are known, by name.
    pub(crate) fn namespace_names(&self) -> Vec<String> {
        self.namespaces.iter().filter(|(_, n)| n.labels.is_some()).map(|(name, _)| name.clone()).collect()
    }

    /// Every policy, by namespace and name.
    pub(crate) fn policy_keys(&self) -> Vec<PolicyKey> {
        let of = |(namespace, n): (&String, &Namespace)| {
            n.policies.keys().map(|name| (namespace.clone(), name.clone())).collect::<Vec<_>>()
        };
        self.namespaces.iter().flat_map(of).collect()
    }

    /// Every guarded pod, by namespace and name.
    pub(crate) fn pod_keys(&self) -> Vec<(String, String)> {
        let of = |(namespace, n): (&String, &Namespace)| {
            n.pods.keys().map(|name| (namespace.clone(), name.clone())).collect::<Vec<_>>()
        };
        self.namespaces.iter().flat_map(of).collect()
    }

    /// What status says of each policy, save those whose first generation is still being compiled.
    pub(crate) fn facts(&self) -> BTreeMap<PolicyKey, PolicyFacts> {
        let mut all = BTreeMap::new();
        for (namespace, n) in &self.namespaces {
            for (name, policy) in &n.policies {
                let key = (namespace.clone(), name.clone());
                // A status of a generation that is not judged yet would be a guess.
                if !self.compiling.contains(&key) {
                    all.insert(key, n.facts(namespace, name, policy));
                }
            }
        }
        all
    }
}

impl Namespace {
    fn killed_by(&self, policy_killed: bool) -> Option<KilledBy> {
        killed_by(self.killed, policy_killed)
    }

    /// The set of policies, or a spec of one, is another.
    fn accepted_changed(&mut self) {
        self.accepted = self
            .policies
            .values()
            .filter_map(|policy| {
                let good = policy.good.as_ref()?;
                Some(AgentPolicyObject {
                    metadata: policy.meta.clone(),
                    spec: good.spec.clone(),
                    status: None,
                })
            })
            .collect();
        self.place_all();
    }

    fn place_all(&mut self) {
        for pod in self.pods.values_mut() {
            pod.place(&self.accepted, &self.policies, self.killed);
        }
    }

    fn facts(&self, namespace: &str, name: &str, policy: &Policy) -> PolicyFacts {
        let killed = self.killed_by(policy.killed);
        let mine = || self.pods.values().filter(|p| p.running && p.policy.as_deref() == Some(name));
        let stale = policy
            .good
            .as_ref()
            .map_or(0, |good| mine().filter(|p| p.pod_fields.as_ref() != Some(&good.pod_fields)).count());
        PolicyFacts {
            uid: policy.meta.uid.clone().unwrap_or_default(),
            generation: policy.generation,
            error: policy.error.clone(),
            good: policy.good.as_ref().map(|good| GoodFacts {
                generation: good.generation,
                digest: good.bundle(killed).digest.clone(),
                rules: good.rules,
                advisory: good.is_advisory(),
                capacity: good.capacity.clone(),
            }),
            killed: killed.map(|by| by.text(namespace, name)),
            pods: mine().count() as u32,
            stale: stale as u32,
            conflict: self.conflict(name, policy),
            status: policy.status.clone(),
        }
    }

    /// The policy that takes every pod from this one. That is so where guarded pods match the selector and
    /// none of them is this policy's; and, as no pod would choose it unasked, where an older policy has the
    /// very same selector.
    fn conflict(&self, name: &str, policy: &Policy) -> Option<String> {
        let good = policy.good.as_ref()?;
        if self.pods.values().any(|p| p.policy.as_deref() == Some(name)) {
            return None;
        }
        let taken = self
            .pods
            .values()
            .filter(|p| good.spec.selector.matches(&p.labels))
            .find_map(|p| p.policy.clone());
        taken.or_else(|| {
            let age = |meta: &ObjectMeta| (meta.creation_timestamp.clone().map(|t| t.0), meta.name.clone());
            self.accepted
                .iter()
                .filter(|other| other.spec.selector == good.spec.selector)
                .filter(|other| age(&other.metadata) < age(&policy.meta))
                .min_by_key(|other| age(&other.metadata))
                .and_then(|other| other.metadata.name.clone())
        })
    }
}

fn killed_by(namespace: bool, policy: bool) -> Option<KilledBy> {
    if namespace { Some(KilledBy::Namespace) } else { policy.then_some(KilledBy::Policy) }
}

impl GuardedPod {
    fn new(uid: &str) -> Self {
        Self {
            uid: uid.to_owned(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            running: false,
            pod_fields: None,
            policy: None,
            good: None,
            killed_by_policy: false,
            bundle: watch::Sender::new(None),
        }
    }

    /// Finds the pod's policy anew. Where there is none, it keeps what it had, killed or not: a pod that
    /// was guarded is never let go.
    fn place(
        &mut self,
        accepted: &[AgentPolicyObject],
        policies: &BTreeMap<String, Policy>,
        namespace_killed: bool,
    ) {
        let chosen = choose(&self.labels, &self.annotations, accepted).and_then(|p| p.metadata.name.clone());
        if let Some(policy) = chosen.as_ref().and_then(|name| policies.get(name)) {
            self.good.clone_from(&policy.good);
            self.killed_by_policy = policy.killed;
        }
        self.policy = chosen;
        let killed = killed_by(namespace_killed, self.killed_by_policy);
        let bundle = self.good.as_ref().map(|good| Arc::clone(good.bundle(killed)));
        self.bundle.send_if_modified(|current| {
            let same = match (&*current, &bundle) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, None) => true,
                _ => false,
            };
            if !same {
                *current = bundle;
            }
            !same
        });
    }

    fn bundle_is_of(&self, policy: &str) -> bool {
        self.bundle.borrow().as_ref().and_then(|b| b.policy.as_ref()).is_some_and(|p| p.name == policy)
    }
}
