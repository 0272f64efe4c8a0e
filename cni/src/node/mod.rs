//! The daemon: serves the plugin, keeps it installed, tells what it sees.
//!
//! It ends with its last word to the node: where its DaemonSet is gone for good, it takes the plugin out of the
//! node's configuration; where it will be back, it leaves it there, and guarded pods wait for it.

mod install;
mod leave;
mod pages;
mod rules;
mod serve;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

pub use install::{Installer, Paths, Repaired};
pub use leave::decide;
pub use pages::{Metrics, name, names};
pub use rules::{Counter, RulesError};
pub use serve::Server;

/// Between the configuration's change and the removal of the plugin: a runtime that has not noticed yet would
/// look for it at the end of a pod.
const SETTLE: Duration = Duration::from_secs(2);

/// The daemon that captures guarded pods on its node.
#[derive(Clone, Debug, Parser)]
#[command(name = "sallyport-cni-node", version)]
pub struct Args {
    /// The node's directory of CNI configuration.
    #[arg(long, env = "SALLYPORT_CNI_CONF_DIR", default_value = "/host/etc/cni/net.d")]
    pub conf_dir: PathBuf,
    /// The node's directory of CNI plugins.
    #[arg(long, env = "SALLYPORT_CNI_BIN_DIR", default_value = "/host/opt/cni/bin")]
    pub bin_dir: PathBuf,
    /// The plugin to install.
    #[arg(long, env = "SALLYPORT_CNI_PLUGIN", default_value = "/sallyport-cni")]
    pub plugin: PathBuf,
    /// Where the plugin finds the daemon; the same path on the node and here.
    #[arg(long, env = "SALLYPORT_CNI_SOCKET", default_value = crate::conf::SOCKET)]
    pub socket: PathBuf,
    /// Where metrics and probes are served, plain HTTP.
    #[arg(long, env = "SALLYPORT_METRICS_ADDR", default_value = "0.0.0.0:15091")]
    pub metrics_addr: SocketAddr,
    /// The DaemonSet's namespace.
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: String,
    /// The DaemonSet's name.
    #[arg(long, env = "SALLYPORT_CNI_DAEMONSET", default_value = "sallyport-cni")]
    pub daemonset: String,
    /// What is logged: a level, or directives.
    #[arg(long, env = "SALLYPORT_LOG_LEVEL", default_value = "info")]
    pub log_level: String,
}

/// Runs the process.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let filter = match args.log_level.parse::<tracing_subscriber::EnvFilter>() {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("sallyport-cni-node: --log-level: {error}");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "the daemon ends");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(args: &Args) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let metrics = Arc::new(Metrics::new().context("metrics")?);
    let server = Server::bind(&args.socket, Arc::clone(&metrics))
        .with_context(|| format!("{}: can't listen", args.socket.display()))?;
    let server = Arc::new(server);
    let installer = Arc::new(Installer::new(Paths {
        conf_dir: args.conf_dir.clone(),
        bin_dir: args.bin_dir.clone(),
        plugin: args.plugin.clone(),
        socket: args.socket.display().to_string(),
    }));
    let serving = aside("serve", {
        let server = Arc::clone(&server);
        move || server.serve()
    })?;
    // The plugin is installed once somebody answers it.
    let installing = aside("install", {
        let (installer, metrics) = (Arc::clone(&installer), Arc::clone(&metrics));
        move || install::keep(&installer, &metrics)
    })?;
    let listener = tokio::net::TcpListener::bind(args.metrics_addr)
        .await
        .with_context(|| format!("{}: can't listen", args.metrics_addr))?;
    let pages = pages::router(Arc::clone(&metrics), Arc::clone(&server));
    tracing::info!(socket = %args.socket.display(), metrics = %args.metrics_addr, "serving");
    tokio::select! {
        // None of them ends by itself: one that does has panicked.
        _ = serving => anyhow::bail!("the thread that serves the plugin ended"),
        _ = installing => anyhow::bail!("the thread that keeps the plugin installed ended"),
        served = axum::serve(listener, pages).into_future() => served.context("serving metrics")?,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    metrics.leaving();
    let gone = leave::for_good(&args.namespace, &args.daemonset).await;
    tracing::info!(uninstall = gone, "stopping");
    if gone {
        installer.leave_lists().context("taking the plugin out of the node's configuration")?;
        tokio::time::sleep(SETTLE).await;
        installer.leave_binary().context("removing the plugin")?;
    }
    Ok(())
}

/// Runs work on a thread of its own. What comes back tells when it ended.
fn aside(name: &str, work: impl FnOnce() + Send + 'static) -> anyhow::Result<oneshot::Receiver<()>> {
    let (alive, ended) = oneshot::channel::<()>();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Dropped by a panic too.
            let _alive = alive;
            work();
        })
        .with_context(|| format!("can't start the thread {name}"))?;
    Ok(ended)
}
