//! The operator: what it knows of the cluster, how policies reach pods, and who may say so.
//!
//! [`run`] wires the parts: every replica indexes the cluster, serves admission and streams of policy;
//! the one that holds the [`lease`] writes.

pub mod args;
pub mod certs;
pub mod discovery;
pub mod events;
pub mod health;
pub mod index;
pub mod lease;
pub mod metrics;
pub mod probe;
pub mod run;
pub mod serve;
pub mod status;
mod tasks;
pub mod trust;
pub mod webhook;

use std::collections::BTreeMap;
use std::time::Duration;

use backon::ExponentialBuilder;
use kube::runtime::utils::ResetTimerBackoff;
use kube::runtime::watcher::ExponentialBackoff;

pub use run::main;

/// How long a watch that failed waits before it begins again: each time twice as long, at most ten seconds.
/// kube's own waits up to a minute, and for so long after an outage of the API server no edit and no kill
/// switch would be in force. What is paid for that is a handful of requests in ten seconds, while nobody answers.
pub(crate) fn watch_backoff() -> ResetTimerBackoff<ExponentialBackoff> {
    let builder = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(500))
        // Jitter adds as much again.
        .with_max_delay(Duration::from_secs(5))
        .with_factor(2.0)
        .with_jitter()
        .without_max_times();
    ResetTimerBackoff::new(builder.into(), Duration::from_secs(120))
}

/// The label on what the operator makes.
pub(crate) fn managed_by() -> BTreeMap<String, String> {
    let manager = sallyport_api::names::FIELD_MANAGER;
    BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), manager.to_owned())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_begins_again_within_ten_seconds_however_often_it_failed() {
        let delays: Vec<_> = watch_backoff().take(50).collect();
        assert_eq!(delays.len(), 50, "it never gives up");
        assert!(delays.iter().all(|d| *d <= Duration::from_secs(10)), "{delays:?}");
        assert!(delays[0] <= Duration::from_secs(1) && delays[49] >= Duration::from_secs(5), "{delays:?}");
    }
}
