//! The ConfigMap by which guarded pods trust the operator, in every namespace that can have some.
//!
//! The leader writes it before the first pod needs it (a namespace is known by its label), and again when
//! somebody edits or deletes it. A pod that is faster waits: kubelet tries its mount again.
//!
//! What is not guaranteed: the ConfigMap stays in a namespace that is guarded no longer, and after the
//! operator is uninstalled, labelled `app.kubernetes.io/managed-by`. Running pods mount it; taking it away
//! would keep their containers from restarting.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use sallyport_api::names::{FIELD_MANAGER, TRUST_CONFIG_MAP, TRUST_KEY};
use tokio::sync::watch;

use crate::metrics::Metrics;

/// How long after a failed write the next is tried.
const AGAIN: Duration = Duration::from_secs(5);
/// How long one write may take, so that one slow answer does not hold up every other namespace.
const WRITE: Duration = Duration::from_secs(5);

/// Keeps the ConfigMaps until the watch ends.
pub async fn run(
    client: Client,
    mut namespaces: watch::Receiver<BTreeSet<String>>,
    mut bundle: watch::Receiver<Option<Arc<str>>>,
    mut leader: watch::Receiver<bool>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let all: Api<ConfigMap> = Api::all(client.clone());
    let config = watcher::Config::default().fields(&format!("metadata.name={TRUST_CONFIG_MAP}"));
    let mut events = pin!(watcher(all, config).backoff(crate::watch_backoff()));
    let mut held = Held::default();
    let mut failed = false;
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(event)) => held.saw(event),
                Some(Err(error)) => {
                    tracing::warn!(%error, name = TRUST_CONFIG_MAP, "watching the trust ConfigMaps");
                    continue;
                }
                None => anyhow::bail!("the watch on ConfigMaps {TRUST_CONFIG_MAP} ended"),
            },
            changed = namespaces.changed() => changed?,
            changed = bundle.changed() => changed?,
            changed = leader.changed() => changed?,
            () = tokio::time::sleep(AGAIN), if failed => {}
        }
        failed = false;
        let wanted = bundle.borrow_and_update().clone();
        let guarded = namespaces.borrow_and_update().clone();
        let (Some(wanted), true, true) = (wanted, held.complete, *leader.borrow_and_update()) else {
            continue;
        };
        for namespace in &guarded {
            if held.content.get(namespace).map(String::as_str) == Some(&*wanted) {
                continue;
            }
            let ok = write(&client, namespace, &wanted).await;
            metrics.trust_written(ok);
            if ok {
                held.content.insert(namespace.clone(), wanted.to_string());
            } else {
                failed = true;
            }
        }
    }
}

/// What the ConfigMaps hold, by namespace.
#[derive(Debug, Default)]
struct Held {
    content: BTreeMap<String, String>,
    /// Collected while the watch lists anew.
    listed: BTreeMap<String, String>,
    complete: bool,
}

impl Held {
    fn saw(&mut self, event: Event<ConfigMap>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(map) => self.listed.extend(entry(map)),
            Event::InitDone => {
                self.content = std::mem::take(&mut self.listed);
                self.complete = true;
            }
            Event::Apply(map) => self.content.extend(entry(map)),
            Event::Delete(map) => {
                self.content.remove(&map.metadata.namespace.unwrap_or_default());
            }
        }
    }
}

fn entry(map: ConfigMap) -> Option<(String, String)> {
    let content = map.data.unwrap_or_default().remove(TRUST_KEY).unwrap_or_default();
    Some((map.metadata.namespace?, content))
}

async fn write(client: &Client, namespace: &str, bundle: &str) -> bool {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(TRUST_CONFIG_MAP.into()),
            labels: Some(crate::managed_by()),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([(TRUST_KEY.to_owned(), bundle.to_owned())])),
        ..ConfigMap::default()
    };
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let patch = Patch::Apply(&map);
    match tokio::time::timeout(WRITE, api.patch(TRUST_CONFIG_MAP, &params, &patch)).await {
        Ok(Ok(_)) => {
            tracing::info!(namespace, "wrote the trust ConfigMap");
            true
        }
        Ok(Err(error)) => {
            // A namespace that is being deleted answers 403 until it is gone.
            tracing::warn!(%error, namespace, "writing the trust ConfigMap");
            false
        }
        Err(_) => {
            tracing::warn!(namespace, "writing the trust ConfigMap took too long");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(namespace: &str, bundle: &str) -> ConfigMap {
        ConfigMap {
            metadata: ObjectMeta { namespace: Some(namespace.into()), ..ObjectMeta::default() },
            data: Some(BTreeMap::from([(TRUST_KEY.into(), bundle.into())])),
            ..ConfigMap::default()
        }
    }

    #[test]
    fn a_list_replaces_what_was_known_and_a_deleted_map_is_missing() {
        let mut held = Held::default();
        held.saw(Event::Init);
        held.saw(Event::InitApply(map("a", "1")));
        held.saw(Event::InitApply(map("b", "1")));
        assert!(!held.complete);
        held.saw(Event::InitDone);
        assert_eq!(held.content.len(), 2);
        held.saw(Event::Apply(map("a", "edited")));
        held.saw(Event::Delete(map("b", "1")));
        assert_eq!(held.content, BTreeMap::from([("a".into(), "edited".into())]));
        held.saw(Event::Init);
        held.saw(Event::InitDone);
        assert!(held.content.is_empty());
    }
}
