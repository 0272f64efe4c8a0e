//! The switch that blocks everything: the kill switch, and the time before anything is known.
//!
//! Beside the policy and not one of its kinds, because exchanges keep the policy they began with, and a kill
//! switch that lets open exchanges go on is none. A message costs one load of a flag as long as it is off.

use std::sync::atomic::{AtomicBool, Ordering};

use sallyport_engine::Verdict;
use tokio::sync::watch;

/// Blocks every message while it is thrown.
#[derive(Debug)]
pub struct Stop {
    thrown: AtomicBool,
    why: watch::Sender<Option<Why>>,
}

/// Why everything is blocked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nothing to enforce was ever received.
    NoBundle,
    /// The kill switch; what was annotated.
    Killed(String),
}

impl Default for Stop {
    /// Off.
    fn default() -> Self {
        Self { thrown: AtomicBool::new(false), why: watch::Sender::new(None) }
    }
}

// === impl Stop ===

impl Stop {
    /// Throws the switch, for another reason perhaps than before, or reverses it.
    pub fn set(&self, why: Option<Why>) {
        let thrown = why.is_some();
        // The reason stands before the flag says that there is one.
        self.why.send_replace(why);
        self.thrown.store(thrown, Ordering::Release);
    }

    /// Why everything is blocked, if it is.
    pub fn why(&self) -> Option<Why> {
        self.why.borrow().clone()
    }

    pub(crate) fn is_thrown(&self) -> bool {
        self.thrown.load(Ordering::Acquire)
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Why>> {
        self.why.subscribe()
    }

    /// What every message gets; nothing where the switch is off.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        self.why.borrow().as_ref().map(|why| match why {
            Why::NoBundle => Verdict::no_bundle(),
            Why::Killed(by) => Verdict::killed(by),
        })
    }
}
