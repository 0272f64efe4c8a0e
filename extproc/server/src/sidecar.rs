//! The process in a pod: the filter, what the operator sends it, and Envoy's configuration beside it.
//!
//! Four threads: one answers Envoy and the readiness probe and does nothing else; one follows the operator
//! and puts bundles in force; one resolves names; one serves metrics. What the agent can reach (the filter, the resolver, the metrics) can't
//! keep the kill switch waiting.
//!
//! Not guaranteed: anything before the first bundle but this, that every call is refused.

mod apply;
mod captured;
mod envoy;
mod http;
mod ready;
mod refusing;
mod state;

use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::sync::{Mutex, oneshot, watch};

use crate::discovery::{Apply, Client, Target};
use crate::dns::{Conf, Names, RESOLV_CONF};
use crate::metrics::{Metrics, MetricsObserver};
use crate::server::{Config, Server};
use crate::watchdog;
use apply::Applier;
use captured::Captured;
use envoy::Envoy;
pub use ready::ask as ask_ready;
use state::State;
pub(crate) use state::replace;

/// The filter's socket in the run directory; Envoy's configuration names it.
pub const SOCKET: &str = "extproc.sock";
/// Compiling, reading and writing files, each one at a time.
const BLOCKING_THREADS: usize = 2;

/// How the process runs in a pod.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the operator is: `https://host:port`.
    pub discovery: String,
    /// Sockets and Envoy's configuration.
    pub run_dir: PathBuf,
    /// The last good bundle.
    pub state_dir: PathBuf,
    /// `ca.crt` and `token`.
    pub identity_dir: PathBuf,
    /// Whether capture rules must be there before anything is enforced.
    pub captured: bool,
    /// Where metrics are served.
    pub metrics_addr: SocketAddr,
    /// On which port of the loopback names are resolved; none where connections are not captured.
    pub dns_port: Option<u16>,
    /// How the filter runs; its socket is in `run_dir`.
    pub config: Config,
    /// Abort when no call could be answered for so long.
    pub watchdog: Duration,
}

/// Runs until `shutdown` comes back. On a runtime with one thread: it is the one that answers.
pub async fn run(options: Options, shutdown: impl Future<Output = ()> + Send) -> Result<()> {
    let limit = options.watchdog;
    let heart = watchdog::start(limit, move || {
        eprintln!("sallyport-extproc: nothing was answered for {} s; aborting", limit.as_secs());
        std::process::abort();
    })?;
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let mut config = options.config;
    config.socket = options.run_dir.join(SOCKET);
    let socket = config.socket.display().to_string();
    let observer = Arc::new(MetricsObserver::new(Arc::clone(&metrics)));
    let resolver_observer = Arc::clone(&observer) as Arc<dyn crate::Observer>;
    let mut server = Server::bind(config, Arc::new(refusing::Refusing::default()), observer)
        .with_context(|| format!("{socket}: can't listen"))?;
    let envoy = Envoy::new(&options.run_dir);
    let state = State::new(&options.state_dir);
    // Blocks everything from here on, and before the server answers anybody.
    let applier = Arc::new(Applier::new(server.policy(), server.stop(), state, envoy.clone()));
    let ready = ready::ReadySocket::bind(&options.run_dir).context("the readiness socket")?;
    tracing::info!(socket, metrics = %options.metrics_addr, "listening");

    let mut names = None;
    let mut names_ended = None;
    if let Some(port) = options.dns_port {
        let conf = Conf::of_pod(&options.state_dir, Path::new(RESOLV_CONF))
            .with_context(|| format!("{RESOLV_CONF}: the pod's nameservers"))?;
        let (policy, stop, dir) = (server.policy(), server.stop(), options.state_dir.clone());
        let (resolver, ended) = on_its_own("names", move |runtime| {
            let names = Names::new(conf, &dir, policy, stop, resolver_observer, runtime);
            (Arc::clone(&names), names.serve(port))
        })?;
        server.set_names(Arc::clone(&resolver));
        names = Some(resolver);
        names_ended = Some(ended);
    }
    let names_ended = async {
        if let Some(ended) = names_ended {
            let _ = ended.await;
        } else {
            std::future::pending::<()>().await;
        }
    };

    let (looking, mut captured) = watch::channel(Captured::at_start(options.captured));
    let pages = Arc::new(http::Pages {
        captured: captured.clone(),
        names,
        metrics: Arc::clone(&metrics),
        budget: server.budget(),
        heart,
        stop: server.stop(),
        envoy,
        in_force: applier.watch(),
        page: Mutex::default(),
        envoy_ready: Mutex::default(),
    });
    let metrics_ended = aside("metrics", http::serve(options.metrics_addr, pages))?;
    let (told, seen) = (captured.clone(), Arc::clone(&metrics));
    let target = Target { url: options.discovery, identity_dir: options.identity_dir };
    let in_force = applier.watch();
    let discovery_ended = aside("discovery", async move {
        // A pod that is not captured enforces nothing that could be relied on, and does not say it does.
        captured::wait(&mut captured).await;
        let held = applier.restore().await;
        Client::new(target, applier as Arc<dyn Apply>, metrics, held).run().await;
    })?;
    let ready = tokio::spawn(ready.serve(in_force, told));
    let looking = tokio::spawn(captured::keep(looking, seen));

    let mut fault = None;
    let end = async {
        // None of them ends by itself: one that does has panicked.
        fault = tokio::select! {
            () = shutdown => None,
            _ = metrics_ended => Some("the thread that serves metrics"),
            () = names_ended => Some("the thread that resolves names"),
            _ = discovery_ended => Some("the thread that follows the operator"),
            _ = ready => Some("the task that answers readiness probes"),
            _ = looking => Some("the task that looks for the capture rules"),
        };
        if let Some(what) = fault {
            tracing::error!("{what} ended; shutting down");
        }
    };
    server.serve(end).await.context("the server failed")?;
    match fault {
        None => Ok(()),
        Some(what) => bail!("{what} ended"),
    }
}

/// Runs a future on a thread of its own. What comes back tells when it ended.
fn aside(
    name: &'static str,
    work: impl Future<Output = ()> + Send + 'static,
) -> Result<oneshot::Receiver<()>> {
    on_its_own(name, |_| ((), work)).map(|((), ended)| ended)
}

/// The same of work that is made with a handle of the thread's runtime.
fn on_its_own<T, F: Future<Output = ()> + Send + 'static>(
    name: &'static str,
    make: impl FnOnce(tokio::runtime::Handle) -> (T, F),
) -> Result<(T, oneshot::Receiver<()>)> {
    let (alive, ended) = oneshot::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .with_context(|| format!("can't start the runtime for {name}"))?;
    let (made, work) = make(runtime.handle().clone());
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Dropped by a panic too.
            let _alive: oneshot::Sender<()> = alive;
            runtime.block_on(work);
        })
        .with_context(|| format!("can't start the thread for {name}"))?;
    Ok((made, ended))
}
