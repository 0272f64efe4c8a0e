//! What is known of one message of an exchange, until it goes into its record.

use std::sync::Arc;
use std::time::Duration;

use sallyport_engine::{BodyVerdict, Code, Decision, Protocol, RequestHead, TransportFailure, Verdict};

use crate::judge::guarded;
use crate::observer::{Direction, Observer, Record};

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
    /// Something was found that the access log has not been told.
    news: bool,
}

impl Tally {
    /// Adds a verdict: the strongest decision speaks, everything found is kept.
    pub(crate) fn add(&mut self, other: Verdict) {
        let verdict = &mut self.verdict;
        let louder = other.decision > verdict.decision;
        if louder || (other.decision == verdict.decision && verdict.message.is_empty()) {
            // An engine that names no code still refuses by policy.
            verdict.code = other.code.or(match other.decision {
                Decision::Hold => Some(Code::Held),
                Decision::Block => Some(Code::PolicyDenied),
                _ => None,
            });
            verdict.message = other.message;
        }
        self.news |= other.decision > Decision::Allow;
        verdict.decision = verdict.decision.max(other.decision);
        verdict.score = verdict.score.max(other.score);
        verdict.reasons.extend(other.reasons);
        verdict.findings.extend(other.findings);
    }

    /// Adds a failure of transport.
    pub(crate) fn failed(&mut self, failure: TransportFailure) {
        self.add(failure.verdict());
    }

    /// Whether the verdict has changed since this was last asked.
    pub(crate) fn news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    /// Takes in what was decided about the body.
    pub(crate) fn body(&mut self, judged: Result<BodyVerdict, TransportFailure>) -> Option<Vec<u8>> {
        match judged {
            Ok(judged) => {
                self.protocol = judged.protocol;
                // Only a redaction changes bytes; one that brings none can't be carried out, and passing
                // the original instead would be to leak it.
                let redacts = judged.verdict.decision == Decision::Redact;
                self.add(judged.verdict);
                if redacts && judged.rewritten.is_none() {
                    self.failed(TransportFailure::Internal);
                }
                judged.rewritten.filter(|_| redacts)
            }
            Err(failure) => {
                self.failed(failure);
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
