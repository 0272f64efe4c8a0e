//! `sallyport up` as a child, and what it says about each decision.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::client::Call;
use crate::rig::workspace_binary;
use crate::upstream::Upstream;

/// A start takes half a second; a machine that builds at the same time gets more.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// A decision is printed within a few milliseconds of the call.
const RECORD_WITHIN: Duration = Duration::from_secs(5);
/// Lines of the child that are shown when it fails.
const LAST_LINES: usize = 20;

/// A running `sallyport up`.
pub(super) struct Guard {
    /// The proxy, as a URL.
    pub(super) proxy: String,
    proxy_address: SocketAddr,
    base: SocketAddr,
    child: Child,
    lines: Receiver<Value>,
    /// A demo leaves nothing behind, its authority included.
    _authority: tempfile::TempDir,
}

/// How a row's call gets to the upstream.
pub(super) struct Routes {
    /// The API's base URL, as the agent is told.
    pub(super) base: String,
    /// The upstream's own address.
    pub(super) upstream: String,
    proxy: Option<SocketAddr>,
}

impl Routes {
    /// Past the sidecar.
    pub(super) fn direct(upstream: &Upstream) -> Self {
        Self { base: upstream.url(""), upstream: upstream.url(""), proxy: None }
    }

    /// Sends a call by the proxy, if there is one on this route.
    pub(super) fn by_proxy(&self, call: Call) -> Call {
        match self.proxy {
            Some(proxy) => call.via(proxy),
            None => call,
        }
    }
}

/// One decision above `allow`, as `sallyport up` printed it.
pub(super) struct Record {
    /// `flag`, `redact` or `block`.
    pub(super) decision: String,
    rules: Vec<String>,
    policies: Vec<String>,
}

impl Record {
    fn read(line: &Value) -> Option<Self> {
        let strings = |name: &str| {
            line[name]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|v| v.as_str().map(str::to_owned))
                .collect()
        };
        let decision = line["decision"].as_str()?.to_owned();
        Some(Self { decision, rules: strings("rules"), policies: strings("policies") })
    }

    /// The rule behind it; a destination is refused by a policy and not by a rule.
    pub(super) fn why(&self) -> String {
        let all = if self.rules.is_empty() { &self.policies } else { &self.rules };
        match all.as_slice() {
            [] => String::new(),
            [one] => one.clone(),
            [first, rest @ ..] => format!("{first} +{}", rest.len()),
        }
    }
}

impl Guard {
    pub(super) fn start(policy: &Path, upstream: &Upstream) -> anyhow::Result<Self> {
        let (proxy, base) = (free_port()?, free_port()?);
        let binary = workspace_binary("sallyport", "SALLYPORT");
        let authority = tempfile::tempdir().context("no temporary directory")?;
        let mut child = Command::new(&binary)
            .args(["up", "--log", "json", "--proxy-port", &proxy.to_string(), "-f"])
            .arg(policy)
            .arg("--authority")
            .arg(authority.path())
            .args(["--base-url", &format!("{base}={}", upstream.url(""))])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} can't be started", binary.display()))?;
        let said = keep_last_lines(&mut child);
        let lines = json_lines(&mut child);
        let mut guard = Self {
            proxy: format!("http://127.0.0.1:{proxy}"),
            proxy_address: SocketAddr::from(([127, 0, 0, 1], proxy)),
            base: SocketAddr::from(([127, 0, 0, 1], base)),
            child,
            lines,
            _authority: authority,
        };
        if let Err(e) = guard.wait_ready() {
            guard.stop();
            let said = said.lock().map(|l| Vec::from(l.clone()).join("\n")).unwrap_or_default();
            bail!("`sallyport up` did not become ready ({e}):\n{said}");
        }
        Ok(guard)
    }

    fn wait_ready(&mut self) -> Result<(), RecvTimeoutError> {
        let end = Instant::now() + READY_WITHIN;
        loop {
            let line = self.lines.recv_timeout(end.saturating_duration_since(Instant::now()))?;
            if line["event"] == "ready" {
                return Ok(());
            }
        }
    }

    pub(super) fn routes(&self, upstream: &Upstream) -> Routes {
        Routes {
            base: format!("http://{}", self.base),
            upstream: upstream.url(""),
            proxy: Some(self.proxy_address),
        }
    }

    /// Drops the records of calls that nobody asks about.
    pub(super) fn forget(&self) {
        // Records trail their calls by a moment.
        while self.lines.recv_timeout(Duration::from_millis(50)).is_ok() {}
    }

    /// The record of the call just made, if one is to come.
    pub(super) fn record(&self, expected: &str) -> Option<Record> {
        let wait = if expected == "allow" { Duration::from_millis(50) } else { RECORD_WITHIN };
        Record::read(&self.lines.recv_timeout(wait).ok()?)
    }

    /// Ends the child, politely first.
    pub(super) fn stop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // A second signal stops it at once, and Envoy with it.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.stop();
        }
    }
}

fn json_lines(child: &mut Child) -> Receiver<Value> {
    let (sender, receiver) = channel();
    if let Some(out) = child.stdout.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Ok(value) = serde_json::from_str(&line)
                    && sender.send(value).is_err()
                {
                    return;
                }
            }
        });
    }
    receiver
}

fn keep_last_lines(child: &mut Child) -> Arc<Mutex<VecDeque<String>>> {
    let kept = Arc::new(Mutex::new(VecDeque::new()));
    if let Some(err) = child.stderr.take() {
        let kept = Arc::clone(&kept);
        std::thread::spawn(move || {
            for line in BufReader::new(err).lines().map_while(Result::ok) {
                if let Ok(mut kept) = kept.lock() {
                    if kept.len() == LAST_LINES {
                        kept.pop_front();
                    }
                    kept.push_back(line);
                }
            }
        });
    }
    kept
}

fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}
