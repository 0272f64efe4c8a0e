//! The port for Prometheus and the kubelet: `/metrics`, `/ready`, `/ready/envoy`.
//!
//! Whoever reaches the pod reaches this port, the agent in it first of all. So it runs on a thread of its own,
//! serves few connections at a time and each for a short time, and asks Envoy at most once a second.
//!
//! Not guaranteed: that a scrape gets through while somebody floods the port.

use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore, watch};

use super::apply::InForce;
use super::captured::Captured;
use super::envoy::Envoy;
use crate::budget::Budget;
use crate::dns::Names;
use crate::metrics::{BundleFacts, Metrics, seconds};
use crate::stop::{Stop, Why};
use crate::watchdog::Heart;

const CONNECTIONS: usize = 16;
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// hyper's least, and more than any scraper sends.
const MOST_HEADER_BYTES: usize = 8 << 10;
const MOST_HEADERS: usize = 32;
/// Between two attempts to listen.
const BIND_PAUSE: Duration = Duration::from_secs(1);
/// For how long a page is served again.
const PAGE_AGE: Duration = Duration::from_secs(1);

/// What the pages are made of.
pub(crate) struct Pages {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) names: Option<Arc<Names>>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) heart: Heart,
    pub(crate) stop: Arc<Stop>,
    pub(crate) envoy: Envoy,
    pub(crate) captured: watch::Receiver<Captured>,
    pub(crate) in_force: watch::Receiver<Option<Arc<InForce>>>,
    pub(crate) page: Mutex<Option<(Instant, Bytes)>>,
    pub(crate) envoy_ready: Mutex<Option<(Instant, Result<(), String>)>>,
}

/// Serves for ever.
pub(crate) async fn serve(address: SocketAddr, pages: Arc<Pages>) {
    let listener = bind(address).await;
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Nobody closes the semaphore.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::warn!("metrics: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let pages = Arc::clone(&pages);
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let pages = Arc::clone(&pages);
                async move { Ok::<_, Infallible>(pages.answer(&request).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(MOST_HEADER_BYTES)
                .max_headers(MOST_HEADERS)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
            drop(place);
        });
    }
}

/// An agent that sits on the port must not keep the filter from running, so this goes on until it is free.
async fn bind(address: SocketAddr) -> TcpListener {
    let mut told = false;
    loop {
        let mut bound = TcpListener::bind(address).await;
        // `[::]` means both families; a machine without IPv6 has the other one.
        if bound.is_err() && address.ip() == Ipv6Addr::UNSPECIFIED {
            bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await;
        }
        match bound {
            Ok(listener) => return listener,
            Err(e) if !told => tracing::error!("metrics: {address}: {e}; trying again until it is free"),
            Err(_) => {}
        }
        told = true;
        tokio::time::sleep(BIND_PAUSE).await;
    }
}

// === impl Pages ===

impl Pages {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "GET only\n");
        }
        match request.uri().path() {
            "/metrics" => match self.page().await {
                Ok(page) => text(StatusCode::OK, page),
                Err(e) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
            },
            "/ready" => state(self.ready()),
            "/ready/envoy" => state(self.envoy_ready().await),
            _ => text(StatusCode::NOT_FOUND, "/metrics, /ready, /ready/envoy\n"),
        }
    }

    fn ready(&self) -> Result<(), String> {
        self.captured.borrow().fine()?;
        match &*self.in_force.borrow() {
            Some(_) => Ok(()),
            None => Err("no bundle is in force".to_owned()),
        }
    }

    async fn envoy_ready(&self) -> Result<(), String> {
        self.ready()?;
        let mut known = self.envoy_ready.lock().await;
        if let Some((at, state)) = &*known
            && at.elapsed() < PAGE_AGE / 2
        {
            return state.clone();
        }
        let state = self.envoy.ready().await;
        *known = Some((Instant::now(), state.clone()));
        state
    }

    async fn page(&self) -> Result<Bytes, prometheus::Error> {
        // Also while somebody makes one: he who waits gets that one.
        let mut known = self.page.lock().await;
        if let Some((at, page)) = &*known
            && at.elapsed() < PAGE_AGE
        {
            return Ok(page.clone());
        }
        let metrics = &self.metrics;
        let in_force = self.in_force.borrow().clone();
        metrics.bundle(in_force.map(|now| facts(&now)).as_ref());
        metrics.budget_used.set(i64::try_from(self.budget.used()).unwrap_or(i64::MAX));
        metrics.budget_limit.set(i64::try_from(self.budget.limit()).unwrap_or(i64::MAX));
        let bound = self.names.as_ref().map_or(0, |names| names.bound());
        metrics.bindings.set(i64::try_from(bound).unwrap_or(i64::MAX));
        metrics.heartbeat_age.set(seconds(self.heart.age()));
        metrics.killed.set(i64::from(matches!(self.stop.why(), Some(Why::Killed(_)))));
        let envoy = self.envoy.metrics().await;
        metrics.envoy_up.set(i64::from(envoy.is_ok()));
        let mut page = metrics.page()?;
        page.extend_from_slice(envoy.unwrap_or_default().as_bytes());
        let page = Bytes::from(page);
        *known = Some((Instant::now(), page.clone()));
        Ok(page)
    }
}

fn facts(now: &InForce) -> BundleFacts {
    BundleFacts {
        namespace: now.source.namespace.clone(),
        policy: now.source.name.clone(),
        generation: now.source.generation,
        digest: now.digest.clone(),
        age: now.since.elapsed(),
    }
}

fn state(state: Result<(), String>) -> Response<Full<Bytes>> {
    match state {
        Ok(()) => text(StatusCode::OK, "ready\n"),
        Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
    response
}
