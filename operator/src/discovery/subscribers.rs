//! Who is connected and what each has in force: the memory that status and the command line read.
//!
//! An entry outlives its stream by a minute: streams end every half hour, the pod enforces on meanwhile, and
//! a policy of 1,000 pods would otherwise never be enforced by all. The next Hello says what is in force, and
//! that counts like an acknowledgement.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tokio::time::Instant;

/// Characters kept of an error that a sidecar reports. Enough for a message with its place; a sidecar must
/// not fill the operator's memory or a policy's status.
const LONGEST_ERROR: usize = 300;

/// How long a pod may be between two streams: its longest back-off, and the time to be let in.
const AWAY: Duration = Duration::from_secs(60);

/// Everybody who is or just was connected to this replica, by pod uid.
#[derive(Debug, Default)]
pub(crate) struct Subscribers {
    by_uid: Mutex<HashMap<String, Subscriber>>,
}

/// One pod's stream.
#[derive(Clone, Debug)]
pub(crate) struct Subscriber {
    /// Tells two streams of one pod apart: the newest one counts.
    pub(crate) stream: u64,
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) version: String,
    pub(crate) since: Timestamp,
    pub(crate) policy: Option<String>,
    /// Digest of the newest bundle for this pod; empty where there is none.
    pub(crate) newest: String,
    pub(crate) sent_at: Option<Instant>,
    /// Digest of what the sidecar has in force; empty where nothing.
    pub(crate) in_force: String,
    pub(crate) nack: Option<Nacked>,
    /// It can't read the newest bundle's schema.
    pub(crate) too_old: bool,
    /// When its stream ended; none while it is connected.
    pub(crate) away: Option<Instant>,
}

/// A bundle that a sidecar refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Nacked {
    pub(crate) digest: String,
    pub(crate) error: String,
}

/// One pod, as `sallyport status` shows it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SubscriberView {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The policy that its newest bundle is made of.
    pub policy: Option<String>,
    /// Digest of its newest bundle; empty where there is none.
    pub digest: String,
    /// Digest of what it has in force; empty where nothing.
    pub in_force: String,
    /// Whether both are the same.
    pub acked: bool,
    /// The sidecar's version.
    pub version: String,
    /// When its stream began.
    pub since: Timestamp,
    /// Why it refused its newest bundle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nack_error: Option<String>,
    /// Whether it is too old for its newest bundle.
    pub too_old: bool,
}

impl Subscribers {
    /// A stream said Hello.
    pub(crate) fn begin(&self, uid: &str, subscriber: Subscriber) {
        let mut all = self.lock();
        // A stream that lingers must not displace the one that came after it.
        if all.get(uid).is_none_or(|old| old.stream < subscriber.stream) {
            all.insert(uid.to_owned(), subscriber);
        }
    }

    /// A stream ended.
    pub(crate) fn end(&self, uid: &str, stream: u64) {
        self.change(uid, stream, |s| s.away = Some(Instant::now()));
    }

    /// Forgets who has been away for too long.
    pub(crate) fn forget(&self, now: Instant) {
        let mut all = self.lock();
        all.retain(|_, s| s.away.is_none_or(|at| now.saturating_duration_since(at) < AWAY));
        if all.capacity() > 4 * (all.len() + 64) {
            // After a storm the table would stay as large as it ever was.
            all.shrink_to_fit();
        }
    }

    /// There is a newer bundle for the pod.
    pub(crate) fn offered(&self, uid: &str, stream: u64, offer: Offer) {
        self.change(uid, stream, |s| {
            s.policy = Some(offer.policy);
            s.newest = offer.digest;
            s.too_old = offer.too_old;
            s.sent_at = offer.sent.then(Instant::now);
            if s.nack.as_ref().is_some_and(|n| n.digest != s.newest) {
                s.nack = None;
            }
        });
    }

    /// A sidecar put a bundle in force; how long after it was sent.
    pub(crate) fn acked(&self, uid: &str, stream: u64, digest: String) -> Option<Duration> {
        self.change(uid, stream, |s| {
            let after = (digest == s.newest).then(|| s.sent_at.take()).flatten().map(|at| at.elapsed());
            if s.nack.as_ref().is_some_and(|n| n.digest == digest) {
                s.nack = None;
            }
            s.in_force = digest;
            after
        })
        .flatten()
    }

    /// A sidecar refused a bundle.
    pub(crate) fn nacked(&self, uid: &str, stream: u64, digest: String, error: &str) {
        self.change(uid, stream, |s| s.nack = Some(Nacked { digest, error: trimmed(error) }));
    }

    /// Looks at everybody.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&HashMap<String, Subscriber>) -> T) -> T {
        look(&self.lock())
    }

    /// Everybody, for people, by namespace and pod.
    pub(crate) fn view(&self) -> Vec<SubscriberView> {
        let mut all: Vec<_> =
            self.lock().values().filter(|s| s.away.is_none()).map(SubscriberView::from).collect();
        all.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
        all
    }

    fn change<T>(&self, uid: &str, stream: u64, change: impl FnOnce(&mut Subscriber) -> T) -> Option<T> {
        self.lock().get_mut(uid).filter(|s| s.stream == stream).map(change)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Subscriber>> {
        self.by_uid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A newer bundle for a pod.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) policy: String,
    pub(crate) digest: String,
    pub(crate) too_old: bool,
    /// Whether it was put on the wire: not where the sidecar has it in force already, or can't read it.
    pub(crate) sent: bool,
}

impl From<&Subscriber> for SubscriberView {
    fn from(s: &Subscriber) -> Self {
        Self {
            namespace: s.namespace.clone(),
            pod: s.pod.clone(),
            policy: s.policy.clone(),
            digest: s.newest.clone(),
            in_force: s.in_force.clone(),
            acked: !s.newest.is_empty() && s.newest == s.in_force,
            version: s.version.clone(),
            since: s.since,
            nack_error: s.nack.as_ref().map(|n| n.error.clone()),
            too_old: s.too_old,
        }
    }
}

/// A text from a sidecar as it may stand in a log, a status and on a terminal.
pub(crate) fn trimmed(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = text.trim().chars().take(LONGEST_ERROR).map(clean).collect();
    if text.trim().chars().nth(LONGEST_ERROR).is_some() {
        short.push_str("...");
    }
    short
}
