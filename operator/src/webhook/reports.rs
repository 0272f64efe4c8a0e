//! Events about injection: best effort, never in the way of admission.

use std::collections::HashMap;
use std::future::Future;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use sallyport_api::names::FIELD_MANAGER;
use tokio::sync::mpsc;

use crate::metrics::Metrics;

/// Events that wait to be written. A rollout of a thousand pods has few owners, and [`QUIET`] folds them.
const WAITING: usize = 256;
/// The same Event of the same object is written once in this time.
const QUIET: Duration = Duration::from_secs(30);
/// Objects that are remembered for [`QUIET`].
const REMEMBERED: usize = 4096;
/// How long one write may take.
const WRITE: Duration = Duration::from_secs(5);
/// The longest note that the API takes is 1 KiB.
const MOST_NOTE: usize = 1000;

/// What happened to a pod.
#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) regarding: ObjectReference,
    pub(super) reason: &'static str,
    pub(super) warning: bool,
    pub(super) note: String,
}

/// Where reports go. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Reports {
    queue: mpsc::Sender<Report>,
    metrics: Metrics,
}

impl Reports {
    /// The future writes them.
    pub fn new(
        client: Client,
        instance: String,
        metrics: Metrics,
    ) -> (Self, impl Future<Output = anyhow::Result<()>> + Send + use<>) {
        let (queue, waiting) = mpsc::channel(WAITING);
        let reporter = Reporter { controller: FIELD_MANAGER.into(), instance: Some(instance) };
        let writing = write(Recorder::new(client, reporter), waiting, metrics.clone());
        (Self { queue, metrics }, writing)
    }

    pub(super) fn send(&self, report: Report) {
        if self.queue.try_send(report).is_err() {
            self.metrics.event_dropped("full");
        }
    }
}

async fn write(
    recorder: Recorder,
    mut waiting: mpsc::Receiver<Report>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let mut quiet = Quiet::default();
    while let Some(report) = waiting.recv().await {
        if !quiet.may(&report, Instant::now()) {
            continue;
        }
        let mut note = report.note;
        super::cut(&mut note, MOST_NOTE);
        let event = Event {
            type_: if report.warning { EventType::Warning } else { EventType::Normal },
            reason: report.reason.into(),
            note: Some(note),
            action: "Inject".into(),
            secondary: None,
        };
        match tokio::time::timeout(WRITE, recorder.publish(&event, &report.regarding)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                metrics.event_dropped("error");
                tracing::warn!(%error, reason = report.reason, "writing an Event");
            }
            Err(_) => metrics.event_dropped("timeout"),
        }
    }
    anyhow::bail!("nobody can report any more")
}

/// What was written lately.
#[derive(Default)]
struct Quiet(HashMap<String, Instant>);

impl Quiet {
    fn may(&mut self, report: &Report, now: Instant) -> bool {
        let of = &report.regarding;
        let key = format!("{:?}/{:?}/{:?}/{}/{}", of.namespace, of.kind, of.name, report.reason, report.note);
        if self.0.get(&key).is_some_and(|at| now.duration_since(*at) < QUIET) {
            return false;
        }
        if self.0.len() >= REMEMBERED {
            self.0.retain(|_, at| now.duration_since(*at) < QUIET);
        }
        // Still full: write it, forget it.
        if self.0.len() < REMEMBERED {
            self.0.insert(key, now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str, note: &str) -> Report {
        let regarding = ObjectReference { name: Some(name.into()), ..ObjectReference::default() };
        Report { regarding, reason: "Injected", warning: false, note: note.into() }
    }

    #[test]
    fn the_same_event_is_written_once_in_a_while() {
        let (mut quiet, now) = (Quiet::default(), Instant::now());
        assert!(quiet.may(&report("a", "x"), now));
        assert!(!quiet.may(&report("a", "x"), now));
        assert!(quiet.may(&report("a", "y"), now));
        assert!(quiet.may(&report("b", "x"), now));
        assert!(quiet.may(&report("a", "x"), now + QUIET));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut quiet, now) = (Quiet::default(), Instant::now());
        for i in 0..(2 * REMEMBERED) {
            assert!(quiet.may(&report(&i.to_string(), ""), now));
        }
        assert_eq!(quiet.0.len(), REMEMBERED);
        assert!(quiet.may(&report("late", ""), now + QUIET));
        assert_eq!(quiet.0.len(), 1);
    }
}
