//! What admission knows of the cluster: the index, LimitRanges, and the API server itself in doubt.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{LimitRange, Namespace};
use kube::api::ListParams;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use sallyport_api::AgentPolicyObject;

use super::Answer;
use crate::index::Index;

/// How long the API server may take to tell what it knows. Two such questions fit into a deadline.
const ASK: Duration = Duration::from_millis(1500);
/// How long a request waits for the first list of LimitRanges.
const FIRST: Duration = Duration::from_secs(1);

/// What the index knows.
pub trait Known: Send + Sync + 'static {
    /// Whether it has read everything once.
    fn synced(&self) -> bool;
    /// The policies of a namespace that can be in force.
    fn policies(&self, namespace: &str) -> Vec<AgentPolicyObject>;
    /// The labels of a namespace; `None` if there is no such namespace.
    fn namespace(&self, name: &str) -> Option<BTreeMap<String, String>>;
}

impl Known for Index {
    fn synced(&self) -> bool {
        self.synced()
    }

    fn policies(&self, namespace: &str) -> Vec<AgentPolicyObject> {
        self.policies(namespace)
    }

    fn namespace(&self, name: &str) -> Option<BTreeMap<String, String>> {
        self.namespace(name)
    }
}

/// The surroundings of pods. Cheap to clone.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    known: Arc<dyn Known>,
    limit_ranges: Store<LimitRange>,
}

/// What is known of one namespace.
pub(super) struct Surroundings {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) policies: Vec<AgentPolicyObject>,
    pub(super) limit_ranges: Vec<LimitRange>,
}

impl Cluster {
    /// Asks the index, and the client in doubt. The future keeps LimitRanges.
    pub fn new(
        client: Client,
        known: Arc<dyn Known>,
    ) -> (Self, impl Future<Output = anyhow::Result<()>> + Send + use<>) {
        let (limit_ranges, writer) = reflector::store();
        let api: Api<LimitRange> = Api::all(client.clone());
        let watching = async move {
            let events =
                watcher(api, watcher::Config::default()).backoff(crate::watch_backoff()).reflect(writer);
            let mut events = std::pin::pin!(events);
            while let Some(event) = events.next().await {
                if let Err(error) = event {
                    tracing::warn!(%error, "watching LimitRanges");
                }
            }
            anyhow::bail!("the watch on LimitRanges ended")
        };
        (Self { client, known, limit_ranges }, watching)
    }

    /// Whether pods can be judged.
    pub(super) fn ready(&self) -> Result<(), Answer> {
        if self.known.synced() {
            return Ok(());
        }
        let message = "the operator has not read policies and namespaces yet; try again in a few seconds";
        Err(Answer::failed("NotSynced", message.into()))
    }

    /// What the index knows of a namespace; `None` if it does not know it.
    pub(super) async fn known(&self, namespace: &str) -> Result<Option<Surroundings>, Answer> {
        let Some(labels) = self.known.namespace(namespace) else {
            return Ok(None);
        };
        let policies = self.known.policies(namespace);
        Ok(Some(Surroundings { labels, policies, limit_ranges: self.limit_ranges(namespace).await? }))
    }

    /// What the API server says of a namespace now, and the policies there that the index does not hold for
    /// valid: it refused them, or has not seen them yet.
    pub(super) async fn fresh(
        &self,
        namespace: &str,
    ) -> Result<(Surroundings, Vec<AgentPolicyObject>), Answer> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let policies: Api<AgentPolicyObject> = Api::namespaced(self.client.clone(), namespace);
        let list = ListParams::default();
        let both = async { tokio::try_join!(namespaces.get(namespace), policies.list(&list)) };
        let (object, policies) = match tokio::time::timeout(ASK, both).await {
            Ok(Ok(both)) => both,
            Ok(Err(error)) => return Err(unanswered(&error.to_string())),
            Err(_) => return Err(unanswered("no answer in time")),
        };
        // The index knows which are valid. Those that it has not heard of are for the caller to judge.
        let (mut known, mut new) = (self.known.policies(namespace), policies.items);
        known.retain(|k| new.iter().any(|n| n.metadata.uid == k.metadata.uid));
        new.retain(|n| known.iter().all(|k| n.metadata.uid != k.metadata.uid));
        let surroundings = Surroundings {
            labels: object.metadata.labels.unwrap_or_default(),
            policies: known,
            limit_ranges: self.limit_ranges(namespace).await?,
        };
        Ok((surroundings, new))
    }

    async fn limit_ranges(&self, namespace: &str) -> Result<Vec<LimitRange>, Answer> {
        if !matches!(tokio::time::timeout(FIRST, self.limit_ranges.wait_until_ready()).await, Ok(Ok(()))) {
            return Err(Answer::failed("NotSynced", "the operator has not read LimitRanges yet".into()));
        }
        let ours = |l: &&Arc<LimitRange>| l.metadata.namespace.as_deref() == Some(namespace);
        Ok(self.limit_ranges.state().iter().filter(ours).map(|l| LimitRange::clone(l)).collect())
    }
}

fn unanswered(error: &str) -> Answer {
    Answer::failed("Unanswered", format!("asking the API server about the namespace: {error}"))
}
