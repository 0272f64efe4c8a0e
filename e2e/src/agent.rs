//! The agent of the cluster suite: it makes the calls that a test asks it for, from inside its pod.
//!
//! Its own port is inbound traffic, which the sidecar does not touch, so a test on the node can tell it
//! what to do and is told what came of it. It is also the adversary: plain TCP and UDP to any address,
//! reading files, all as the container's user.

use std::convert::Infallible;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};

use crate::client::{Answer, Call, raw};
use crate::upstream::Upstream;

/// The agent's own port.
pub const AGENT_PORT: u16 = 8000;
/// The upstream's port in the cluster.
pub const UPSTREAM_PORT: u16 = 8080;

const USAGE: &str = "\
Usage: sallyport-e2e-agent agent               serves on port 8000 and makes the calls it is told to
       sallyport-e2e-agent upstream            an LLM API, an MCP server and web pages on port 8080
       sallyport-e2e-agent once STATUS URL     one GET; exit status 0 if that status came back
       sallyport-e2e-agent sleep               nothing, until it is ended";

/// What a test may ask for.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Task {
    /// An HTTP call.
    Call(Call),
    /// Bytes over TCP, and what came back until the other side closed or the deadline passed.
    Tcp {
        /// Where to.
        address: SocketAddr,
        /// What is sent.
        send: Vec<u8>,
        /// How long to wait for the end.
        deadline: Duration,
    },
    /// A datagram, and the first that came back.
    Udp {
        /// Where to.
        address: SocketAddr,
        /// What is sent.
        send: Vec<u8>,
        /// How long to wait for an answer.
        deadline: Duration,
    },
    /// Addresses of a name, by the pod's resolver.
    Resolve(String),
    /// A file's content.
    Read(String),
    /// The names in a directory, sorted.
    List(String),
    /// Listens on a port of the pod, TCP and UDP, and answers whatever comes; what came in this time.
    Hear {
        /// The port.
        port: u16,
        /// How long.
        during: Duration,
    },
    /// The environment.
    Environment,
}

/// What came of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub enum Outcome {
    /// Of a call.
    Answer(Answer),
    /// Of bytes: what came back, and whether the other side closed.
    Bytes(Vec<u8>, bool),
    /// Of everything else.
    Text(String),
    /// It could not be done.
    Failed(String),
}

/// Runs what the arguments say.
pub fn main(mut args: impl Iterator<Item = String>) -> anyhow::Result<()> {
    match args.next().as_deref() {
        Some("agent") => serve(SocketAddr::from(([0, 0, 0, 0], AGENT_PORT))),
        Some("upstream") => {
            Upstream::start_at(SocketAddr::from(([0, 0, 0, 0], UPSTREAM_PORT)))?.wait();
            Ok(())
        }
        Some("once") => {
            let (Some(status), Some(url)) = (args.next(), args.next()) else { bail!(USAGE) };
            let answer = Call::get(url).send().context("no answer")?;
            println!("{} {}", answer.status, answer.text());
            anyhow::ensure!(answer.status.to_string() == status, "expected {status}");
            Ok(())
        }
        Some("sleep") => loop {
            std::thread::park();
        },
        _ => bail!(USAGE),
    }
}

fn serve(address: SocketAddr) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(address).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            tokio::spawn(async move {
                let service = hyper::service::service_fn(answer);
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    })
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = match request.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(_) => return Ok(reply(StatusCode::BAD_REQUEST, "the task broke off".into())),
    };
    if body.is_empty() {
        return Ok(reply(StatusCode::OK, "ready".into()));
    }
    let task: Task = match serde_json::from_slice(&body) {
        Ok(task) => task,
        Err(e) => return Ok(reply(StatusCode::BAD_REQUEST, e.to_string())),
    };
    // Every task blocks.
    let outcome =
        tokio::task::spawn_blocking(move || run(&task).unwrap_or_else(|e| Outcome::Failed(e.to_string())));
    let outcome = outcome.await.unwrap_or_else(|e| Outcome::Failed(e.to_string()));
    let text = serde_json::to_string(&outcome).expect("an outcome is JSON");
    Ok(reply(StatusCode::OK, text))
}

fn reply(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut reply = Response::new(Full::new(Bytes::from(text)));
    *reply.status_mut() = status;
    reply
}

fn run(task: &Task) -> io::Result<Outcome> {
    Ok(match task {
        Task::Call(call) => Outcome::Answer(call.send()?),
        Task::Tcp { address, send, deadline } => {
            let (got, closed) = raw(*address, send, *deadline)?;
            Outcome::Bytes(got, closed.is_some())
        }
        Task::Udp { address, send, deadline } => {
            let socket = UdpSocket::bind(if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
            socket.set_read_timeout(Some(*deadline))?;
            socket.send_to(send, address)?;
            let mut buffer = vec![0; 64 << 10];
            let (n, _) = socket.recv_from(&mut buffer)?;
            buffer.truncate(n);
            Outcome::Bytes(buffer, true)
        }
        Task::Resolve(name) => {
            use std::net::ToSocketAddrs as _;
            let addresses: Vec<_> =
                (name.as_str(), 80).to_socket_addrs()?.map(|a| a.ip().to_string()).collect();
            Outcome::Text(addresses.join(" "))
        }
        // Not as UTF-8: a process' arguments may be any bytes.
        Task::Read(path) => Outcome::Text(String::from_utf8_lossy(&std::fs::read(path)?).into_owned()),
        Task::List(path) => {
            let mut names = std::fs::read_dir(path)?
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect::<io::Result<Vec<_>>>()?;
            names.sort();
            Outcome::Text(names.join("\n"))
        }
        Task::Hear { port, during } => {
            let ear = Ear::listen(SocketAddr::from(([0, 0, 0, 0], *port)))?;
            std::thread::sleep(*during);
            Outcome::Text(ear.heard())
        }
        Task::Environment => {
            let pairs: Vec<_> = std::env::vars().map(|(k, v)| format!("{k}={v}")).collect();
            Outcome::Text(pairs.join("\n"))
        }
    })
}

/// Listens on one port, TCP and UDP, keeps what comes and answers it with [`HEARD`].
#[derive(Debug)]
pub struct Ear {
    heard: Arc<Mutex<Vec<u8>>>,
    closed: Arc<AtomicBool>,
}

/// What an [`Ear`] answers.
pub const HEARD: &[u8] = b"HEARD\n";

impl Ear {
    /// Listens until this value goes.
    pub fn listen(address: SocketAddr) -> io::Result<Self> {
        const TURN: Duration = Duration::from_millis(100);
        let tcp = TcpListener::bind(address)?;
        let udp = UdpSocket::bind(address)?;
        tcp.set_nonblocking(true)?;
        udp.set_read_timeout(Some(TURN))?;
        let ear = Self { heard: Arc::default(), closed: Arc::default() };
        let (heard, closed) = (Arc::clone(&ear.heard), Arc::clone(&ear.closed));
        std::thread::spawn(move || {
            while !closed.load(Ordering::Relaxed) {
                let Ok((stream, _)) = tcp.accept() else {
                    std::thread::sleep(TURN / 10);
                    continue;
                };
                let heard = Arc::clone(&heard);
                std::thread::spawn(move || hear(stream, &heard));
            }
        });
        let (heard, closed) = (Arc::clone(&ear.heard), Arc::clone(&ear.closed));
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while !closed.load(Ordering::Relaxed) {
                if let Ok((n, from)) = udp.recv_from(&mut buffer) {
                    keep(&heard, &buffer[..n]);
                    let _ = udp.send_to(HEARD, from);
                }
            }
        });
        Ok(ear)
    }

    /// Everything that came.
    pub fn heard(&self) -> String {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&heard).into_owned()
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

fn keep(heard: &Mutex<Vec<u8>>, bytes: &[u8]) {
    heard.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
}

fn hear(mut stream: TcpStream, heard: &Mutex<Vec<u8>>) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    let _ = stream.write_all(HEARD);
    let mut buffer = [0; 16 << 10];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        keep(heard, &buffer[..n]);
    }
}

/// How long an agent may take, besides what it is told to wait.
const PATIENCE: Duration = Duration::from_secs(120);

fn outcome(text: &str) -> io::Result<Outcome> {
    serde_json::from_str(text).map_err(|e| io::Error::other(format!("{e}: {text}")))
}

/// An agent in a pod, as a test sees it.
#[derive(Clone, Debug)]
pub struct Remote {
    address: SocketAddr,
}

impl Remote {
    /// The agent at this pod address.
    pub fn new(address: std::net::IpAddr) -> Self {
        Self { address: SocketAddr::new(address, AGENT_PORT) }
    }

    /// Whether it serves.
    pub fn is_up(&self) -> bool {
        self.exchange(b"").is_ok_and(|text| text == "ready")
    }

    /// Has it do something.
    pub fn run(&self, task: &Task) -> io::Result<Outcome> {
        outcome(&self.exchange(&serde_json::to_vec(task)?)?)
    }

    /// Has it make a call; an error is the agent's own.
    pub fn call(&self, call: &Call) -> io::Result<Answer> {
        let text =
            self.exchange_within(call.given() + PATIENCE, &serde_json::to_vec(&Task::Call(call.clone()))?)?;
        match outcome(&text)? {
            Outcome::Answer(answer) => Ok(answer),
            Outcome::Failed(e) => Err(io::Error::other(e)),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    fn exchange(&self, body: &[u8]) -> io::Result<String> {
        self.exchange_within(PATIENCE, body)
    }

    fn exchange_within(&self, limit: Duration, body: &[u8]) -> io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(5))?;
        stream.set_read_timeout(Some(limit))?;
        write!(
            stream,
            "POST / HTTP/1.1\r\nhost: agent\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )?;
        stream.write_all(body)?;
        let mut got = Vec::new();
        stream.read_to_end(&mut got)?;
        let text = String::from_utf8_lossy(&got).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("no answer"))?;
        if head.starts_with("HTTP/1.1 200") { Ok(body.to_owned()) } else { Err(io::Error::other(text)) }
    }
}
