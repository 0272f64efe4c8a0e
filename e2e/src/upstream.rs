//! An honest small upstream on the loopback: an LLM API, an MCP server, web pages, and plain HTTP oddities.
//!
//! It does what its routes say and keeps count, so that a test can prove that a refused call never
//! reached it, or that it learned of a stream that was cut.

mod chat;
mod mcp;
mod plain;

pub use chat::{DESTRUCTIVE_SQL, GOOD_WORDS};
pub use mcp::POISON;
pub use plain::{hex, pattern};

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

/// A response of the upstream.
pub type Reply = Response<BoxBody<Bytes, Infallible>>;

/// A credential of the right form that opens nothing. Put together here so that scanners of source code
/// don't take it for a leak.
pub fn fake_key() -> String {
    format!("{}{}", "AKIA", "Q3EGVNPL2XTR5WJM")
}

/// What the upstream saw.
#[derive(Clone, Debug, Default)]
pub struct Seen(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    requests: BTreeMap<String, u64>,
    cut: u64,
    finished: u64,
}

impl Seen {
    /// Requests for that path, queries left out.
    pub fn requests(&self, path: &str) -> u64 {
        self.lock().requests.get(path).copied().unwrap_or(0)
    }

    /// Streams whose client went away before their end.
    pub fn cut(&self) -> u64 {
        self.lock().cut
    }

    /// Streams that were written to their end.
    pub fn finished(&self) -> u64 {
        self.lock().finished
    }

    /// Waits until a stream was cut, at most for this long.
    pub fn wait_for_cut(&self, deadline: Duration) -> bool {
        let end = std::time::Instant::now() + deadline;
        while self.cut() == 0 {
            if std::time::Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().expect("no handler panics with the lock held")
    }

    fn json(&self) -> Value {
        let counts = self.lock();
        json!({"requests": counts.requests, "cut": counts.cut, "finished": counts.finished})
    }
}

/// A running upstream; it ends with the process, or when this is dropped.
#[derive(Debug)]
pub struct Upstream {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it saw.
    pub seen: Seen,
    scheme: &'static str,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Upstream {
    /// Starts an upstream on a port of the loopback; 0 picks a free one.
    pub fn start(port: u16) -> std::io::Result<Self> {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], port)))
    }

    /// Starts an upstream on this address; in a pod that is every address.
    pub fn start_at(address: SocketAddr) -> std::io::Result<Self> {
        Self::serve(address, None)
    }

    /// Starts an upstream that speaks TLS, on a free port of the loopback.
    pub fn start_tls(config: Arc<rustls::ServerConfig>) -> std::io::Result<Self> {
        Self::serve(SocketAddr::from(([127, 0, 0, 1], 0)), Some(config.into()))
    }

    fn serve(address: SocketAddr, tls: Option<TlsAcceptor>) -> std::io::Result<Self> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let seen = Seen::default();
        let counted = seen.clone();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("upstream".into()).spawn(move || {
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener made above");
                tokio::select! {
                    () = accept(&listener, tls, &counted) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { address, seen, scheme, stop: Some(stop), thread: Some(thread) })
    }

    /// `http://127.0.0.1:port` and the path; `https://localhost:port` where it speaks TLS, because an address is
    /// no name that TLS could ask for.
    pub fn url(&self, path: &str) -> String {
        if self.scheme == "https" {
            format!("https://localhost:{}{path}", self.address.port())
        } else {
            format!("http://{}{path}", self.address)
        }
    }

    /// Serves until the process ends.
    pub fn wait(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: &TcpListener, tls: Option<TlsAcceptor>, seen: &Seen) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let seen = seen.clone();
        let tls = tls.clone();
        tokio::spawn(async move {
            match tls {
                None => serve_connection(stream, seen).await,
                // A handshake that fails is the other side's affair.
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        serve_connection(stream, seen).await;
                    }
                }
            }
        });
    }
}

async fn serve_connection(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, seen: Seen) {
    let service = hyper::service::service_fn(move |request| answer(request, seen.clone()));
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
}

async fn answer(request: Request<Incoming>, seen: Seen) -> Result<Reply, Infallible> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    if path == "/__seen" {
        return Ok(json_reply(StatusCode::OK, &seen.json()));
    }
    *seen.lock().requests.entry(path.clone()).or_default() += 1;
    let body = match body.collect().await {
        Ok(body) => body.to_bytes(),
        // The client went away in the middle of its request.
        Err(_) => return Ok(text_reply(StatusCode::BAD_REQUEST, "text/plain", "the body broke off")),
    };
    Ok(match path.as_str() {
        "/v1/chat/completions" => chat::completions(&head, &body, &seen),
        "/mcp" => mcp::message(&head, &body),
        _ => plain::route(&head, &path, &body, &seen),
    })
}

/// A reply with a length.
fn text_reply(status: StatusCode, kind: &str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()).boxed());
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, kind.parse().expect("a constant"));
    reply
}

fn json_reply(status: StatusCode, body: &Value) -> Reply {
    text_reply(status, "application/json", body.to_string())
}

/// A reply without a length, whose pieces come with pauses between them.
fn paced_reply(kind: &str, pieces: Vec<Bytes>, pause: Duration, seen: &Seen) -> Reply {
    framed_reply(kind, pieces.into_iter().map(Frame::data).collect(), pause, seen)
}

fn framed_reply(kind: &str, frames: Vec<Frame<Bytes>>, pause: Duration, seen: &Seen) -> Reply {
    let (sender, receiver) = mpsc::channel::<Frame<Bytes>>(1);
    let seen = seen.clone();
    tokio::spawn(async move {
        for frame in frames {
            let sent = tokio::select! {
                sent = sender.send(frame) => sent.is_ok(),
                () = sender.closed() => false,
            };
            if !sent {
                seen.lock().cut += 1;
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = sender.closed() => {
                    seen.lock().cut += 1;
                    return;
                }
            }
        }
        seen.lock().finished += 1;
    });
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|frame| (Ok::<_, Infallible>(frame), receiver))
    });
    let mut reply =
        Response::new(BodyExt::boxed(StreamBody::new(SyncStream(std::sync::Mutex::new(Box::pin(frames))))));
    reply.headers_mut().insert(CONTENT_TYPE, kind.parse().expect("a constant"));
    reply
}

/// A pause asked for by the request's `x-demo-pause-ms`, else this many milliseconds.
fn pause(head: &hyper::http::request::Parts, millis: u64) -> Duration {
    let asked =
        head.headers.get("x-demo-pause-ms").and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
    Duration::from_millis(asked.unwrap_or(millis))
}

type FrameStream =
    std::pin::Pin<Box<dyn futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>;

/// hyper's boxed body must be `Sync`; a stream polled by one task behind a lock is.
struct SyncStream(std::sync::Mutex<FrameStream>);

impl futures_util::Stream for SyncStream {
    type Item = Result<Frame<Bytes>, Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.0.get_mut().expect("no other holder").as_mut().poll_next(context)
    }
}
