//! Admission: what the API server asks before a pod or a policy comes into being.
//!
//! Every answer is decided on what the index knows; what would let a pod through unguarded, or refuse it
//! for want of a policy, is decided again on what the API server says at that moment, because an index is
//! always a little late. `dryRun` leaves no trace.
//!
//! What is not guaranteed: who calls. The API server shows no client certificate, so anybody who reaches
//! the port may ask; answers tell no secret, and what an answer costs is bounded.

mod answer;
mod cluster;
mod pods;
mod policies;
mod reports;
mod review;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::FutureExt;
use kube::Client;
use sallyport_plan::inject::InjectSettings;
use tokio::sync::Semaphore;
use tokio::time::Instant;

pub use answer::Answer;
pub use cluster::{Cluster, Known};
pub use reports::Reports;

use crate::index::Index;
use crate::metrics::Metrics;
use crate::tasks::said;

/// The largest review that is read. etcd holds objects of at most 1.5 MiB; an update carries two.
pub const MOST_BYTES: usize = 3 << 20;
/// The time for one answer: the chart gives the API server 5 s.
const DEADLINE: Duration = Duration::from_secs(4);
/// Policies that are compiled at once; each takes a core.
const COMPILERS: usize = 2;

/// What the handlers share. Cheap to clone.
#[derive(Clone)]
pub struct Admission {
    cluster: Cluster,
    settings: Arc<InjectSettings>,
    reports: Reports,
    metrics: Metrics,
    compilers: Arc<Semaphore>,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission").finish_non_exhaustive()
    }
}

impl Admission {
    /// Answers with what the cluster says; what happens to pods is reported.
    pub fn new(cluster: Cluster, settings: InjectSettings, reports: Reports, metrics: Metrics) -> Self {
        let compilers = Arc::new(Semaphore::new(COMPILERS));
        Self { cluster, settings: Arc::new(settings), reports, metrics, compilers }
    }
}

/// The paths, and the work in their background: the watch on LimitRanges and the writing of Events.
pub fn start(
    client: Client,
    index: Index,
    settings: InjectSettings,
    pod_name: &str,
    metrics: &Metrics,
) -> (Router, impl Future<Output = anyhow::Result<()>> + Send + use<>) {
    let (cluster, watching) = Cluster::new(client.clone(), Arc::new(index));
    let (reports, reporting) = Reports::new(client, pod_name.to_owned(), metrics.clone());
    let admission = Admission::new(cluster, settings, reports, metrics.clone());
    let work = async move {
        tokio::select! {
            result = watching => result,
            result = reporting => result,
        }
    };
    (router(admission), work)
}

/// The paths.
pub fn router(admission: Admission) -> Router {
    Router::new()
        .route("/mutate-pods", post(mutate_pods))
        .route("/validate-pods", post(validate_pods))
        .route("/validate-policies", post(validate_policies))
        .layer(DefaultBodyLimit::max(MOST_BYTES))
        .with_state(admission)
}

async fn mutate_pods(State(admission): State<Admission>, request: Request) -> Response {
    respond(&admission.metrics, "mutate-pods", request, |r| {
        let admission = admission.clone();
        async move { pods::mutate(&admission, &r).await }
    })
    .await
}

async fn validate_pods(State(admission): State<Admission>, request: Request) -> Response {
    respond(&admission.metrics, "validate-pods", request, |r| {
        let admission = admission.clone();
        async move { pods::validate(&admission, &r).await }
    })
    .await
}

async fn validate_policies(State(admission): State<Admission>, request: Request) -> Response {
    respond(&admission.metrics, "validate-policies", request, |r| {
        let admission = admission.clone();
        async move { policies::validate(&admission, &r).await }
    })
    .await
}

/// Reads the review, has it answered, and writes the answer, whatever happens in between.
async fn respond<F>(
    metrics: &Metrics,
    webhook: &'static str,
    request: Request,
    decide: impl FnOnce(review::Request) -> F,
) -> Response
where
    F: Future<Output = Answer>,
{
    let began = Instant::now();
    let count = |outcome: &str, reason: &str| metrics.admitted(webhook, outcome, reason, began.elapsed());
    let request = match review::read(request, DEADLINE).await {
        Ok(request) => request,
        Err(refused) => {
            count("error", refused.reason());
            tracing::warn!(webhook, error = %refused, "a request that is no review");
            return (refused.status(), format!("sallyport: {refused}\n")).into_response();
        }
    };
    let envelope = request.envelope();
    let decided = AssertUnwindSafe(tokio::time::timeout_at(began + DEADLINE, decide(request))).catch_unwind();
    let answer = match decided.await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Answer::failed("Timeout", format!("no answer within {} s", DEADLINE.as_secs())),
        Err(panic) => {
            let said = said(panic.as_ref());
            tracing::error!(webhook, uid = envelope.uid, panic = said, "answering a review panicked");
            // It would panic again: a clear no is better than an error that is tried again.
            Answer::denied(
                500,
                "InternalError",
                format!("the operator has a fault that this object shows: {said}"),
            )
        }
    };
    count(answer.outcome(), answer.reason());
    match answer.into_review(&envelope) {
        Ok(review) => axum::Json(review).into_response(),
        Err(message) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("sallyport: {message}\n")).into_response()
        }
    }
}

/// Shortens a text to at most so many bytes, between characters.
fn cut(text: &mut String, most: usize) {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}
