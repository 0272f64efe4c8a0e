//! The authorities (CAs) and their life: pure functions of a list and an instant.
//!
//! The life of one authority, with the instants that matter:
//!
//! ```text
//! created ── +ACTIVATION ──────── 2/3 of LIFE ─────────────────────────── LIFE
//! trusted    signs                a successor is made;                    expired
//!                                 once that signs (+ACTIVATION) and OVERLAP has passed, this one goes
//! ```
//!
//! What is not guaranteed: a client that has not read the trust bundle for [`ACTIVATION`] refuses the
//! new authority's certificates until it reads it.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// How long an authority is valid.
pub const LIFE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// How long an authority is only trusted before it signs. kubelet refreshes a projected ConfigMap once a
/// minute plus its cache's delay, and the sidecar reads the file at each connection: two minutes would do,
/// ten forgive a slow node.
pub const ACTIVATION: SignedDuration = SignedDuration::from_mins(10);
/// How long a replaced authority stays trusted. A replica that lost the API server does not learn of the
/// successor and serves its last certificate to the end ([`super::mint::LEAF_LIFE`]); streams live 30
/// minutes. Nobody else can still show a certificate of the old one.
pub const OVERLAP: SignedDuration = SignedDuration::from_hours(26);
/// How much earlier than `created` a certificate says it begins, for clients whose clock is behind.
pub const BACKDATE: SignedDuration = SignedDuration::from_hours(1);

/// A certificate authority with its key.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Authority {
    /// The certificate, PEM.
    pub cert: String,
    /// The key, PKCS#8 PEM.
    pub key: Secretive,
    /// When it was made.
    pub created: Timestamp,
}

/// A text that does not show itself in logs.
#[derive(Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Secretive(pub String);

impl std::fmt::Debug for Secretive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

impl Authority {
    /// The instant from which it is valid no longer.
    pub fn expires(&self) -> Timestamp {
        later(self.created, LIFE)
    }

    /// The instant from which it should have a successor.
    pub fn renews(&self) -> Timestamp {
        later(self.created, LIFE / 3 * 2)
    }

    /// The instant from which it may sign.
    pub fn active(&self) -> Timestamp {
        later(self.created, ACTIVATION)
    }

    fn valid(&self, now: Timestamp) -> bool {
        now >= later(self.created, -BACKDATE) && now < self.expires()
    }
}

/// `at + by`, held inside what a timestamp can say.
pub(super) fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.saturating_add(by).unwrap_or(at)
}

/// The authority that signs now: the newest that is active. Before any is (the first ten minutes of an
/// installation, or after a loss), the oldest valid one, because its trust has had the most time to spread.
pub fn signer(list: &[Authority], now: Timestamp) -> Option<&Authority> {
    let valid = || list.iter().filter(|a| a.valid(now));
    valid()
        .filter(|a| a.active() <= now)
        .max_by_key(|a| a.created)
        .or_else(|| valid().min_by_key(|a| a.created))
}

/// What the leader has to change in the list now; `None` when it is as it should be.
///
/// `wanted` asks for a successor before its time. `make` is called at most once, and its failure leaves
/// the list as it was.
pub fn next<E>(
    list: &[Authority],
    now: Timestamp,
    wanted: bool,
    make: impl FnOnce(Timestamp) -> Result<Authority, E>,
) -> Result<Option<Vec<Authority>>, E> {
    let mut next: Vec<Authority> = list.iter().filter(|a| keep(a, list, now)).cloned().collect();
    let newest = next.iter().filter(|a| a.valid(now)).max_by_key(|a| a.created);
    if wanted || newest.is_none_or(|a| a.renews() <= now) {
        next.push(make(now)?);
    }
    next.sort_by_key(|a| a.created);
    Ok((next != list).then_some(next))
}

/// An authority goes when it has expired, or when another has been signing for [`OVERLAP`].
fn keep(authority: &Authority, list: &[Authority], now: Timestamp) -> bool {
    let replaced = list
        .iter()
        .filter(|other| other.created > authority.created && other.valid(now))
        .any(|other| later(other.active(), OVERLAP) <= now);
    now < authority.expires() && !replaced
}

/// The trust bundle: every authority's certificate, the newest first.
pub fn bundle(list: &[Authority]) -> String {
    let mut sorted: Vec<&Authority> = list.iter().collect();
    sorted.sort_by_key(|a| std::cmp::Reverse(a.created));
    let lines = sorted.iter().flat_map(|a| [a.cert.trim_end(), "\n"]);
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(hours: i64) -> Timestamp {
        later("2026-01-01T00:00:00Z".parse().unwrap(), SignedDuration::from_hours(hours))
    }

    #[expect(clippy::unnecessary_wraps, reason = "what `next` takes")]
    fn fake(created: Timestamp) -> Result<Authority, std::convert::Infallible> {
        Ok(Authority { cert: format!("cert {created}"), key: Secretive(String::new()), created })
    }

    fn step(list: &[Authority], now: Timestamp) -> Option<Vec<Authority>> {
        next(list, now, false, fake).unwrap()
    }

    #[test]
    fn the_first_authority_signs_at_once() {
        let list = step(&[], at(0)).unwrap();
        assert_eq!(list.len(), 1);
        assert_eq!(signer(&list, at(0)), list.first());
        assert_eq!(step(&list, at(0)), None);
    }

    #[test]
    fn a_whole_life_has_a_signer_whose_trust_has_spread_at_every_hour() {
        let mut list = step(&[], at(0)).unwrap();
        let first = list[0].clone();
        let mut most = 0;
        for hour in 0..(3 * 365 * 24) {
            if let Some(changed) = step(&list, at(hour)) {
                list = changed;
            }
            most = most.max(list.len());
            let signs = signer(&list, at(hour)).unwrap();
            assert!(signs == &first || signs.active() <= at(hour), "hour {hour}");
            assert!(signs.expires() > at(hour + 24), "a leaf of hour {hour} outlives its authority");
        }
        assert_eq!(most, 2, "an authority and its successor, never more");
        assert!(!list.contains(&first));
    }

    #[test]
    fn a_successor_is_trusted_before_it_signs_and_its_predecessor_after() {
        let list = step(&[], at(0)).unwrap();
        let due = list[0].renews();
        let both = step(&list, due).unwrap();
        assert_eq!(both.len(), 2);
        assert_eq!(signer(&both, due), both.first(), "trusted, not yet signing");
        let active = later(due, ACTIVATION);
        assert_eq!(signer(&both, active), both.get(1));
        assert_eq!(step(&both, active), None, "the old one is still trusted");
        let over = later(active, OVERLAP);
        assert_eq!(step(&both, later(over, -SignedDuration::from_secs(1))), None);
        assert_eq!(step(&both, over).unwrap(), both[1..]);
    }

    #[test]
    fn after_a_year_without_a_leader_a_new_one_is_made_and_signs_at_once() {
        let list = step(&[], at(0)).unwrap();
        let now = at(400 * 24);
        assert_eq!(signer(&list, now), None);
        let fresh = step(&list, now).unwrap();
        assert_eq!(fresh.len(), 1);
        assert_eq!(signer(&fresh, now), fresh.first());
    }

    #[test]
    fn a_clock_set_back_finds_a_signer_and_set_right_again_loses_none() {
        let list = step(&[], at(1000)).unwrap();
        assert_eq!(signer(&list, at(0)), None, "its certificate begins later");
        let both = step(&list, at(0)).unwrap();
        assert_eq!(signer(&both, at(0)).unwrap().created, at(0));
        assert!(both.contains(&list[0]), "the one of the future is kept");
        assert_eq!(signer(&both, at(1001)).unwrap(), &list[0]);
    }

    #[test]
    fn a_successor_can_be_asked_for() {
        let list = step(&[], at(0)).unwrap();
        let both = next(&list, at(5), true, fake).unwrap().unwrap();
        assert_eq!(both.len(), 2);
        assert_eq!(signer(&both, at(5)), both.first());
        assert_eq!(signer(&both, at(6)), both.get(1));
    }

    #[test]
    fn the_bundle_names_the_newest_first_and_keys_do_not_show() {
        let list = [fake(at(0)).unwrap(), fake(at(9)).unwrap()];
        assert_eq!(bundle(&list), format!("cert {}\ncert {}\n", at(9), at(0)));
        assert!(format!("{list:?}").contains("(secret)"));
    }
}
