//! `sallyport up` from outside, most of it with the real Envoy.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test may stop at what it did not expect"
)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A busy machine may take its time with Envoy's start; a hang is a failure.
const DEADLINE: Duration = Duration::from_secs(60);

const POLICY: &str =
    "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {name: laptop}\nspec:\n";

/// A running `sallyport up`; killed when the test is over, whatever came of it.
struct Up {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Up {
    fn start(dir: &Path, envoy: Option<&Path>, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sallyport"));
        command.arg("up").args(args).current_dir(dir).stdin(Stdio::null());
        command.env("XDG_STATE_HOME", dir.join("state")).env_remove("SALLYPORT_ENVOY");
        // What a killed one leaves behind goes with the test.
        command.env("TMPDIR", dir).env_remove("XDG_RUNTIME_DIR");
        if let Some(envoy) = envoy {
            command.env("SALLYPORT_ENVOY", envoy);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (say, lines) = channel();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        for stream in [Box::new(out) as Box<dyn std::io::Read + Send>, Box::new(err)] {
            let say = say.clone();
            std::thread::spawn(move || {
                BufReader::new(stream).lines().map_while(Result::ok).try_for_each(|l| say.send(l))
            });
        }
        Self { child, lines, seen: Vec::new() }
    }

    fn wait_for(&mut self, text: &str) {
        let end = Instant::now() + DEADLINE;
        while !self.seen.last().is_some_and(|l| l.contains(text)) {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(e) => panic!("no `{text}` ({e}) in:\n{}", self.seen.join("\n")),
            }
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Waits for its end; returns everything it said.
    fn end(mut self) -> (ExitStatus, String) {
        let end = Instant::now() + DEADLINE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "still running");
            std::thread::sleep(Duration::from_millis(10));
        };
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(1)) {
            self.seen.push(line);
        }
        (status, self.seen.join("\n"))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // It may have ended by itself, as it should.
        let _ = self.child.kill();
    }
}

fn policy(dir: &Path, spec: &str) {
    std::fs::write(dir.join("p.yaml"), format!("{POLICY}{spec}\n")).unwrap();
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// What stands in for Envoy: gives its version, then does what the test wants.
fn fake_envoy(dir: &Path, then: &str) -> PathBuf {
    let path = dir.join("fake-envoy");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'envoy  version: 0/1.40.0/Clean/RELEASE/BoringSSL'; exit; fi\n{then}\n"
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The Envoy that `tools/envoy-fetch` fetched. Without it these tests would prove nothing, so they fail.
fn real_envoy() -> PathBuf {
    let named = std::env::var_os("SALLYPORT_ENVOY").map(PathBuf::from);
    let fetched = format!(".cache/envoy/1.40.0-{}/envoy", std::env::consts::ARCH);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    named
        .or_else(|| here.ancestors().map(|d| d.join(&fetched)).find(|p| p.is_file()))
        .expect("an Envoy: get it with tools/envoy-fetch")
}

/// Serves one answer per connection, its second half after `pause`.
fn upstream(pause: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut head = [0; 4096];
                let _ = stream.read(&mut head);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello");
                std::thread::sleep(pause);
                let _ = stream.write_all(b"world");
            });
        }
    });
    port
}

fn get(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET /x HTTP/1.1\r\nhost: a.test\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn a_port_in_use_is_named_with_its_flag() {
    let dir = tempfile::tempdir().unwrap();
    policy(dir.path(), "  egress: {default: Allow}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (status, said) = Up::start(dir.path(), None, &["-f", "p.yaml", "--proxy-port", &port]).end();
    assert_eq!(status.code(), Some(1));
    assert!(said.starts_with(&format!("error: --proxy-port {port}: port {port} is in use")), "{said}");

    let (proxy, base) = (free_port().to_string(), format!("{port}=http://a.test"));
    let args = ["-f", "p.yaml", "--proxy-port", &proxy, "--base-url", &base];
    let (_, said) = Up::start(dir.path(), None, &args).end();
    assert!(said.contains("give another one with --base-url"), "{said}");

    let base = format!("{proxy}=http://a.test");
    let args = ["-f", "p.yaml", "--proxy-port", &proxy, "--base-url", &base];
    let (_, said) = Up::start(dir.path(), None, &args).end();
    assert!(said.contains("is in use"), "the same port twice: {said}");
}

#[test]
fn an_envoy_that_dies_early_is_quoted_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    policy(dir.path(), "  egress: {default: Allow}");
    let envoy = fake_envoy(dir.path(), "echo 'cannot bind: something' >&2; exit 3");
    let run_dir = dir.path().join("run");
    let port = free_port().to_string();
    let args = ["-f", "p.yaml", "--proxy-port", &port, "--run-dir", run_dir.to_str().unwrap()];
    let (status, said) = Up::start(dir.path(), Some(&envoy), &args).end();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("Envoy ended by itself (exit status: 3)"), "{said}");
    assert!(said.contains("cannot bind: something"), "{said}");
    assert!(!run_dir.exists());
}

#[test]
fn a_wrong_or_missing_envoy_is_answered_with_the_command_that_gets_it() {
    let dir = tempfile::tempdir().unwrap();
    policy(dir.path(), "  egress: {default: Allow}");
    let port = free_port().to_string();
    let missing = dir.path().join("nowhere");
    for envoy in [&missing, &PathBuf::from("/bin/true")] {
        let (status, said) =
            Up::start(dir.path(), Some(envoy), &["-f", "p.yaml", "--proxy-port", &port]).end();
        assert_eq!(status.code(), Some(1));
        assert!(said.contains("$SALLYPORT_ENVOY"), "{said}");
    }
}

#[test]
fn it_serves_takes_edits_lets_calls_end_and_goes() {
    let envoy = real_envoy();
    let dir = tempfile::tempdir().unwrap();
    policy(dir.path(), "  egress: {default: Allow}");
    let (proxy, base) = (free_port(), free_port());
    let upstream = upstream(Duration::from_secs(2));
    let base_url = format!("{base}=http://127.0.0.1:{upstream}");
    let (run_dir, proxy_port) = (dir.path().join("run"), proxy.to_string());
    let args = [
        "-f",
        "p.yaml",
        "--proxy-port",
        &proxy_port,
        "--base-url",
        &base_url,
        "--run-dir",
        run_dir.to_str().unwrap(),
    ];
    let mut up = Up::start(dir.path(), Some(&envoy), &args);
    up.wait_for("ready");

    // What comes through a tunnel must be TLS; anything else is closed, and reaches nobody.
    let mut tunnel = TcpStream::connect(("127.0.0.1", proxy)).unwrap();
    tunnel.set_read_timeout(Some(DEADLINE)).unwrap();
    tunnel.write_all(b"CONNECT a.test:443 HTTP/1.1\r\nhost: a.test:443\r\n\r\n").unwrap();
    let mut start = [0; 12];
    tunnel.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    tunnel.write_all(b"GET / HTTP/1.1\r\nhost: a.test\r\n\r\n").unwrap();
    let mut rest = String::new();
    let _ = tunnel.read_to_string(&mut rest);
    assert!(!rest.contains("HTTP/1.1"), "{rest}");

    policy(dir.path(), "  egres: {}");
    up.wait_for("the last good policy stays in force");
    policy(dir.path(), "  egress: {default: Deny}");
    up.wait_for("reloaded");
    let answer = get(base);
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("egress_denied"), "{answer}");
    up.wait_for("egress_denied");
    policy(dir.path(), "  egress: {default: Allow}");
    up.wait_for("reloaded");

    // Two seconds of a call that is open when the end comes.
    let call = std::thread::spawn(move || get(base));
    std::thread::sleep(Duration::from_millis(500));
    up.signal("INT");
    let (status, said) = up.end();
    assert_eq!(status.code(), Some(0), "{said}");
    let answer = call.join().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("helloworld"), "{answer}");
    assert!(!run_dir.exists());
    assert!(TcpStream::connect(("127.0.0.1", proxy)).is_err(), "Envoy is still there");
}

#[test]
fn a_second_signal_does_not_wait_and_a_kill_takes_envoy_along() {
    let envoy = real_envoy();
    let dir = tempfile::tempdir().unwrap();
    policy(dir.path(), "  egress: {default: Allow}");
    for signals in [&["INT", "TERM"][..], &["KILL"]] {
        let (proxy, base) = (free_port(), free_port());
        let base_url = format!("{base}=http://127.0.0.1:{}", upstream(Duration::from_secs(8)));
        let proxy_port = proxy.to_string();
        let args = ["-f", "p.yaml", "--proxy-port", &proxy_port, "--base-url", &base_url];
        let mut up = Up::start(dir.path(), Some(&envoy), &args);
        up.wait_for("ready");
        std::thread::spawn(move || get(base));
        std::thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        for signal in signals {
            up.signal(signal);
            std::thread::sleep(Duration::from_millis(300));
        }
        let (status, said) = up.end();
        assert!(!status.success(), "{said}");
        assert!(start.elapsed() < Duration::from_secs(6), "it waited for the open call: {said}");
        let gone = Instant::now() + DEADLINE;
        while TcpStream::connect(("127.0.0.1", proxy)).is_ok() {
            assert!(Instant::now() < gone, "Envoy is still there");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn bench_leaves_a_record() {
    let envoy = real_envoy();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("record.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sallyport"));
    command.args(["bench", "--seconds", "3", "--out"]).arg(&out).env("SALLYPORT_ENVOY", envoy);
    command.env("TMPDIR", dir.path()).env_remove("XDG_RUNTIME_DIR");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + 3 * DEADLINE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("still running");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(status.success());
    let record: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!(record["sizes"].as_array().unwrap().len(), 4);
    for size in record["sizes"].as_array().unwrap() {
        for field in
            ["requests", "envoy_us", "server_us", "engine_us", "noop_envoy_us", "plain_envoy_us", "p99_us"]
        {
            assert!(size[field].as_f64().unwrap() > 0.0, "{field}: {size}");
        }
    }
    assert!(record["memory"]["extproc_loaded"]["rss_kib"].as_u64().unwrap() > 0);
    assert!(record["rules"].as_u64().unwrap() > 0);
}
