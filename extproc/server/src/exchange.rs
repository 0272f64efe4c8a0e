//! The request path: one HTTP exchange, from the request's headers to the response's last byte.
//!
//! A state machine: a message from Envoy goes in, a [`Step`] comes out. It knows nothing of sockets,
//! threads or gRPC; whoever drives it carries the steps out (`stream.rs`).
//!
//! Two rules hold everywhere. *Enforce* answers each message with what was decided, and where nothing
//! could be decided with a refusal that names why. *Observe* changes neither a byte nor a status: the same
//! questions are asked and recorded as what would have been.
//!
//! Not guaranteed: that a response which is forwarded while it arrives never leaves in part. It may be cut,
//! but what left before the cut was scanned and let pass.

mod bodies;
mod ending;
mod step;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use sallyport_api::Mode;
use sallyport_engine::{Destination, ResponseHead, TransportFailure};
use sallyport_proto::ext_proc::{HttpBody, HttpHeaders, HttpTrailers, Message, ProcessingRequest};

use crate::budget::Held;
use crate::coding::Coding;
use crate::head::{self, Head};
use crate::observer::Direction;
use crate::reply::{self, Send};
use crate::tally::{Subject, Tally};
use crate::tls::{Inside, OpenedTo};

use ending::unenforceable;
pub(crate) use step::INLINE_SCAN_BYTES;
use step::Side;
pub use step::{Context, Lookup, Note, Outcome, Settled, Step, Work};

/// One HTTP exchange.
#[allow(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub struct Exchange {
    cx: Context,
    enforce: bool,
    cap: usize,
    subject: Subject,
    response: Arc<ResponseHead>,
    request_side: Side,
    response_side: Side,
    request_tally: Tally,
    response_tally: Tally,
    /// Bytes of the response that were forwarded: from then on it can be cut, but no longer refused.
    forwarded: u64,
    /// The response is forwarded while it arrives: its head can no longer be replaced.
    streaming: bool,
    /// The message that is being worked on is a part of a body.
    in_body: bool,
    /// Refused or cut: what still comes means nothing.
    over: bool,
    /// The servers that the connection was opened to; nothing where it is none of TLS.
    opened_to: OpenedTo,
    /// When the message that is being worked on came.
    started: Instant,
    first: bool,
    /// Where the agent made its connection to, if it is captured.
    original: Option<SocketAddr>,
    /// A head that waits for what is found out of its destination, and whether a body follows.
    waiting: Option<(Head, bool)>,
    /// What Envoy is to dial, until it was told.
    dial: Option<SocketAddr>,
}

// === impl Exchange ===

impl Exchange {
    /// A new exchange; nothing has come yet.
    pub fn new(cx: Context) -> Self {
        let spec = cx.judge.spec();
        let subject =
            Subject { observer: Arc::clone(&cx.observer), request: Arc::default(), id: Arc::from("") };
        Self {
            enforce: spec.mode == Mode::Enforce,
            cap: spec.limits.max_body_bytes as usize,
            subject,
            response: Arc::default(),
            request_side: Side::Headers,
            response_side: Side::Headers,
            request_tally: Tally::default(),
            response_tally: Tally::default(),
            forwarded: 0,
            streaming: false,
            in_body: false,
            over: false,
            opened_to: OpenedTo::default(),
            started: Instant::now(),
            first: true,
            original: None,
            waiting: None,
            dial: None,
            cx,
        }
    }

    /// Takes the next message.
    pub fn take(&mut self, message: ProcessingRequest) -> Step {
        self.started = Instant::now();
        if self.over {
            return Step::Wait;
        }
        if self.cx.stop.is_thrown()
            && let Some(step) = self.stopped_by(&message)
        {
            return step;
        }
        if std::mem::take(&mut self.first) {
            // The attribute may carry the id where no header does.
            if let Some(id) = head::id_attribute(&message) {
                self.subject.id = Arc::from(id);
            }
            self.opened_to = OpenedTo::read(&message, self.cx.inside);
            self.original = head::destination_attribute(&message).filter(|_| self.cx.captured);
            if let Some(fault) = unenforceable(&message).filter(|_| self.enforce) {
                tracing::error!("can't enforce with this configuration of Envoy's ext_proc filter: {fault}");
                return self.fail(Direction::Request, TransportFailure::ProtocolError);
            }
        }
        self.in_body = matches!(message.request, Some(Message::RequestBody(_) | Message::ResponseBody(_)));
        match message.request {
            Some(Message::RequestHeaders(m)) => self.request_headers(m),
            Some(Message::RequestBody(m)) => self.request_body(m),
            Some(Message::RequestTrailers(m)) => self.request_trailers(m),
            Some(Message::ResponseHeaders(m)) => self.response_headers(m),
            Some(Message::ResponseBody(m)) => self.response_body(m),
            Some(Message::ResponseTrailers(m)) => self.response_trailers(m),
            // A kind of message that a newer Envoy knows and we don't: there is no answer to it.
            None => self.fail(Direction::Request, TransportFailure::ProtocolError),
        }
    }

    // --- the request ---

    fn request_headers(&mut self, message: HttpHeaders) -> Step {
        if !matches!(self.request_side, Side::Headers) {
            return self
                .disorder(Direction::Request, reply::headers(Direction::Request, Vec::new(), &[], None));
        }
        let mut head = head::request(message.headers, self.cx.upstream.as_ref(), self.cx.inside);
        if !self.cx.captured || head.bad.is_some() {
            return self.request_head(head, message.end_of_stream);
        }
        let Some((original, names)) = self.original.zip(self.cx.names.clone()) else {
            tracing::error!("a captured call without `destination.address`, or without a resolver");
            return self.fail(Direction::Request, TransportFailure::ProtocolError);
        };
        // What is observed goes where it was going. What is enforced goes to the address that was judged, on
        // the port that was judged.
        let port = if self.enforce { head.request.port } else { original.port() };
        self.dial = Some(SocketAddr::new(original.ip(), port));
        if let Some(destination) = names.look(&head.request.host, original.ip()) {
            head.request.destination = destination;
            return self.request_head(head, message.end_of_stream);
        }
        let lookup = Lookup { names, host: head.request.host.clone(), address: original.ip() };
        self.request_side = Side::Resolving;
        self.waiting = Some((head, message.end_of_stream));
        Step::Resolve(Box::new(lookup))
    }

    /// Goes on with a head whose destination was asked for.
    pub fn resolved(&mut self, destination: Destination) -> Step {
        let Some((mut head, end_of_stream)) = self.waiting.take() else {
            return self.fail(Direction::Request, TransportFailure::Internal);
        };
        head.request.destination = destination;
        self.request_head(head, end_of_stream)
    }

    fn request_head(&mut self, head: Head, end_of_stream: bool) -> Step {
        if !head.id.is_empty() {
            self.subject.id = Arc::from(head.id);
        }
        let request = Arc::new(head.request);
        self.subject.request = Arc::clone(&request);
        self.request_tally.open = true;

        // A head that makes no sense is not worth the engine's opinion.
        // CONNECT on a listener that opens what comes through it is a question of the destination only.
        let upgrade = head::is_upgrade(&request);
        let opened = request.method == "CONNECT" && self.cx.inside == Inside::Proxy && !upgrade;
        let verdict = match head.bad {
            Some(why) => head::bad_url(why),
            // Judged by one name and sent to the server of another would be a way around the policy, here or
            // at the upstream.
            None if !self.opened_to.agree(&request) => TransportFailure::Misdirected.verdict(),
            None if opened => self.ask(|judge, now| judge.request_tunnel(&request, now)),
            None => self.ask(|judge, now| judge.request_head(&request, now)),
        };
        self.request_tally.add(verdict);

        // What turns the connection into a tunnel takes it out of our sight, whatever the policy says.
        let tunnel = upgrade || (request.method == "CONNECT" && !opened);
        if tunnel && !self.request_tally.verdict.decision.refuses() {
            self.request_tally.failed(TransportFailure::TunnelDenied);
        }

        // A length that is announced is judged before a byte of it is awaited.
        let mut held = Held::none(&self.cx.budget);
        let body = !end_of_stream && !tunnel && request.method != "CONNECT";
        let length = head::content_length(&request.headers).unwrap_or(0);
        let mut lost = None;
        if body && length > self.cap as u64 {
            lost = Some(TransportFailure::BodyTooLarge);
        } else if body && !held.resize(length as usize) {
            lost = Some(TransportFailure::Overloaded);
        }

        if !self.enforce {
            self.request_side =
                if body { Side::Copy { body: Vec::new(), held, lost } } else { Side::Answered };
            let send = body.then_some(Send::Chunks(Direction::Request));
            let answer = reply::headers(Direction::Request, Vec::new(), &[], send);
            return self.answer(Direction::Request, answer, !body);
        }
        if let Some(failure) = lost {
            self.request_tally.failed(failure);
        }
        if self.refuses(Direction::Request) {
            return self.refuse(Direction::Request);
        }
        // Encoded answers cost a decoding each and partial ones can't be judged: ask for neither.
        let identity = vec![reply::set("accept-encoding", &b"identity"[..])];
        let ranges: &[&str] = if request.header("range").is_some() { &["range", "if-range"] } else { &[] };
        self.request_side = if body { Side::Whole { held } } else { Side::Answered };
        let send = body.then_some(Send::Whole(Direction::Request));
        let answer = reply::headers(Direction::Request, identity, ranges, send);
        self.answer(Direction::Request, answer, !body)
    }

    fn request_body(&mut self, message: HttpBody) -> Step {
        self.request_tally.bytes += message.body.len() as u64;
        match std::mem::replace(&mut self.request_side, Side::Answered) {
            Side::Whole { held } => self.whole(Direction::Request, message, held),
            Side::Copy { body, held, lost } => self.copy(Direction::Request, &message, body, held, lost),
            side => {
                self.request_side = side;
                self.disorder(Direction::Request, reply::body_unchanged(Direction::Request))
            }
        }
    }

    fn request_trailers(&mut self, message: HttpTrailers) -> Step {
        match std::mem::replace(&mut self.request_side, Side::Answered) {
            Side::Copy { body, held, lost } => {
                self.judge_request_trailers(message);
                let answer = reply::trailers(Direction::Request);
                self.note(Direction::Request, answer, body.into(), held, lost)
            }
            // `Whole`: trailers without a body before them.
            Side::Answered | Side::Whole { .. } if self.request_tally.open => {
                self.judge_request_trailers(message);
                if self.refuses(Direction::Request) {
                    return self.refuse(Direction::Request);
                }
                self.answer(Direction::Request, reply::trailers(Direction::Request), true)
            }
            side => {
                self.request_side = side;
                self.disorder(Direction::Request, reply::trailers(Direction::Request))
            }
        }
    }

    // --- the response ---

    fn response_headers(&mut self, message: HttpHeaders) -> Step {
        if !matches!(self.response_side, Side::Headers) {
            return self
                .disorder(Direction::Response, reply::headers(Direction::Response, Vec::new(), &[], None));
        }
        let response = Arc::new(head::response(message.headers));
        self.response = Arc::clone(&response);
        if matches!(self.request_side, Side::Headers | Side::Whole { .. }) {
            // A response to a request that we have not seen to its end. Either Envoy itself gave up on the
            // request (413: its body is longer than what may be held), or it does not send us what we must
            // see. Both are the end of it.
            match (&self.request_side, response.status) {
                // Before it asks us Envoy resolves names, where we only observe. What it can't resolve it
                // answers itself; there was no call to judge.
                (Side::Headers, 503) if !self.enforce => {
                    self.request_side = Side::Passing;
                    self.response_side = Side::Passing;
                    let answer = reply::headers(Direction::Response, Vec::new(), &[], None);
                    return self.answer(Direction::Request, answer, false);
                }
                (_, 413) => self.request_tally.failed(TransportFailure::BodyTooLarge),
                // Envoy's own words are gone by then; it says 400 before it sends us the request.
                (Side::Headers, 400) => self
                    .request_tally
                    .add(head::bad_url("the request has no Host, or a path that can't be read")),
                _ => self.request_tally.failed(TransportFailure::ProtocolError),
            }
            if self.enforce {
                return self.refuse(Direction::Request);
            }
            self.request_side = Side::Passing;
            self.response_side = Side::Passing;
            let answer = reply::headers(Direction::Response, Vec::new(), &[], None);
            return self.answer(Direction::Request, answer, true);
        }
        self.response_tally.open = true;
        let request = Arc::clone(&self.subject.request);
        let verdict = self.ask(|judge, now| judge.response_head(&request, &response, now));
        self.response_tally.add(verdict);
        let tunnel = response.status == 101;
        if tunnel && !self.response_tally.verdict.decision.refuses() {
            self.response_tally.failed(TransportFailure::TunnelDenied);
        }
        let body = !message.end_of_stream && !tunnel && request.method != "CONNECT";
        let coding = Coding::of(&response.headers);
        let length = head::content_length(&response.headers).filter(|l| *l <= self.cap as u64);
        let mut held = Held::none(&self.cx.budget);
        if body {
            let failure = if coding == Coding::Other {
                Some(TransportFailure::BadEncoding)
            } else if !held.resize(length.unwrap_or(0) as usize) {
                Some(TransportFailure::Overloaded)
            } else {
                None
            };
            if let Some(failure) = failure {
                self.response_tally.failed(failure);
            }
        }
        if self.refuses(Direction::Response) {
            return self.refuse(Direction::Response);
        }
        if !body {
            self.response_side = Side::Answered;
            let answer = reply::headers(Direction::Response, Vec::new(), &[], None);
            return self.answer(Direction::Response, answer, true);
        }

        // Known and short: held as a whole, so that a refusal is still a proper answer. Everything else
        // is forwarded while it arrives: an LLM's tokens can't wait for the last one.
        let whole = length.is_some();
        let identity = coding == Coding::Identity;
        let (side, send, remove): (_, _, &[&str]) = if !self.enforce {
            let side = if whole || !identity {
                Ok(Side::Copy { body: Vec::new(), held, lost: None })
            } else {
                self.scanner(held)
            };
            let lost = |failure| Side::Copy {
                body: Vec::new(),
                held: Held::none(&self.cx.budget),
                lost: Some(failure),
            };
            (Ok(side.unwrap_or_else(lost)), Send::Chunks(Direction::Response), &[])
        } else if whole {
            (Ok(Side::Whole { held }), Send::Whole(Direction::Response), &[])
        } else if identity {
            // Envoy keeps a content-length through the change of mode; with other bytes behind it the
            // client would cut the body short, or take the rest for the next response.
            (self.scanner(held), Send::Stream, &["content-length"])
        } else {
            // Forwarded as it was inspected: without its encoding.
            let side = Ok(Side::Hold { body: Vec::new(), held });
            (side, Send::Stream, &["content-length", "content-encoding", "etag"])
        };
        self.response_side = match side {
            Ok(side) => side,
            Err(failure) => {
                self.response_tally.failed(failure);
                return self.refuse(Direction::Response);
            }
        };
        self.streaming = send == Send::Stream;
        let answer = reply::headers(Direction::Response, Vec::new(), remove, Some(send));
        self.answer(Direction::Response, answer, false)
    }

    fn response_body(&mut self, message: HttpBody) -> Step {
        self.response_tally.bytes += message.body.len() as u64;
        match std::mem::replace(&mut self.response_side, Side::Answered) {
            Side::Whole { held } => self.whole(Direction::Response, message, held),
            Side::Copy { body, held, lost } => self.copy(Direction::Response, &message, body, held, lost),
            Side::Scan { scanner, held } => {
                self.scan(message.body, message.end_of_stream, None, scanner, held)
            }
            Side::Hold { body, held } => self.hold(&message, body, held),
            // Envoy may send the end of a stream twice (envoy#46237), and takes one answer to both.
            Side::Answered if self.enforce && message.body.is_empty() && message.end_of_stream => Step::Wait,
            side => {
                self.response_side = side;
                self.disorder(Direction::Response, reply::body_unchanged(Direction::Response))
            }
        }
    }

    fn response_trailers(&mut self, message: HttpTrailers) -> Step {
        match std::mem::replace(&mut self.response_side, Side::Answered) {
            Side::Copy { body, held, lost } => {
                self.judge_response_trailers(message);
                let answer = reply::trailers(Direction::Response);
                self.note(Direction::Response, answer, body.into(), held, lost)
            }
            Side::Scan { scanner, held } => self.scan(Bytes::new(), true, Some(message), scanner, held),
            Side::Hold { body, held } => {
                self.response_side = Side::Judging { whole: false, last: true, trailers: Some(message) };
                self.judge(Direction::Response, body.into(), held)
            }
            Side::Answered | Side::Whole { .. } if self.response_tally.open => {
                self.judge_response_trailers(message);
                if self.refuses(Direction::Response) {
                    return self.refuse(Direction::Response);
                }
                self.answer(Direction::Response, reply::trailers(Direction::Response), true)
            }
            side => {
                self.response_side = side;
                self.disorder(Direction::Response, reply::trailers(Direction::Response))
            }
        }
    }
}
