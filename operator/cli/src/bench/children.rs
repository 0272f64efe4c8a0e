//! The processes that are measured, started from this same program: the filter, and an upstream.

use std::convert::Infallible;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use sallyport_extproc::{Config, LogObserver, Server};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use super::body;
use crate::envoy::tethered;
use crate::policy;

/// A start takes well below a second; compiling every rule in a debug build a few.
const START_WITHIN: Duration = Duration::from_secs(60);

/// The filter's process, as the sidecar runs it, or one that decides nothing.
#[derive(Debug, clap::Args)]
pub(crate) struct ExtprocArgs {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long, conflicts_with = "policy")]
    noop: bool,
    #[arg(long, required_unless_present = "noop")]
    policy: Option<PathBuf>,
}

/// An upstream that answers every call with the same short completion.
#[derive(Debug, clap::Args)]
pub(crate) struct UpstreamArgs {}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")
}

impl ExtprocArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let served = match &self.policy {
            None => runtime()?
                .block_on(sallyport_extproc::noop::serve_noop(&self.socket, std::future::pending::<()>())),
            Some(path) => {
                let engine = policy::engine(Some(path))?;
                // With the log the sidecar writes, one line per message; nobody reads it here.
                tracing_subscriber::fmt().json().with_writer(std::io::stderr).init();
                runtime()?.block_on(async {
                    let config = Config::new(&self.socket);
                    let server = Server::bind(config, Arc::new(engine), Arc::new(LogObserver))?;
                    server.serve(std::future::pending()).await
                })
            }
        };
        served.with_context(|| format!("{}: the filter failed", self.socket.display()))?;
        Ok(ExitCode::SUCCESS)
    }
}

impl UpstreamArgs {
    #[allow(clippy::unused_self, reason = "the shape of every command")]
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        runtime()?.block_on(upstream())?;
        Ok(ExitCode::SUCCESS)
    }
}

async fn upstream() -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("{}", listener.local_addr()?.port());
    std::io::stdout().flush()?;
    let answer = Bytes::from(body::completion());
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let answer = answer.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let answer = answer.clone();
                async move {
                    let mut body = request.into_body();
                    while body.frame().await.is_some() {}
                    let mut response = Response::new(Full::new(answer));
                    let json = hyper::header::HeaderValue::from_static("application/json");
                    response.headers_mut().insert(hyper::header::CONTENT_TYPE, json);
                    Ok::<_, Infallible>(response)
                }
            });
            // A connection that ends badly was closed by Envoy at its end.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = tethered(std::ffi::OsStr::new("/proc/self/exe"));
    command.args(args).stdin(Stdio::null()).stderr(Stdio::null());
    let mut command = Command::from(command);
    command.kill_on_drop(true);
    command
}

/// Starts the upstream; returns it with its port.
pub(super) async fn start_upstream() -> anyhow::Result<(Child, u16)> {
    let mut child = command(&["bench-upstream"]).stdout(Stdio::piped()).spawn().context("the upstream")?;
    let stdout = child.stdout.take().context("the upstream has no output")?;
    let mut line = String::new();
    timeout(START_WITHIN, BufReader::new(stdout).read_line(&mut line))
        .await
        .context("the upstream did not start")??;
    let port = line.trim().parse().context("the upstream gave no port")?;
    Ok((child, port))
}

/// Starts a filter, and waits for its socket.
pub(super) async fn start_extproc(socket: &Path, policy: Option<&Path>) -> anyhow::Result<Child> {
    let socket_arg = socket.to_string_lossy().into_owned();
    let mut args = vec!["bench-extproc", "--socket", &socket_arg];
    let policy_arg = policy.map(|p| p.to_string_lossy().into_owned());
    match &policy_arg {
        Some(policy) => args.extend(["--policy", policy]),
        None => args.push("--noop"),
    }
    let mut child = command(&args).stdout(Stdio::null()).spawn().context("the filter")?;
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if let Some(status) = child.try_wait()? {
            bail!("the filter ended at once ({status})");
        }
        if start.elapsed() > START_WITHIN {
            bail!("the filter did not start within {START_WITHIN:?}");
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok(child)
}
