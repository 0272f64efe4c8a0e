//! The command line of `sallyport-extproc`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use sallyport_engine::Engine;
use tokio::signal::unix::{SignalKind, signal};

use crate::observer::LogObserver;
use crate::server::{Config, Server};
use crate::watchdog;

const HELP: &str = "\
Answers Envoy's external processing filter by an AgentPolicy.

Usage: sallyport-extproc --policy FILE --socket PATH [OPTIONS]

Options:
  --policy FILE        the AgentPolicy to enforce (YAML or JSON)
  --socket PATH        the unix socket to listen on; made with mode 0600
  --budget-bytes N     bytes of bodies that may be held at once, beyond which calls
                       get 503 (default 67108864)
  --scan-timeout-ms N  how long the scan of one large body may take before the call
                       gets 504 (default 500)
  --drain-s N          how long open calls may go on after SIGTERM (default 5)
  --watchdog-s N       abort when no call could be answered for so long (default 10)
  --log-level LEVEL    error, warn, info, debug or trace (default info); refused
                       messages are warn, marked and redacted ones info, passed
                       ones debug
  --help               this text
  --version            the version

Exit status: 0 after SIGTERM or SIGINT, 1 where it can't run, 2 on wrong usage.
";

const DEFAULT_WATCHDOG: Duration = Duration::from_secs(10);
/// Large scans run beside the thread that answers; more of them than cores would only slow each other.
const SCAN_THREADS: usize = 4;

struct Args {
    policy: PathBuf,
    config: Config,
    watchdog: Duration,
    log_level: tracing::Level,
}

enum Parsed {
    Run(Args),
    Print(String),
}

/// Runs the process with its own arguments.
pub fn main() -> ExitCode {
    match parse(std::env::args_os().skip(1)) {
        Ok(Parsed::Print(text)) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Ok(Parsed::Run(args)) => match run(args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("sallyport-extproc: {e:#}");
                ExitCode::FAILURE
            }
        },
        Err(e) => {
            eprintln!("sallyport-extproc: {e}\nTry `sallyport-extproc --help`.");
            ExitCode::from(2)
        }
    }
}

fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Parsed, lexopt::Error> {
    use lexopt::prelude::*;

    let (mut policy, mut socket) = (None, None);
    let mut config = Config::new("");
    let mut watchdog = DEFAULT_WATCHDOG;
    let mut log_level = tracing::Level::INFO;
    let mut parser = lexopt::Parser::from_args(args);
    while let Some(arg) = parser.next()? {
        match arg {
            Long("policy") => policy = Some(PathBuf::from(parser.value()?)),
            Long("socket") => socket = Some(PathBuf::from(parser.value()?)),
            Long("budget-bytes") => config.budget_bytes = number(&mut parser, "--budget-bytes")?,
            Long("scan-timeout-ms") => {
                config.scan_timeout = Duration::from_millis(positive(&mut parser, "--scan-timeout-ms")?);
            }
            Long("drain-s") => config.drain = Duration::from_secs(number(&mut parser, "--drain-s")?),
            Long("watchdog-s") => watchdog = Duration::from_secs(positive(&mut parser, "--watchdog-s")?),
            Long("log-level") => log_level = parser.value()?.parse()?,
            Short('h') | Long("help") => return Ok(Parsed::Print(HELP.to_owned())),
            Short('V') | Long("version") => {
                return Ok(Parsed::Print(format!("sallyport-extproc {}\n", env!("CARGO_PKG_VERSION"))));
            }
            _ => return Err(arg.unexpected()),
        }
    }
    let policy = policy.ok_or("--policy FILE is missing: the AgentPolicy to enforce")?;
    config.socket = socket.ok_or("--socket PATH is missing: where Envoy connects")?;
    Ok(Parsed::Run(Args { policy, config, watchdog, log_level }))
}

fn number<T: std::str::FromStr<Err: std::fmt::Display>>(
    parser: &mut lexopt::Parser,
    option: &str,
) -> Result<T, lexopt::Error> {
    let value = parser.value()?;
    let number = value.to_str().unwrap_or_default().parse();
    number.map_err(|e| format!("{option}: cannot parse {}: {e}", value.display()).into())
}

fn positive(parser: &mut lexopt::Parser, option: &str) -> Result<u64, lexopt::Error> {
    match number(parser, option)? {
        0 => Err(format!("{option}: nothing can be done in no time; give 1 or more").into()),
        n => Ok(n),
    }
}

fn run(args: Args) -> Result<()> {
    tracing_subscriber::fmt().json().with_max_level(args.log_level).with_writer(std::io::stderr).init();
    let engine = load(&args.policy)?;
    let socket = args.config.socket.display().to_string();
    // One thread answers: with two the same work took half as much CPU again, and no fewer milliseconds.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(SCAN_THREADS)
        .build()
        .context("can't start the runtime")?;
    let served = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let limit = args.watchdog;
        watchdog::start(limit, move || {
            eprintln!("sallyport-extproc: nothing was answered for {} s; aborting", limit.as_secs());
            std::process::abort();
        })?;
        let server = Server::bind(args.config, Arc::new(engine), Arc::new(LogObserver))
            .with_context(|| format!("--socket {socket}: can't listen"))?;
        tracing::info!(socket, "listening");
        let shutdown = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("shutting down");
        };
        server.serve(shutdown).await.context("the server failed")
    });
    // A scan that hangs must not keep the process: everything it could tell is decided.
    runtime.shutdown_background();
    served
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

    fn args(line: &str) -> Result<Parsed, String> {
        parse(line.split_whitespace().map(OsString::from)).map_err(|e| e.to_string())
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for (line, part) in [
            ("", "--policy FILE"),
            ("--policy p", "--socket PATH"),
            ("--policy p --socket s --budget-bytes x", "--budget-bytes: cannot parse"),
            ("--policy p --socket s --scan-timeout-ms 0", "1 or more"),
            ("--policy p --socket s --bogus", "bogus"),
            ("--policy p --socket s stray", "stray"),
        ] {
            let error = args(line).err().unwrap_or_default();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn options_reach_the_configuration() {
        let line = "--policy p --socket s --budget-bytes 7 --scan-timeout-ms 8 --drain-s 9 --watchdog-s 3";
        let Ok(Parsed::Run(args)) = args(line) else { panic!("not understood") };
        assert_eq!(args.policy, Path::new("p"));
        assert_eq!(args.config.socket, Path::new("s"));
        assert_eq!(args.config.budget_bytes, 7);
        assert_eq!(args.config.scan_timeout, Duration::from_millis(8));
        assert_eq!(args.config.drain, Duration::from_secs(9));
        assert_eq!(args.watchdog, Duration::from_secs(3));
        assert!(matches!(super::parse([OsString::from("--help")]), Ok(Parsed::Print(_))));
    }

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
