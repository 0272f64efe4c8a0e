//! Writing: this replica's shard, and, for the leader, policies' status.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt as _};
use sallyport_api::names::{self, conditions, reasons};
use sallyport_api::{API_VERSION, AgentPolicyObject, AgentPolicyStatus, KIND};
use serde_json::json;
use tokio::time::Instant;

use super::gauges::{Gauges, Numbers};
use super::shard::{Others, Shard, sum};
use super::{HEARTBEAT, Identity, ROUND, condition};
use crate::events::{Events, News};
use crate::index::Index;
use crate::index::state::{PolicyFacts, PolicyKey};

/// How long the API server may take for one patch.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How far a watch may be behind.
const BEHIND: Duration = Duration::from_secs(10);
/// Patches under way at once. A change of 1,000 policies takes some seconds then, and the API server hardly
/// notices.
const AT_ONCE: usize = 8;
/// The key in a shard's ConfigMap.
const SHARD_KEY: &str = "shard.json";
/// What a shard's ConfigMap is called before the replica's pod name.
const SHARD_PREFIX: &str = "sallyport-shard-";

fn apply() -> PatchParams {
    PatchParams::apply(names::FIELD_MANAGER).force()
}

/// Why a patch was not made.
#[derive(Debug, thiserror::Error)]
enum PatchError {
    #[error("{0}")]
    Api(#[from] Box<kube::Error>),
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    Timeout,
}

async fn within<T>(answer: impl Future<Output = kube::Result<T>>) -> Result<T, PatchError> {
    let answer = tokio::time::timeout(TIMEOUT, answer).await.map_err(|_| PatchError::Timeout)?;
    answer.map_err(|e| PatchError::Api(Box::new(e)))
}

// === Shards ===

/// Keeps this replica's shard: on change, at most once a round, and as a heartbeat.
pub(super) async fn publish_shards(client: Client, index: Index, identity: &Identity) {
    let name = format!("{SHARD_PREFIX}{}", identity.pod_name);
    let maps = Api::<ConfigMap>::namespaced(client.clone(), &identity.namespace);
    let pods = Api::<Pod>::namespaced(client, &identity.namespace);
    let mut owner = None;
    let mut touched = index.touched();
    let mut written: Option<Shard> = None;
    let mut beat = 0_u64;
    let mut due = Instant::now();
    loop {
        touched.borrow_and_update();
        let shard = Shard::of(&index);
        if written.as_ref() != Some(&shard) || Instant::now() >= due {
            if owner.is_none() {
                owner = owner_of(&pods, &identity.pod_name).await;
            }
            beat += 1;
            let map = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": name,
                    "labels": {names::SHARD: "true"},
                    "ownerReferences": owner.iter().collect::<Vec<_>>(),
                },
                // Without the beat a heartbeat would change nothing, and the leader would not see it.
                "data": {SHARD_KEY: serde_json::to_string(&shard).unwrap_or_default(), "beat": beat.to_string()},
            });
            match within(maps.patch(&name, &apply(), &Patch::Apply(&map))).await {
                Ok(_) => {
                    written = Some(shard);
                    due = Instant::now() + HEARTBEAT;
                }
                Err(error) => tracing::warn!(%error, "this replica's counts can't be published"),
            }
        }
        tokio::time::sleep(ROUND).await;
        tokio::select! {
            _ = touched.changed() => {}
            () = tokio::time::sleep_until(due) => {}
        }
    }
}

/// The replica's pod, so that its shard goes with it. Outside a pod there is none.
async fn owner_of(pods: &Api<Pod>, name: &str) -> Option<OwnerReference> {
    match within(pods.get(name)).await {
        Ok(pod) => Some(OwnerReference {
            api_version: "v1".into(),
            kind: "Pod".into(),
            name: name.to_owned(),
            uid: pod.uid()?,
            ..OwnerReference::default()
        }),
        Err(error) => {
            tracing::debug!(%error, "this replica's pod can't be read; its counts outlive it");
            None
        }
    }
}

/// Follows the other replicas' shards.
pub(super) async fn follow_shards(
    client: Client,
    index: Index,
    identity: &Identity,
    others: Arc<Mutex<Others>>,
) {
    let own = format!("{SHARD_PREFIX}{}", identity.pod_name);
    let maps = Api::<ConfigMap>::namespaced(client, &identity.namespace);
    let config = watcher::Config::default().labels(&format!("{}=true", names::SHARD));
    let mut events = pin!(watcher::watcher(maps, config).backoff(crate::watch_backoff()));
    while let Some(event) = events.next().await {
        let mut others = others.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Ok(Event::Apply(map) | Event::InitApply(map)) if map.name_any() != own => {
                let text = map.data.as_ref().and_then(|d| d.get(SHARD_KEY));
                if let Some(Ok(shard)) = text.map(|t| serde_json::from_str::<Shard>(t)) {
                    let version = map.resource_version().unwrap_or_default();
                    others.put(&map.name_any(), &version, shard, Instant::now());
                    index.touch();
                } else {
                    tracing::warn!(replica = map.name_any(), "counts that can't be read");
                }
            }
            Ok(Event::Delete(map)) => others.remove(&map.name_any()),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "the watch of other replicas' counts failed; it begins again");
            }
        }
    }
}

// === Policies ===

/// Writes policies' status.
pub(super) struct Writer {
    client: Client,
    index: Index,
    events: Events,
    written: BTreeMap<PolicyKey, Written>,
    gauges: Gauges,
}

/// What was written last. The watch may be behind it.
struct Written {
    uid: String,
    status: AgentPolicyStatus,
    at: Instant,
}

impl Written {
    /// The status to compare with: ours while the watch may not have shown it yet, then what the API server
    /// says, so that what somebody else wrote over it is put right.
    fn standing<'a>(written: Option<&'a Self>, seen: Option<&'a AgentPolicyStatus>) -> AgentPolicyStatus {
        let status = match (written, seen) {
            (Some(w), Some(seen)) if w.at.elapsed() > BEHIND => Some(seen),
            (Some(w), _) => Some(&w.status),
            (None, seen) => seen,
        };
        status.cloned().unwrap_or_default()
    }
}

impl Writer {
    pub(super) fn new(client: Client, index: Index, events: Events) -> Self {
        let gauges = Gauges::new(index.metrics().clone());
        Self { client, index, events, written: BTreeMap::new(), gauges }
    }

    /// Trusts the API server again, and not what was written; shows no numbers of policies.
    pub(super) fn forget(&mut self) {
        self.gauges.clear();
        self.written.clear();
    }

    /// Writes every status that differs from what stands there.
    pub(super) async fn round(&mut self, others: &[Shard]) {
        let own = Shard::of(&self.index);
        let facts = self.index.read(crate::index::state::State::facts);
        self.written.retain(|key, written| facts.get(key).is_some_and(|f| f.uid == written.uid));
        // Kubernetes keeps whole seconds.
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        let mut due = Vec::new();
        let tallied: Vec<_> = facts
            .into_iter()
            .map(|(key, facts)| {
                let digest = facts.good.as_ref().map(|g| g.digest.as_str()).unwrap_or_default();
                let tally = sum(others.iter().chain([&own]), &key, digest);
                (key, facts, tally)
            })
            .collect();
        self.gauges.show(tallied.iter().map(|(key, facts, tally)| {
            let enforced = tally.enforcing(facts.pods);
            (key, Numbers { enforced, running: facts.pods, killed: facts.killed.as_deref() })
        }));
        for (key, facts, tally) in tallied {
            let old = Written::standing(self.written.get(&key), facts.status.as_ref());
            let status = condition::status(&facts, &tally, &old, now);
            if status != old {
                due.push((key, facts, old, status));
            }
        }
        let (client, index, events) = (&self.client, &self.index, &self.events);
        let done: Vec<_> = stream::iter(due)
            .map(|(key, facts, old, status)| async move {
                match patch(client, &key, &facts, &status).await {
                    Ok(()) => {
                        index.metrics().status_patch("ok");
                        for news in news(&old, &status) {
                            events.publish(&reference(&key, &facts), news).await;
                        }
                        Some((key, Written { uid: facts.uid, status, at: Instant::now() }))
                    }
                    Err(error) => {
                        let timeout = matches!(error, PatchError::Timeout);
                        index.metrics().status_patch(if timeout { "timeout" } else { "error" });
                        tracing::warn!(namespace = key.0, policy = key.1, %error, "status not written");
                        None
                    }
                }
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        self.written.extend(done.into_iter().flatten());
    }
}

async fn patch(
    client: &Client,
    (namespace, name): &PolicyKey,
    facts: &PolicyFacts,
    status: &AgentPolicyStatus,
) -> Result<(), PatchError> {
    let patch = json!({
        "apiVersion": API_VERSION,
        "kind": KIND,
        // With the uid, a policy that was made again does not get its predecessor's status.
        "metadata": {"name": name, "uid": facts.uid},
        "status": status,
    });
    // The answer is not read as a policy: one that can't be read as such has a status too.
    let api = Api::<kube::api::DynamicObject>::namespaced_with(
        client.clone(),
        namespace,
        &kube::api::ApiResource::erase::<AgentPolicyObject>(&()),
    );
    within(api.patch_status(name, &apply(), &Patch::Apply(&patch))).await.map(|_| ())
}

fn reference((namespace, name): &PolicyKey, facts: &PolicyFacts) -> ObjectReference {
    ObjectReference {
        api_version: Some(API_VERSION.into()),
        kind: Some(KIND.into()),
        namespace: Some(namespace.clone()),
        name: Some(name.clone()),
        uid: Some(facts.uid.clone()),
        ..ObjectReference::default()
    }
}

/// What a change of status is worth an Event for: a policy that is refused, or accepted again, and bundles
/// that sidecars refuse. The rest moves with every pod.
fn news(old: &AgentPolicyStatus, new: &AgentPolicyStatus) -> Vec<News> {
    let of = |status: &AgentPolicyStatus, kind: &str| {
        let found = status.conditions.iter().find(|c| c.type_ == kind);
        found.map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
    };
    let mut all = Vec::new();
    if let Some((status, reason, message)) = of(new, conditions::ACCEPTED) {
        let before = of(old, conditions::ACCEPTED);
        let refused_anew = status == "False" && before.as_ref().is_none_or(|b| b.2 != message);
        let accepted_again = status == "True" && before.is_some_and(|b| b.0 == "False");
        if refused_anew || accepted_again {
            let known = [reasons::VALID, reasons::INVALID, reasons::CONFLICTED];
            let reason = known.into_iter().find(|r| *r == reason).unwrap_or(reasons::INVALID);
            all.push(News { warning: refused_anew, reason, action: "Load", note: message });
        }
    }
    if let Some((_, reason, message)) = of(new, conditions::ENFORCED)
        && reason == reasons::NACKED
        && of(old, conditions::ENFORCED).is_none_or(|(_, before, _)| before != reason)
    {
        all.push(News { warning: true, reason: reasons::NACKED, action: "Enforce", note: message });
    }
    all
}
