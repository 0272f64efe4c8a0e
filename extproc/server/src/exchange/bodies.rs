//! Bodies: whole, in chunks that are forwarded as they pass, held to their end, or only looked on at.

use std::sync::Arc;

use bytes::Bytes;
use sallyport_engine::{Cut, StreamStep, TransportFailure};
use sallyport_proto::ext_proc::{HttpBody, HttpTrailers, ProcessingResponse};

use super::Exchange;
use super::step::{Done, INLINE_SCAN_BYTES, Note, Outcome, Push, Pushed, Side, Step, Task, Work};
use crate::budget::Held;
use crate::coding::Coding;
use crate::head;
use crate::judge::{Job, Scan, guarded};
use crate::observer::Direction;
use crate::reply;

impl Exchange {
    /// A body that came in one message.
    pub(super) fn whole(&mut self, direction: Direction, message: HttpBody, held: Held) -> Step {
        // Without the end of the stream in it, the body is whole all the same, but trailers follow.
        let last = message.end_of_stream;
        *self.side(direction) = Side::Judging { whole: true, last, trailers: None };
        if message.body.len() > self.cap {
            return self.judged(TransportFailure::BodyTooLarge.into());
        }
        self.judge(direction, message.body, held)
    }

    /// A chunk of a response that is held to its end.
    pub(super) fn hold(&mut self, message: &HttpBody, mut body: Vec<u8>, mut held: Held) -> Step {
        let size = body.len() + message.body.len();
        let failure = if size > self.cap {
            Some(TransportFailure::BodyTooLarge)
        } else if !held.resize(size) {
            Some(TransportFailure::Overloaded)
        } else {
            None
        };
        if let Some(failure) = failure {
            self.response_tally.failed(failure);
            return self.refuse(Direction::Response);
        }
        body.extend_from_slice(&message.body);
        if message.end_of_stream {
            self.response_side = Side::Judging { whole: false, last: true, trailers: None };
            return self.judge(Direction::Response, body.into(), held);
        }
        self.response_side = Side::Hold { body, held };
        self.forward(Bytes::new(), false)
    }

    pub(super) fn judge(&mut self, direction: Direction, body: Bytes, held: Held) -> Step {
        match self.job(direction, body, held) {
            Ok(job) => Step::Judge(Box::new(Work(Task::Body(job)))),
            Err(failure) => self.judged(failure.into()),
        }
    }

    fn job(&mut self, direction: Direction, body: Bytes, mut held: Held) -> Result<Job, TransportFailure> {
        let request = &self.subject.request;
        let (headers, response) = match direction {
            Direction::Request => (&request.headers, None),
            Direction::Response => (&self.response.headers, Some(Arc::clone(&self.response))),
        };
        let coding = Coding::of(headers);
        // What may come out of the encoding is held too.
        let size = if coding == Coding::Identity { 0 } else { coding.most(body.len(), self.cap) };
        let fits = held.resize(body.len() + size);
        self.tally(direction).held = held.peak();
        if !fits {
            return Err(TransportFailure::Overloaded);
        }
        let (judge, request) = (Arc::clone(&self.cx.judge), Arc::clone(&self.subject.request));
        Ok(Job { judge, request, response, body, coding, cap: self.cap, held })
    }

    /// Takes what came of a [`Step::Judge`].
    pub fn judged(&mut self, outcome: Outcome) -> Step {
        if matches!(self.response_side, Side::Scanning { .. }) {
            return self.scanned_aside(outcome);
        }
        let direction = match (&self.request_side, &self.response_side) {
            (Side::Judging { .. }, _) => Direction::Request,
            (_, Side::Judging { .. }) => Direction::Response,
            _ => return self.fail(Direction::Response, TransportFailure::Internal),
        };
        let Side::Judging { whole, last, trailers } = std::mem::replace(self.side(direction), Side::Answered)
        else {
            return self.fail(direction, TransportFailure::Internal);
        };
        let (verdict, decoded) = match outcome.0 {
            Ok(Done::Body(judged)) => (Ok(judged.verdict), judged.decoded),
            Ok(Done::Chunk(_)) => (Err(TransportFailure::Internal), None),
            Err(failure) => (Err(failure), None),
        };
        let rewritten = self.tally(direction).body(verdict);
        if self.refuses(direction) {
            return self.refuse(direction);
        }
        if whole {
            let had_length = head::content_length(match direction {
                Direction::Request => &self.subject.request.headers,
                Direction::Response => &self.response.headers,
            })
            .is_some();
            let answer = match rewritten {
                Some(bytes) => reply::body_replaced(direction, bytes, had_length),
                None => reply::body_unchanged(direction),
            };
            return self.answer(direction, answer, last);
        }
        let bytes = Bytes::from(rewritten.or(decoded).unwrap_or_default());
        match trailers {
            None => self.forward(bytes, true),
            Some(trailers) => {
                self.judge_response_trailers(trailers);
                self.end_with_trailers(bytes)
            }
        }
    }

    /// A scanner for a response that is forwarded while it arrives.
    pub(super) fn scanner(&mut self, held: Held) -> Result<Side, TransportFailure> {
        let judge = Arc::clone(&self.cx.judge);
        let (request, answers) = (&self.subject.request, &self.request_tally.protocol);
        let scanner = guarded(|| judge.response_stream(request, &self.response, answers))?;
        Ok(Side::Scan { scanner, held })
    }

    /// A chunk of a response that is forwarded while it arrives; `trailers` come after the last one.
    pub(super) fn scan(
        &mut self,
        chunk: Bytes,
        end: bool,
        trailers: Option<HttpTrailers>,
        scanner: Box<dyn Scan>,
        held: Held,
    ) -> Step {
        let push = Push { scanner, held, chunk, end };
        if push.chunk.len() > INLINE_SCAN_BYTES {
            self.response_side = Side::Scanning { end, trailers };
            return Step::Judge(Box::new(Work(Task::Chunk(push))));
        }
        let pushed = push.run();
        self.scanned(pushed, end, trailers)
    }

    fn scanned_aside(&mut self, outcome: Outcome) -> Step {
        let Side::Scanning { end, trailers } = std::mem::replace(&mut self.response_side, Side::Answered)
        else {
            return self.fail(Direction::Response, TransportFailure::Internal);
        };
        let pushed = outcome.0.and_then(|done| match done {
            Done::Chunk(pushed) => Ok(pushed),
            Done::Body(_) => Err(TransportFailure::Internal),
        });
        self.scanned(pushed, end, trailers)
    }

    fn scanned(
        &mut self,
        pushed: Result<Pushed, TransportFailure>,
        end: bool,
        trailers: Option<HttpTrailers>,
    ) -> Step {
        let tally = &mut self.response_tally;
        let (step, next) = match pushed {
            Ok(Pushed { step, scanner, held }) => {
                tally.held = held.peak();
                (step, Side::Scan { scanner, held })
            }
            Err(failure) => {
                let verdict = Some(failure.verdict());
                (StreamStep { verdict, cut: Some(Cut::Reset), ..StreamStep::default() }, Side::Answered)
            }
        };
        let StreamStep { mut emit, verdict, mut cut } = step;
        if let Some(verdict) = verdict {
            tally.add(verdict);
        }
        if cut.is_some() && !tally.verdict.decision.refuses() {
            // A cut without a reason is still a cut; say at least that we don't know why.
            tally.failed(TransportFailure::Internal);
        }
        if cut.is_none() && tally.verdict.decision.refuses() {
            cut = Some(Cut::Reset);
        }
        if !self.enforce {
            let answer = match trailers {
                Some(trailers) => {
                    self.judge_response_trailers(trailers);
                    reply::trailers(Direction::Response)
                }
                None => reply::body_unchanged(Direction::Response),
            };
            let done = end || cut.is_some();
            self.response_side = if done { Side::Passing } else { next };
            return self.answer(Direction::Response, answer, done);
        }
        match cut {
            Some(Cut::Terminal(terminal)) => {
                emit.extend_from_slice(&terminal);
                let step = self.forward(emit.into(), true);
                self.over = true;
                step
            }
            Some(Cut::Reset) => self.refuse(Direction::Response),
            None => match trailers {
                Some(trailers) => {
                    self.judge_response_trailers(trailers);
                    self.end_with_trailers(emit.into())
                }
                None if end => self.forward(emit.into(), true),
                None => {
                    self.response_side = next;
                    self.forward(emit.into(), false)
                }
            },
        }
    }

    /// Forwards bytes of a response; from then on it can be cut, but no longer refused. A chunk that is held
    /// back whole is answered too, with no bytes: Envoy keeps trailers that came together with it until all
    /// chunks before them are answered, and would wait as we would.
    fn forward(&mut self, bytes: Bytes, end: bool) -> Step {
        self.forwarded += bytes.len() as u64;
        self.answer(Direction::Response, reply::streamed(bytes, end), end)
    }

    /// The end of a forwarded body, then its trailers: the order in which Envoy wants them.
    fn end_with_trailers(&mut self, body: Bytes) -> Step {
        if self.refuses(Direction::Response) {
            return self.refuse(Direction::Response);
        }
        let trailers = reply::trailers(Direction::Response);
        if body.is_empty() {
            return self.answer(Direction::Response, trailers, true);
        }
        match self.answer(Direction::Response, trailers, true) {
            Step::Answer(trailers) => Step::AnswerTwice(Box::new([reply::streamed(body, false), *trailers])),
            step => step,
        }
    }

    // --- Observe ---

    /// A chunk that passes, and whose copy is kept.
    pub(super) fn copy(
        &mut self,
        direction: Direction,
        message: &HttpBody,
        mut body: Vec<u8>,
        mut held: Held,
        mut lost: Option<TransportFailure>,
    ) -> Step {
        let size = body.len() + message.body.len();
        if lost.is_none() && size > self.cap {
            lost = Some(TransportFailure::BodyTooLarge);
        } else if lost.is_none() && !held.resize(size) {
            lost = Some(TransportFailure::Overloaded);
        }
        self.tally(direction).held = held.peak();
        if lost.is_none() {
            body.extend_from_slice(&message.body);
        } else {
            body = Vec::new();
            // Fewer bytes than before always fit.
            let _ = held.resize(0);
        }
        let answer = reply::body_unchanged(direction);
        if message.end_of_stream {
            return self.note(direction, answer, body.into(), held, lost);
        }
        *self.side(direction) = Side::Copy { body, held, lost };
        self.answer(direction, answer, false)
    }

    /// The end of a body that passed: what it would have got is found out aside, so that not even the time
    /// it takes is felt.
    pub(super) fn note(
        &mut self,
        direction: Direction,
        answer: ProcessingResponse,
        body: Bytes,
        held: Held,
        lost: Option<TransportFailure>,
    ) -> Step {
        *self.side(direction) = Side::Passing;
        let job = match lost {
            Some(failure) => Err(failure),
            None => self.job(direction, body, held),
        };
        let started = self.started;
        let tally = self.tally(direction);
        tally.busy += started.elapsed();
        let tally = std::mem::take(tally);
        let note = Note { job, tally, subject: self.subject.clone(), direction };
        Step::AnswerThenNote(Box::new(answer), Box::new(note))
    }
}
