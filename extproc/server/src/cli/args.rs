//! What stands on the command line.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::server::Config;
use crate::sidecar;
use crate::tls::Tls;

pub(super) const HELP: &str = "\
Answers Envoy's external processing filter by an AgentPolicy.

Usage: sallyport-extproc --policy FILE --socket PATH [OPTIONS]
       sallyport-extproc sidecar --discovery URL --run-dir DIR --state-dir DIR
                                 --identity-dir DIR [--metrics-addr ADDR]
                                 [--captured] [--dns-port PORT] [OPTIONS]
       sallyport-extproc ready --run-dir DIR

The first form enforces a file. `sidecar` runs in a guarded pod: it enforces what
the operator sends, and keeps it. `ready` tells whether a sidecar enforces.

Options of the first form:
  --policy FILE        the AgentPolicy to enforce (YAML or JSON)
  --socket PATH        the unix socket to listen on; made with mode 0600
  --authority DIR      serve certificates for the TLS that Envoy opens, by the authority
                       there (ca.pem, ca.key; made where there is none)
  --tls-names N        names that certificates are held for at once (default 512)

Options of `sidecar`:
  --discovery URL      the operator: https://HOST:PORT
  --run-dir DIR        for sockets and Envoy's configuration; shared with Envoy
  --state-dir DIR      for the last good bundle; shared with nobody
  --identity-dir DIR   with `ca.crt`, the operator's authorities, and `token`
  --metrics-addr ADDR  where metrics are served (default 127.0.0.1:15020)
  --captured           enforce nothing until this pod's capture rules are there
  --dns-port PORT      resolve names on this port of the loopback, UDP and TCP, and
                       hold captured calls against them (default: don't)

Options of both:
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

Exit status: 0 after SIGTERM or SIGINT, 1 where it can't run (`ready`: is not ready),
2 on wrong usage.
";

const DEFAULT_WATCHDOG: Duration = Duration::from_secs(10);
/// The loopback, where nobody says otherwise.
const DEFAULT_METRICS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 15_020);

/// What the process is to do.
pub(super) enum Parsed {
    File(Args),
    Sidecar(Box<sidecar::Options>, tracing::Level),
    Ready(PathBuf),
    Print(String),
}

/// To enforce a file.
pub(super) struct Args {
    pub(super) policy: PathBuf,
    pub(super) config: Config,
    pub(super) authority: Option<PathBuf>,
    pub(super) tls_names: usize,
    pub(super) watchdog: Duration,
    pub(super) log_level: tracing::Level,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    File,
    Sidecar,
    Ready,
}

/// Reads the arguments after the program's name.
pub(super) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Parsed, lexopt::Error> {
    use lexopt::prelude::*;

    let mut args = args.into_iter().peekable();
    let form = match args.peek().and_then(|a| a.to_str()) {
        Some("sidecar") => Form::Sidecar,
        Some("ready") => Form::Ready,
        _ => Form::File,
    };
    if form != Form::File {
        args.next();
    }
    let (file, pod, ready) = (form == Form::File, form == Form::Sidecar, form == Form::Ready);

    let (mut policy, mut socket, mut discovery) = (None, None, None);
    let (mut run_dir, mut state_dir, mut identity_dir) = (None, None, None);
    let (mut authority, mut tls_names) = (None, Tls::DEFAULT_MOST_NAMES);
    let mut captured = false;
    let mut metrics_addr = DEFAULT_METRICS;
    let mut dns_port = None;
    let mut config = Config::new("");
    let mut watchdog = DEFAULT_WATCHDOG;
    let mut log_level = tracing::Level::INFO;
    let mut parser = lexopt::Parser::from_args(args);
    while let Some(arg) = parser.next()? {
        match arg {
            Long("policy") if file => policy = Some(PathBuf::from(parser.value()?)),
            Long("socket") if file => socket = Some(PathBuf::from(parser.value()?)),
            Long("authority") if file => authority = Some(PathBuf::from(parser.value()?)),
            Long("tls-names") if file => {
                tls_names = positive(&mut parser, "--tls-names")?.try_into().unwrap_or(usize::MAX);
            }
            Long("discovery") if pod => discovery = Some(parser.value()?.string()?),
            Long("run-dir") if pod || ready => run_dir = Some(PathBuf::from(parser.value()?)),
            Long("state-dir") if pod => state_dir = Some(PathBuf::from(parser.value()?)),
            Long("identity-dir") if pod => identity_dir = Some(PathBuf::from(parser.value()?)),
            Long("metrics-addr") if pod => metrics_addr = number(&mut parser, "--metrics-addr")?,
            Long("captured") if pod => captured = true,
            Long("dns-port") if pod => dns_port = Some(number(&mut parser, "--dns-port")?),
            Long("budget-bytes") if !ready => config.budget_bytes = number(&mut parser, "--budget-bytes")?,
            Long("scan-timeout-ms") if !ready => {
                config.scan_timeout = Duration::from_millis(positive(&mut parser, "--scan-timeout-ms")?);
            }
            Long("drain-s") if !ready => {
                config.drain = Duration::from_secs(number(&mut parser, "--drain-s")?);
            }
            Long("watchdog-s") if !ready => {
                watchdog = Duration::from_secs(positive(&mut parser, "--watchdog-s")?);
            }
            Long("log-level") if !ready => log_level = parser.value()?.parse()?,
            Short('h') | Long("help") => return Ok(Parsed::Print(HELP.to_owned())),
            Short('V') | Long("version") => {
                return Ok(Parsed::Print(format!("sallyport-extproc {}\n", env!("CARGO_PKG_VERSION"))));
            }
            _ => return Err(arg.unexpected()),
        }
    }
    match form {
        Form::File => {
            let policy = policy.ok_or("--policy FILE is missing: the AgentPolicy to enforce")?;
            config.socket = socket.ok_or("--socket PATH is missing: where Envoy connects")?;
            Ok(Parsed::File(Args { policy, config, authority, tls_names, watchdog, log_level }))
        }
        Form::Ready => Ok(Parsed::Ready(run_dir.ok_or("--run-dir DIR is missing: the sidecar's")?)),
        Form::Sidecar => {
            let discovery = discovery.ok_or("--discovery URL is missing: the operator's")?;
            if !discovery.starts_with("https://") {
                // Anything else would tell the pod's token to whoever listens.
                return Err(format!("--discovery: `{discovery}` does not begin with https://").into());
            }
            let run_dir = run_dir.ok_or("--run-dir DIR is missing: for sockets and Envoy's configuration")?;
            let state_dir = state_dir.ok_or("--state-dir DIR is missing: for the last good bundle")?;
            let identity_dir = identity_dir.ok_or("--identity-dir DIR is missing: ca.crt and token")?;
            let options = sidecar::Options {
                discovery,
                run_dir,
                state_dir,
                identity_dir,
                captured,
                metrics_addr,
                dns_port,
                config,
                watchdog,
            };
            Ok(Parsed::Sidecar(Box::new(options), log_level))
        }
    }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

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
            ("--policy p --socket s --tls-names 0", "1 or more"),
            ("--policy p --socket s --bogus", "bogus"),
            ("--policy p --socket s stray", "stray"),
            ("--policy p --socket s --run-dir r", "run-dir"),
            ("sidecar", "--discovery URL"),
            ("sidecar --policy p", "policy"),
            ("sidecar --discovery http://o:1 --run-dir r", "https://"),
            ("sidecar --discovery https://o:1 --run-dir r --state-dir s", "--identity-dir DIR"),
            ("sidecar --metrics-addr here", "--metrics-addr: cannot parse"),
            ("sidecar --dns-port 70000", "--dns-port: cannot parse"),
            ("--policy p --socket s --dns-port 1", "dns-port"),
            ("ready", "--run-dir DIR"),
            ("ready --drain-s 1", "drain-s"),
        ] {
            let error = args(line).err().unwrap_or_default();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn options_reach_the_configuration() {
        let common = "--budget-bytes 7 --scan-timeout-ms 8 --drain-s 9 --watchdog-s 3";
        let Ok(Parsed::File(args1)) =
            args(&format!("--policy p --socket s --authority a --tls-names 4 {common}"))
        else {
            panic!("not understood")
        };
        assert_eq!(args1.policy, Path::new("p"));
        assert_eq!(args1.config.socket, Path::new("s"));
        assert_eq!((args1.authority.as_deref(), args1.tls_names), (Some(Path::new("a")), 4));
        assert_eq!(args1.watchdog, Duration::from_secs(3));
        let line = format!(
            "sidecar --discovery https://o:8443 --run-dir r --state-dir s --identity-dir i \
             --metrics-addr 0.0.0.0:15020 --captured --dns-port 15053 --log-level debug {common}"
        );
        let Ok(Parsed::Sidecar(options, level)) = args(&line) else { panic!("not understood") };
        assert_eq!(options.discovery, "https://o:8443");
        assert_eq!(options.run_dir, Path::new("r"));
        assert_eq!(options.state_dir, Path::new("s"));
        assert_eq!(options.identity_dir, Path::new("i"));
        assert_eq!(options.metrics_addr, "0.0.0.0:15020".parse().unwrap());
        assert!(options.captured);
        assert_eq!(options.dns_port, Some(15_053));
        assert_eq!(level, tracing::Level::DEBUG);
        for config in [args1.config, options.config] {
            assert_eq!(config.budget_bytes, 7);
            assert_eq!(config.scan_timeout, Duration::from_millis(8));
            assert_eq!(config.drain, Duration::from_secs(9));
        }
        assert!(matches!(args("ready --run-dir r"), Ok(Parsed::Ready(dir)) if dir == Path::new("r")));
        for line in ["--help", "sidecar --help", "ready --version"] {
            assert!(matches!(args(line), Ok(Parsed::Print(_))));
        }
    }
}
