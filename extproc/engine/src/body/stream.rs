//! Scanning a response while it is forwarded.
//!
//! Three shapes, told apart by the first bytes, never by the declared type:
//!
//! - **Event streams** (SSE). Whole events only are forwarded. Texts that a model writes piece by piece are
//!   put together per channel, so that a finding split over events is found. An event is held back while
//!   the last word of its text is not finished (at most [`MOST_HELD`] bytes of text), so that a token or a
//!   card number is whole before any of it leaves; then it can be redacted across events. An order of
//!   several words is noticed when its last word arrives: the words before it may have left, the stream
//!   ends there.
//! - **JSON documents.** Held whole, up to the body cap: nobody can use half a document.
//! - **Everything else.** Held up to [`WINDOW`], then forwarded behind a window of [`OVERLAP`] bytes in
//!   which every rule has been run.
//!
//! What is not guaranteed: a pattern wider than [`OVERLAP`] that crosses windows, or one split between a
//! word and the next in two channels of one stream.

mod events;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use jiff::Timestamp;

use self::events::{Channel, Event, Held};
use super::redact;
use super::segment::utf16_mark;
use super::sse;
use crate::engine::Engine;
use crate::message::{RequestHead, ResponseHead};
use crate::verdict::{Cut, Decision, Protocol, StreamStep, TransportFailure, Verdict, error_body};

/// Text of one channel that may wait for the end of its last word: longer than any token that a shipped
/// rule knows, except keys of many lines, whose first line is enough to end the stream.
const MOST_HELD: usize = 2048;
/// Text of a channel that is kept behind for patterns of several words.
const TAIL: usize = 1024;
/// Bytes of a body of unknown shape that are held before any is forwarded.
const WINDOW: usize = 64 << 10;
/// Bytes that stay behind the window.
const OVERLAP: usize = 4 << 10;
/// A name of an event may be this long (`response.function_call_arguments.delta`), a number this.
const LONGEST_NAME: usize = 48;
const SHORT_NUMBER: usize = 8;
/// Channels of one stream; an honest one has a handful.
const MOST_CHANNELS: usize = 64;

enum Shape {
    Unknown,
    Events,
    Document,
    Bytes,
    /// The stream was cut: whatever still comes goes nowhere.
    Ended,
}

/// Incremental scanning of one response with bounded hold-back.
pub struct StreamScanner<E = Arc<Engine>> {
    engine: E,
    request: RequestHead,
    response: ResponseHead,
    answers: Protocol,
    shape: Shape,
    /// Bytes that belong to no whole event yet, or to the window.
    buffer: Vec<u8>,
    /// Up to where `buffer` holds no end of an event.
    cursor: sse::Cursor,
    /// The mark of a body in UTF-16. Only its start shows what it is, and windows of it have none.
    mark: Option<[u8; 2]>,
    /// For bodies of unknown shape: how long `buffer` has to be before it is looked at again.
    next: usize,
    /// Events that wait for the end of a word.
    waiting: VecDeque<Event>,
    held: Held,
    channels: HashMap<String, Channel>,
    /// The end of what stood beside the data of the events so far.
    beside: Vec<u8>,
    /// Whether any byte has been forwarded.
    emitted: bool,
}

impl<E> std::fmt::Debug for StreamScanner<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamScanner").field("buffer", &self.buffer.len()).finish_non_exhaustive()
    }
}

impl<E: Deref<Target = Engine>> StreamScanner<E> {
    pub(crate) fn new(engine: E, request: RequestHead, response: ResponseHead, answers: Protocol) -> Self {
        Self {
            engine,
            request,
            response,
            answers,
            shape: Shape::Unknown,
            buffer: Vec::new(),
            cursor: sse::Cursor::default(),
            mark: None,
            next: WINDOW,
            waiting: VecDeque::new(),
            held: Held::default(),
            channels: HashMap::new(),
            beside: Vec::new(),
            emitted: false,
        }
    }

    /// A scanner of what is known to be events, whatever its first line says.
    pub(crate) fn of_events(engine: E, request: RequestHead, response: ResponseHead) -> Self {
        Self { shape: Shape::Events, ..Self::new(engine, request, response, Protocol::Unknown) }
    }

    /// Bytes held back right now.
    pub fn held(&self) -> usize {
        self.buffer.len() + self.held.bytes
    }

    /// Takes a chunk; `end` says that it is the last. Returns what may be forwarded now.
    pub fn push(&mut self, chunk: &[u8], end: bool, now: Timestamp) -> StreamStep {
        self.buffer.extend_from_slice(chunk);
        let mut mark: &[u8] = b"";
        if matches!(self.shape, Shape::Unknown) {
            // White space to begin with keeps a connection alive; it decides nothing and needs no holding.
            if !end && self.buffer.len() > MOST_HELD && self.buffer.iter().all(u8::is_ascii_whitespace) {
                return StreamStep { emit: std::mem::take(&mut self.buffer), ..StreamStep::default() };
            }
            let body = self.buffer.strip_prefix(sse::BOM).unwrap_or(&self.buffer);
            let start = body.iter().position(|b| !b.is_ascii_whitespace());
            // `retry:` is the longest field name; fewer bytes than that decide nothing.
            let enough = end || start.is_some_and(|s| body.len() - s >= 6);
            if !enough {
                return StreamStep::default();
            }
            // By the first line only: to look further would let the cut of the chunks decide. Events after
            // something else are found by the window, or at the end.
            self.shape = if sse::declared(&self.response) || sse::sniff(&self.buffer) {
                // A byte order mark is no part of the first line.
                if self.buffer.starts_with(sse::BOM) {
                    self.buffer.drain(..sse::BOM.len());
                    mark = sse::BOM;
                }
                Shape::Events
            } else if start.is_some_and(|s| matches!(body[s], b'{' | b'[')) {
                Shape::Document
            } else {
                Shape::Bytes
            };
        }
        let mut step = match self.shape {
            Shape::Events => self.events(end, now),
            Shape::Document => self.document(end, now),
            Shape::Bytes | Shape::Unknown => self.bytes(end, now),
            Shape::Ended => {
                self.buffer.clear();
                StreamStep::default()
            }
        };
        if !mark.is_empty() {
            step.emit.splice(0..0, mark.iter().copied());
        }
        if step.cut.is_some() {
            self.shape = Shape::Ended;
            self.buffer = Vec::new();
            self.waiting.clear();
            self.held = Held::default();
            self.channels.clear();
        }
        self.emitted |= !step.emit.is_empty();
        if let Some(v) = &mut step.verdict {
            v.findings.truncate(64);
        }
        step
    }

    // === Documents and other bytes

    fn cap(&self) -> usize {
        self.engine.spec().limits.max_body_bytes as usize
    }

    fn document(&mut self, end: bool, now: Timestamp) -> StreamStep {
        if !end {
            if self.buffer.len() > self.cap() {
                return self.refuse(TransportFailure::BodyTooLarge.verdict());
            }
            return StreamStep::default();
        }
        self.whole(now)
    }

    /// The bytes that are held, as they are read: in UTF-16 with a mark before them, where it has gone out
    /// already. Nothing is cut out of UTF-16, so no place has to be led back.
    fn window(&self) -> Cow<'_, [u8]> {
        match self.mark {
            Some(mark) if self.emitted => Cow::Owned([&mark, &self.buffer[..]].concat()),
            _ => Cow::Borrowed(&self.buffer),
        }
    }

    /// The rest of the body, judged as a body.
    fn whole(&mut self, now: Timestamp) -> StreamStep {
        let mut judged = self.engine.response_body(&self.request, &self.response, &self.window(), now);
        let body = std::mem::take(&mut self.buffer);
        if judged.verdict.decision.refuses() {
            return self.refuse(judged.verdict);
        }
        let emit = judged.rewritten.take().unwrap_or(body);
        StreamStep { emit, verdict: interesting(judged.verdict), cut: None }
    }

    fn bytes(&mut self, end: bool, now: Timestamp) -> StreamStep {
        if end {
            return self.whole(now);
        }
        if self.buffer.len() <= self.next {
            return StreamStep::default();
        }
        // Events after something else, which their readers skip.
        if sse::is_stream(false, &self.buffer) {
            self.shape = Shape::Events;
            return self.events(false, now);
        }
        if !self.emitted {
            self.mark = utf16_mark(&self.buffer);
        }
        let (verdict, edits) =
            self.engine.response_part(&self.request, &self.response, &self.window(), &[], now);
        if verdict.decision.refuses() {
            return self.refuse(verdict);
        }
        // What reaches into the overlap stays behind whole: the next window sees it again, to its end.
        let mut keep = self.buffer.len() - OVERLAP;
        while let Some(e) = edits.iter().find(|e| e.start < keep && keep < e.end) {
            keep = e.start;
        }
        // A character has three continuation bytes at most; more of them are none, and hold nothing back.
        let inside = self.buffer[..=keep].iter().rev().take(4).take_while(|b| **b & 0xc0 == 0x80).count();
        if inside < 4 {
            keep = keep.saturating_sub(inside);
        }
        if self.mark.is_some() {
            keep &= !1;
        }
        // One finding that goes on and on keeps everything behind it: it ends where a document would.
        if keep == 0 && self.buffer.len() > self.cap().max(2 * WINDOW) {
            return self.refuse(TransportFailure::BodyTooLarge.verdict());
        }
        let edits = edits.into_iter().filter(|e| e.end <= keep).collect();
        let emit = redact::apply(&self.buffer[..keep], edits);
        self.buffer.drain(..keep);
        // What stays is not read again for every chunk.
        self.next = self.buffer.len() + WINDOW - OVERLAP;
        StreamStep { emit, verdict: interesting(verdict), cut: None }
    }

    /// Ends the stream with a verdict.
    fn refuse(&mut self, verdict: Verdict) -> StreamStep {
        let id = self.request.header("x-request-id").unwrap_or_default();
        let cut = match self.shape {
            Shape::Events => Cut::Terminal(self.terminal(&verdict, id)),
            // Nothing has left: the client gets an error of the usual shape instead of a part.
            _ if !self.emitted => Cut::Terminal(error_body(&verdict, id, &self.answers).into_bytes()),
            _ => Cut::Reset,
        };
        StreamStep { emit: Vec::new(), verdict: Some(verdict), cut: Some(cut) }
    }
}

fn interesting(verdict: Verdict) -> Option<Verdict> {
    (verdict.decision != Decision::Allow || !verdict.findings.is_empty()).then_some(verdict)
}

/// Adds a verdict to what a step has brought so far.
fn note(step: &mut StreamStep, verdict: Verdict) {
    let Some(new) = interesting(verdict) else { return };
    match &mut step.verdict {
        None => step.verdict = Some(new),
        Some(old) => {
            for f in new.findings {
                if !old.findings.iter().any(|o| o.rule == f.rule && o.evidence == f.evidence) {
                    old.findings.push(f);
                }
            }
            for r in new.reasons {
                if !old.reasons.contains(&r) {
                    old.reasons.push(r);
                }
            }
            old.score = old.score.max(new.score);
            if new.decision > old.decision {
                old.decision = new.decision;
                old.code = new.code;
                old.message = new.message;
            }
        }
    }
}
