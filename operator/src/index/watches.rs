//! The watches that feed the index.
//!
//! A watch that fails begins again with back-off. An object that can't be read stops no other: it is logged
//! and, where it is a policy, its status says so.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::PartialObjectMeta;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt as _};
use sallyport_api::{AgentPolicyObject, names};
use tokio::sync::Semaphore;

use super::Index;
use super::bundle::{Job, compile};

/// Objects per page of a list. A guarded pod takes some 20 KiB on the wire and several times that while it is
/// read, and the heap keeps what a page took: pages of 200 cost a replica some 10 MiB for good.
const PAGE: u32 = 50;

/// Policies that are compiled at once. Two, so that one slow policy does not hold up the next; not more,
/// because each takes tens of megabytes while it is compiled.
const COMPILERS: usize = 2;

/// How many watches there are.
const WATCHES: usize = 3;

pub(super) async fn run(client: Client, index: Index) -> anyhow::Result<()> {
    let unlisted = Arc::new(AtomicUsize::new(WATCHES));
    let listed = |index: &Index| {
        let (index, unlisted) = (index.clone(), Arc::clone(&unlisted));
        let mut first = true;
        move || {
            if std::mem::take(&mut first) && unlisted.fetch_sub(1, Ordering::AcqRel) == 1 {
                index.all_listed();
            }
        }
    };
    let namespaces = follow(
        "Namespace",
        watcher::watcher(Api::<PartialObjectMeta<Namespace>>::all(client.clone()), config()),
        Namespaces(index.clone()),
        listed(&index),
    );
    let guarded = format!("{}=true", names::GUARDED);
    let pods = follow(
        "Pod",
        watcher::watcher(Api::<DeserializeGuard<Pod>>::all(client.clone()), config().labels(&guarded)),
        Pods(index.clone()),
        listed(&index),
    );
    let policies = follow(
        "AgentPolicy",
        watcher::watcher(Api::<DeserializeGuard<AgentPolicyObject>>::all(client), config()),
        Policies { index: index.clone(), compilers: Arc::new(Semaphore::new(COMPILERS)) },
        listed(&index),
    );
    tokio::select! {
        () = namespaces => anyhow::bail!("the watch of namespaces ended"),
        () = pods => anyhow::bail!("the watch of pods ended"),
        () = policies => anyhow::bail!("the watch of policies ended"),
    }
}

fn config() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

/// Where a watch's objects go.
trait Sink {
    type Object;
    fn apply(&mut self, object: Self::Object);
    fn delete(&mut self, key: &(String, String));
    /// Everything of this kind that the index holds.
    fn known(&self) -> Vec<(String, String)>;
}

/// Follows one kind. A list that is taken again after a failure also tells what is gone.
async fn follow<S: Sink>(
    kind: &'static str,
    events: impl Stream<Item = watcher::Result<Event<S::Object>>>,
    mut sink: S,
    mut listed: impl FnMut(),
) where
    S::Object: kube::Resource<DynamicType: Default> + Debug,
{
    let mut events = pin!(events.backoff(crate::watch_backoff()));
    let mut seen = BTreeSet::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => seen.clear(),
            Ok(Event::InitApply(object)) => {
                seen.insert(key(&object));
                sink.apply(object);
            }
            Ok(Event::InitDone) => {
                for key in sink.known() {
                    if !seen.contains(&key) {
                        sink.delete(&key);
                    }
                }
                seen.clear();
                listed();
            }
            Ok(Event::Apply(object)) => sink.apply(object),
            Ok(Event::Delete(object)) => sink.delete(&key(&object)),
            Err(error) => tracing::warn!(kind, %error, "watch failed; it begins again"),
        }
    }
}

fn key<K: kube::Resource>(object: &K) -> (String, String) {
    (object.namespace().unwrap_or_default(), object.name_any())
}

struct Namespaces(Index);

impl Sink for Namespaces {
    type Object = PartialObjectMeta<Namespace>;

    fn apply(&mut self, object: Self::Object) {
        self.0.apply_namespace(&object.metadata);
    }

    fn delete(&mut self, (_, name): &(String, String)) {
        self.0.delete_namespace(name);
    }

    fn known(&self) -> Vec<(String, String)> {
        self.0.read(|s| s.namespace_names().into_iter().map(|name| (String::new(), name)).collect())
    }
}

struct Pods(Index);

impl Sink for Pods {
    type Object = DeserializeGuard<Pod>;

    fn apply(&mut self, object: Self::Object) {
        match object.0 {
            Ok(pod) => self.0.apply_pod(&pod),
            Err(invalid) => tracing::warn!(
                namespace = invalid.metadata.namespace,
                pod = invalid.metadata.name,
                error = invalid.error,
                "a pod that can't be read"
            ),
        }
    }

    fn delete(&mut self, (namespace, name): &(String, String)) {
        self.0.delete_pod(namespace, name);
    }

    fn known(&self) -> Vec<(String, String)> {
        self.0.read(super::state::State::pod_keys)
    }
}

struct Policies {
    index: Index,
    compilers: Arc<Semaphore>,
}

impl Policies {
    fn compile(&self, job: Job) {
        let (index, compilers) = (self.index.clone(), Arc::clone(&self.compilers));
        tokio::spawn(async move {
            let Ok(_turn) = compilers.acquire().await else { return };
            let settings = index.settings().clone();
            let spare = job.clone();
            let compiled = tokio::task::spawn_blocking(move || compile(job, &settings)).await;
            let compiled = compiled.unwrap_or_else(|_| spare.failed("the policy can't be compiled".into()));
            if let Err(error) = &compiled.result {
                tracing::warn!(
                    namespace = compiled.namespace,
                    policy = compiled.name,
                    generation = compiled.generation,
                    error,
                    "a policy that does not load"
                );
            }
            index.compiled(compiled);
        });
    }
}

impl Sink for Policies {
    type Object = DeserializeGuard<AgentPolicyObject>;

    fn apply(&mut self, object: Self::Object) {
        match object.0 {
            Ok(policy) => {
                if let Some(job) = self.index.apply_policy(policy) {
                    self.compile(job);
                }
            }
            Err(invalid) => {
                tracing::warn!(
                    namespace = invalid.metadata.namespace,
                    policy = invalid.metadata.name,
                    error = invalid.error,
                    "a policy that can't be read"
                );
                self.index.apply_invalid_policy(invalid);
            }
        }
    }

    fn delete(&mut self, (namespace, name): &(String, String)) {
        self.index.delete_policy(namespace, name);
    }

    fn known(&self) -> Vec<(String, String)> {
        self.index.read(super::state::State::policy_keys)
    }
}
