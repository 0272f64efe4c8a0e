//! `sallyport up`: the sidecar on a laptop. The same Envoy, bootstrap and filter as in a guarded pod,
//! from the same policy file, without a cluster.

mod console;
mod filter;
mod trust;
mod watch;

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use sallyport_api::{AgentPolicySpec, EgressAction, Mode};
use sallyport_plan::{AccessLog, BaseUrl, ProxyListener, Settings};
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::admin::Admin;
use crate::envoy::{self, Envoy};
use crate::note;
use crate::rundir::RunDir;
use console::{Console, Log};
use filter::Filter;
use trust::Trust;
use watch::{Loaded, PolicyFile};

/// Open calls get so long to end when we are told to stop: an LLM's answer may take a while, a person
/// with a finger on Ctrl-C won't.
const DRAIN: Duration = Duration::from_secs(10);

/// How often the policy file is looked at; edits hold within a second.
const POLL: Duration = Duration::from_millis(500);

/// Ctrl-C's exit status by convention, for a stop that cut calls.
const EXIT_INTERRUPTED: u8 = 130;

const EXAMPLES: &str = "\
Examples:
  sallyport up -f policies/samples/support-bot.yaml
      . /run/user/1000/sallyport-xyz/env     # it says which
      curl https://example.com/
  sallyport up -f policy.yaml --base-url 15002=https://api.openai.com
      OPENAI_BASE_URL=http://127.0.0.1:15002/v1 python agent.py
  sallyport up -f policy.yaml --proxy-port 16001 --log json | jq .

https:// is opened for inspection: programs must trust the authority that is made at the first start,
which the printed file `env` tells most of them by variables. Those that ship their own authorities
need a base URL. Edits to the policy file hold within a second. Ctrl-C lets open calls end, a second
one doesn't.";

/// Runs Envoy and the filter on this machine, from a policy file.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The AgentPolicy to enforce
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
    /// Port of the HTTP proxy
    #[arg(long, value_name = "PORT", default_value_t = 15001, value_parser = clap::value_parser!(u16).range(1..))]
    proxy_port: u16,
    /// Let `http://127.0.0.1:PORT` stand for an upstream, such as `15002=https://api.openai.com`; repeatable
    #[arg(long = "base-url", value_name = "PORT=URL", value_parser = base_url)]
    base_urls: Vec<BaseUrl>,
    /// Address of the HTTP proxy; base URLs are on 127.0.0.1 always
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    listen: IpAddr,
    /// The Envoy 1.40 to run; left out, $SALLYPORT_ENVOY, then .cache/envoy here or above, then PATH
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
    /// Directory for sockets and Envoy's bootstrap; left out, a fresh private one
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// PEM file with authorities to check upstreams' certificates against, besides Mozilla's
    #[arg(long, value_name = "FILE")]
    ca_bundle: Option<PathBuf>,
    /// Directory of the authority that programs must trust (ca.pem, ca.key), made where there is none;
    /// left out, `sallyport/authority` in $XDG_STATE_HOME or ~/.local/state
    #[arg(long, value_name = "DIR")]
    authority: Option<PathBuf>,
    /// How decisions above `allow` are shown
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    log: Log,
}

fn base_url(text: &str) -> Result<BaseUrl, String> {
    let (port, url) = text.split_once('=').ok_or("is not PORT=URL, such as 15002=https://api.openai.com")?;
    let port = u16::from_str(port).ok().filter(|p| *p > 0).ok_or(format!("`{port}` is not a port"))?;
    let upstream = url.parse().map_err(|e| format!("{e}; give scheme, host and port only"))?;
    Ok(BaseUrl { port, upstream })
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (file, loaded) = PolicyFile::open(&args.file)?;
    check_ports(args)?;
    let binary = envoy::find(args.envoy.as_deref())?;
    let authority = args.authority.clone().map_or_else(trust::authority_dir, Ok)?;
    let run_dir = RunDir::create(args.run_dir.as_deref())?;
    // What the filter's process has to say of itself; messages have lines of their own.
    let level = tracing::Level::WARN;
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();

    let trust = Trust::open(&authority, run_dir.path(), args.ca_bundle.as_deref())?;
    let mut settings = Settings::new(run_dir.path());
    settings.node_id = format!("sallyport-up-{}", std::process::id());
    settings.proxy = Some(ProxyListener { address: args.listen, port: args.proxy_port });
    settings.base_urls.clone_from(&args.base_urls);
    settings.access_log = AccessLog::Off; // our own lines say more, and only where it matters
    settings.ca_bundle.clone_from(&trust.upstream);
    settings.intercept_tls = true;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    let ended = runtime.block_on(guard(args, &binary, &settings, &trust, file, loaded));
    let removed = run_dir.remove();
    let code = ended?;
    removed.map(|()| code)
}

/// From the first socket to the last.
async fn guard(
    args: &Args,
    binary: &Path,
    settings: &Settings,
    trust: &Trust,
    mut file: PolicyFile,
    loaded: Loaded,
) -> anyhow::Result<ExitCode> {
    // Before anything is started, so that no Ctrl-C finds nobody home.
    let mut signals = Signals::new()?;
    let Loaded { policy, engine } = loaded;
    let rules = engine.rule_count();
    let console = Console::start(args.log).context("no thread for the console")?;
    let mut filter = Filter::start(&settings.extproc_socket(), engine, Arc::new(console), trust.tls.clone())?;

    let rendered = sallyport_plan::render(&policy.spec, settings);
    let bootstrap = settings.run_dir.join("envoy.json");
    std::fs::write(&bootstrap, rendered.to_string())
        .with_context(|| format!("{}: can't be written", bootstrap.display()))?;
    let mut envoy = Envoy::start(binary, &bootstrap, Admin::new(settings.admin_socket()))?;
    tokio::select! {
        ready = envoy.ready() => ready?,
        error = filter.ended() => return Err(error),
        () = signals.next() => {
            envoy.kill().await;
            return Ok(ExitCode::from(EXIT_INTERRUPTED));
        }
    }
    let env = settings.run_dir.join("env");
    trust.write_env(&env, &proxy_url(args))?;
    announce(args, &policy.metadata.name, &policy.spec, rules, &env, trust);

    let mut poll = tokio::time::interval(POLL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            error = envoy.ended() => return Err(error),
            error = filter.ended() => return Err(error),
            () = signals.next() => break,
            _ = poll.tick() => match file.poll() {
                None => {}
                Some(Ok(new)) => take(&filter, new, settings, &rendered),
                Some(Err(e)) => note(&format!("{e:#}\nthe last good policy stays in force")),
            },
        }
    }
    note("draining; Ctrl-C again stops at once");
    let drained = tokio::select! {
        stopped = envoy.stop(DRAIN) => stopped.is_ok(),
        () = signals.next() => false, // dropping Envoy's handle kills it
    };
    filter.stop().await;
    Ok(if drained { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INTERRUPTED) })
}

/// Puts an edited policy in force, and says what of it has to wait.
fn take(filter: &Filter, new: Loaded, settings: &Settings, rendered: &Value) {
    let (spec, rules) = (new.policy.spec, new.engine.rule_count());
    filter.swap(new.engine);
    note(&format!("policy {} reloaded ({}), {rules} rules", new.policy.metadata.name, mode(&spec)));
    if sallyport_plan::render(&spec, settings) != *rendered {
        note(
            "mode, failurePolicy or limits.maxBodyBytes changed: what Envoy itself does by them (a filter \
             that can't answer, bodies too large) changes when `sallyport up` is started again",
        );
    }
}

fn mode(spec: &AgentPolicySpec) -> &'static str {
    match spec.mode {
        Mode::Enforce => "Enforce",
        Mode::Observe => "Observe, nothing is blocked or changed",
    }
}

/// The proxy as programs on this machine reach it.
fn proxy_url(args: &Args) -> String {
    let reachable = if args.listen.is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { args.listen };
    format!("http://{}", SocketAddr::new(reachable, args.proxy_port))
}

fn announce(args: &Args, name: &str, spec: &AgentPolicySpec, rules: usize, env: &Path, trust: &Trust) {
    use std::fmt::Write as _;

    let proxy = proxy_url(args);
    let mut banner = format!(
        "Sallyport {} guards by policy {name} ({}), {rules} rules\n  proxy     {proxy}\n            curl -x {proxy} http://{}/\n",
        env!("CARGO_PKG_VERSION"),
        mode(spec),
        example_host(spec),
    );
    let _ = writeln!(
        banner,
        "  https     . {}  (proxy and authorities, for curl, Python, Node, Go, git, ...)",
        env.display()
    );
    let _ = writeln!(banner, "            programs must trust {}", trust.authority.display());
    for base in &args.base_urls {
        let (port, upstream) = (base.port, base.upstream.url());
        let _ = writeln!(banner, "  base URL  http://127.0.0.1:{port} stands for {upstream}");
        let _ = writeln!(banner, "            OPENAI_BASE_URL=http://127.0.0.1:{port}/v1");
    }
    if !args.listen.is_loopback() {
        banner += "  Whoever reaches this address can use the proxy.\n";
    }
    if args.log == Log::Json {
        note(&format!("{banner}ready"));
        let ports: Vec<_> = args.base_urls.iter().map(|b| b.port).collect();
        let ready = json!({"event": "ready", "policy": name, "rules": rules, "proxy_port": args.proxy_port, "base_url_ports": ports, "env": env, "authority": trust.authority});
        say(&ready.to_string());
    } else {
        say(&format!("{banner}ready"));
    }
}

/// A host that the policy allows, for the example.
fn example_host(spec: &AgentPolicySpec) -> &str {
    let allowed = spec.egress.rules.iter().filter(|r| r.action == EgressAction::Allow);
    allowed.flat_map(|r| &r.hosts).find(|h| !h.contains('*')).map_or("example.com", String::as_str)
}

/// A reader that is gone does not end what it read about.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// A port that is taken is found here, where its flag can be named: Envoy would share it silently with
/// another Envoy (it sets SO_REUSEPORT), or die with a message about sockets.
fn check_ports(args: &Args) -> anyhow::Result<()> {
    let proxy = (args.listen, args.proxy_port, format!("--proxy-port {}", args.proxy_port), "--proxy-port");
    let bases = args.base_urls.iter().map(|b| {
        let flag = format!("--base-url {}={}", b.port, b.upstream.url());
        (IpAddr::V4(Ipv4Addr::LOCALHOST), b.port, flag, "--base-url")
    });
    // All are held until all are checked, so that a port given twice is found, too.
    let mut held = Vec::new();
    for (address, port, given, flag) in std::iter::once(proxy).chain(bases) {
        let socket = SocketAddr::new(address, port);
        match TcpListener::bind(socket) {
            Ok(listener) => held.push(listener),
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => bail!(
                "{given}: port {port} is in use on {address}, perhaps by another `sallyport up`; \
                 give another one with {flag}"
            ),
            Err(e) => return Err(anyhow!(e).context(format!("{given}: can't listen on {socket}"))),
        }
    }
    Ok(())
}

/// Ctrl-C, and what a service manager or a closing terminal sends.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("signals can't be watched");
        Ok(Self([on(SignalKind::interrupt())?, on(SignalKind::terminate())?, on(SignalKind::hangup())?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_url_is_a_port_and_an_upstream() {
        let base = base_url("15002=https://api.openai.com").unwrap();
        assert_eq!((base.port, base.upstream.url().as_str()), (15002, "https://api.openai.com:443"));
        for (text, error) in [
            ("https://x", "PORT=URL"),
            ("0=https://x", "`0` is not a port"),
            ("70000=https://x", "`70000` is not a port"),
            ("1=https://x/v1", "scheme, host and port only"),
            ("1=ftp://x", "http://"),
        ] {
            let e = base_url(text).unwrap_err();
            assert!(e.contains(error), "{e}");
        }
    }
}
