//! Certificates for Envoy: one delta ADS stream, on the socket of ext_proc, that answers secrets only.
//!
//! Envoy asks for a name when the first client names it, and keeps what it got. So names are bounded here:
//! beyond [`Tls::DEFAULT_MOST_NAMES`] the one that was asked for longest ago is taken away, and minted again
//! should anybody come back to it. A name that the policy allows no request to is taken away at once, which
//! ends the handshake that waits for it.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt, stream};
use jiff::Timestamp;
use sallyport_api::Mode;
use sallyport_engine::{Protocol, TransportFailure, Verdict};
use sallyport_proto::secrets::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer, DeltaDiscoveryRequest,
    DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource, SECRET_TYPE,
};
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior};
use tonic::{Request, Response, Status, Streaming};

use super::authority::Minter;
use super::names::server_name;
use crate::judge::guarded;
use crate::observer::{Direction, Observer, Record};
use crate::server::Policy;
use crate::stream::{Phase, turned_away};

/// How often certificates are looked at that should be renewed; a fraction of what they have left by then.
const LOOK: Duration = Duration::from_secs(60);

/// What a server needs to serve certificates.
#[derive(Clone, Debug)]
pub struct Tls {
    minter: Arc<Minter>,
    most_names: usize,
}

impl Tls {
    /// The default of [`Tls::most_names`]. A name costs Envoy some 27 KB.
    pub const DEFAULT_MOST_NAMES: usize = 512;

    /// Certificates of this minter.
    pub fn new(minter: Minter) -> Self {
        Self { minter: Arc::new(minter), most_names: Self::DEFAULT_MOST_NAMES }
    }

    /// For how many names Envoy may hold a certificate at once; at least one.
    #[must_use]
    pub fn most_names(self, names: usize) -> Self {
        Self { most_names: names.max(1), ..self }
    }

    /// Whose certificates these are.
    pub fn minter(&self) -> &Minter {
        &self.minter
    }
}

/// The service.
pub(crate) struct Secrets {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
}

struct Shared {
    tls: Tls,
    policy: Policy,
    observer: Arc<dyn Observer>,
}

impl Secrets {
    pub(crate) fn new(
        tls: Tls,
        policy: Policy,
        observer: Arc<dyn Observer>,
        phase: watch::Receiver<Phase>,
    ) -> Self {
        Self { shared: Arc::new(Shared { tls, policy, observer }), phase }
    }

    pub(crate) fn service(self) -> AggregatedDiscoveryServiceServer<Self> {
        AggregatedDiscoveryServiceServer::new(self)
    }
}

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Secrets {
    type StreamAggregatedResourcesStream = Replies<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Replies<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        _: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Err(Status::unimplemented("secrets are served by delta only"))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        if let Some(status) = turned_away(&self.phase) {
            return Err(status);
        }
        let session = Session::new(request.into_inner(), Arc::clone(&self.shared), self.phase.clone());
        Ok(Response::new(Box::pin(stream::unfold(Some(Box::new(session)), |session| async {
            let mut session = session?;
            match session.next().await {
                Ok(response) => Some((Ok(response), Some(session))),
                Err(status) => Some((Err(status), None)),
            }
        }))))
    }
}

/// One stream of Envoy's.
struct Session<In> {
    inbound: In,
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    held: Held,
    look: Interval,
    sent: u64,
}

// === impl Session ===

impl<In> Session<In>
where
    In: Stream<Item = Result<DeltaDiscoveryRequest, Status>> + Send + Unpin,
{
    fn new(inbound: In, shared: Arc<Shared>, phase: watch::Receiver<Phase>) -> Self {
        let held = Held { most: shared.tls.most_names, ..Held::default() };
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { inbound, shared, phase, held, look, sent: 0 }
    }

    /// What is sent next.
    async fn next(&mut self) -> Result<DeltaDiscoveryResponse, Status> {
        loop {
            let response = tokio::select! {
                biased;
                () = ending(&mut self.phase) => return Err(Status::unavailable("shutting down")),
                message = self.inbound.next() => match message {
                    Some(message) => self.take(message?)?,
                    None => return Err(Status::aborted("Envoy ended the stream")),
                },
                _ = self.look.tick() => self.renew(Timestamp::now()),
            };
            if !(response.resources.is_empty() && response.removed_resources.is_empty()) {
                self.sent += 1;
                return Ok(DeltaDiscoveryResponse {
                    type_url: SECRET_TYPE.to_owned(),
                    nonce: self.sent.to_string(),
                    ..response
                });
            }
        }
    }

    fn take(&mut self, message: DeltaDiscoveryRequest) -> Result<DeltaDiscoveryResponse, Status> {
        if message.type_url != SECRET_TYPE {
            return Err(Status::invalid_argument("nothing but secrets is served"));
        }
        if let Some(error) = message.error_detail {
            tracing::error!("Envoy does not take a certificate: {}", error.message);
        }
        for name in &message.resource_names_unsubscribe {
            self.held.remove(name);
        }
        let mut response = DeltaDiscoveryResponse::default();
        for name in message.resource_names_subscribe {
            match self.shared.mint(&name) {
                Some((resource, renews)) => {
                    response.resources.push(resource);
                    response.removed_resources.extend(self.held.insert(&name, renews));
                }
                None => response.removed_resources.push(name),
            }
        }
        Ok(response)
    }

    /// Certificates that should be replaced by now. Connections go on with the one they began with.
    fn renew(&mut self, now: Timestamp) -> DeltaDiscoveryResponse {
        let mut response = DeltaDiscoveryResponse::default();
        for name in self.held.due(now) {
            if let Some((resource, renews)) = self.shared.mint(&name) {
                response.resources.push(resource);
                self.held.renewed(&name, renews);
            } else {
                self.held.remove(&name);
                response.removed_resources.push(name.to_string());
            }
        }
        response
    }
}

// === impl Shared ===

impl Shared {
    /// A certificate for the server that Envoy calls so, and when it should be renewed; `None` where there
    /// shall be none.
    fn mint(&self, resource: &str) -> Option<(Resource, Timestamp)> {
        let started = Instant::now();
        let now = Timestamp::now();
        let judge = self.policy.judge();
        let enforced = judge.spec().mode == Mode::Enforce;
        let name = server_name(resource);
        let verdict = match &name {
            None => TransportFailure::BadUrl.verdict(),
            Some(name) => guarded(|| judge.server_name(name, now)).unwrap_or_else(TransportFailure::verdict),
        };
        // A name that can't stand in a certificate can't be served, whatever the mode.
        if verdict.decision.refuses() && (enforced || name.is_none()) {
            self.record(resource, &verdict, started);
            return None;
        }
        let minted = match self.tls.minter.mint(&name?, resource, now) {
            Ok(minted) => minted,
            Err(e) => {
                tracing::error!(name = resource, "no certificate could be made: {e}");
                self.record(resource, &TransportFailure::Internal.verdict(), started);
                return None;
            }
        };
        let any = prost_types::Any { type_url: SECRET_TYPE.to_owned(), value: minted.secret };
        let resource = Resource {
            name: resource.to_owned(),
            // Never twice the same, also not by the next process.
            version: now.as_nanosecond().to_string(),
            resource: Some(any),
            ..Resource::default()
        };
        Some((resource, minted.renews))
    }

    /// Notes a handshake that was refused: no request of it will ever be seen.
    fn record(&self, name: &str, verdict: &Verdict, started: Instant) {
        let record = Record {
            request_id: "",
            direction: Direction::Request,
            method: "CONNECT",
            host: name,
            path: "",
            verdict,
            enforced: true,
            complete: true,
            protocol: &Protocol::Unknown,
            bytes: 0,
            held: 0,
            micros: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        if guarded(|| self.observer.record(&record)).is_err() {
            tracing::error!("the observer failed on a handshake that was refused");
        }
    }
}

/// The names that Envoy holds certificates for, in the order they were asked for.
#[derive(Debug, Default)]
struct Held {
    most: usize,
    order: VecDeque<Arc<str>>,
    renews: HashMap<Arc<str>, Timestamp>,
}

// === impl Held ===

impl Held {
    /// Adds a name, or puts it last again; the name that must go for it comes back.
    fn insert(&mut self, name: &str, renews: Timestamp) -> Option<String> {
        self.remove(name);
        let name: Arc<str> = Arc::from(name);
        self.order.push_back(Arc::clone(&name));
        self.renews.insert(name, renews);
        if self.order.len() <= self.most {
            return None;
        }
        let oldest = self.order.pop_front()?;
        self.renews.remove(&oldest);
        Some(oldest.to_string())
    }

    fn remove(&mut self, name: &str) {
        if self.renews.remove(name).is_some() {
            self.order.retain(|held| **held != *name);
        }
    }

    fn renewed(&mut self, name: &str, renews: Timestamp) {
        if let Some(at) = self.renews.get_mut(name) {
            *at = renews;
        }
    }

    fn due(&self, now: Timestamp) -> Vec<Arc<str>> {
        self.renews.iter().filter(|(_, at)| **at <= now).map(|(name, _)| Arc::clone(name)).collect()
    }
}

async fn ending(phase: &mut watch::Receiver<Phase>) {
    // A sender that is gone ends the process as well.
    let _ = phase.wait_for(|phase| *phase != Phase::Running).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn the_name_that_was_asked_for_longest_ago_goes_first() {
        let mut held = Held { most: 2, ..Held::default() };
        assert_eq!(held.insert("a", at(1)), None);
        assert_eq!(held.insert("b", at(1)), None);
        assert_eq!(held.insert("a", at(2)), None, "asked for again: no third");
        assert_eq!(held.insert("c", at(1)).as_deref(), Some("b"));
        held.remove("a");
        held.remove("never held");
        assert_eq!(held.insert("d", at(1)), None);
        assert_eq!(held.order.len(), held.renews.len());
    }

    #[test]
    fn what_is_due_is_renewed_once() {
        let mut held = Held { most: 9, ..Held::default() };
        held.insert("a", at(10));
        held.insert("b", at(20));
        assert_eq!(held.due(at(15)), [Arc::from("a")]);
        held.renewed("a", at(30));
        assert!(held.due(at(15)).is_empty());
    }
}
