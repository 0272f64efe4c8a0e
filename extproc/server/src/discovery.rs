//! The client of the operator's discovery: one stream, kept up for as long as the process lives.
//!
//! What it brings is checked here and put in force by an [`Apply`]; nothing that happens to the stream
//! changes what is in force. A bundle that failed for a reason that passes (Envoy silent, a full disk) is tried
//! again for as long as it is the newest. The authorities and the token are read anew for each stream, because the kubelet
//! replaces both in their files.
//!
//! Not guaranteed: that a bundle in force is the newest. Without any operator it is the last one there was;
//! its age is a metric.

mod backoff;
mod bundle;

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sallyport_proto::discovery::{
    Ack, DiscoveryClient, Hello, Kill, Nack, Request, Response, SCHEMA, SubscribeRequest,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use crate::metrics::Metrics;
use backoff::Backoff;
pub use bundle::{Held, Refused, Verified};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the operator may think about our token: it asks the API server about it.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// An operator that died without a word is noticed after the sum of these.
const KEEPALIVE: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// A stream that was there for so long did not fail to begin.
const LONG: Duration = Duration::from_secs(60);
/// A policy of a megabyte of Cedar and its Envoy configuration, several times over.
const MOST_MESSAGE_BYTES: usize = 16 << 20;
/// Our answers to one bundle each; the operator reads them at once.
const ANSWERS: usize = 16;
/// What is said of an error, at most: it ends up in a condition's message.
const MOST_ERROR_CHARS: usize = 2048;

/// Puts bundles in force.
pub trait Apply: Send + Sync + 'static {
    /// The kill switch of the newest bundle, told before that bundle can be in force: blocking must not wait
    /// for a compiler.
    fn announce(&self, kill: Option<&Kill>);
    /// Puts a bundle in force; the error says why it is not, and what was in force still is.
    fn apply(self: Arc<Self>, bundle: Verified) -> Pin<Box<dyn Future<Output = Result<(), Failed>> + Send>>;
    /// The digest of what is in force; empty where nothing is.
    fn in_force(&self) -> String;
}

/// Why a bundle is not in force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// The bundle's own fault: it fails here whenever it is tried.
    #[error("{0}")]
    ForGood(String),
    /// The fault of what is around it, which may pass.
    #[error("{0}")]
    ForNow(String),
}

/// Where the operator is and how it is known.
#[derive(Clone, Debug)]
pub struct Target {
    /// `https://host:port`.
    pub url: String,
    /// The directory with `ca.crt` and `token`.
    pub identity_dir: PathBuf,
}

/// Keeps the stream up.
pub struct Client {
    target: Target,
    apply: Arc<dyn Apply>,
    metrics: Arc<Metrics>,
    held: Held,
}

/// How a stream ended.
struct End {
    why: Error,
    /// It brought something that could be used, or was there for long.
    useful: bool,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}: {1}")]
    File(String, std::io::Error),
    #[error("the token in {0} is empty or holds other characters than a header may")]
    Token(String),
    #[error("the operator can't be reached: {0}")]
    Connect(String),
    #[error("the operator did not answer within {} s", OPEN_TIMEOUT.as_secs())]
    Silent,
    #[error("the operator ended the stream: {:?}: {}", .0.code(), .0.message())]
    Ended(Box<Status>),
    #[error("the operator ended the stream")]
    Closed,
    #[error("the operator believes that we hold parts which we don't; asking for everything")]
    Forgotten,
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Ended(Box::new(status))
    }
}

// === impl Client ===

impl Client {
    /// A client; `held` are the parts that were restored.
    pub fn new(target: Target, apply: Arc<dyn Apply>, metrics: Arc<Metrics>, held: Held) -> Self {
        Self { target, apply, metrics, held }
    }

    /// Runs for ever.
    pub async fn run(mut self) {
        let mut backoff = Backoff::default();
        loop {
            let end = self.stream().await;
            self.metrics.connected.set(0);
            let asked = match &end.why {
                Error::Ended(status) => retry_after(status),
                _ => None,
            };
            let forgotten = matches!(end.why, Error::Forgotten);
            let pause = if end.useful && asked.is_none() && !forgotten {
                backoff.after_use()
            } else {
                backoff.after_failure(asked)
            };
            if forgotten {
                self.held = Held::default();
            }
            tracing::info!(
                target: "sallyport::discovery",
                again_in_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
                "{}", end.why
            );
            tokio::time::sleep(pause).await;
        }
    }

    async fn stream(&mut self) -> End {
        let mut useful = false;
        let begun = Instant::now();
        let why = match self.follow(&mut useful).await {
            Ok(()) => Error::Closed,
            Err(why) => why,
        };
        End { why, useful: useful || begun.elapsed() > LONG }
    }

    async fn follow(&mut self, useful: &mut bool) -> Result<(), Error> {
        let (answers, outbound) = mpsc::channel(ANSWERS);
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            schema_least: bundle::SCHEMA_LEAST,
            schema_most: SCHEMA,
            held: self.held.digests(),
            in_force: self.apply.in_force(),
        };
        // The channel is ours and empty.
        let _ = answers.try_send(SubscribeRequest { kind: Some(Request::Hello(hello)) });
        let mut request = tonic::Request::new(ReceiverStream::new(outbound));
        request.metadata_mut().insert("authorization", self.bearer().await?);
        let endpoint = self.endpoint().await?;
        let channel = endpoint.connect().await.map_err(|e| Error::Connect(chain(&e)))?;
        let mut client = DiscoveryClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES);
        let opened = tokio::time::timeout(OPEN_TIMEOUT, client.subscribe(request));
        let mut inbound = opened.await.map_err(|_| Error::Silent)??.into_inner();
        self.metrics.connected.set(1);
        tracing::info!(target: "sallyport::discovery", url = self.target.url, "subscribed");

        let mut applying: Option<Applying> = None;
        // Only the newest bundle counts: one that waits is replaced by one that comes.
        let mut waiting: Option<Verified> = None;
        let mut retry = Retry::default();
        loop {
            if applying.is_none()
                && let Some(bundle) = waiting.take()
            {
                applying = Some(Applying::start(Arc::clone(&self.apply), bundle));
            }
            let message = tokio::select! {
                message = inbound.message() => message?,
                (bundle, outcome) = finished(&mut applying) => {
                    applying = None;
                    let digest = bundle.digest().to_owned();
                    // Said once: that it is tried again is nothing new.
                    if retry.says_more(&digest, &outcome) {
                        self.answer(&answers, digest, outcome.clone().map_err(|e| e.to_string())).await?;
                    }
                    if waiting.is_none() {
                        retry.after(bundle, outcome);
                    }
                    continue;
                }
                bundle = retry.due() => {
                    waiting = Some(bundle);
                    continue;
                }
            };
            let Some(message) = message else { return Ok(()) };
            let Some(Response::Bundle(bundle)) = message.kind else {
                // Of a newer operator; there is nothing to answer it with.
                tracing::warn!(target: "sallyport::discovery", "a message of an unknown kind");
                continue;
            };
            retry.drop_bundle();
            let digest = bundle.digest.clone();
            match Verified::new(bundle, &self.held) {
                Ok(verified) => {
                    *useful = true;
                    self.held.remember(&verified.bundle().parts);
                    self.apply.announce(verified.kill());
                    waiting = Some(verified);
                }
                Err(refused) => {
                    let missing = matches!(refused, Refused::NotHeld { .. });
                    self.answer(&answers, digest, Err(refused.to_string())).await?;
                    if missing {
                        // Half a second for the nack to leave before the connection does.
                        drop(answers);
                        let _ = tokio::time::timeout(Duration::from_millis(500), inbound.message()).await;
                        return Err(Error::Forgotten);
                    }
                }
            }
        }
    }

    async fn answer(
        &self,
        answers: &mpsc::Sender<SubscribeRequest>,
        digest: String,
        outcome: Result<(), String>,
    ) -> Result<(), Error> {
        let kind = match outcome {
            Ok(()) => {
                self.metrics.acks.inc();
                Request::Ack(Ack { digest })
            }
            Err(error) => {
                self.metrics.nacks.inc();
                let error: String = error.chars().take(MOST_ERROR_CHARS).collect();
                tracing::error!(target: "sallyport::bundle", digest, error, "refused");
                Request::Nack(Nack { digest, error })
            }
        };
        answers.send(SubscribeRequest { kind: Some(kind) }).await.map_err(|_| Error::Closed)
    }

    async fn endpoint(&self) -> Result<Endpoint, Error> {
        // tonic takes every certificate of the file.
        let authorities = Certificate::from_pem(self.read("ca.crt").await?);
        let connect = |e: tonic::transport::Error| Error::Connect(chain(&e));
        let endpoint = Endpoint::from_shared(self.target.url.clone()).map_err(connect)?;
        // Without TLS the token would go to whoever answers.
        let tls = ClientTlsConfig::new().ca_certificate(authorities);
        let endpoint = endpoint.tls_config(tls).map_err(connect)?;
        Ok(endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true))
    }

    async fn bearer(&self) -> Result<MetadataValue<tonic::metadata::Ascii>, Error> {
        let token = self.read("token").await?;
        let wrong = || Error::Token(self.target.identity_dir.join("token").display().to_string());
        let token = std::str::from_utf8(&token).map_err(|_| wrong())?.trim();
        if token.is_empty() {
            return Err(wrong());
        }
        let mut value = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| wrong())?;
        value.set_sensitive(true);
        Ok(value)
    }

    async fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let path = self.target.identity_dir.join(name);
        let shown = path.display().to_string();
        let read = tokio::task::spawn_blocking(move || std::fs::read(path)).await;
        read.unwrap_or_else(|e| Err(std::io::Error::other(e))).map_err(|e| Error::File(shown, e))
    }
}

/// A bundle that is being put in force. It goes on where the stream ends meanwhile.
struct Applying {
    bundle: Verified,
    task: JoinHandle<Result<(), Failed>>,
}

impl Applying {
    fn start(apply: Arc<dyn Apply>, bundle: Verified) -> Self {
        Self { task: tokio::spawn(apply.apply(bundle.clone())), bundle }
    }
}

async fn finished(applying: &mut Option<Applying>) -> (Verified, Result<(), Failed>) {
    match applying {
        None => std::future::pending().await,
        Some(Applying { bundle, task }) => {
            let panicked = || Failed::ForGood("the sidecar failed while loading it".to_owned());
            let outcome = task.await.unwrap_or_else(|_| Err(panicked()));
            (bundle.clone(), outcome)
        }
    }
}

/// The newest bundle, where it failed for a reason that may pass. A stream that ends takes it along: the
/// next one brings the newest again.
#[derive(Default)]
struct Retry {
    bundle: Option<(Verified, tokio::time::Instant)>,
    backoff: Backoff,
    /// What was said last of which digest.
    said: Option<(String, Failed)>,
}

impl Retry {
    /// Whether the operator has not been told this yet.
    fn says_more(&mut self, digest: &str, outcome: &Result<(), Failed>) -> bool {
        let now = outcome.clone().err().map(|why| (digest.to_owned(), why));
        let more = now.is_none() || now != self.said;
        self.said = now;
        more
    }

    fn after(&mut self, bundle: Verified, outcome: Result<(), Failed>) {
        if let Err(Failed::ForNow(why)) = outcome {
            let pause = self.backoff.after_failure(None);
            let again_in_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
            tracing::info!(target: "sallyport::bundle", digest = bundle.digest(), again_in_ms, "{why}");
            self.bundle = Some((bundle, tokio::time::Instant::now() + pause));
        }
    }

    /// Another bundle came: it counts, whatever becomes of it.
    fn drop_bundle(&mut self) {
        self.bundle = None;
        self.backoff = Backoff::default();
    }

    /// The bundle, once it is time to try again.
    async fn due(&mut self) -> Verified {
        match &self.bundle {
            None => std::future::pending().await,
            Some((bundle, at)) => {
                tokio::time::sleep_until(*at).await;
                let bundle = bundle.clone();
                self.bundle = None;
                bundle
            }
        }
    }
}

/// How long the operator asks us to stay away.
fn retry_after(status: &Status) -> Option<Duration> {
    if status.code() != tonic::Code::ResourceExhausted {
        return None;
    }
    let seconds = status.metadata().get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// An error with its causes: tonic's own says `transport error` only.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}
