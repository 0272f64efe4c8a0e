//! A pod's sidecar: the real program in directories of its own.
#![allow(unreachable_pub, reason = "a part of the test above it")]

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

use crate::operator::{Authority, DEADLINE, Operator, TOKEN};

pub struct Pod {
    pub dir: tempfile::TempDir,
    pub metrics_port: u16,
    url: String,
    child: Option<Child>,
}

impl Pod {
    /// Directories with an identity; nothing runs.
    pub fn new(operator: &Operator, authority: &Authority) -> Self {
        let dir = tempfile::Builder::new().prefix("sp").tempdir().unwrap();
        for sub in ["run", "state", "identity"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let pod = Self { dir, metrics_port: port, url: operator.url(), child: None };
        pod.trust(&[authority]);
        std::fs::write(pod.path("identity/token"), format!("{TOKEN}\n")).unwrap();
        pod
    }

    /// A pod whose sidecar runs.
    pub fn start(operator: &Operator, authority: &Authority) -> Self {
        let mut pod = Self::new(operator, authority);
        pod.run();
        pod
    }

    pub fn trust(&self, authorities: &[&Authority]) {
        let pem: String = authorities.iter().map(|a| a.pem()).collect();
        std::fs::write(self.path("identity/ca.crt"), pem).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("run/extproc.sock")
    }

    pub fn run(&mut self) {
        self.run_with(&[]);
    }

    /// The sidecar with more arguments.
    pub fn run_with(&mut self, more: &[&str]) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let dir = |name: &str| self.path(name).display().to_string();
        let child = Command::new(env!("CARGO_BIN_EXE_sallyport-extproc"))
            .args(["sidecar", "--discovery", &self.url, "--run-dir", &dir("run")])
            .args(["--state-dir", &dir("state"), "--identity-dir", &dir("identity")])
            .args(["--metrics-addr", &format!("[::]:{}", self.metrics_port)])
            .args(["--log-level", "trace", "--drain-s", "0"])
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    pub async fn kill(&mut self) {
        self.child.take().unwrap().kill().await.unwrap();
    }

    /// What the readiness probe says: its exit status and its words.
    pub async fn probe(&self) -> (i32, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_sallyport-extproc"))
            .args(["ready", "--run-dir"])
            .arg(self.path("run"))
            .output()
            .await
            .unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    pub async fn ready(&self) {
        self.wait("readiness", async || self.probe().await.0 == 0).await;
    }

    /// Until its socket can be connected to.
    pub async fn up(&self) {
        self.wait("the socket", async || tokio::net::UnixStream::connect(self.socket()).await.is_ok()).await;
    }

    pub async fn wait(&self, what: &str, mut found: impl AsyncFnMut() -> bool) {
        let end = Instant::now() + DEADLINE;
        while !found().await {
            assert!(Instant::now() < end, "{what}\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let ours = log.lines().filter(|l| l.contains("sallyport")).collect::<Vec<_>>();
        ours[ours.len().saturating_sub(30)..].join("\n")
    }

    /// GET on the metrics port: status and body.
    pub async fn http(&self, path: &str) -> (u16, String) {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", self.metrics_port)).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let status = text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
        (status, text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
    }

    /// The value of a line of the metrics page.
    pub async fn metric(&self, name: &str) -> Option<f64> {
        // A page is served again for a second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let (_, page) = self.http("/metrics").await;
        page.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }
}
