//! What one replica's sidecars said, as it goes to the leader, and the sum of it.
//!
//! Each replica keeps one ConfigMap. It carries counts, never pods' names; ask the replicas themselves
//! (`/subscribers`) who is missing.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::discovery::subscribers::Subscriber;
use crate::index::Index;
use crate::index::state::PolicyKey;

/// A shard that was not written for so long is a dead replica's: three heartbeats.
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(15);

/// The policies of one replica, by `namespace/name`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub(super) struct Shard {
    policies: BTreeMap<String, OfPolicy>,
}

/// One policy's sidecars.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
struct OfPolicy {
    /// Those that are connected, whatever they have in force.
    connected: u32,
    /// What they said, by digest.
    digests: BTreeMap<String, Tally>,
}

/// What sidecars said of one bundle.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Tally {
    /// They are connected and have it in force.
    pub(super) acked: u32,
    /// They had it in force when their stream ended, a moment ago.
    pub(super) away: u32,
    /// They refused it.
    pub(super) nacked: u32,
    /// One of their reasons.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// They can't read its schema.
    pub(super) too_old: u32,
    /// Sidecars of the policy that are connected, over all digests; only in a sum.
    #[serde(skip)]
    pub(super) connected: u32,
}

impl Tally {
    /// Of `pods` that run, those that enforce. Who is away may be connected to another replica by now, or be
    /// in two shards: so they fill only the places of pods that are connected nowhere, and never hide one
    /// that is connected and has not acknowledged.
    pub(super) fn enforcing(&self, pods: u32) -> u32 {
        let unconnected = pods.saturating_sub(self.connected);
        self.acked.saturating_add(self.away.min(unconnected)).min(pods)
    }
}

impl Shard {
    /// Counts this replica's subscribers. Only pods that run count: they are what `m` counts.
    pub(super) fn of(index: &Index) -> Self {
        index.subscribers().forget(Instant::now());
        index.read(|state| index.subscribers().read(|all| Self::count(state.running_pods(), all)))
    }

    fn count<'a>(
        pods: impl Iterator<Item = (PolicyKey, &'a str)>,
        subscribers: &HashMap<String, Subscriber>,
    ) -> Self {
        let mut shard = Self::default();
        for ((namespace, policy), uid) in pods {
            let Some(s) = subscribers.get(uid) else { continue };
            let policy = shard.policies.entry(format!("{namespace}/{policy}")).or_default();
            let digests = &mut policy.digests;
            if s.away.is_some() {
                digests.entry(s.in_force.clone()).or_default().away += 1;
                continue;
            }
            policy.connected += 1;
            if !s.in_force.is_empty() {
                digests.entry(s.in_force.clone()).or_default().acked += 1;
            }
            if s.too_old {
                digests.entry(s.newest.clone()).or_default().too_old += 1;
            }
            if let Some(nack) = &s.nack {
                let tally = digests.entry(nack.digest.clone()).or_default();
                tally.nacked += 1;
                tally.error.get_or_insert_with(|| nack.error.clone());
            }
        }
        shard
    }

    /// What was said of one bundle of one policy.
    fn tally(&self, (namespace, policy): &PolicyKey, digest: &str) -> Option<Tally> {
        let policy = self.policies.get(&format!("{namespace}/{policy}"))?;
        let tally = policy.digests.get(digest).cloned().unwrap_or_default();
        Some(Tally { connected: policy.connected, ..tally })
    }
}

/// The sum over shards.
pub(super) fn sum<'a>(shards: impl Iterator<Item = &'a Shard>, policy: &PolicyKey, digest: &str) -> Tally {
    shards.filter_map(|s| s.tally(policy, digest)).fold(Tally::default(), |mut sum, t| {
        sum.acked = sum.acked.saturating_add(t.acked);
        sum.away = sum.away.saturating_add(t.away);
        sum.connected = sum.connected.saturating_add(t.connected);
        sum.nacked = sum.nacked.saturating_add(t.nacked);
        sum.too_old = sum.too_old.saturating_add(t.too_old);
        if sum.error.is_none() {
            sum.error = t.error;
        }
        sum
    })
}

/// The other replicas' shards, as the leader saw them. A shard's age is taken from when it changed here, so
/// no two clocks are compared.
#[derive(Debug, Default)]
pub(super) struct Others {
    shards: BTreeMap<String, (String, Shard, Instant)>,
}

impl Others {
    /// Takes in what a replica wrote; `version` tells one writing from the next.
    pub(super) fn put(&mut self, replica: &str, version: &str, shard: Shard, now: Instant) {
        // A list that is taken again must not make a dead replica look alive.
        if self.shards.get(replica).is_none_or(|(seen, ..)| seen != version) {
            self.shards.insert(replica.to_owned(), (version.to_owned(), shard, now));
        }
    }

    /// A replica's shard is gone.
    pub(super) fn remove(&mut self, replica: &str) {
        self.shards.remove(replica);
    }

    /// Those of replicas that live.
    pub(super) fn alive(&self, now: Instant) -> impl Iterator<Item = &Shard> {
        self.shards
            .values()
            .filter(move |(.., at)| now.saturating_duration_since(*at) < DEAD_AFTER)
            .map(|(_, shard, _)| shard)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

    use jiff::Timestamp;

    use super::*;
    use crate::discovery::subscribers::Nacked;

    fn key(name: &str) -> PolicyKey {
        ("agents".into(), name.into())
    }

    fn subscriber(in_force: &str) -> Subscriber {
        Subscriber {
            stream: 1,
            namespace: "agents".into(),
            pod: "bot".into(),
            version: "1".into(),
            since: Timestamp::UNIX_EPOCH,
            policy: Some("p".into()),
            newest: "new".into(),
            sent_at: None,
            in_force: in_force.into(),
            nack: None,
            too_old: false,
            away: None,
        }
    }

    fn shard(said: &[Subscriber], running: usize) -> Shard {
        let uids: Vec<String> = (0..said.len()).map(|i| i.to_string()).collect();
        let all = uids.iter().cloned().zip(said.iter().cloned()).collect();
        Shard::count(uids[..running].iter().map(|uid| (key("p"), uid.as_str())), &all)
    }

    #[test]
    fn acks_are_counted_by_digest_and_only_of_pods_that_run() {
        let shard = shard(&[subscriber("new"), subscriber("new"), subscriber("old"), subscriber("new")], 3);
        assert_eq!(shard.tally(&key("p"), "new").unwrap().acked, 2);
        assert_eq!(shard.tally(&key("p"), "old").unwrap().acked, 1);
        assert_eq!(shard.tally(&key("p"), "new").unwrap().connected, 3);
        assert_eq!(shard.tally(&key("q"), "new"), None);
    }

    #[test]
    fn a_refusal_counts_for_what_was_refused_and_what_holds_still_holds() {
        let mut refusing = subscriber("old");
        refusing.nack = Some(Nacked { digest: "new".into(), error: "bad".into() });
        let mut old = subscriber("old");
        old.too_old = true;
        let shard = shard(&[refusing, old, subscriber("new")], 3);
        let new = Tally { acked: 1, away: 0, nacked: 1, error: Some("bad".into()), too_old: 1, connected: 3 };
        assert_eq!(shard.tally(&key("p"), "new"), Some(new));
        assert_eq!(shard.tally(&key("p"), "old").unwrap().acked, 2);
    }

    #[test]
    fn shards_add_up() {
        let (a, b) = (shard(&[subscriber("new")], 1), shard(&[subscriber("new"), subscriber("old")], 2));
        assert_eq!(sum([&a, &b].into_iter(), &key("p"), "new").acked, 2);
        assert_eq!(sum([&a, &b].into_iter(), &key("q"), "new"), Tally::default());
    }

    #[test]
    fn a_shard_survives_being_written() {
        let a = shard(&[subscriber("new"), subscriber("")], 2);
        let text = serde_json::to_string(&a).unwrap();
        assert_eq!(
            text,
            r#"{"agents/p":{"connected":2,"digests":{"new":{"acked":1,"away":0,"nacked":0,"tooOld":0}}}}"#
        );
        assert_eq!(serde_json::from_str::<Shard>(&text).unwrap(), a);
    }

    #[test]
    fn who_is_away_counts_but_hides_nobody() {
        let gone = Subscriber { away: Some(Instant::now()), ..subscriber("new") };
        let one = shard(&[gone, subscriber("new"), subscriber("old")], 3);
        let two = shard(&[subscriber("new")], 1);
        let enforcing =
            |shards: &[&Shard], pods| sum(shards.iter().copied(), &key("p"), "new").enforcing(pods);
        assert_eq!(enforcing(&[&one], 3), 2, "the one that is away enforces on");
        assert_eq!(enforcing(&[&one, &two], 3), 2, "it came back elsewhere; the one with `old` still counts");
        assert_eq!(enforcing(&[&two, &two], 1), 1);
    }

    #[test]
    fn a_dead_replicas_shard_is_dropped_also_when_it_is_listed_again() {
        let counts = || shard(&[subscriber("new")], 1);
        let (mut others, start) = (Others::default(), Instant::now());
        others.put("a", "1", counts(), start);
        others.put("b", "1", counts(), start);
        let later = start + Duration::from_secs(10);
        others.put("a", "1", counts(), later);
        others.put("b", "2", counts(), later);
        assert_eq!(others.alive(later).count(), 2);
        assert_eq!(others.alive(later + Duration::from_secs(10)).count(), 1);
        others.remove("b");
        assert_eq!(others.alive(later + Duration::from_secs(10)).count(), 0);
    }
}
