//! Metrics and probes: `/metrics`, `/healthz`, `/readyz`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder as _, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};
use tokio::sync::Mutex;

use super::install::Repaired;
use super::serve::Server;
use crate::wire::Command;

/// The names of all metrics.
pub mod name {
    /// What the plugin asked for, by command and outcome.
    pub const REQUESTS: &str = "sallyport_cni_requests_total";
    /// 1 where the plugin and its entry are in place on the node.
    pub const INSTALLED: &str = "sallyport_cni_installed";
    /// How often something had to be put there, by what (`binary`, `list`); the first time counts.
    pub const REPAIRS: &str = "sallyport_cni_repairs_total";
    /// Packets that met a capture rule, by namespace, pod and reason. For `redirected`: connections.
    pub const PACKETS: &str = "sallyport_capture_packets";
}

/// Every name, for whoever checks dashboards and alerts against them.
pub fn names() -> Vec<&'static str> {
    vec![name::REQUESTS, name::INSTALLED, name::REPAIRS, name::PACKETS]
}

/// For how long what was read from the pods is shown again: reading costs a process for each.
const AGE: Duration = Duration::from_secs(5);

/// The daemon's metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    installed: IntGauge,
    repairs: IntCounterVec,
    packets: IntGaugeVec,
    leaving: AtomicBool,
}

// === impl Metrics ===

impl Metrics {
    /// All of them at zero.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counters = |name, help, labels: &[&str]| {
            let counters = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counters.clone())).map(|()| counters)
        };
        let requests = counters(name::REQUESTS, "What the plugin asked for.", &["command", "outcome"])?;
        let repairs = counters(name::REPAIRS, "How often the plugin or its entry was put there.", &["what"])?;
        let installed = IntGauge::new(name::INSTALLED, "1 where the plugin and its entry are in place.")?;
        registry.register(Box::new(installed.clone()))?;
        let packets = IntGaugeVec::new(
            Opts::new(name::PACKETS, "Packets that met a capture rule since the pod started."),
            &["namespace", "pod", "reason"],
        )?;
        registry.register(Box::new(packets.clone()))?;
        Ok(Self { registry, requests, installed, repairs, packets, leaving: AtomicBool::new(false) })
    }

    pub(super) fn request(&self, command: Command, outcome: &str) {
        let command = match command {
            Command::Add => "add",
            Command::Check => "check",
            Command::Del => "del",
            Command::Gc => "gc",
        };
        self.requests.with_label_values(&[command, outcome]).inc();
    }

    pub(super) fn installed(&self, is: bool, repaired: Repaired) {
        self.installed.set(is.into());
        for (what, was) in [("binary", repaired.binary), ("list", repaired.list)] {
            self.repairs.with_label_values(&[what]).inc_by(was.into());
        }
    }

    pub(super) fn leaving(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    fn ready(&self) -> bool {
        self.installed.get() == 1 && !self.leaving.load(Ordering::Relaxed)
    }
}

/// What the pages are made of.
#[derive(Clone)]
struct Pages {
    metrics: Arc<Metrics>,
    server: Arc<Server>,
    read: Arc<Mutex<Option<Instant>>>,
}

pub(super) fn router(metrics: Arc<Metrics>, server: Arc<Server>) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(page))
        .with_state(Pages { metrics, server, read: Arc::default() })
}

async fn readyz(State(pages): State<Pages>) -> (StatusCode, &'static str) {
    if pages.metrics.ready() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the plugin is not installed on the node; the log says why\n")
    }
}

async fn page(State(pages): State<Pages>) -> Response {
    // Also while somebody reads: he who waits gets that.
    let mut read = pages.read.lock().await;
    if read.is_none_or(|at| at.elapsed() >= AGE) {
        let server = Arc::clone(&pages.server);
        let all = tokio::task::spawn_blocking(move || server.counters()).await.unwrap_or_default();
        // Pods that are gone go from the page as well.
        pages.metrics.packets.reset();
        for (namespace, pod, counters) in all {
            for counter in counters {
                let labels = [namespace.as_str(), pod.as_str(), counter.name.as_str()];
                let packets = i64::try_from(counter.packets).unwrap_or(i64::MAX);
                pages.metrics.packets.with_label_values(&labels).set(packets);
            }
        }
        *read = Some(Instant::now());
    }
    drop(read);
    let mut text = Vec::new();
    match TextEncoder::new().encode(&pages.metrics.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
