//! Discovery: each sidecar's stream to the operator, as the proto describes it.
//!
//! A stream proves by its token which pod it is, and follows that pod's bundle in the index. Nothing is
//! queued per stream: whoever is slow gets the newest bundle next, not every one. Bundles are shared, so a
//! subscriber costs its connection and about one kilobyte here.
//!
//! What is *not* done here: TLS, and finding dead connections (the server's HTTP/2 keep-alive). Made-up tokens
//! cost the address they come from (`peers`); a flood from many addresses still uses up the TokenReviews of
//! its second, and new streams wait, while pods that run enforce on. An agent in a guarded pod reaches this
//! port only where its policy allows it.

mod admission;
pub(crate) mod metrics;
mod peers;
mod review;
mod session;
pub(crate) mod subscribers;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use axum::routing::post;
use http_body_util::StreamBody;
use prometheus::Registry;
use sallyport_proto::discovery::{SUBSCRIBE_PATH, requests};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tonic::metadata::{GRPC_CONTENT_TYPE, MetadataMap};
use tonic::{Code, Status};

use crate::index::{Index, Packed};
use crate::serve::Peer;
use admission::Bucket;
use peers::Peers;
use review::Cache;
pub use review::{PodIdentity, ReviewError, Reviewer, Verdict};
use session::Session;
pub use subscribers::SubscriberView;

/// The largest message a sidecar may send. A Hello names a handful of digests of 64 characters.
const LARGEST_MESSAGE: usize = 16 << 10;

/// TokenReviews under way at once. The client holds a connection for each, for a minute and a half after it,
/// some 20 KiB here and more at the API server; at 50 a second each may take a third of a second.
const ASKED_AT_ONCE: usize = 16;

/// How the service behaves; the defaults are what runs, tests shorten them.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// TokenReviews a second. Each replica has its own share of the API server's patience.
    pub(crate) reviews_per_second: u32,
    /// Streams a second whose token is known: they cost the API server nothing, but us a stream.
    pub(crate) streams_per_second: u32,
    /// How long a stream may stay silent at its beginning.
    pub(crate) hello: Duration,
    /// How long a stream waits for its pod to be seen: watches are behind what tokens prove.
    pub(crate) pod: Duration,
    /// How long a stream lives, at least; at most a tenth longer.
    pub(crate) life: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            reviews_per_second: 50,
            streams_per_second: 500,
            hello: Duration::from_secs(10),
            pod: Duration::from_secs(10),
            life: Duration::from_secs(30 * 60),
        }
    }
}

/// What streams share.
struct Service {
    index: Index,
    reviewer: Box<dyn Reviewer>,
    cache: Cache,
    peers: Peers,
    /// Reviews that may be asked at once.
    asking: Semaphore,
    reviews: Bucket,
    streams: Bucket,
    limits: Limits,
    next_stream: AtomicU64,
}

/// The service over an index, for a server that speaks TLS and HTTP/2; `registry` gathers what it counts.
pub fn router(client: kube::Client, index: Index, registry: &Registry) -> Router {
    if let Err(error) = index.metrics().register(registry) {
        tracing::error!(%error, "metrics of discovery are not gathered");
    }
    served(Box::new(client), index, Limits::default())
}

/// Everybody who is connected to this replica: what `/subscribers` answers.
pub fn subscribers(index: &Index) -> Vec<SubscriberView> {
    index.subscribers().view()
}

/// Answers by hand what tonic would: its server encodes every message for every stream, and keeps the memory.
pub(crate) fn served(reviewer: Box<dyn Reviewer>, index: Index, limits: Limits) -> Router {
    let service = Service {
        index,
        reviewer,
        cache: Cache::default(),
        peers: Peers::default(),
        asking: Semaphore::new(ASKED_AT_ONCE),
        reviews: Bucket::new(limits.reviews_per_second),
        streams: Bucket::new(limits.streams_per_second),
        limits,
        next_stream: AtomicU64::new(0),
    };
    Router::new()
        .route(SUBSCRIBE_PATH, post(subscribe))
        .fallback(async || Status::unimplemented("").into_http::<Body>())
        .with_state(Arc::new(service))
}

/// Why a stream was not begun, or was ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("metadata `authorization: Bearer TOKEN` is missing")]
    NoToken,
    #[error("{0}")]
    BadToken(&'static str),
    #[error("too many streams begin; come again in {} s", seconds(*.0))]
    TooMany(Duration),
    #[error("too many tokens from this address are nobody's; come again in {} s", seconds(*.0))]
    TooManyFromPeer(Duration),
    #[error("{0}")]
    Review(#[from] ReviewError),
    #[error("no guarded pod {0}/{1} with this uid is known")]
    UnknownPod(String, String),
    #[error("the operator has not read every policy yet")]
    NotSynced,
    #[error("this replica stops")]
    Stopping,
    #[error("the stream is old; authenticate again")]
    Expired,
    #[error("the pod is gone")]
    PodGone,
    #[error("no Hello came in time")]
    NoHello,
    #[error("{0}")]
    Protocol(&'static str),
}

impl Refused {
    /// As in the metrics.
    const fn reason(&self) -> &'static str {
        match self {
            Self::NoToken => "no_token",
            Self::BadToken(_) => "bad_token",
            Self::TooMany(_) => "too_many",
            Self::TooManyFromPeer(_) => "too_many_from_peer",
            Self::Review(_) => "review_failed",
            Self::UnknownPod(..) => "unknown_pod",
            Self::NotSynced => "not_synced",
            Self::Stopping => "stopping",
            Self::Expired => "expired",
            Self::PodGone => "pod_gone",
            Self::NoHello => "no_hello",
            Self::Protocol(_) => "protocol",
        }
    }

    const fn code(&self) -> Code {
        match self {
            Self::NoToken | Self::BadToken(_) => Code::Unauthenticated,
            Self::TooMany(_) | Self::TooManyFromPeer(_) => Code::ResourceExhausted,
            Self::Review(_) | Self::NotSynced | Self::Stopping | Self::Expired => Code::Unavailable,
            Self::UnknownPod(..) => Code::PermissionDenied,
            Self::PodGone => Code::NotFound,
            Self::NoHello => Code::DeadlineExceeded,
            Self::Protocol(_) => Code::InvalidArgument,
        }
    }

    fn status(&self) -> Status {
        let mut metadata = MetadataMap::new();
        if let Self::TooMany(wait) | Self::TooManyFromPeer(wait) = self {
            metadata.insert("retry-after", seconds(*wait).into());
        }
        Status::with_metadata(self.code(), self.to_string(), metadata)
    }
}

async fn subscribe(State(service): State<Arc<Service>>, request: Request) -> Response {
    let peer = request.extensions().get::<Peer>().copied();
    match service.admit(request.headers(), peer).await {
        Ok((pod, bundles)) => {
            let stream = service.next_stream.fetch_add(1, Ordering::Relaxed) + 1;
            let said = requests(request.into_body(), LARGEST_MESSAGE);
            let session = Session::new(stream, pod, bundles, said, service.index.clone(), &service.limits);
            let mut response = Response::new(Body::new(StreamBody::new(session.run())));
            response.headers_mut().insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
            response
        }
        Err(refused) => {
            service.index.metrics().refused(refused.reason());
            tracing::debug!(%refused, "stream refused");
            refused.status().into_http()
        }
    }
}

type Bundles = watch::Receiver<Option<Arc<Packed>>>;

impl Service {
    /// Cheap checks first: what costs the API server something comes last but for the pod, which is only
    /// looked for once it is known who asks.
    async fn admit(
        &self,
        headers: &HeaderMap,
        peer: Option<Peer>,
    ) -> Result<(PodIdentity, Bundles), Refused> {
        if *self.index.stopping().borrow() {
            return Err(Refused::Stopping);
        }
        let token = bearer(headers).ok_or(Refused::NoToken)?;
        let pod = match self.review(token, peer).await? {
            Verdict::Pod(pod) => pod,
            Verdict::Rejected(why) => return Err(Refused::BadToken(why)),
        };
        let bundles = self.bundles(&pod).await?;
        Ok((pod, bundles))
    }

    async fn review(&self, token: &str, peer: Option<Peer>) -> Result<Verdict, Refused> {
        let now = Instant::now();
        match self.cache.get(token, now) {
            Some(verdict @ Verdict::Pod(_)) => {
                self.streams.enter(now).map_err(Refused::TooMany)?;
                return Ok(verdict);
            }
            Some(rejected) => return Ok(rejected),
            None => {}
        }
        // Only a server that does not say who calls charges nobody.
        let charge = |peer: Peer| self.peers.charge(peer.0, now);
        peer.map_or(Ok(()), charge).map_err(Refused::TooManyFromPeer)?;
        let asked = match self.reviews.enter(now) {
            Ok(()) => self.ask(token).await,
            Err(wait) => Err(Refused::TooMany(wait)),
        };
        if let Some(peer) = peer
            && !matches!(asked, Ok(Verdict::Rejected(_)))
        {
            self.peers.give_back(peer.0, Instant::now());
        }
        asked
    }

    /// Asks the API server.
    async fn ask(&self, token: &str) -> Result<Verdict, Refused> {
        let asked = async {
            let waits = tokio::time::timeout(review::TIMEOUT, self.asking.acquire());
            let _turn = waits.await.map_err(|_| ReviewError::Timeout)?;
            self.reviewer.review(token).await
        };
        let verdict = asked.await.inspect_err(|error| {
            self.index.metrics().review("error");
            tracing::warn!(%error, "a sidecar can't be let in");
        })?;
        self.index.metrics().review(match verdict {
            Verdict::Pod(_) => "authenticated",
            Verdict::Rejected(_) => "rejected",
        });
        self.cache.put(token, &verdict, Instant::now());
        Ok(verdict)
    }

    /// The pod's bundles, once the index is complete and has seen the pod.
    async fn bundles(&self, pod: &PodIdentity) -> Result<Bundles, Refused> {
        let mut touched = self.index.touched();
        let seen = async {
            loop {
                touched.borrow_and_update();
                if self.index.synced()
                    && let Some(bundles) = self.index.watch(&pod.namespace, &pod.name, &pod.uid)
                {
                    return bundles;
                }
                if touched.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::time::timeout(self.limits.pod, seen).await.map_err(|_| {
            if self.index.synced() {
                Refused::UnknownPod(pod.namespace.clone(), pod.name.clone())
            } else {
                Refused::NotSynced
            }
        })
    }
}

/// Whole seconds, and never zero: who is told 0 comes at once.
const fn seconds(wait: Duration) -> u64 {
    wait.as_secs() + 1
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty()).then(|| token.trim())
}
