//! How messages and exchanges end: answered, refused, failed, settled or abandoned.

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use sallyport_engine::{Code, Decision, RequestHead, ResponseHead, TransportFailure, Verdict, error_body};
use sallyport_proto::ext_proc::{BodySendMode, HttpTrailers, Message, ProcessingRequest, ProcessingResponse};

use super::Exchange;
use super::step::{Settled, Side, Step};
use crate::head;
use crate::judge::{Judge, guarded};
use crate::observer::{self, Direction, Observer};
use crate::reply;
use crate::stop::Stop;
use crate::tally::Tally;

impl Exchange {
    /// Asks the judge about a head or trailers.
    pub(super) fn ask(&self, question: impl FnOnce(&dyn Judge, Timestamp) -> Verdict) -> Verdict {
        let verdict =
            guarded(|| question(&*self.cx.judge, Timestamp::now())).unwrap_or_else(TransportFailure::verdict);
        // Only bodies can be rewritten. To pass the original instead would be to leak it.
        if verdict.decision == Decision::Redact { verdict.unredactable() } else { verdict }
    }

    /// Judges trailers: headers that come late, and carry text as well as those.
    pub(super) fn judge_request_trailers(&mut self, message: HttpTrailers) {
        let headers = head::response(message.trailers).headers;
        let trailers = RequestHead { headers, ..(*self.subject.request).clone() };
        let verdict = self.ask(|judge, now| judge.request_head(&trailers, now));
        self.request_tally.add(verdict);
    }

    /// Judges trailers, as above.
    pub(super) fn judge_response_trailers(&mut self, message: HttpTrailers) {
        let headers = head::response(message.trailers).headers;
        let trailers = ResponseHead { status: self.response.status, headers };
        let verdict = self.ask(|judge, now| judge.response_head(&self.subject.request, &trailers, now));
        self.response_tally.add(verdict);
    }

    pub(super) fn side(&mut self, direction: Direction) -> &mut Side {
        match direction {
            Direction::Request => &mut self.request_side,
            Direction::Response => &mut self.response_side,
        }
    }

    pub(super) fn tally(&mut self, direction: Direction) -> &mut Tally {
        match direction {
            Direction::Request => &mut self.request_tally,
            Direction::Response => &mut self.response_tally,
        }
    }

    /// Whether the message must be refused, as far as is known.
    pub(super) fn refuses(&mut self, direction: Direction) -> bool {
        self.enforce && self.tally(direction).verdict.decision.refuses()
    }

    /// Gives an answer that lets the message, or this part of it, pass; `done` with its last part.
    pub(super) fn answer(&mut self, direction: Direction, answer: ProcessingResponse, done: bool) -> Step {
        let mut answer = Box::new(answer);
        let enforced = self.enforce;
        let tally = self.tally(direction);
        if tally.news() {
            answer.dynamic_metadata = reply::metadata(&tally.verdict, enforced);
        }
        if let Some(dial) = self.dial.take() {
            reply::dial(&mut answer, dial);
        }
        if self.account(direction, done) { Step::Answer(answer) } else { self.untraced() }
    }

    /// Refuses the message with an answer of our own, or by an error where part of it has left.
    pub(super) fn refuse(&mut self, direction: Direction) -> Step {
        let code = observer::code(&self.tally(direction).verdict).unwrap_or(Code::Internal);
        self.over = true;
        if !self.account(direction, true) {
            return self.untraced();
        }
        if self.forwarded > 0 {
            return Step::Fail(code);
        }
        let verdict = match direction {
            Direction::Request => &self.request_tally.verdict,
            Direction::Response => &self.response_tally.verdict,
        };
        let (request, call) = (&self.subject.request, &self.request_tally.protocol);
        if self.streaming {
            // The response's head is on its way, and with it a status that can't be taken back. What can
            // still be said is said in the body; instead of trailers nothing can.
            return if self.in_body {
                let error = error_body(verdict, &self.subject.id, call);
                Step::Answer(Box::new(reply::streamed(error.into(), true)))
            } else {
                Step::Fail(code)
            };
        }
        Step::Answer(Box::new(reply::refuse(verdict, request, &self.subject.id, call)))
    }

    /// Ends the stream by an error: there is no answer that Envoy would take.
    pub(super) fn fail(&mut self, direction: Direction, failure: TransportFailure) -> Step {
        let verdict = failure.verdict();
        let code = verdict.code.unwrap_or(Code::Internal);
        self.tally(direction).add(verdict);
        self.over = true;
        if self.account(direction, true) { Step::Fail(code) } else { self.untraced() }
    }

    pub(crate) fn observer(&self) -> &dyn Observer {
        &*self.cx.observer
    }

    /// The switch that every message is held against.
    pub(crate) fn stop(&self) -> &Arc<Stop> {
        &self.cx.stop
    }

    /// Whether there is anything left that the stop switch could end.
    pub(crate) fn stoppable(&self) -> bool {
        let begun = !matches!(self.request_side, Side::Headers);
        // Observe lets bytes pass whose record is written already.
        let done = self.enforce
            && matches!(self.response_side, Side::Answered | Side::Passing)
            && !self.response_tally.open;
        begun && !self.over && !done
    }

    /// The first message carries what the record of its refusal names.
    pub(super) fn stopped_by(&mut self, message: &ProcessingRequest) -> Option<Step> {
        if std::mem::take(&mut self.first) {
            if let Some(id) = head::id_attribute(message) {
                self.subject.id = Arc::from(id);
            }
            if let Some(Message::RequestHeaders(m)) = &message.request {
                let head = head::request(m.headers.clone(), self.cx.upstream.as_ref(), self.cx.inside);
                if !head.id.is_empty() {
                    self.subject.id = Arc::from(head.id);
                }
                self.subject.request = Arc::new(head.request);
            }
        }
        self.stopped()
    }

    /// Ends the exchange because the stop switch is thrown, also where its policy only observes. `None` where
    /// the switch was reversed meanwhile.
    ///
    /// By an answer of our own, never by an error: with `failure_mode_allow` Envoy would let the rest of the
    /// exchange pass by. Where the response's head has left, Envoy resets the connection instead, at whatever
    /// moment the answer comes.
    pub(crate) fn stopped(&mut self) -> Option<Step> {
        let verdict = self.cx.stop.verdict()?;
        self.started = Instant::now();
        self.enforce = true;
        self.over = true;
        let passed = matches!(self.request_side, Side::Answered | Side::Passing);
        let direction = if passed { Direction::Response } else { Direction::Request };
        // Drops what is held, and gives its budget back.
        self.request_side = Side::Answered;
        self.response_side = Side::Answered;
        let tally = self.tally(direction);
        // A record that is written already is not written again.
        if passed && !tally.open {
            *tally = Tally::default();
        }
        tally.add(verdict.clone());
        if !self.account(direction, true) {
            return Some(self.untraced());
        }
        let (request, call) = (&self.subject.request, &self.request_tally.protocol);
        Some(Step::Answer(Box::new(reply::refuse(&verdict, request, &self.subject.id, call))))
    }

    /// A message that can't come where it came. Enforce refuses; Observe passes it by `neutral`.
    pub(super) fn disorder(&mut self, direction: Direction, neutral: ProcessingResponse) -> Step {
        if !self.enforce && matches!(self.side(direction), Side::Passing | Side::Answered) {
            return Step::Answer(Box::new(neutral));
        }
        self.tally(direction).failed(TransportFailure::ProtocolError);
        if self.enforce {
            return self.refuse(direction);
        }
        *self.side(direction) = Side::Passing;
        self.answer(direction, neutral, true)
    }

    /// Accounts for the time since the message came; writes the record with its last part.
    fn account(&mut self, direction: Direction, done: bool) -> bool {
        let tally = match direction {
            Direction::Request => &mut self.request_tally,
            Direction::Response => &mut self.response_tally,
        };
        tally.busy += self.started.elapsed();
        !done || tally.record(&self.subject, direction, self.enforce, true)
    }

    /// The observer failed: a decision that leaves no trace is not carried out.
    fn untraced(&mut self) -> Step {
        tracing::error!("the observer failed; the exchange is ended");
        self.over = true;
        Step::Fail(Code::Internal)
    }

    /// Proof that nothing is left unanswered, if that is so: every part of a message that came was
    /// answered, none is held back, and no body that we asked for is still to come.
    pub fn settle(&self) -> Option<Settled> {
        let open = |side: &Side| !matches!(side, Side::Headers | Side::Answered | Side::Passing);
        let settled = self.over || !(open(&self.request_side) || open(&self.response_side));
        settled.then_some(Settled(()))
    }

    /// Writes the records of messages that will not be seen to their end. Without a `cause` a peer went
    /// away, which is no decision.
    pub fn abandon(&mut self, cause: Option<TransportFailure>) {
        self.over = true;
        self.started = Instant::now();
        let subject = self.subject.clone();
        for direction in [Direction::Request, Direction::Response] {
            let enforce = self.enforce;
            let tally = self.tally(direction);
            if !tally.open {
                continue;
            }
            if let Some(cause) = cause {
                tally.failed(cause);
            }
            if !tally.record(&subject, direction, enforce, false) {
                tracing::error!("the observer failed on an abandoned message");
            }
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.abandon(None);
    }
}

/// What in Envoy's configuration would let bytes pass before or without our answer.
pub(super) fn unenforceable(message: &ProcessingRequest) -> Option<&'static str> {
    if message.observability_mode {
        return Some("observability_mode: Envoy does not wait for answers");
    }
    let config = message.protocol_config?;
    if config.send_body_without_waiting_for_header_response {
        return Some("send_body_without_waiting_for_header_response: Envoy ignores our choice of body mode");
    }
    let modes = [config.request_body_mode, config.response_body_mode];
    let held = |mode: &i32| [BodySendMode::None, BodySendMode::Buffered].iter().any(|m| *m as i32 == *mode);
    (!modes.iter().all(held)).then_some("a body mode that is neither NONE nor BUFFERED")
}
