//! What one address may cost: tokens that turn out to be nobody's.
//!
//! The TokenReviews of a second are shared by everybody who comes. A pod that makes up tokens pays for them
//! from a share of its address; a token that proves a pod is given back, so that neither a storm of sidecars
//! nor a node that masquerades its pods is held up. Where the agent of a pod has spent the share, its sidecar
//! has none left either: they have one address. Others notice nothing.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Reviews that an address may have under way or wasted: what all have together in a second. Pods behind one
/// address come together after a restart.
const MOST: f64 = 50.0;
/// Wasted reviews a second that are forgiven.
const FORGIVEN: f64 = 1.0;
/// Addresses that are remembered, some 50 bytes each. Beyond that a new one is not charged; only what all
/// have together bounds it then.
const ADDRESSES: usize = 10_000;
/// What is added at random to a wait.
const JITTER: f64 = 1.0;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Peers {
    by_address: Mutex<HashMap<IpAddr, Spent>>,
}

#[derive(Clone, Copy, Debug)]
struct Spent {
    reviews: f64,
    at: Instant,
}

impl Spent {
    fn by(self, now: Instant) -> f64 {
        (self.reviews - now.saturating_duration_since(self.at).as_secs_f64() * FORGIVEN).max(0.0)
    }
}

impl Peers {
    /// Charges a review, or says when to come again.
    pub(super) fn charge(&self, peer: IpAddr, now: Instant) -> Result<(), Duration> {
        let mut all = self.lock();
        let reviews = all.get(&peer).map_or(0.0, |spent| spent.by(now)) + 1.0;
        if reviews > MOST {
            return Err(Duration::from_secs_f64((reviews - MOST) / FORGIVEN + fastrand::f64() * JITTER));
        }
        if all.len() >= ADDRESSES {
            all.retain(|_, spent| spent.by(now) > 0.0);
        }
        if all.len() < ADDRESSES || all.contains_key(&peer) {
            all.insert(peer, Spent { reviews, at: now });
        }
        Ok(())
    }

    /// Gives a charged review back: it was not wasted.
    pub(super) fn give_back(&self, peer: IpAddr, now: Instant) {
        let mut all = self.lock();
        let Some(spent) = all.get_mut(&peer) else { return };
        let reviews = spent.by(now) - 1.0;
        if reviews > 0.0 {
            *spent = Spent { reviews, at: now };
        } else {
            all.remove(&peer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, Spent>> {
        self.by_address.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

    use super::*;

    const FLOOD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn who_wastes_reviews_waits_and_others_do_not() {
        let (peers, now) = (Peers::default(), Instant::now());
        let let_in = (0..1_000).filter(|_| peers.charge(FLOOD, now).is_ok()).count();
        assert_eq!(let_in, 50);
        let wait = peers.charge(FLOOD, now).unwrap_err();
        assert!((1.0..2.0).contains(&wait.as_secs_f64()), "{wait:?}");
        peers.charge(OTHER, now).unwrap();
        // One a second from then on.
        let later = now + Duration::from_secs(10);
        assert_eq!((0..1_000).filter(|_| peers.charge(FLOOD, later).is_ok()).count(), 10);
    }

    #[test]
    fn a_storm_of_good_tokens_behind_one_address_costs_it_nothing() {
        let (peers, now) = (Peers::default(), Instant::now());
        for _ in 0..5_000 {
            peers.charge(FLOOD, now).unwrap();
            peers.give_back(FLOOD, now);
        }
        assert!(peers.lock().is_empty());
    }

    #[test]
    fn the_memory_of_addresses_is_bounded() {
        let (peers, now) = (Peers::default(), Instant::now());
        let address = |i: u32| IpAddr::V4(std::net::Ipv4Addr::from(i));
        for i in 0..ADDRESSES as u32 + 100 {
            peers.charge(address(i), now).unwrap();
        }
        assert_eq!(peers.lock().len(), ADDRESSES);
        peers.charge(address(u32::MAX), now + Duration::from_secs(2)).unwrap();
        assert_eq!(peers.lock().len(), 1, "those that are forgiven make room");
    }
}
