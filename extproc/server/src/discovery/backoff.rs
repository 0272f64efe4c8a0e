//! How long to wait before asking the operator again.

use std::time::Duration;

const LEAST: Duration = Duration::from_secs(1);
const MOST: Duration = Duration::from_secs(30);
/// A stream that had been of use ended: its pod comes back within this time, and ten thousand pods spread
/// over it.
const AFTER_USE: Duration = Duration::from_secs(1);
/// An operator that names a longer time than this is not believed.
const MOST_ASKED: Duration = Duration::from_secs(300);

/// Doubles from 1 to 30 seconds, with full jitter: thousands of sidecars lose one operator at one moment.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The pause after a stream that did something.
    pub(crate) fn after_use(&mut self) -> Duration {
        self.failures = 0;
        AFTER_USE.mul_f64(fastrand::f64())
    }

    /// The pause after a failure. What the operator asked for is waited in full, and a little more, or all
    /// who were turned away would come back at one moment.
    pub(crate) fn after_failure(&mut self, asked: Option<Duration>) -> Duration {
        let most = (LEAST * 2u32.saturating_pow(self.failures.min(8))).min(MOST);
        self.failures += 1;
        let jitter = most.mul_f64(fastrand::f64());
        match asked {
            Some(asked) => asked.min(MOST_ASKED) + jitter.min(LEAST),
            None => jitter,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bound_and_are_spread() {
        let mut backoff = Backoff::default();
        for bound in [1, 2, 4, 8, 16, 30, 30, 30] {
            let pause = backoff.after_failure(None);
            assert!(pause <= Duration::from_secs(bound), "{pause:?} of {bound}");
        }
        let pauses: std::collections::HashSet<_> = (0..100).map(|_| backoff.after_failure(None)).collect();
        assert!(pauses.len() > 90);
        assert!(backoff.after_use() <= AFTER_USE);
        assert!(backoff.after_failure(None) <= LEAST, "begun anew");
    }

    #[test]
    fn what_the_operator_asks_for_is_waited_in_full() {
        let mut backoff = Backoff::default();
        for _ in 0..20 {
            let pause = backoff.after_failure(Some(Duration::from_secs(7)));
            assert!((7.0..=8.0).contains(&pause.as_secs_f64()), "{pause:?}");
        }
        assert!(backoff.after_failure(Some(Duration::MAX)) <= MOST_ASKED + LEAST);
    }
}
