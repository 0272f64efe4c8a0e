//! Names: the agent's resolver, and which addresses belong to which names.
//!
//! Every question of the agent to port 53, of whatever nameserver, comes here, by the capture rules. The policy
//! is asked first, then the cache, then the pod's own nameservers; addresses in an answer are judged before the
//! agent sees them, and kept (`binding`), so that a call can be held against the name it claims.
//!
//! A name that the policy does not allow does not exist (NXDOMAIN), with an extended error that says why: any
//! other code ends the search through the pod's search domains (glibc), or has the client wait in vain (musl).
//!
//! Not guaranteed: that nothing leaves in a name. What a pattern of the policy leaves open can carry data, slowly;
//! see the pack `dns`.

mod binding;
mod cache;
mod conf;
mod forward;
mod pace;
mod reply;
mod serve;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use jiff::Timestamp;
use sallyport_api::{Listed, Mode, ends_label};
use sallyport_engine::{Destination, NameQuestion, Peer, TransportFailure, Verdict};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use self::binding::Bindings;
use self::cache::{Answer, Cache};
use self::conf::within;
pub use self::conf::{Conf, RESOLV_CONF};
use self::forward::Failed;
use self::pace::{Excess, Pace};
use self::reply::Extended;
use crate::judge::{Judge, guarded};
use crate::observer::{NameRecord, NameSource, Observer};
use crate::server::Policy;
use crate::sidecar::replace;
use crate::stop::{Stop, Why};

const KEPT: &str = "bindings.json";
/// How often changed bindings are written.
const KEEP: Duration = Duration::from_secs(5);
/// Questions that nameservers are asked at one time; an agent that asks more is told to try again.
const MOST_ASKED: usize = 256;

/// Addresses that are told while the kill switch is on; they fit into every datagram.
const MOST_KNOWN: usize = 16;

/// Record types that agents need. Others are for zones and their transfers, or are carriers of tunnels.
const KINDS: [RecordType; 8] = [
    RecordType::A,
    RecordType::AAAA,
    RecordType::HTTPS,
    RecordType::SVCB,
    RecordType::TXT,
    RecordType::SRV,
    RecordType::CNAME,
    RecordType::PTR,
];

const BUSY: &str = "too many names are being resolved";

/// The resolver; clones of its `Arc` share everything.
pub struct Names {
    conf: Conf,
    state_dir: PathBuf,
    /// The API server's address, as every pod is told.
    api_server: Option<IpAddr>,
    policy: Policy,
    stop: Arc<Stop>,
    observer: Arc<dyn Observer>,
    cache: Mutex<Cache>,
    bindings: Mutex<Bindings>,
    pace: Mutex<Pace>,
    asked: Semaphore,
    /// The thread on which nameservers are asked, also for calls.
    runtime: Handle,
}

/// A question as the policy is asked about it.
struct Subject {
    /// Without the search domain or the service's labels, where the policy speaks of it so.
    name: String,
    listed: Listed,
    of_cluster: bool,
}

/// Why a question is not answered.
enum Refused {
    Question(Verdict),
    Answer(Verdict),
    Failed(Failed),
    Busy,
}

// === impl Names ===

impl Names {
    /// A resolver that asks what `conf` names; bindings of the process before are read from `state_dir`.
    pub fn new(
        conf: Conf,
        state_dir: &Path,
        policy: Policy,
        stop: Arc<Stop>,
        observer: Arc<dyn Observer>,
        runtime: Handle,
    ) -> Arc<Self> {
        let api_server = std::env::var("KUBERNETES_SERVICE_HOST").ok().and_then(|a| a.parse().ok());
        let kept = std::fs::read(state_dir.join(KEPT)).unwrap_or_default();
        Arc::new(Self {
            conf,
            state_dir: state_dir.to_owned(),
            api_server,
            policy,
            stop,
            observer,
            cache: Mutex::default(),
            bindings: Mutex::new(Bindings::read(&kept)),
            pace: Mutex::default(),
            asked: Semaphore::new(MOST_ASKED),
            runtime,
        })
    }

    /// How many addresses are bound to names.
    pub(crate) fn bound(&self) -> usize {
        lock(&self.bindings).count()
    }

    /// What is known of a call's destination without asking anybody; none where a nameserver has to be.
    pub fn look(&self, host: &str, address: IpAddr) -> Option<Destination> {
        if let Some(literal) = literal(host) {
            let is_it = canonical(literal) == canonical(address);
            return Some(if is_it {
                Destination::Bound(self.peer(address, false))
            } else {
                Destination::Unbound(format!("{host} is not {address}, to which the connection was made"))
            });
        }
        let bound = lock(&self.bindings).used(host, canonical(address), now())?;
        Some(Destination::Bound(self.peer(address, bound.of_cluster)))
    }

    /// Resolves the host of a call whose destination is not known, and says whether it leads there.
    ///
    /// Goes on although nobody waits for it any more: the next call will find the answer.
    pub async fn find(self: Arc<Self>, host: String, address: IpAddr) -> Destination {
        let this = Arc::clone(&self);
        let found = self.runtime.spawn(async move {
            let failed = this.resolve(&host, address).await;
            this.look(&host, address).unwrap_or_else(|| match failed {
                Some(why) => {
                    Destination::Unresolved(format!("{host} could not be resolved: {why}; try again"))
                }
                None => Destination::Unbound(format!(
                    "{host} has no address {address}, to which the connection was made"
                )),
            })
        });
        found.await.unwrap_or_else(|_| Destination::Unresolved("the name could not be resolved".to_owned()))
    }

    /// What went wrong, if the host was not found and might have been: of one that was refused, no failure of the
    /// search domains after it says anything.
    async fn resolve(&self, host: &str, address: IpAddr) -> Option<String> {
        let (mut failed, mut refused) = (None, false);
        let kind = if address.is_ipv4() { RecordType::A } else { RecordType::AAAA };
        for candidate in self.conf.candidates(host) {
            let Ok(name) = Name::from_ascii(format!("{candidate}.")) else { continue };
            match self.decide(&candidate, &name, kind, host).await {
                Ok(answer) if answer.code == ResponseCode::NoError => return None,
                Err(Refused::Failed(e)) => failed = Some(e.to_string()),
                Err(Refused::Busy) => failed = Some(BUSY.to_owned()),
                Err(Refused::Question(_) | Refused::Answer(_)) => refused = true,
                Ok(_) => {}
            }
        }
        failed.filter(|_| !refused)
    }

    fn peer(&self, address: IpAddr, of_cluster: bool) -> Peer {
        let api_server = self.api_server.is_some_and(|a| canonical(a) == canonical(address));
        Peer { address, of_cluster, api_server }
    }

    /// Answers one message; none where there is nobody to answer.
    pub(crate) async fn answer(&self, bytes: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let Ok(question) = Message::from_vec(bytes) else { return reply::malformed(bytes) };
        if question.metadata.message_type != MessageType::Query {
            return None;
        }
        let message = self.answer_to(&question).await;
        reply::bytes(&question, &message, tcp)
    }

    async fn answer_to(&self, question: &Message) -> Message {
        let plain = |code| reply::plain(question, code);
        if question.metadata.op_code != OpCode::Query {
            return plain(ResponseCode::NotImp);
        }
        let [query] = question.queries.as_slice() else { return plain(ResponseCode::FormErr) };
        if query.query_class != DNSClass::IN {
            return plain(ResponseCode::Refused);
        }
        if let Some(why) = self.stop.why() {
            return self.stopped(question, &why);
        }
        let enforce = self.policy.judge().spec().mode == Mode::Enforce;
        let kind = query.query_type;
        if enforce && !KINDS.contains(&kind) {
            let why = format!("records of the type {kind} are not resolved");
            return reply::refusal(question, ResponseCode::Refused, Extended::Prohibited, &why);
        }
        // Asked on in lower case: capitals carry data, too.
        let name = query.name.to_lowercase();
        let text = name.to_ascii();
        let text = text.trim_end_matches('.');
        let outcome = self.decide(text, &name, kind, text).await;
        match outcome {
            Ok(answer) => reply::answer(question, answer),
            Err(Refused::Question(v)) => {
                reply::refusal(question, ResponseCode::NXDomain, Extended::Prohibited, &v.message)
            }
            Err(Refused::Answer(v)) => {
                reply::refusal(question, ResponseCode::NXDomain, Extended::Filtered, &v.message)
            }
            Err(Refused::Failed(e)) => reply::refusal(
                question,
                ResponseCode::ServFail,
                Extended::NoReachableAuthority,
                &e.to_string(),
            ),
            Err(Refused::Busy) => reply::refusal(
                question,
                ResponseCode::ServFail,
                Extended::NotReady,
                &format!("{BUSY}; try again"),
            ),
        }
    }

    /// What is answered while everything is blocked. Nobody is asked; with the kill switch on, what is known is
    /// told all the same, so that a call gets as far as the refusal that says why.
    fn stopped(&self, question: &Message, why: &Why) -> Message {
        let verdict = self.stop.verdict().unwrap_or_default();
        if *why == Why::NoBundle {
            // It will come: "try again".
            return reply::refusal(question, ResponseCode::ServFail, Extended::NotReady, &verdict.message);
        }
        let Some(query) = question.queries.first() else {
            return reply::plain(question, ResponseCode::FormErr);
        };
        let text = lower(&query.name);
        let known = lock(&self.bindings).addresses(&text, now());
        if known.is_empty() {
            let kind = query.query_type.to_string();
            let record = NameRecord {
                name: &text,
                kind: &kind,
                verdict: &verdict,
                enforced: true,
                source: NameSource::None,
            };
            let _ = guarded(|| self.observer.resolved(&record));
            // As for names that are not allowed: the search through the search domains must go on.
            return reply::refusal(question, ResponseCode::NXDomain, Extended::NotReady, &verdict.message);
        }
        let answers = known.into_iter().filter_map(|address| {
            let data = match (address, query.query_type) {
                (IpAddr::V4(a), RecordType::A) => RData::A(A(a)),
                (IpAddr::V6(a), RecordType::AAAA) => RData::AAAA(AAAA(a)),
                _ => return None,
            };
            // Not to be kept: it may be old.
            Some(Record::from_rdata(query.name.clone(), 0, data))
        });
        let answers = answers.take(MOST_KNOWN).collect();
        reply::answer(question, Answer { code: ResponseCode::NoError, answers, authorities: Vec::new() })
    }

    /// Policy, cache, nameserver, policy again: in this order. `host` is what a call names that is resolved by
    /// this question.
    async fn decide(&self, text: &str, name: &Name, kind: RecordType, host: &str) -> Result<Answer, Refused> {
        let judge = self.policy.judge();
        let enforce = judge.spec().mode == Mode::Enforce;
        let subject = self.subject(&*judge, text);
        let cached = lock(&self.cache).get(text, kind, Instant::now());
        let excess = if cached.is_some() || subject.of_cluster {
            Excess::default()
        } else {
            lock(&self.pace).question(text, subject.listed != Listed::ByName, Instant::now())
        };
        let kind_text = kind.to_string();
        let ask = |peer: Option<Peer>| {
            let question = NameQuestion {
                name: &subject.name,
                kind: &kind_text,
                of_cluster: subject.of_cluster,
                too_fast: excess.too_fast,
                too_many: excess.too_many,
                peer,
            };
            guarded(|| judge.name(&question, Timestamp::now())).unwrap_or_else(TransportFailure::verdict)
        };
        let note = |verdict: &Verdict, source: NameSource| {
            let record = NameRecord { name: text, kind: &kind_text, verdict, enforced: enforce, source };
            // As for calls: a decision that leaves no trace is not carried out.
            guarded(|| self.observer.resolved(&record)).is_ok()
        };
        let verdict = ask(None);
        if enforce && verdict.decision.refuses() {
            note(&verdict, NameSource::None);
            return Err(Refused::Question(verdict));
        }
        let (mut answer, source) = match cached {
            Some(answer) => (answer, NameSource::Cache),
            None => match self.forward(name, kind).await {
                Ok(answer) => {
                    lock(&self.cache).put(text, kind, &answer, Instant::now());
                    (answer, NameSource::Nameserver)
                }
                Err(refused) => {
                    if let Refused::Failed(e) = &refused {
                        tracing::warn!(target: "sallyport::name", name = text, kind = kind_text, "{e}");
                    }
                    note(&verdict, NameSource::Failed);
                    return Err(refused);
                }
            },
        };
        if enforce {
            reply::without_ech(&mut answer.answers);
        }
        let mut worst = verdict;
        let found = reply::addresses(&answer.answers);
        for (owner, address, _) in &found {
            // Both: the cluster may point one of its names outside, and whoever answers for a name outside may say
            // that it is one of the cluster's.
            let of_cluster = subject.of_cluster && self.of_cluster(&lower(owner));
            let verdict = ask(Some(self.peer(*address, of_cluster)));
            if verdict.decision > worst.decision {
                worst = verdict;
            }
        }
        if !note(&worst, source) {
            return Err(Refused::Busy);
        }
        if enforce && worst.decision.refuses() {
            return Err(Refused::Answer(worst));
        }
        self.bind([text, host, &subject.name], subject.of_cluster, &found);
        Ok(answer)
    }

    async fn forward(&self, name: &Name, kind: RecordType) -> Result<Answer, Refused> {
        let _slot = self.asked.try_acquire().map_err(|_| Refused::Busy)?;
        forward::ask(&self.conf.nameservers, name, kind).await.map_err(Refused::Failed)
    }

    /// Notes the addresses under the names that were asked for, and under no other: who answers for a name does
    /// not answer for those that it is an alias of. A call that names one of these has it resolved.
    fn bind(&self, mut names: [&str; 3], of_cluster: bool, found: &[(&Name, IpAddr, u32)]) {
        names.sort_unstable();
        let now = now();
        let mut bindings = lock(&self.bindings);
        for (owner, address, ttl) in found {
            let of_cluster = of_cluster && self.of_cluster(&lower(owner));
            for (i, name) in names.iter().enumerate() {
                if i == 0 || names[i - 1] != *name {
                    bindings.bind(name, canonical(*address), of_cluster, *ttl, now);
                }
            }
        }
    }

    /// The reading of a name that the policy allows most: as it is, without one of the pod's search domains
    /// (the stub resolver tries `api.example.com.default.svc.cluster.local`), and without the labels of a
    /// service (`_https._tcp`).
    fn subject(&self, judge: &dyn Judge, text: &str) -> Subject {
        let of_cluster = self.of_cluster(text);
        let mut best = Subject { name: text.to_owned(), listed: judge.names(text), of_cluster };
        let mut consider = |name: &str| {
            let listed = judge.names(name);
            if listed > best.listed {
                best = Subject { name: name.to_owned(), listed, of_cluster };
            }
        };
        for search in std::iter::once("").chain(self.conf.search.iter().map(String::as_str)) {
            let Some(short) = (if search.is_empty() { Some(text) } else { below(text, search) }) else {
                continue;
            };
            consider(short);
            let mut host = short;
            while let Some((_, rest)) =
                host.split_once('.').filter(|(l, _)| l.starts_with('_') && !l.ends_with('\\'))
            {
                host = rest;
            }
            if host.len() < short.len() {
                consider(host);
            }
        }
        best
    }

    fn of_cluster(&self, name: &str) -> bool {
        self.conf.cluster_domain().is_some_and(|domain| within(name, domain))
    }

    /// Writes changed bindings, for ever.
    async fn keep(&self) {
        loop {
            tokio::time::sleep(KEEP).await;
            self.keep_now().await;
        }
    }

    async fn keep_now(&self) {
        let bytes = {
            let mut bindings = lock(&self.bindings);
            if !bindings.dirty {
                return;
            }
            bindings.kept(now())
        };
        let dir = self.state_dir.clone();
        let kept = tokio::task::spawn_blocking(move || replace(&dir, KEPT, &bytes)).await;
        if let Err(e) = kept.map_err(std::io::Error::other).and_then(|kept| kept) {
            tracing::warn!(target: "sallyport::dns", "the bindings can't be kept: {e}");
            lock(&self.bindings).dirty = true;
        }
    }
}

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Names").field("conf", &self.conf).finish_non_exhaustive()
    }
}

/// What stands before a search domain.
fn below<'a>(name: &'a str, domain: &str) -> Option<&'a str> {
    let rest = name.strip_suffix(domain).filter(|rest| ends_label(rest))?;
    rest.strip_suffix('.').filter(|rest| !rest.is_empty())
}

fn lower(name: &Name) -> String {
    let mut text = name.to_ascii();
    text.make_ascii_lowercase();
    text.truncate(text.trim_end_matches('.').len());
    text
}

/// The address that a host in a URL is, if it is one.
pub(crate) fn literal(host: &str) -> Option<IpAddr> {
    let inside = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    inside.unwrap_or(host).parse().ok()
}

/// IPv4 in IPv6's clothes is IPv4: a connection to it is.
fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

fn now() -> i64 {
    Timestamp::now().as_second()
}

/// Held for a look-up each; a thread that panicked left nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
