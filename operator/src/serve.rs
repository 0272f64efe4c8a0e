//! The accept loop of every listener: TLS or plain, HTTP/1.1 and HTTP/2, bounded.
//!
//! Bounds hold per listener: connections at once, time for a handshake, time and bytes for a request's
//! head, streams per connection. Bodies are bounded by who reads them. What is not guaranteed: fairness
//! among clients; a client that takes every connection keeps others out until its idle ones are pinged away.
//!
//! Handlers find who calls as [`Peer`] in a request's extensions.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tower::util::MapRequest;

use crate::metrics::Metrics;
use crate::tasks::stopped;

/// A client that does not finish its handshake in this time is turned away.
const PATIENCE: Duration = Duration::from_secs(5);
/// HTTP/2 connections are pinged so often, and closed if no answer comes in [`PING_TIMEOUT`]: that is how
/// a stream whose node vanished ends.
const PING: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The largest head of a request. Tokens come in headers; a projected one is about 1 KiB.
const HEAD_BYTES: u32 = 32 << 10;

/// One listener.
#[derive(Clone, Debug)]
pub struct Listener {
    /// Its name, in metrics.
    pub name: &'static str,
    /// Connections at once.
    pub connections: usize,
    /// HTTP/2 streams at once on one connection.
    pub streams: u32,
    /// How long an HTTP/1.1 connection may wait for a request, and a request for the rest of its head.
    pub idle: Duration,
    /// How long connections may finish what they do after the stop.
    pub drain: Duration,
}

/// The address that a request's connection comes from. Where the network masquerades, that of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// Binds an address. `[::]` means both families; a machine without IPv6 listens on `0.0.0.0` instead.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let mut bound = TcpListener::bind(address).await;
    if bound.is_err() && address.ip() == Ipv6Addr::UNSPECIFIED {
        bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await;
    }
    bound.map_err(|e| io::Error::new(e.kind(), format!("listening on {address}: {e}")))
}

/// Serves until told to stop, then lets connections finish.
pub async fn serve(
    socket: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    listener: Listener,
    metrics: Metrics,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let slots = Arc::new(Semaphore::new(listener.connections));
    let graceful = GracefulShutdown::new();
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // From the end of the answer before it: it closes connections that rest, too.
        .header_read_timeout(listener.idle)
        .max_buf_size(HEAD_BYTES as usize)
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING_TIMEOUT)
        .max_header_list_size(HEAD_BYTES)
        .max_concurrent_streams(listener.streams);
    loop {
        let (stream, from) = tokio::select! {
            () = stopped(&mut stop) => break,
            accepted = socket.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, or a client that is gone already: neither ends the listener.
                    metrics.refused(listener.name, "accept");
                    tracing::warn!(%error, listener = listener.name, "accepting a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let Ok(slot) = slots.clone().try_acquire_owned() else {
            metrics.refused(listener.name, "full");
            continue;
        };
        let (builder, router, watcher) = (builder.clone(), router.clone(), graceful.watcher());
        let (tls, metrics, name) = (tls.clone(), metrics.clone(), listener.name);
        tokio::spawn(async move {
            let _slot = slot;
            let _open = metrics.connected(name);
            let Some(stream) = secure(stream, tls, &metrics, name).await else {
                return;
            };
            let service = TowerToHyperService::new(from_peer(router, Peer(from.ip().to_canonical())));
            let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
            if let Err(error) = watcher.watch(connection).await {
                tracing::debug!(%error, listener = name, "a connection ended");
            }
        });
    }
    drop(socket);
    if tokio::time::timeout(listener.drain, graceful.shutdown()).await.is_err() {
        tracing::warn!(listener = listener.name, "some connections were cut off");
    }
    Ok(())
}

/// The service of one connection: every request says where it comes from.
fn from_peer<B>(
    router: Router,
    peer: Peer,
) -> MapRequest<Router, impl FnMut(Request<B>) -> Request<B> + Clone + Send> {
    MapRequest::new(router, move |mut request: Request<B>| {
        request.extensions_mut().insert(peer);
        request
    })
}

/// What a connection is read from and written to.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

async fn secure(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    metrics: &Metrics,
    listener: &'static str,
) -> Option<Box<dyn Stream>> {
    // Small answers should not wait for each other.
    stream.set_nodelay(true).ok();
    let Some(tls) = tls else {
        return Some(Box::new(stream));
    };
    match tokio::time::timeout(PATIENCE, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(Box::new(stream)),
        Ok(Err(error)) => {
            metrics.refused(listener, "handshake");
            tracing::debug!(%error, listener, "a TLS handshake failed");
            None
        }
        Err(_) => {
            metrics.refused(listener, "timeout");
            None
        }
    }
}
