//! What the operator knows of the cluster, and the bundle each guarded pod shall have.
//!
//! Three watches (namespaces' metadata, guarded pods, policies) feed `state`, which is pure. Policies are
//! compiled on threads of their own, so one that takes long holds up no other object, and no kill switch.
//!
//! Every replica has an index of its own; nothing here writes to the cluster.

mod bundle;
mod kill;
mod notice;
mod packed;
pub(crate) mod state;
#[cfg(test)]
pub(crate) mod tests;
mod watches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::error_boundary::InvalidObject;
use sallyport_api::AgentPolicyObject;
use sallyport_plan::inject::InjectSettings;
use tokio::sync::{broadcast, watch};

pub use notice::{Notice, Subject};
pub(crate) use packed::Packed;

use crate::discovery::metrics::Metrics;
use crate::discovery::subscribers::Subscribers;
use bundle::{Compiled, Job};
use state::State;

/// Notices that wait for their Event. More at once means that hundreds of policies changed in one moment;
/// then the oldest are logged only.
const NOTICES: usize = 256;

/// The index. Clones are the same index.
#[derive(Clone, Debug)]
pub struct Index {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: RwLock<State>,
    settings: InjectSettings,
    /// How many of the watches have not been through their first list.
    synced: AtomicBool,
    listed: AtomicBool,
    /// Counts changes, of objects and of subscribers.
    touched: watch::Sender<u64>,
    guarded_namespaces: watch::Sender<BTreeSet<String>>,
    notices: broadcast::Sender<Notice>,
    stopping: watch::Sender<bool>,
    subscribers: Subscribers,
    metrics: Metrics,
}

/// An index and what keeps it up to date: a future that runs until it is dropped. The watches begin again
/// after every failure; should one end all the same, that is an error, because the index would go stale.
pub fn start(
    client: kube::Client,
    settings: InjectSettings,
) -> (Index, impl Future<Output = anyhow::Result<()>> + Send) {
    let index = Index::new(settings);
    let running = watches::run(client, index.clone());
    (index, running)
}

impl Index {
    /// An index of nothing, which nothing feeds.
    pub(crate) fn new(settings: InjectSettings) -> Self {
        let shared = Shared {
            state: RwLock::default(),
            settings,
            synced: AtomicBool::new(false),
            listed: AtomicBool::new(false),
            touched: watch::Sender::new(0),
            guarded_namespaces: watch::Sender::new(BTreeSet::new()),
            notices: broadcast::Sender::new(NOTICES),
            stopping: watch::Sender::new(false),
            subscribers: Subscribers::default(),
            metrics: Metrics::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The policies of a namespace that have a loadable generation, each with the spec that is in force.
    pub fn policies(&self, namespace: &str) -> Vec<AgentPolicyObject> {
        self.read(|s| s.policies(namespace))
    }

    /// A namespace's labels; none where there is no such namespace.
    pub fn namespace(&self, name: &str) -> Option<BTreeMap<String, String>> {
        self.read(|s| s.labels(name).cloned())
    }

    /// Namespaces that have guarded pods, or may have one at any moment.
    pub fn guarded_namespaces(&self) -> watch::Receiver<BTreeSet<String>> {
        self.shared.guarded_namespaces.subscribe()
    }

    /// Whether everything there is was seen and every policy compiled. Once true it stays so.
    pub fn synced(&self) -> bool {
        self.shared.synced.load(Ordering::Acquire)
    }

    /// Ends every stream of discovery with UNAVAILABLE, so that sidecars go to another replica. For the
    /// shutdown, before the server is asked to finish.
    pub fn shut_down(&self) {
        self.shared.stopping.send_replace(true);
    }

    pub(crate) fn stopping(&self) -> watch::Receiver<bool> {
        self.shared.stopping.subscribe()
    }

    pub(crate) fn settings(&self) -> &InjectSettings {
        &self.shared.settings
    }

    pub(crate) fn subscribers(&self) -> &Subscribers {
        &self.shared.subscribers
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub(crate) fn notices(&self) -> broadcast::Receiver<Notice> {
        self.shared.notices.subscribe()
    }

    /// The bundles of one pod, newest only; none where there is no such guarded pod.
    pub(crate) fn watch(
        &self,
        namespace: &str,
        pod: &str,
        uid: &str,
    ) -> Option<watch::Receiver<Option<Arc<Packed>>>> {
        self.read(|s| s.watch(namespace, pod, uid))
    }

    /// Changes whenever an object or a subscriber does.
    pub(crate) fn touched(&self) -> watch::Receiver<u64> {
        self.shared.touched.subscribe()
    }

    pub(crate) fn touch(&self) {
        self.shared.touched.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// Looks at the state. Whoever does so must not wait for anything meanwhile.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.shared.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.shared.state.write().unwrap_or_else(PoisonError::into_inner));
        self.touch();
        changed
    }

    // === What the watches say ===

    pub(crate) fn apply_namespace(&self, meta: &ObjectMeta) {
        let notices = self.write(|s| s.apply_namespace(meta));
        self.tell(notices);
        self.guarded_changed(meta.name.as_deref().unwrap_or_default());
    }

    pub(crate) fn delete_namespace(&self, name: &str) {
        self.write(|s| s.delete_namespace(name));
        self.guarded_changed(name);
    }

    pub(crate) fn apply_pod(&self, pod: &Pod) {
        self.write(|s| s.apply_pod(pod));
        self.guarded_changed(pod.metadata.namespace.as_deref().unwrap_or_default());
    }

    pub(crate) fn delete_pod(&self, namespace: &str, name: &str) {
        self.write(|s| s.delete_pod(namespace, name));
        self.guarded_changed(namespace);
    }

    pub(crate) fn apply_policy(&self, policy: AgentPolicyObject) -> Option<Job> {
        let (job, notices) = self.write(|s| s.apply_policy(policy));
        self.tell(notices);
        job
    }

    pub(crate) fn apply_invalid_policy(&self, invalid: InvalidObject) {
        let notices = self.write(|s| s.apply_invalid_policy(invalid));
        self.tell(notices);
        self.settle();
    }

    pub(crate) fn delete_policy(&self, namespace: &str, name: &str) {
        let notices = self.write(|s| s.delete_policy(&(namespace.to_owned(), name.to_owned())));
        self.tell(notices);
        self.settle();
    }

    pub(crate) fn compiled(&self, compiled: Compiled) {
        self.write(|s| s.compiled(compiled));
        self.settle();
    }

    /// Every watch has been through its first list.
    pub(crate) fn all_listed(&self) {
        self.shared.listed.store(true, Ordering::Release);
        self.settle();
    }

    /// A replica that has not compiled every policy must not judge pods or send bundles: a younger policy
    /// could pass for the one in force.
    fn settle(&self) {
        if !self.synced() && self.shared.listed.load(Ordering::Acquire) && self.read(State::is_settled) {
            self.shared.synced.store(true, Ordering::Release);
            tracing::info!("index synced");
            self.touch();
        }
    }

    fn guarded_changed(&self, namespace: &str) {
        let guarded = self.read(|s| s.is_guarded(namespace));
        self.shared.guarded_namespaces.send_if_modified(|all| {
            if guarded { all.insert(namespace.to_owned()) } else { all.remove(namespace) }
        });
    }

    /// Logs, and leaves it to the leader to make Events. What was so before this replica started is no
    /// news: it is logged, and no Event is made of it.
    fn tell(&self, notices: Vec<Notice>) {
        for notice in notices {
            match &notice {
                Notice::Kill { subject, on, who } => tracing::warn!(
                    kind = subject.kind,
                    namespace = subject.namespace.as_deref(),
                    name = subject.name,
                    on,
                    who = who.as_deref().unwrap_or("unknown"),
                    "kill switch"
                ),
                Notice::PolicyDeleted { subject, pods } => tracing::warn!(
                    namespace = subject.namespace.as_deref(),
                    name = subject.name,
                    pods,
                    "policy deleted; its pods keep its last good bundle"
                ),
            }
            if self.synced() {
                // Nobody listens where this replica does not lead.
                let _ = self.shared.notices.send(notice);
            }
        }
    }
}
