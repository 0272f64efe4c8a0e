//! How many streams may begin.
//!
//! After a restart of the operator every sidecar comes at once, and each has to be asked of the API server.
//! Whoever is turned away is told when to come again: one after the other, as many a second as may begin, so
//! that the second try is not another storm. Nothing is queued here, and nothing is remembered of who came.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The longest that anybody is sent away for. With 50 streams a second this spreads 3,000.
const LONGEST_WAIT: f64 = 60.0;
/// What is added at random to a wait, so that clients told the same second do not come in one moment.
const JITTER: f64 = 1.0;

/// So many a second, and as many at once.
#[derive(Debug)]
pub(super) struct Bucket {
    rate: f64,
    level: Mutex<Level>,
}

#[derive(Debug)]
struct Level {
    tokens: f64,
    /// Those who were sent away and may still come: each has a turn in the future.
    promised: f64,
    at: Instant,
}

impl Bucket {
    pub(super) fn new(rate: u32) -> Self {
        let rate = f64::from(rate.max(1));
        Self { rate, level: Mutex::new(Level { tokens: rate, promised: 0.0, at: Instant::now() }) }
    }

    /// Lets one in, or says when to come again.
    pub(super) fn enter(&self, now: Instant) -> Result<(), Duration> {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let since = now.saturating_duration_since(level.at).as_secs_f64() * self.rate;
        level.at = level.at.max(now);
        level.tokens = (level.tokens + since).min(self.rate);
        level.promised = (level.promised - since).max(0.0);
        if level.tokens >= 1.0 {
            level.tokens -= 1.0;
            return Ok(());
        }
        level.promised = (level.promised + 1.0).min(LONGEST_WAIT * self.rate);
        let wait = level.promised / self.rate + fastrand::f64() * JITTER;
        Err(Duration::from_secs_f64(wait))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_storm_is_spread_over_the_seconds_it_takes() {
        let bucket = Bucket::new(50);
        let now = Instant::now();
        let waits: Vec<_> = (0..550).map(|_| bucket.enter(now)).collect();
        assert_eq!(waits.iter().filter(|w| w.is_ok()).count(), 50);
        let waits: Vec<_> = waits.into_iter().filter_map(Result::err).map(|w| w.as_secs()).collect();
        let longest = waits.iter().max().unwrap();
        assert!((10..=11).contains(longest), "500 at 50 a second: {longest}");
        for second in 0..10 {
            let here = waits.iter().filter(|w| **w == second).count();
            assert!(here <= 100, "{here} are told second {second}");
        }
    }

    #[test]
    fn whoever_comes_when_told_is_let_in() {
        let bucket = Bucket::new(50);
        let now = Instant::now();
        let mut waits: Vec<_> = (0..150).filter_map(|_| bucket.enter(now).err()).collect();
        waits.sort();
        let again = waits.into_iter().filter(|wait| bucket.enter(now + *wait).is_err()).count();
        assert_eq!(again, 0);
    }

    #[test]
    fn nobody_is_sent_away_for_longer_than_a_minute() {
        let bucket = Bucket::new(1);
        let now = Instant::now();
        let longest = (0..10_000).filter_map(|_| bucket.enter(now).err()).max().unwrap();
        assert!(longest <= Duration::from_secs(61), "{longest:?}");
    }
}
