//! What a guarded agent gets while something is broken: keys, which must never pass, and harmless pages.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sallyport_e2e::client::{Call, End};
use sallyport_e2e::cluster::Pod;
use sallyport_e2e::messages::chat;
use sallyport_e2e::upstream::fake_key;

/// Two clients in the pod, until they are stopped.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    keys: JoinHandle<Outcomes>,
    pages: JoinHandle<Outcomes>,
}

/// Statuses with the code of our error, where there was one, and how often; `failed` is a call that got no
/// answer, `cut` one whose answer broke off.
#[derive(Default)]
struct Outcomes {
    counts: BTreeMap<String, usize>,
    slowest_refusal: Duration,
}

/// What there was.
pub(crate) struct Seen {
    keys: Outcomes,
    pages: Outcomes,
}

impl Watch {
    pub(crate) fn start(pod: &Pod, host: &str, address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let secret = chat("demo", &format!("my key is {}", fake_key()), false);
        let secret = Call::post_json(format!("http://{host}/v1/chat/completions"), &secret);
        let page = Call::get(format!("http://{host}/api/orders"));
        let [keys, pages] = [secret, page].map(|call| {
            let call = call.connect_to(address);
            let (stop, agent) = (Arc::clone(&stop), pod.agent.clone());
            std::thread::spawn(move || {
                let mut all = Outcomes::default();
                while !stop.load(Ordering::Relaxed) {
                    let what = match agent.call(&call) {
                        Err(_) => "failed".to_owned(),
                        Ok(a) if a.end != End::Clean => "cut".to_owned(),
                        Ok(a) if a.status == 200 => "200".to_owned(),
                        Ok(a) => {
                            all.slowest_refusal = all.slowest_refusal.max(a.took);
                            format!("{} {}", a.status, a.code())
                        }
                    };
                    *all.counts.entry(what).or_default() += 1;
                    std::thread::sleep(Duration::from_millis(20));
                }
                all
            })
        });
        Self { stop, keys, pages }
    }

    pub(crate) fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        Seen { keys: self.keys.join().unwrap(), pages: self.pages.join().unwrap() }
    }
}

impl Seen {
    /// Every key was refused, and some were by the policy.
    pub(crate) fn no_key_passed(&self) {
        assert!(!self.keys.counts.contains_key("200"), "{self}");
        assert!(self.keys.counts.contains_key("403 policy_denied"), "{self}");
    }

    /// Nothing else came of the pages, and some were served.
    pub(crate) fn pages_were_only(&self, these: &[&str]) {
        assert!(self.pages.counts.keys().all(|what| these.contains(&what.as_str())), "{self}");
        assert!(self.pages.counts.contains_key("200"), "{self}");
    }

    /// The pages were served. A machine that does everything at once may be late for one in a hundred.
    pub(crate) fn pages_were_served(&self) {
        self.pages_were_only(&["200", "504 filter_unavailable"]);
        let late = self.pages.counts.get("504 filter_unavailable").unwrap_or(&0);
        assert!(late * 100 <= self.pages.counts["200"], "{self}");
    }

    /// Some of the pages were answered so.
    pub(crate) fn pages_got(&self, this: &str) {
        assert!(self.pages.counts.contains_key(this), "{self}");
    }

    /// Nobody waited longer for a refusal.
    pub(crate) fn refused_within(&self, limit: Duration) {
        assert!(self.keys.slowest_refusal.max(self.pages.slowest_refusal) < limit, "{self}");
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slowest = self.keys.slowest_refusal.max(self.pages.slowest_refusal);
        write!(f, "keys {:?}, pages {:?}, slowest refusal {slowest:.1?}", self.keys.counts, self.pages.counts)
    }
}
