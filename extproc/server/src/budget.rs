//! One bound on the bytes that all exchanges together hold for inspection.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes this process may hold. Beyond it, messages are refused as `overloaded` rather than queued:
/// an out-of-memory kill would take every agent call of the pod with it.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// Bytes held right now.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may be held.
    pub fn limit(&self) -> usize {
        self.limit
    }

    fn take(&self, bytes: usize) -> bool {
        let taken = self.used.fetch_add(bytes, Ordering::Relaxed);
        let fits = taken.checked_add(bytes).is_some_and(|sum| sum <= self.limit);
        if !fits {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }
}

/// Bytes taken from a [`Budget`]; dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Held {
    budget: Arc<Budget>,
    bytes: usize,
    peak: usize,
}

impl Held {
    /// Holds nothing yet.
    pub(crate) fn none(budget: &Arc<Budget>) -> Self {
        Self { budget: Arc::clone(budget), bytes: 0, peak: 0 }
    }

    /// Holds `bytes` from now on, more or fewer than before; `false` (and no change) where the budget is
    /// exhausted.
    #[must_use = "what did not fit must be refused"]
    pub(crate) fn resize(&mut self, bytes: usize) -> bool {
        if bytes > self.bytes && !self.budget.take(bytes - self.bytes) {
            return false;
        }
        if bytes < self.bytes {
            self.budget.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        }
        self.bytes = bytes;
        self.peak = self.peak.max(bytes);
        true
    }

    /// The most that was held at once.
    pub(crate) fn peak(&self) -> usize {
        self.peak
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_when_their_holder_is_dropped() {
        let budget = Budget::new(100);
        let mut a = Held::none(&budget);
        assert!(a.resize(60));
        let mut b = Held::none(&budget);
        assert!(!b.resize(41), "over the limit");
        assert!(b.resize(40));
        assert!(a.resize(10));
        assert_eq!(budget.used(), 50);
        drop(a);
        assert_eq!(budget.used(), 40);
        assert!(b.resize(100));
        assert_eq!(b.peak(), 100);
        drop(b);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn an_absurd_length_does_not_wrap_around() {
        let budget = Budget::new(100);
        let mut a = Held::none(&budget);
        assert!(a.resize(1));
        let mut b = Held::none(&budget);
        assert!(!b.resize(usize::MAX));
        assert_eq!(budget.used(), 1);
    }
}
