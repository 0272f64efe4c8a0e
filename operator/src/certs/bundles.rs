//! Keeps `caBundle` of both webhook configurations at the trust bundle.
//!
//! The configurations are the chart's; this field alone is ours. The leader watches them, so an upgrade
//! that wipes the field is repaired as soon as the watch tells it. What is not guaranteed: between the two,
//! the API server refuses every guarded pod (`failurePolicy: Fail`), which is the safe side.

use std::pin::pin;
use std::sync::Arc;

use futures_util::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::metrics::Metrics;

/// The field manager of `caBundle`.
pub const FIELD_MANAGER: &str = "sallyport-operator-ca";

/// How long after a failed write the next is tried.
const AGAIN: std::time::Duration = std::time::Duration::from_secs(2);

/// A kind of webhook configuration.
pub trait Configuration:
    Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + Sync + 'static
{
    /// Name and client configuration of each webhook.
    fn clients(&self) -> Vec<(&str, &WebhookClientConfig)>;
}

impl Configuration for MutatingWebhookConfiguration {
    fn clients(&self) -> Vec<(&str, &WebhookClientConfig)> {
        self.webhooks.iter().flatten().map(|w| (w.name.as_str(), &w.client_config)).collect()
    }
}

impl Configuration for ValidatingWebhookConfiguration {
    fn clients(&self) -> Vec<(&str, &WebhookClientConfig)> {
        self.webhooks.iter().flatten().map(|w| (w.name.as_str(), &w.client_config)).collect()
    }
}

/// Keeps the field in one configuration until the watch ends.
pub async fn run<K: Configuration>(
    client: Client,
    name: String,
    mut bundle: watch::Receiver<Option<Arc<str>>>,
    mut leader: watch::Receiver<bool>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let kind = K::kind(&());
    let api: Api<K> = Api::all(client);
    let mut events = pin!(watcher::watch_object(api.clone(), &name).backoff(crate::watch_backoff()));
    let mut seen: Option<K> = None;
    let mut failed = false;
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(object)) => {
                    if object.is_none() {
                        tracing::warn!(%kind, name, "is not there; the chart makes it");
                    }
                    seen = object;
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, %kind, name, "watching a webhook configuration");
                    continue;
                }
                None => anyhow::bail!("the watch on {kind} {name} ended"),
            },
            changed = bundle.changed() => changed?,
            changed = leader.changed() => changed?,
            () = tokio::time::sleep(AGAIN), if failed => {}
        }
        failed = false;
        let wanted = bundle.borrow_and_update().clone();
        let (Some(object), Some(wanted), true) = (&seen, wanted, *leader.borrow_and_update()) else {
            continue;
        };
        let Some(patch) = repair(object, &wanted) else {
            continue;
        };
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        match api.patch(&name, &params, &Patch::Strategic(patch)).await {
            Ok(object) => {
                tracing::info!(%kind, name, "wrote caBundle");
                metrics.ca_bundle_written(&kind);
                seen = Some(object);
            }
            Err(error) => {
                // A conflict too: the watch brings the newer object, or the next try meets it.
                tracing::warn!(%error, %kind, name, "writing caBundle");
                failed = true;
            }
        }
    }
}

/// The patch that makes every webhook's `caBundle` right; `None` if each is. Webhooks are merged by name,
/// and the resourceVersion makes the API server refuse it where one has vanished meanwhile: merged then,
/// half a webhook would be left.
fn repair<K: Configuration>(object: &K, bundle: &str) -> Option<Value> {
    let wrong: Vec<Value> = object
        .clients()
        .into_iter()
        .filter(|(_, c)| c.ca_bundle.as_ref().is_none_or(|b| b.0 != bundle.as_bytes()))
        .map(|(name, _)| json!({"name": name, "clientConfig": {"caBundle": ByteString(bundle.into())}}))
        .collect();
    (!wrong.is_empty())
        .then(|| json!({"metadata": {"resourceVersion": object.resource_version()}, "webhooks": wrong}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_wrong_is_written_and_only_that_field() {
        let object: ValidatingWebhookConfiguration = serde_json::from_value(json!({
            "metadata": {"name": "sallyport", "resourceVersion": "7"},
            "webhooks": [
                {"name": "a", "clientConfig": {"caBundle": "bmV3"}, "sideEffects": "None", "admissionReviewVersions": ["v1"]},
                {"name": "b", "clientConfig": {}, "sideEffects": "None", "admissionReviewVersions": ["v1"]},
            ]
        }))
        .unwrap();
        assert_eq!(
            repair(&object, "new").unwrap(),
            json!({"metadata": {"resourceVersion": "7"}, "webhooks": [{"name": "b", "clientConfig": {"caBundle": "bmV3"}}]})
        );
        assert_eq!(repair(&object, "newer").unwrap()["webhooks"].as_array().unwrap().len(), 2);
        let none = ValidatingWebhookConfiguration::default();
        assert_eq!(repair(&none, "new"), None);
    }
}
