//! What is known of one message of an exchange, until it goes into its record.

use std::sync::Arc;
use std::time::Duration;

use sallyport_engine::{BodyVerdict, Decision, Protocol, RequestHead, TransportFailure, Verdict};

use crate::judge::guarded;
use crate::observer::{Direction, Observer, Record};

/// Adds one verdict to another: the strongest decision speaks, everything found is kept.
pub(crate) fn merge(into: &mut Verdict, other: Verdict) {
    let louder = other.decision > into.decision;
    if louder || (other.decision == into.decision && into.message.is_empty()) {
        into.code = other.code;
        into.message = other.message;
    }
    into.decision = into.decision.max(other.decision);
    into.score = into.score.max(other.score);
    into.reasons.extend(other.reasons);
    into.findings.extend(other.findings);
}

/// One message's account.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) verdict: Verdict,
    pub(crate) protocol: Protocol,
    pub(crate) bytes: u64,
    pub(crate) held: usize,
    pub(crate) busy: Duration,
    /// Something of the message was seen, and its record is not written.
    pub(crate) open: bool,
}

impl Tally {
    /// Takes in what was decided about the body.
    pub(crate) fn body(&mut self, judged: Result<BodyVerdict, TransportFailure>) -> Option<Vec<u8>> {
        match judged {
            Ok(judged) => {
                self.protocol = judged.protocol;
                // Only a redaction changes bytes; one that brings none can't be carried out, and passing
                // the original instead would be to leak it.
                let redacts = judged.verdict.decision == Decision::Redact;
                merge(&mut self.verdict, judged.verdict);
                if redacts && judged.rewritten.is_none() {
                    merge(&mut self.verdict, TransportFailure::Internal.verdict());
                }
                judged.rewritten.filter(|_| redacts)
            }
            Err(failure) => {
                merge(&mut self.verdict, failure.verdict());
                None
            }
        }
    }

    /// Writes the record. `false` where the observer failed.
    #[must_use = "a decision that left no trace must not be carried out"]
    pub(crate) fn record(
        &mut self,
        of: &Subject,
        direction: Direction,
        enforced: bool,
        complete: bool,
    ) -> bool {
        self.open = false;
        let path = of.request.path.split(['?', '#']).next().unwrap_or_default();
        let record = Record {
            request_id: &of.id,
            direction,
            method: &of.request.method,
            host: &of.request.host,
            path,
            verdict: &self.verdict,
            enforced,
            complete,
            protocol: &self.protocol,
            bytes: self.bytes,
            held: self.held,
            micros: u64::try_from(self.busy.as_micros()).unwrap_or(u64::MAX),
        };
        guarded(|| of.observer.record(&record)).is_ok()
    }
}

/// Whom a record is about and who is told.
#[derive(Clone)]
pub(crate) struct Subject {
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) request: Arc<RequestHead>,
    pub(crate) id: Arc<str>,
}
