//! Kubernetes Events: what happened to a policy or a namespace, for `kubectl describe`.
//!
//! Only the leader makes them. The same Event again within minutes raises a count. Events are a courtesy:
//! one that can't be published is counted and forgotten, the log has it.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use sallyport_api::names::{self, reasons};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

use crate::index::{Index, Notice};

/// How long the API server may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of an Event's text; Kubernetes refuses more than 1,024.
const LONGEST_NOTE: usize = 1_000;

/// Publishes Events.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
    index: Index,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// Events from the replica that is called so.
    pub fn new(client: Client, index: Index, pod_name: &str) -> Self {
        let reporter =
            Reporter { controller: names::FIELD_MANAGER.into(), instance: Some(pod_name.to_owned()) };
        Self { recorder: Recorder::new(client, reporter), index }
    }

    /// Publishes one.
    pub async fn publish(&self, object: &ObjectReference, news: News) {
        let mut note = news.note;
        cut(&mut note, LONGEST_NOTE);
        let event = Event {
            type_: if news.warning { EventType::Warning } else { EventType::Normal },
            reason: news.reason.into(),
            note: Some(note),
            action: news.action.into(),
            secondary: None,
        };
        let result = tokio::time::timeout(TIMEOUT, self.recorder.publish(&event, object)).await;
        let result = match result {
            Ok(Ok(())) => "ok",
            Ok(Err(error)) => {
                tracing::warn!(%error, reason = news.reason, "an Event was not published");
                "error"
            }
            Err(_) => "timeout",
        };
        self.index.metrics().event(result);
    }
}

/// Shortens a text to so many bytes, between two characters.
pub(crate) fn cut(text: &mut String, most: usize) {
    if let Some(end) = (0..=most.min(text.len())).rev().find(|&i| text.is_char_boundary(i)) {
        text.truncate(end);
    }
}

/// What an Event says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Whether somebody should look.
    pub warning: bool,
    /// One of [`reasons`].
    pub reason: &'static str,
    /// What was done, in one word.
    pub action: &'static str,
    /// The text.
    pub note: String,
}

impl From<&Notice> for News {
    fn from(notice: &Notice) -> Self {
        match notice {
            Notice::Kill { on, who, .. } => Self {
                warning: *on,
                reason: if *on { reasons::KILLED } else { reasons::UNKILLED },
                action: "Kill",
                note: format!(
                    "every call of its guarded pods is {}; {}",
                    if *on { "blocked" } else { "decided by policy again" },
                    who.as_ref().map_or_else(
                        || "the object does not say by whom".to_owned(),
                        |who| format!("written by {who}")
                    )
                ),
            },
            Notice::PolicyDeleted { pods, .. } => Self {
                warning: *pods > 0,
                reason: reasons::POLICY_DELETED,
                action: "Delete",
                note: format!(
                    "{pods} guarded pods keep its last good bundle until another policy selects them"
                ),
            },
        }
    }
}

/// Makes Events of what the index notices, while this replica leads. Runs until the index is gone.
pub(crate) async fn run(events: Events, leader: watch::Receiver<bool>) {
    let mut notices = events.index.notices();
    loop {
        match notices.recv().await {
            Ok(notice) if *leader.borrow() => {
                let subject = match &notice {
                    Notice::Kill { subject, .. } | Notice::PolicyDeleted { subject, .. } => {
                        subject.reference()
                    }
                };
                events.publish(&subject, News::from(&notice)).await;
            }
            Ok(_) => {}
            Err(RecvError::Lagged(missed)) => {
                tracing::warn!(missed, "more news than Events could be made of");
            }
            Err(RecvError::Closed) => return,
        }
    }
}
