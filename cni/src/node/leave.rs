//! Whether a daemon that is told to stop will be back.

use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{Api, Client};

/// The API server's time to answer. The kubelet gives the daemon half a minute in all.
const ASK: Duration = Duration::from_secs(8);

/// Whether the DaemonSet is being deleted or gone. Unsure, it is not: then the plugin stays, unguarded pods are
/// served without the daemon and guarded ones wait.
pub(super) async fn for_good(namespace: &str, name: &str) -> bool {
    let ask = async { Api::<DaemonSet>::namespaced(Client::try_default().await?, namespace).get(name).await };
    let Ok(answer) = tokio::time::timeout(ASK, ask).await else {
        tracing::warn!("the API server does not say whether DaemonSet {name} is there; the plugin stays");
        return false;
    };
    decide(&answer)
}

/// What the API server's answer means.
///
/// An uninstall deletes the daemon's account and rights right after the DaemonSet, so "you may not know" is how
/// its end often looks from here. Should somebody have taken the rights away from a daemon that stays, then
/// guarded pods that start before it is back come up without rules, and are not let go on.
pub fn decide(answer: &Result<DaemonSet, kube::Error>) -> bool {
    match answer {
        Ok(daemonset) => daemonset.metadata.deletion_timestamp.is_some(),
        Err(kube::Error::Api(status)) => matches!(status.code, 401 | 403 | 404),
        Err(error) => {
            tracing::warn!(%error, "asking for the DaemonSet; the plugin stays");
            false
        }
    }
}
