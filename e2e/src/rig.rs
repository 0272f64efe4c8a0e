//! One test's machinery: Envoy, a filter, an upstream, all on the loopback and in a temporary directory.
//!
//! Everything is a real process with the bootstrap that `sallyport-plan` renders. Dropping the rig ends
//! them; if the test is failing at that moment, their logs are printed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sallyport_api::{
    AgentPolicy, AgentPolicySpec, DefaultAction, Egress, EgressAction, EgressRule, FailurePolicy, Metadata,
    Mode,
};
use sallyport_plan::{AccessLog, BaseUrl, ProxyListener, Settings, render};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::Call;
use crate::tls::Authority;
use crate::upstream::Upstream;

/// How long a start may take. A start takes a third of a second; a loaded machine gets a hundred times that.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// Which filter answers Envoy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// `sallyport-extproc`, the product.
    Honest,
    /// `sallyport-fault-extproc`, which misbehaves on request.
    Faulty,
    /// None: the socket does not exist.
    None,
}

/// What a rig is to be.
pub struct Plan {
    filter: Filter,
    spec: AgentPolicySpec,
    message_timeout: Duration,
    patch: Box<dyn Fn(&mut Value)>,
    drain_seconds: u32,
    tls: Option<Secure>,
}

/// How a rig speaks TLS.
struct Secure {
    upstream: Authority,
    /// Names in the upstream's certificate.
    names: Vec<String>,
    /// Whether Envoy trusts the upstream's authority.
    trusted: bool,
    most_names: usize,
}

/// A running rig.
pub struct Rig {
    /// Where calls end up.
    pub upstream: Upstream,
    /// The explicit proxy.
    pub proxy: SocketAddr,
    /// The base-URL listener that stands for the upstream.
    pub base: SocketAddr,
    dir: TempDir,
    filter_kind: Filter,
    filter_args: Vec<String>,
    filter: Option<Child>,
    envoy: Child,
}

impl Plan {
    /// A rig with this filter, Enforce, failurePolicy Closed, and this machine as the only destination allowed.
    pub fn new(filter: Filter) -> Self {
        Self {
            filter,
            spec: AgentPolicySpec {
                egress: Egress {
                    default: DefaultAction::Deny,
                    rules: vec![EgressRule {
                        hosts: vec!["127.0.0.1".into(), "localhost".into()],
                        ports: vec![],
                        methods: vec![],
                        paths: vec![],
                        action: EgressAction::Allow,
                    }],
                    ..Egress::default()
                },
                ..AgentPolicySpec::default()
            },
            message_timeout: Duration::from_secs(1),
            patch: Box::new(|_| {}),
            drain_seconds: 2,
            tls: None,
        }
    }

    /// An upstream that speaks TLS, and a proxy that opens it for inspection. The upstream is called
    /// `localhost`, and so its certificate says.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = Some(Secure {
            upstream: Authority::default(),
            names: vec!["localhost".into()],
            trusted: true,
            most_names: 512,
        });
        self
    }

    /// The upstream's certificate is for this name instead.
    #[must_use]
    pub fn upstream_called(mut self, name: &str) -> Self {
        if let Some(tls) = &mut self.tls {
            tls.names = vec![name.to_owned()];
        }
        self
    }

    /// Nobody trusts the upstream's authority.
    #[must_use]
    pub fn upstream_untrusted(mut self) -> Self {
        if let Some(tls) = &mut self.tls {
            tls.trusted = false;
        }
        self
    }

    /// Envoy holds certificates for so many names at most.
    #[must_use]
    pub fn most_names(mut self, names: usize) -> Self {
        if let Some(tls) = &mut self.tls {
            tls.most_names = names;
        }
        self
    }

    /// Changes the policy.
    #[must_use]
    pub fn policy(mut self, change: impl FnOnce(&mut AgentPolicySpec)) -> Self {
        change(&mut self.spec);
        self
    }

    /// Sets failurePolicy: Open.
    #[must_use]
    pub fn open(self) -> Self {
        self.policy(|spec| spec.failure_policy = FailurePolicy::Open)
    }

    /// Sets mode: Observe.
    #[must_use]
    pub fn observe(self) -> Self {
        self.policy(|spec| spec.mode = Mode::Observe)
    }

    /// Sets the message timeout.
    #[must_use]
    pub fn message_timeout(mut self, timeout: Duration) -> Self {
        self.message_timeout = timeout;
        self
    }

    /// Changes the rendered bootstrap. For waits that would take minutes as rendered.
    #[must_use]
    pub fn patch(mut self, patch: impl Fn(&mut Value) + 'static) -> Self {
        self.patch = Box::new(patch);
        self
    }

    /// Starts everything and waits until it serves.
    pub fn start(self) -> Rig {
        let upstream = match &self.tls {
            None => Upstream::start(0),
            Some(tls) => {
                let names: Vec<&str> = tls.names.iter().map(String::as_str).collect();
                Upstream::start_tls(tls.upstream.server(&names))
            }
        };
        let upstream = upstream.expect("an upstream on a free port");
        let dir = tempfile::Builder::new().prefix("sp").tempdir().expect("a temporary directory");
        std::fs::create_dir(dir.path().join("run")).expect("a directory of our own");
        let policy = AgentPolicy {
            api_version: sallyport_api::API_VERSION.into(),
            kind: sallyport_api::KIND.into(),
            metadata: Metadata { name: "e2e".into(), ..Metadata::default() },
            spec: self.spec.clone(),
        };
        // JSON is YAML.
        std::fs::write(dir.path().join("policy.yaml"), json!(policy).to_string())
            .expect("a writable directory");

        let mut filter_args = Vec::new();
        if let Some(tls) = &self.tls {
            let other = Authority::default();
            let trusted = if tls.trusted { &tls.upstream } else { &other };
            std::fs::write(dir.path().join("upstream.pem"), &trusted.pem).expect("a writable directory");
            let names = tls.most_names.to_string();
            filter_args = ["--authority", "authority", "--tls-names", &names].map(str::to_owned).to_vec();
        }
        let filter = start_filter(self.filter, dir.path(), &filter_args);
        // A port that was free a moment ago may be gone; then Envoy says so and other ports are tried.
        for _ in 0..4 {
            let (proxy, base) = (free_port(), free_port());
            let settings = Settings {
                proxy: Some(ProxyListener::loopback(proxy)),
                base_urls: vec![BaseUrl {
                    port: base,
                    upstream: upstream.url("").parse().expect("an address of ours"),
                }],
                message_timeout: self.message_timeout,
                intercept_tls: self.tls.is_some(),
                ca_bundle: "upstream.pem".into(),
                access_log: AccessLog::File("access.log".into()),
                ..Settings::new("run")
            };
            let mut bootstrap = render(&self.spec, &settings);
            (self.patch)(&mut bootstrap);
            std::fs::write(dir.path().join("bootstrap.json"), bootstrap.to_string())
                .expect("a writable directory");
            let mut envoy = start_envoy(dir.path(), self.drain_seconds);
            if wait_ready(&mut envoy, dir.path()) {
                return Rig {
                    upstream,
                    proxy: SocketAddr::from(([127, 0, 0, 1], proxy)),
                    base: SocketAddr::from(([127, 0, 0, 1], base)),
                    dir,
                    filter_kind: self.filter,
                    filter_args,
                    filter,
                    envoy,
                };
            }
        }
        panic!("Envoy did not become ready:\n{}", read(&dir.path().join("envoy.log")));
    }
}

impl Rig {
    /// A GET of the upstream's path, through the explicit proxy.
    pub fn get(&self, path: &str) -> Call {
        self.trusting(Call::get(self.upstream.url(path)).via(self.proxy))
    }

    /// A POST of JSON to the upstream's path, through the explicit proxy.
    pub fn post(&self, path: &str, body: &Value) -> Call {
        self.trusting(Call::post_json(self.upstream.url(path), body).via(self.proxy))
    }

    /// Any call to the upstream's path, through the explicit proxy.
    pub fn call(&self, method: &str, path: &str) -> Call {
        self.trusting(Call::new(method, self.upstream.url(path)).via(self.proxy))
    }

    /// The call, with trust in the authority that signs what the proxy shows; without one it stays as it is.
    pub fn trusting(&self, call: Call) -> Call {
        match std::fs::read_to_string(self.dir.path().join("authority/ca.pem")) {
            Ok(pem) => call.trusting(pem),
            Err(_) => call,
        }
    }

    /// Where the authority that agents must trust is kept.
    pub fn authority_dir(&self) -> PathBuf {
        self.dir.path().join("authority")
    }

    /// The directory with the sockets.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// The process id of the filter.
    pub fn filter_pid(&self) -> u32 {
        self.filter.as_ref().expect("a filter").id()
    }

    /// The process id of Envoy.
    pub fn envoy_pid(&self) -> u32 {
        self.envoy.id()
    }

    /// Sends the filter a signal.
    pub fn signal_filter(&self, signal: Signal) {
        let filter = self.filter.as_ref().expect("a filter");
        kill_process(Pid::from_child(filter), signal).expect("a process of ours");
    }

    /// Kills the filter and waits for its end.
    pub fn kill_filter(&mut self) {
        let mut filter = self.filter.take().expect("a filter");
        filter.kill().expect("a process of ours");
        filter.wait().expect("a process of ours");
    }

    /// Starts the filter again.
    pub fn start_filter(&mut self) {
        self.filter = start_filter(self.filter_kind, self.dir.path(), &self.filter_args);
    }

    /// Sends Envoy a signal.
    pub fn signal_envoy(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.envoy), signal).expect("a process of ours");
    }

    /// Whether Envoy ended within the deadline.
    pub fn envoy_ended(&mut self, deadline: Duration) -> bool {
        let end = Instant::now() + deadline;
        while Instant::now() < end {
            if self.envoy.try_wait().expect("a process of ours").is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// A call of the admin interface: status and body.
    pub fn admin(&self, method: &str, path: &str) -> (u16, String) {
        admin(&self.run_dir(), method, path).expect("Envoy's admin socket")
    }

    /// One of Envoy's counters.
    pub fn stat(&self, name: &str) -> u64 {
        let (_, body) = self.admin("GET", &format!("/stats?filter=^{}$", name.replace('.', "\\.")));
        body.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(": ")?.trim().parse().ok()).unwrap_or(0)
    }

    /// The access log's entries, once there are at least this many.
    pub fn access_log(&self, at_least: usize) -> Vec<Value> {
        let file = self.dir.path().join("access.log");
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let entries: Vec<Value> =
                read(&file).lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
            if entries.len() >= at_least || Instant::now() > end {
                assert!(entries.len() >= at_least, "{} entries of {at_least}", entries.len());
                return entries;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for child in [Some(&mut self.envoy), self.filter.as_mut()].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for log in ["envoy.log", "filter.log", "access.log"] {
                let text = read(&self.dir.path().join(log));
                let from = text.len().saturating_sub(6_000);
                eprintln!("--- {log}\n{}", text.get(from..).unwrap_or(&text));
            }
        }
    }
}

/// Whether an entry of the access log shows a message that the filter never answered: gRPC status 10 in one
/// of the phases `rh:MICROS:STATUS` (headers) or `rb:COUNT:MICROS:STATUS` (bodies), `sh` and `sb` for the response.
pub fn unanswered(entry: &Value) -> bool {
    let phases = entry["extproc"].as_str().unwrap_or_default();
    phases.split(',').any(|phase| phase.starts_with(['r', 's']) && phase.ends_with(":10"))
}

/// Where Envoy is: `SALLYPORT_ENVOY`, or what `tools/envoy-fetch` unpacked.
pub fn envoy_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("SALLYPORT_ENVOY") {
        return PathBuf::from(path);
    }
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/envoy");
    let found = cache.join(format!("1.40.0-{}", std::env::consts::ARCH)).join("envoy");
    assert!(
        found.is_file(),
        "no Envoy at {}; run tools/envoy-fetch, or set SALLYPORT_ENVOY",
        found.display()
    );
    found
}

/// A binary of the workspace: from the environment, or beside the test's own executable.
pub fn workspace_binary(name: &str, variable: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        return PathBuf::from(path);
    }
    let own = std::env::current_exe().expect("an executable has a path");
    // target/<profile>/deps/test-hash, or target/<profile>/bin.
    let found = own.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!("no `{name}` beside {}; run `make build`, or set {variable}", own.display())
    })
}

fn start_filter(kind: Filter, dir: &Path, args: &[String]) -> Option<Child> {
    let binary = match kind {
        Filter::None => return None,
        Filter::Honest => workspace_binary("sallyport-extproc", "SALLYPORT_EXTPROC"),
        Filter::Faulty => workspace_binary("sallyport-fault-extproc", "SALLYPORT_FAULT_EXTPROC"),
    };
    let log = append(&dir.join("filter.log"));
    let mut child = Command::new(&binary)
        // Relative, so that a long TMPDIR can't exceed what a socket's path may have.
        .args(["--policy", "policy.yaml", "--socket", "run/extproc.sock"])
        .args(args)
        .current_dir(dir)
        // A panic must answer within the message timeout, not after the symbols of a debug build.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a file descriptor"))
        .stderr(log)
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", binary.display()));
    let end = Instant::now() + START_DEADLINE;
    while UnixStream::connect(dir.join("run/extproc.sock")).is_err() {
        let ended = child.try_wait().expect("a process of ours");
        if ended.is_some() || Instant::now() > end {
            let _ = child.kill();
            panic!("the filter did not start ({ended:?}):\n{}", read(&dir.join("filter.log")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(child)
}

fn start_envoy(dir: &Path, drain_seconds: u32) -> Child {
    let binary = envoy_binary();
    Command::new(&binary)
        .args(["-c", "bootstrap.json", "--concurrency", "1", "--disable-hot-restart"])
        .args(["--reject-unknown-dynamic-fields", "-l", "warning", "--log-path", "envoy.log"])
        .args(["--file-flush-interval-msec", "50", "--drain-strategy", "immediate"])
        .args(["--drain-time-s", &drain_seconds.to_string()])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(append(&dir.join("envoy.log")))
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", binary.display()))
}

fn wait_ready(envoy: &mut Child, dir: &Path) -> bool {
    let end = Instant::now() + START_DEADLINE;
    while Instant::now() < end {
        if envoy.try_wait().expect("a process of ours").is_some() {
            return false;
        }
        if admin(&dir.join("run"), "GET", "/ready").is_ok_and(|(status, _)| status == 200) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = envoy.kill();
    let _ = envoy.wait();
    false
}

fn admin(run_dir: &Path, method: &str, path: &str) -> std::io::Result<(u16, String)> {
    let mut stream = UnixStream::connect(run_dir.join("admin.sock"))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let status = text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    Ok((status, text.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| body.to_owned())))
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr()).expect("a free port").port()
}

fn append(path: &Path) -> std::fs::File {
    std::fs::File::options().create(true).append(true).open(path).expect("a writable directory")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
