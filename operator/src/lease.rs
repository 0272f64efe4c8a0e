//! Leader election on a Lease: one replica writes, all of them serve.
//!
//! A replica holds the lease while its renewals succeed. Nobody's wall clock is compared with another's: a
//! candidate takes a lease over when it has itself watched it stay unchanged for its whole duration, and
//! the holder stops leading two thirds of the duration after it *began* its last renewal, a third before any
//! candidate can have seen it expire. Every write carries the resourceVersion it was decided on.
//!
//! What is not guaranteed: a write that left the old leader before it stopped may arrive after the new one
//! has begun (there is no fencing). Whatever the leader writes must be safe to be written twice.
//!
//! Why not a library: `kube-lease-manager` compares the holder's clock with its own and goes on leading
//! while the API server can't be reached; `kube-leader-election` and `kubert` are for older kube.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::tasks::stopped;

/// How the lease is held.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The Lease's namespace.
    pub namespace: String,
    /// The Lease's name.
    pub name: String,
    /// Who this replica is.
    pub identity: String,
    /// How long a lease holds without renewal. It is renewed each third of this.
    pub duration: Duration,
}

/// Takes part in the election until told to stop, then gives the lease back.
pub async fn run(
    client: Client,
    settings: Settings,
    leader: watch::Sender<bool>,
    mut stop: watch::Receiver<bool>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let api: Api<Lease> = Api::namespaced(client, &settings.namespace);
    let period = settings.duration / 3;
    let mut candidate = Candidate { api, settings, seen: None };
    let set = |leads: bool| {
        if leader.send_replace(leads) != leads {
            metrics.leads(leads);
            tracing::info!(leads, "leadership changed");
        }
    };
    let mut trusted_until = Instant::now();
    loop {
        let began = Instant::now();
        let leads = *leader.borrow();
        // An answer that takes longer than a period, or than what is left, comes too late to be built upon.
        let late = if leads { trusted_until.min(began + period) } else { began + period };
        let outcome = tokio::select! {
            () = stopped(&mut stop) => break,
            outcome = tokio::time::timeout_at(late, candidate.attempt()) => outcome,
        };
        let mut next = began + period;
        match outcome {
            Ok(Ok(true)) => {
                trusted_until = began + 2 * period;
                set(true);
            }
            Ok(Ok(false)) => set(false),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the lease could not be read or written");
                next = Instant::now() + period / 5;
            }
            Err(_) => {
                tracing::warn!("the API server did not answer about the lease in time");
                next = Instant::now() + period / 5;
            }
        }
        if *leader.borrow() {
            next = next.min(trusted_until);
        }
        tokio::select! {
            () = stopped(&mut stop) => break,
            () = tokio::time::sleep_until(next) => {}
        }
        if Instant::now() >= trusted_until {
            set(false);
        }
    }
    // Those who write see this before anybody else can hold the lease.
    set(false);
    match tokio::time::timeout(period, candidate.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the lease was not given back; it expires"),
        Err(_) => tracing::warn!("the lease was not given back in time; it expires"),
    }
    Ok(())
}

struct Candidate {
    api: Api<Lease>,
    settings: Settings,
    /// The lease as it was last seen to change, and when.
    seen: Option<(String, Instant)>,
}

impl Candidate {
    /// Takes or renews the lease; whether it is held now.
    async fn attempt(&mut self) -> kube::Result<bool> {
        let Some(lease) = self.api.get_opt(&self.settings.name).await? else {
            let fresh = Lease {
                metadata: ObjectMeta { name: Some(self.settings.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.claim(None)),
            };
            return written(self.api.create(&PostParams::default(), &fresh).await);
        };
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder != self.settings.identity && !holder.is_empty() {
            let since = match &self.seen {
                Some((seen, since)) if *seen == version => *since,
                _ => {
                    self.seen = Some((version, Instant::now()));
                    return Ok(false);
                }
            };
            // The holder's own promise, as far as it is sane.
            let promised = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
            let duration = Duration::from_secs(promised.min(300)).max(self.settings.duration);
            if since.elapsed() < duration {
                return Ok(false);
            }
            tracing::info!(holder, "the holder of the lease did not renew it");
        }
        let renewed = Lease { spec: Some(self.claim(Some(&spec))), ..lease };
        written(self.api.replace(&self.settings.name, &PostParams::default(), &renewed).await)
    }

    fn claim(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let mine = before.is_some_and(|b| b.holder_identity.as_ref() == Some(&self.settings.identity));
        let changes = before.and_then(|b| b.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.settings.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.settings.duration.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: if mine { before.and_then(|b| b.acquire_time.clone()) } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(if before.is_none() || mine {
                changes
            } else {
                changes.saturating_add(1)
            }),
            ..before.cloned().unwrap_or_default()
        }
    }

    /// Gives the lease back if it is held.
    async fn release(&self) -> kube::Result<()> {
        let Some(mut lease) = self.api.get_opt(&self.settings.name).await? else {
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.settings.identity) {
            return Ok(());
        }
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        written(self.api.replace(&self.settings.name, &PostParams::default(), &lease).await).map(|_| ())
    }
}

/// A conflict means that somebody else was faster.
fn written(result: kube::Result<Lease>) -> kube::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
