//! The gRPC server: one stream per HTTP exchange, on a unix socket.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sallyport_api::Limits;
use sallyport_proto::ext_proc::{ExternalProcessor, ExternalProcessorServer, ProcessingRequest};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, Streaming};

use crate::budget::Budget;
use crate::dns::Names;
use crate::exchange::{Context, Exchange};
use crate::head::Upstream;
use crate::judge::Judge;
use crate::observer::Observer;
use crate::socket::{self, SocketFile};
use crate::stop::Stop;
use crate::stream::{Answers, JudgeSlot, Phase, answers, turned_away};
use crate::tls::{Inside, Secrets, Tls};

/// The stream metadata by which a listener says what its requests come through; see [`Inside`].
pub const TLS_METADATA: &str = "sallyport-tls";
/// The stream metadata by which a base-URL listener names its upstream: `https://host[:port]`.
pub const UPSTREAM_METADATA: &str = "sallyport-upstream";

/// The stream metadata by which a listener says that its connections are captured: each has the address to
/// which the agent made it, and is dialled where we say.
pub const CAPTURED_METADATA: &str = "sallyport-captured";

/// The largest message that is decoded: the largest body any policy may allow, and room for what is around
/// it. A longer one ends its stream with an error. Fixed, because policies come and go.
const MAX_MESSAGE_BYTES: usize = Limits::MOST_MAX_BODY_BYTES as usize + (1 << 20);
/// One HTTP exchange is one stream, and an open SSE response keeps its own: the default of 200 would have
/// Envoy queue the 201st.
const MAX_STREAMS: u32 = 8192;
/// Agents that hang up are ordinary: each resets a stream, and the default of 20 waiting ones would be
/// taken for an attack and cost every other exchange its connection.
const MAX_PENDING_RESETS: usize = 1024;
/// How long errors may take to reach Envoy once exchanges were ended.
const FLUSH: Duration = Duration::from_secs(1);

/// How the server runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where Envoy connects.
    pub socket: PathBuf,
    /// Bytes that all exchanges together may hold.
    pub budget_bytes: usize,
    /// How long the scan of one large body may take.
    pub scan_timeout: Duration,
    /// How long open exchanges may go on after shutdown was asked for.
    pub drain: Duration,
}

impl Config {
    /// 64 bodies of the default cap: what a pod of the default size can hold beside everything else.
    pub const DEFAULT_BUDGET_BYTES: usize = 64 << 20;
    /// The default of `scan_timeout`: well below the least message timeout that Envoy is given for large
    /// bodies, so that the verdict comes from us.
    pub const DEFAULT_SCAN_TIMEOUT: Duration = Duration::from_millis(500);
    /// The default of `drain`.
    pub const DEFAULT_DRAIN: Duration = Duration::from_secs(5);

    /// The defaults, on this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            budget_bytes: Self::DEFAULT_BUDGET_BYTES,
            scan_timeout: Self::DEFAULT_SCAN_TIMEOUT,
            drain: Self::DEFAULT_DRAIN,
        }
    }
}

/// The policy in force; clones share it.
#[derive(Clone)]
pub struct Policy(Arc<JudgeSlot>);

impl Policy {
    fn new(judge: Arc<dyn Judge>) -> Self {
        warm(&judge);
        Self(Arc::new(watch::Sender::new(judge)))
    }

    /// Puts another policy in force for exchanges that begin from now on. Those that are under way end
    /// under the one they began with: half a decision of each would be nobody's.
    pub fn swap(&self, judge: Arc<dyn Judge>) {
        warm(&judge);
        self.0.send_replace(judge);
    }

    /// Who decides for exchanges that begin now.
    pub fn judge(&self) -> Arc<dyn Judge> {
        Arc::clone(&self.0.borrow())
    }
}

/// Prepares a policy on a thread of its own. It serves meanwhile; only the first messages that meet a rule
/// would have to wait for that rule.
fn warm(judge: &Arc<dyn Judge>) {
    let judge = Arc::clone(judge);
    if let Err(e) = std::thread::Builder::new().name("warm".into()).spawn(move || judge.warm()) {
        tracing::warn!("the policy is prepared as messages come, because no thread could be had: {e}");
    }
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy").finish_non_exhaustive()
    }
}

/// A server that is bound and may be started.
pub struct Server {
    config: Config,
    policy: Policy,
    observer: Arc<dyn Observer>,
    stop: Arc<Stop>,
    budget: Arc<Budget>,
    tls: Option<Tls>,
    listener: std::os::unix::net::UnixListener,
    file: SocketFile,
    names: Option<Arc<Names>>,
}

// === impl Server ===

impl Server {
    /// Binds the socket. From here on Envoy can connect; it is answered once [`Server::serve`] runs.
    pub fn bind(config: Config, judge: Arc<dyn Judge>, observer: Arc<dyn Observer>) -> io::Result<Self> {
        let (listener, file) = socket::bind(&config.socket)?;
        let budget = Budget::new(config.budget_bytes);
        let stop = Arc::default();
        let policy = Policy::new(judge);
        Ok(Self { config, policy, observer, stop, budget, tls: None, listener, file, names: None })
    }

    /// Serves certificates, too, for the TLS that Envoy opens.
    #[must_use]
    pub fn with_tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// The switch that blocks every message, whatever the policy says.
    pub fn stop(&self) -> Arc<Stop> {
        Arc::clone(&self.stop)
    }

    /// What all exchanges together may hold.
    pub fn budget(&self) -> Arc<Budget> {
        Arc::clone(&self.budget)
    }

    /// Holds captured calls against these names. Without them every captured call fails.
    pub fn set_names(&mut self, names: Arc<Names>) {
        self.names = Some(names);
    }

    /// The policy in force, to be swapped.
    pub fn policy(&self) -> Policy {
        self.policy.clone()
    }

    /// Serves until `shutdown` comes back, then lets open exchanges go on for the drain period and ends
    /// the rest by errors. The socket is gone when this returns.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send) -> io::Result<()> {
        let listener = tokio::net::UnixListener::from_std(self.listener)?;
        let phase = watch::Sender::new(Phase::Running);
        let secrets = self.tls.map(|tls| {
            Secrets::new(tls, self.policy.clone(), Arc::clone(&self.observer), phase.subscribe()).service()
        });
        let service = Service {
            policy: self.policy,
            observer: self.observer,
            budget: self.budget,
            stop: self.stop,
            phase: phase.subscribe(),
            scan_timeout: self.config.scan_timeout,
            names: self.names,
        };
        let mut draining = phase.subscribe();
        let drained = async move {
            let _ = draining.wait_for(|p| *p != Phase::Running).await;
        };
        let server = tonic::transport::Server::builder()
            .max_concurrent_streams(MAX_STREAMS)
            .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
            .add_service(ExternalProcessorServer::new(service).max_decoding_message_size(MAX_MESSAGE_BYTES))
            .add_optional_service(secrets)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), drained);
        tokio::pin!(server);
        let ended = tokio::select! {
            ended = &mut server => Some(ended),
            () = shutdown => None,
        };
        if let Some(ended) = ended {
            return ended.map_err(io::Error::other);
        }
        // Nobody new: the file first, then the phase that turns away what is already connected.
        drop(self.file);
        phase.send_replace(Phase::Draining);
        if let Ok(ended) = tokio::time::timeout(self.config.drain, &mut server).await {
            return ended.map_err(io::Error::other);
        }
        phase.send_replace(Phase::Halting);
        // What does not get through in this time is cut with the connection, which is an error too.
        tokio::time::timeout(FLUSH, &mut server).await.unwrap_or(Ok(())).map_err(io::Error::other)
    }
}

struct Service {
    policy: Policy,
    observer: Arc<dyn Observer>,
    budget: Arc<Budget>,
    stop: Arc<Stop>,
    phase: watch::Receiver<Phase>,
    scan_timeout: Duration,
    names: Option<Arc<Names>>,
}

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = Answers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        if let Some(status) = turned_away(&self.phase) {
            return Err(status);
        }
        let metadata = request.metadata();
        let upstream = match metadata.get(UPSTREAM_METADATA) {
            None => None,
            // To fall back on what the client says would be to let the client choose.
            Some(url) => Some(url.to_str().ok().and_then(Upstream::parse).ok_or_else(|| {
                tracing::error!("the listener's {UPSTREAM_METADATA} is not `http(s)://host[:port]`");
                Status::invalid_argument(UPSTREAM_METADATA)
            })?),
        };
        let inside = match metadata.get(TLS_METADATA) {
            None => Inside::Clear,
            // To take it for clear HTTP would be to leave the comparison of names out.
            Some(text) => text.to_str().ok().and_then(Inside::parse).ok_or_else(|| {
                tracing::error!("the listener's {TLS_METADATA} is none that this version knows");
                Status::invalid_argument(TLS_METADATA)
            })?,
        };
        let captured = metadata.get(CAPTURED_METADATA).is_some();
        let context = Context {
            inside,
            captured,
            names: self.names.clone(),
            judge: self.policy.judge(),
            observer: Arc::clone(&self.observer),
            budget: Arc::clone(&self.budget),
            upstream,
            stop: Arc::clone(&self.stop),
        };
        let exchange = Exchange::new(context);
        let answers = answers(request.into_inner(), exchange, self.phase.clone(), self.scan_timeout);
        Ok(Response::new(Box::pin(answers)))
    }
}
