//! The command line of `sallyport-extproc`.

mod args;

use std::future::Future;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use sallyport_engine::Engine;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::observer::LogObserver;
use crate::server::Server;
use crate::tls::{Authority, Minter, Tls};
use crate::{sidecar, watchdog};
use args::{Args, Parsed, parse};

/// Large scans run beside the thread that answers; more of them than cores would only slow each other.
const SCAN_THREADS: usize = 4;

/// Runs the process with its own arguments.
pub fn main() -> ExitCode {
    let outcome = match parse(std::env::args_os().skip(1)) {
        Ok(Parsed::Print(text)) => {
            print!("{text}");
            Ok(())
        }
        Ok(Parsed::Ready(run_dir)) => sidecar::ask_ready(&run_dir).map_err(anyhow::Error::msg),
        Ok(Parsed::File(args)) => enforce_file(args),
        Ok(Parsed::Sidecar(options, log_level)) => run_sidecar(*options, log_level),
        Err(e) => {
            eprintln!("sallyport-extproc: {e}\nTry `sallyport-extproc --help`.");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("sallyport-extproc: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn start_log(level: tracing::Level) {
    tracing_subscriber::fmt().json().with_max_level(level).with_writer(std::io::stderr).init();
}

/// One thread answers: with two the same work took half as much CPU again, and no fewer milliseconds.
fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(SCAN_THREADS)
        .build()
        .context("can't start the runtime")
}

fn shutdown() -> std::io::Result<impl Future<Output = ()> + Send> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("shutting down");
    })
}

fn run_sidecar(options: sidecar::Options, log_level: tracing::Level) -> Result<()> {
    start_log(log_level);
    let runtime = runtime()?;
    let served = runtime.block_on(async { sidecar::run(options, shutdown()?).await });
    // A scan that hangs must not keep the process: everything it could tell is decided.
    runtime.shutdown_background();
    served
}

fn enforce_file(args: Args) -> Result<()> {
    start_log(args.log_level);
    let engine = load(&args.policy)?;
    let tls = args.authority.as_deref().map(|dir| certificates(dir, args.tls_names)).transpose()?;
    let socket = args.config.socket.display().to_string();
    let runtime = runtime()?;
    let served = runtime.block_on(async {
        let shutdown = shutdown()?;
        let limit = args.watchdog;
        watchdog::start(limit, move || {
            eprintln!("sallyport-extproc: nothing was answered for {} s; aborting", limit.as_secs());
            std::process::abort();
        })?;
        let mut server = Server::bind(args.config, Arc::new(engine), Arc::new(LogObserver))
            .with_context(|| format!("--socket {socket}: can't listen"))?;
        if let Some(tls) = tls {
            server = server.with_tls(tls);
        }
        tracing::info!(socket, "listening");
        server.serve(shutdown).await.context("the server failed")
    });
    runtime.shutdown_background();
    served
}

fn certificates(dir: &Path, names: usize) -> Result<Tls> {
    let authority = Authority::open(dir, Timestamp::now()).context("--authority")?;
    Ok(Tls::new(Minter::new(authority)?).most_names(names))
}

fn load(path: &Path) -> Result<Engine> {
    let name = || format!("--policy {}", path.display());
    let text = std::fs::read_to_string(path).with_context(name)?;
    let policy = sallyport_api::load_policy(&text).with_context(name)?;
    Engine::new(&policy.spec).with_context(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_does_not_load_is_named_with_its_fault() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.yaml");
        let missing = format!("{:#}", load(&path).unwrap_err());
        assert!(missing.contains("policy.yaml"), "{missing}");
        std::fs::write(&path, "kind: Pod").unwrap();
        let wrong = format!("{:#}", load(&path).unwrap_err());
        assert!(wrong.contains("policy.yaml"), "{wrong}");
    }
}
