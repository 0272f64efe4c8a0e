//! The plain HTTP listener: `/metrics`, `/healthz`, `/readyz`, `/subscribers`.
//!
//! It tells nothing that is secret: numbers, and which pods enforce which bundle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use jiff::Timestamp;

use crate::certs::Certificates;
use crate::metrics::Metrics;

/// Asks something that has two answers.
pub type Ask = Arc<dyn Fn() -> bool + Send + Sync>;
/// Gives the JSON of `/subscribers`.
pub type Subscribers = Arc<dyn Fn() -> serde_json::Value + Send + Sync>;

/// What readiness is made of.
#[derive(Clone)]
pub struct Health {
    /// Whether the index has read everything once.
    pub synced: Ask,
    /// What TLS serves.
    pub certificates: Certificates,
    /// Whether every listener is bound.
    pub bound: Arc<AtomicBool>,
    /// Whether the process is on its way out.
    pub stopping: Arc<AtomicBool>,
    /// Gives the JSON of `/subscribers`.
    pub subscribers: Subscribers,
    /// What `/metrics` shows.
    pub metrics: Metrics,
}

impl Health {
    /// What keeps the replica from being ready, if anything does.
    pub fn unready(&self) -> Option<&'static str> {
        if self.stopping.load(Ordering::Relaxed) {
            Some("stopping")
        } else if !self.bound.load(Ordering::Relaxed) {
            Some("listeners are not bound")
        } else if !self.certificates.ready(Timestamp::now()) {
            Some("there is no valid serving certificate")
        } else if !(self.synced)() {
            Some("policies, namespaces and pods are not read yet")
        } else {
            None
        }
    }
}

/// The routes.
pub fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/subscribers", get(subscribers))
        .with_state(health)
}

async fn ready(State(health): State<Health>) -> Response {
    match health.unready() {
        None => "ok\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn metrics(State(health): State<Health>) -> Response {
    match health.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn subscribers(State(health): State<Health>) -> Response {
    axum::Json((health.subscribers)()).into_response()
}
