//! Which addresses belong to which names, as nameservers said.
//!
//! Kept for longer than the nameservers allow, because a client may keep an address, or a connection, for
//! longer: an hour, or the record's own time where that is longer, and an hour again with every call, up to a
//! day after the name was last answered with the address.

use std::collections::HashMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Addresses of all names together: some hundred names of services with many addresses.
const MOST: usize = 8_192;
/// Addresses of one name. Those that end soonest go first.
const MOST_OF_ONE: usize = 256;
/// The least time that an address is kept, in seconds.
const LEAST_SECONDS: i64 = 3_600;
/// The longest time after an answer that calls can prolong it to, in seconds.
const MOST_SECONDS: i64 = 24 * 3_600;

/// One address of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Bound {
    pub(crate) address: IpAddr,
    /// Whether the name is one of the cluster's own domain.
    pub(crate) of_cluster: bool,
    /// When it was last in an answer, and until when it counts: seconds since 1970.
    answered: i64,
    until: i64,
}

/// The addresses of all names.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Bindings {
    names: HashMap<String, Vec<Bound>>,
    #[serde(skip)]
    count: usize,
    /// Changed since it was last kept.
    #[serde(skip)]
    pub(crate) dirty: bool,
}

// === impl Bindings ===

impl Bindings {
    /// Reads what [`Bindings::kept`] wrote. What can't be read is nothing: names are then resolved anew.
    pub(crate) fn read(bytes: &[u8]) -> Self {
        let mut this: Self = serde_json::from_slice(bytes).unwrap_or_default();
        this.count = this.names.values().map(Vec::len).sum();
        this
    }

    pub(crate) fn kept(&mut self, now: i64) -> Vec<u8> {
        self.forget_old(now);
        self.dirty = false;
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Notes that a nameserver gave this address for this name.
    pub(crate) fn bind(&mut self, name: &str, address: IpAddr, of_cluster: bool, ttl: u32, now: i64) {
        let until = now + i64::from(ttl).clamp(LEAST_SECONDS, MOST_SECONDS);
        let new = Bound { address, of_cluster, answered: now, until };
        if let Some(bound) = self.names.get_mut(name) {
            if let Some(known) = bound.iter_mut().find(|b| b.address == address) {
                // Once a minute is often enough for the disk.
                self.dirty |= until - known.until > 60;
                *known = Bound { until: until.max(known.until), ..new };
                return;
            }
            if bound.len() >= MOST_OF_ONE
                && let Some(soonest) = (0..bound.len()).min_by_key(|i| bound[*i].until)
            {
                bound.swap_remove(soonest);
                self.count -= 1;
            }
        }
        if self.count >= MOST {
            self.forget_old(now);
        }
        if self.count >= MOST {
            self.forget_half();
        }
        self.names.entry(name.to_owned()).or_default().push(new);
        self.count += 1;
        self.dirty = true;
    }

    /// The binding, if there is one; a call that uses it prolongs it.
    pub(crate) fn used(&mut self, name: &str, address: IpAddr, now: i64) -> Option<Bound> {
        let bound = self.names.get_mut(name)?.iter_mut().find(|b| b.address == address)?;
        if bound.until <= now {
            return None;
        }
        bound.until =
            bound.until.max(now + LEAST_SECONDS).min(bound.answered + MOST_SECONDS).max(bound.until);
        Some(*bound)
    }

    /// Every address of a name.
    pub(crate) fn addresses(&self, name: &str, now: i64) -> Vec<IpAddr> {
        let bound = self.names.get(name).into_iter().flatten();
        bound.filter(|b| b.until > now).map(|b| b.address).collect()
    }

    fn forget_old(&mut self, now: i64) {
        self.names.retain(|_, bound| {
            bound.retain(|b| b.until > now);
            !bound.is_empty()
        });
        self.count = self.names.values().map(Vec::len).sum();
    }

    /// Everything counts still, so those that count for the shortest time go. They are resolved again when
    /// somebody calls.
    fn forget_half(&mut self) {
        let mut ends: Vec<i64> = self.names.values().flatten().map(|b| b.until).collect();
        let middle = ends.len() / 2;
        let (_, middle, _) = ends.select_nth_unstable(middle);
        let middle = *middle;
        self.forget_old(middle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u32) -> IpAddr {
        IpAddr::V4(n.into())
    }

    #[test]
    fn an_address_counts_for_an_hour_at_least_and_longer_while_it_is_used() {
        let mut all = Bindings::default();
        all.bind("a.test", ip(1), false, 5, 0);
        assert!(all.used("a.test", ip(1), 3_599).is_some());
        assert!(all.used("a.test", ip(2), 10).is_none() && all.used("b.test", ip(1), 10).is_none());
        // Used a second before its end: an hour more.
        assert!(all.used("a.test", ip(1), 7_000).is_some());
        assert!(all.used("a.test", ip(1), 11_000).is_none(), "not used for more than an hour");
        all.bind("c.test", ip(1), false, 10_000, 0);
        assert!(all.used("c.test", ip(1), 9_999).is_some(), "its own time is longer");
        // No call keeps it for more than a day after the last answer.
        all.bind("d.test", ip(1), false, 0, 0);
        let last = (0..100).map(|i| i * 3_000).take_while(|t| all.used("d.test", ip(1), *t).is_some()).last();
        assert!(matches!(last, Some(83_000..=86_400)), "{last:?}");
    }

    #[test]
    fn there_is_an_end_to_what_is_kept() {
        let mut all = Bindings::default();
        for n in 0..1_000 {
            all.bind("a.test", ip(n), false, n, 0);
        }
        assert_eq!(all.count(), MOST_OF_ONE);
        for n in 0..20_000u32 {
            all.bind(&format!("{n}.test"), ip(n), false, 0, i64::from(n / 10));
            assert!(all.count() <= MOST);
        }
        assert!(all.used("19999.test", ip(19_999), 2_000).is_some(), "the newest is kept");
    }

    #[test]
    fn what_was_kept_comes_back_and_damage_is_nothing() {
        let mut all = Bindings::default();
        all.bind("a.test", ip(1), true, 5, 100);
        let bytes = all.kept(100);
        let mut again = Bindings::read(&bytes);
        assert_eq!(again.count(), 1);
        assert!(again.used("a.test", ip(1), 200).is_some_and(|b| b.of_cluster));
        assert_eq!(Bindings::read(&bytes[1..]).count(), 0);
    }
}
