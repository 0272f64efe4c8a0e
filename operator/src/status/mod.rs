//! Status: what sidecars acknowledged, summed over the replicas, onto each policy.
//!
//! Every replica publishes a shard of counts; the leader adds them up and writes. A status is written only
//! when it changes, and never twice within two seconds. What can't be written is tried again with the next
//! round.

mod condition;
mod gauges;
mod shard;
mod write;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::events::{self, Events};
use crate::index::Index;
use shard::Others;
use write::Writer;

/// The least time between two rounds of writing.
const ROUND: Duration = Duration::from_secs(2);
/// The most time between two: a shard's heartbeat, and how late a dead replica is noticed at most.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Which replica this is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The operator's namespace.
    pub namespace: String,
    /// This replica's pod.
    pub pod_name: String,
}

/// Publishes this replica's shard, and, while it leads, policies' status and Events. Runs until dropped; no
/// failure to write ends it.
pub async fn run(
    client: Client,
    index: Index,
    leader: watch::Receiver<bool>,
    identity: Identity,
) -> anyhow::Result<()> {
    let others = Arc::new(Mutex::new(Others::default()));
    let events = Events::new(client.clone(), index.clone(), &identity.pod_name);
    let shards = write::follow_shards(client.clone(), index.clone(), &identity, Arc::clone(&others));
    let publish = write::publish_shards(client.clone(), index.clone(), &identity);
    let policies = async {
        let mut writer = Writer::new(client, index.clone(), events.clone());
        let (mut touched, mut leader) = (index.touched(), leader.clone());
        loop {
            let leads = *leader.borrow_and_update();
            touched.borrow_and_update();
            if leads && index.synced() {
                let alive: Vec<_> = others
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .alive(Instant::now())
                    .cloned()
                    .collect();
                writer.round(&alive).await;
            } else {
                // Another replica writes now; what this one remembers goes stale.
                writer.forget();
            }
            tokio::time::sleep(ROUND).await;
            tokio::select! {
                _ = touched.changed() => {}
                // Nobody says any more who leads: then it stays as it was.
                Ok(()) = leader.changed() => {}
                () = tokio::time::sleep(HEARTBEAT) => {}
            }
        }
    };
    tokio::select! {
        () = shards => anyhow::bail!("the watch of other replicas' counts ended"),
        () = publish => anyhow::bail!("the publishing of counts ended"),
        () = policies => anyhow::bail!("the writing of status ended"),
        () = events::run(events.clone(), leader.clone()) => anyhow::bail!("the making of Events ended"),
    }
}
