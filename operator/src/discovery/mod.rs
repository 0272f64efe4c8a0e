//! Discovery: each sidecar's stream to the operator, as the proto describes it.
//!
//! A stream proves by its token which pod it is, and follows that pod's bundle in the index. Nothing is
//! queued per stream: whoever is slow gets the newest bundle next, not every one. Bundles are shared, so a
//! subscriber costs its connection and about one kilobyte here.
//!
//! What is *not* done here: TLS, and finding dead connections (the server's HTTP/2 keep-alive). Nor is a flood
//! of made-up tokens told from a storm of sidecars: it uses up the TokenReviews of its second, and new streams
//! wait, while pods that run enforce on. An agent in a guarded pod reaches this port only where its policy
//! allows it.

mod admission;
pub(crate) mod metrics;
mod review;
mod session;
pub(crate) mod subscribers;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::stream::BoxStream;
use prometheus::Registry;
use sallyport_proto::discovery::{Bundle, Discovery, DiscoveryServer, SubscribeRequest, SubscribeResponse};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::index::Index;
use admission::Bucket;
use review::Cache;
pub use review::{PodIdentity, ReviewError, Reviewer, Verdict};
use session::Session;
pub use subscribers::SubscriberView;

/// The largest message a sidecar may send. A Hello names a handful of digests of 64 characters.
const LARGEST_MESSAGE: usize = 16 << 10;

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

/// The service. See [`service`].
pub struct Service {
    index: Index,
    reviewer: Box<dyn Reviewer>,
    cache: Cache,
    reviews: Bucket,
    streams: Bucket,
    limits: Limits,
    next_stream: AtomicU64,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// The service over an index; `registry` gathers what it counts.
pub fn service(client: kube::Client, index: Index, registry: &Registry) -> DiscoveryServer<Service> {
    if let Err(error) = index.metrics().register(registry) {
        tracing::error!(%error, "metrics of discovery are not gathered");
    }
    served(Box::new(client), index, Limits::default())
}

/// [`service`] as a router, for a server that speaks TLS and HTTP/2.
pub fn router(client: kube::Client, index: Index, registry: &Registry) -> axum::Router {
    tonic::service::Routes::new(service(client, index, registry)).prepare().into_axum_router()
}

/// Everybody who is connected to this replica: what `/subscribers` answers.
pub fn subscribers(index: &Index) -> Vec<SubscriberView> {
    index.subscribers().view()
}

pub(crate) fn served(reviewer: Box<dyn Reviewer>, index: Index, limits: Limits) -> DiscoveryServer<Service> {
    let service = Service {
        index,
        reviewer,
        cache: Cache::default(),
        reviews: Bucket::new(limits.reviews_per_second),
        streams: Bucket::new(limits.streams_per_second),
        limits,
        next_stream: AtomicU64::new(0),
    };
    DiscoveryServer::new(service).max_decoding_message_size(LARGEST_MESSAGE)
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
            Self::TooMany(_) => Code::ResourceExhausted,
            Self::Review(_) | Self::NotSynced | Self::Stopping | Self::Expired => Code::Unavailable,
            Self::UnknownPod(..) => Code::PermissionDenied,
            Self::PodGone => Code::NotFound,
            Self::NoHello => Code::DeadlineExceeded,
            Self::Protocol(_) => Code::InvalidArgument,
        }
    }

    fn status(&self) -> Status {
        let mut metadata = MetadataMap::new();
        if let Self::TooMany(wait) = self {
            metadata.insert("retry-after", seconds(*wait).into());
        }
        Status::with_metadata(self.code(), self.to_string(), metadata)
    }
}

#[tonic::async_trait]
impl Discovery for Service {
    type SubscribeStream = BoxStream<'static, Result<SubscribeResponse, Status>>;

    async fn subscribe(
        &self,
        request: Request<Streaming<SubscribeRequest>>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        match self.admit(request.metadata()).await {
            Ok((pod, bundles)) => {
                let stream = self.next_stream.fetch_add(1, Ordering::Relaxed) + 1;
                let session = Session::new(
                    stream,
                    pod,
                    bundles,
                    request.into_inner(),
                    self.index.clone(),
                    &self.limits,
                );
                Ok(Response::new(session.run()))
            }
            Err(refused) => {
                self.index.metrics().refused(refused.reason());
                tracing::debug!(%refused, "stream refused");
                Err(refused.status())
            }
        }
    }
}

type Bundles = watch::Receiver<Option<Arc<Bundle>>>;

impl Service {
    /// Cheap checks first: what costs the API server something comes last but for the pod, which is only
    /// looked for once it is known who asks.
    async fn admit(&self, metadata: &MetadataMap) -> Result<(PodIdentity, Bundles), Refused> {
        if *self.index.stopping().borrow() {
            return Err(Refused::Stopping);
        }
        let token = bearer(metadata).ok_or(Refused::NoToken)?;
        let pod = match self.review(token).await? {
            Verdict::Pod(pod) => pod,
            Verdict::Rejected(why) => return Err(Refused::BadToken(why)),
        };
        let bundles = self.bundles(&pod).await?;
        Ok((pod, bundles))
    }

    async fn review(&self, token: &str) -> Result<Verdict, Refused> {
        let now = Instant::now();
        if let Some(verdict) = self.cache.get(token, now) {
            self.streams.enter(now).map_err(Refused::TooMany)?;
            return Ok(verdict);
        }
        self.reviews.enter(now).map_err(Refused::TooMany)?;
        let verdict = self.reviewer.review(token).await.inspect_err(|error| {
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

fn bearer(metadata: &MetadataMap) -> Option<&str> {
    let value = metadata.get("authorization")?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty()).then(|| token.trim())
}
