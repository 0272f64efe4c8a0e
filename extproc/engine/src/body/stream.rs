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

use std::borrow::Cow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use jiff::Timestamp;

use super::json::Doc;
use super::redact::{self, placeholder};
use super::segment::utf16_mark;
use super::sse::{self, Delta};
use crate::engine::Engine;
use crate::finding::{Category, Surface};
use crate::message::{RequestHead, ResponseHead};
use crate::text::map::SpanMap;
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

struct Event {
    bytes: Vec<u8>,
    /// From its data back to its bytes.
    map: SpanMap,
    pieces: Vec<Piece>,
    /// Whether it says that the texts before it are over. Kept, because comments may be added to its bytes.
    ends: bool,
}

/// Sums over the events that wait: counting them anew for each would cost the square of their number.
#[derive(Default)]
struct Held {
    bytes: usize,
    text: usize,
    /// Events without text (a stop reason, an end mark): they say that the texts before them are over.
    ends: usize,
}

/// A delta, and where its text stands in its channel.
struct Piece {
    delta: Delta,
    start: usize,
    /// Ranges of its text to be cut, and what stands there instead.
    cuts: Vec<(usize, usize, String)>,
}

#[derive(Default)]
struct Channel {
    /// The last [`TAIL`] bytes or more of the text so far.
    tail: String,
    /// Where `tail` starts in the text.
    base: usize,
    /// Up to where the text is finished words.
    settled: usize,
}

impl Channel {
    fn end(&self) -> usize {
        self.base + self.tail.len()
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

    // === Events

    fn events(&mut self, end: bool, now: Timestamp) -> StreamStep {
        let mut step = StreamStep::default();
        let mut at = 0;
        loop {
            let len = match sse::event_end(&self.buffer[at..], &mut self.cursor) {
                Some(len) => len,
                // What follows the last event is dropped by readers, but it is forwarded, so it is judged.
                None if end && at < self.buffer.len() => {
                    self.cursor = sse::Cursor::default();
                    self.buffer.len() - at
                }
                None => break,
            };
            let bytes = self.buffer[at..at + len].to_vec();
            at += len;
            if let Some(refused) = self.event(bytes, &mut step, now) {
                let mut last = self.refuse(refused);
                last.emit = std::mem::take(&mut step.emit);
                return last;
            }
            // After every event, so that what leaves does not depend on how the bytes were cut into chunks.
            self.release(&mut step.emit, false);
        }
        self.buffer.drain(..at);
        if self.buffer.len() > self.cap() {
            let mut last = self.refuse(TransportFailure::BodyTooLarge.verdict());
            last.emit = step.emit;
            return last;
        }
        self.release(&mut step.emit, end);
        step
    }

    /// Judges one event; returns the verdict that ends the stream, if one does.
    fn event(&mut self, mut bytes: Vec<u8>, step: &mut StreamStep, now: Timestamp) -> Option<Verdict> {
        let (mut data, mut map) = sse::data(&bytes);
        let mut pieces = pieces(&data);
        // Pieces of longer texts are judged with what came before them; alone, half a token would be cut
        // out and its other half would pass.
        let skip: Vec<usize> = pieces.iter().map(|p| p.bytes.start).collect();
        let (verdict, edits) =
            self.engine.response_part(&self.request, &self.response, data.as_bytes(), &skip, now);
        if verdict.decision.refuses() {
            return Some(verdict);
        }
        note(step, verdict);
        if !edits.is_empty() {
            bytes = with_data(&bytes, &redact::apply(data.as_bytes(), edits));
            (data, map) = sse::data(&bytes);
            pieces = self::pieces(&data);
        }
        // Lines that are no data (ids, names, comments) are read by somebody too.
        // What they held before is read again with them: to a reader of plain text it is one text.
        let rest = other_lines(&bytes);
        if !rest.is_empty() {
            self.beside.extend_from_slice(&rest);
            let rest = &self.beside;
            let (verdict, _) = self.engine.response_part(&self.request, &self.response, rest, &[], now);
            if verdict.decision >= Decision::Redact {
                return Some(verdict.unredactable());
            }
            note(step, verdict);
            self.beside.drain(..self.beside.len().saturating_sub(TAIL));
        }
        if self.channels.len() + pieces.len() > MOST_CHANNELS {
            // An answer of many blocks opens one channel after the other; those that nothing waits for any
            // more are over.
            let open: HashSet<&str> =
                self.waiting.iter().flat_map(|e| &e.pieces).map(|p| p.delta.channel.as_str()).collect();
            self.channels
                .retain(|name, _| open.contains(name.as_str()) || pieces.iter().any(|p| p.channel == *name));
            let new = pieces.iter().filter(|p| !self.channels.contains_key(&p.channel)).count();
            if self.channels.len() + new > MOST_CHANNELS {
                return Some(TransportFailure::ProtocolError.verdict());
            }
        }
        let ends = pieces.is_empty() && !is_comment(&bytes);
        let mut event = Event { bytes, map, pieces: Vec::new(), ends };
        let mut grown: Vec<(String, Surface, usize)> = Vec::new();
        for delta in pieces {
            let channel = self.channels.entry(delta.channel.clone()).or_default();
            let start = channel.end();
            channel.tail.push_str(&delta.text);
            if !grown.iter().any(|(c, ..)| *c == delta.channel) {
                grown.push((delta.channel.clone(), delta.surface, start));
            }
            event.pieces.push(Piece { delta, start, cuts: Vec::new() });
        }
        self.held.bytes += event.bytes.len();
        match self.waiting.back_mut() {
            // Comments wait with the event before them: many small ones must not cost more than their bytes.
            Some(last)
                if event.pieces.is_empty() && is_comment(&event.bytes) && last.bytes.len() < OVERLAP =>
            {
                last.bytes.append(&mut event.bytes);
            }
            _ => {
                self.held.text += event.text();
                self.held.ends += usize::from(event.ends);
                self.waiting.push_back(event);
            }
        }
        for (name, surface, from) in grown {
            if let Some(refused) = self.channel(&name, surface, from, step, now) {
                return Some(refused);
            }
        }
        None
    }

    /// Judges a channel that grew from `from` on.
    fn channel(
        &mut self,
        name: &str,
        surface: Surface,
        from: usize,
        step: &mut StreamStep,
        now: Timestamp,
    ) -> Option<Verdict> {
        let channel = self.channels.get(name)?;
        let base = channel.base;
        let (mut verdict, cuts) =
            self.engine.judge_texts(&self.request, &self.response, &[(surface, &channel.tail)], now);
        if verdict.decision.refuses() {
            return Some(verdict);
        }
        let gone = self
            .waiting
            .iter()
            .flat_map(|e| &e.pieces)
            .filter(|p| p.delta.channel == name)
            .map(|p| p.start)
            .min();
        for (_, start, end, category) in cuts {
            let (start, end) = (base + start, base + end);
            let left = gone.is_none_or(|g| start < g);
            if end <= from && left {
                // Seen, and cut, when it came.
                continue;
            }
            if left {
                // Its beginning has gone out already: what can't be redacted is refused.
                return Some(verdict.unredactable());
            }
            self.cut(name, start, end, category);
        }
        verdict.findings.retain(|f| base + f.end > from);
        if !verdict.findings.is_empty() {
            note(step, verdict);
        }
        let channel = self.channels.get_mut(name)?;
        channel.settled = channel.end() - unfinished(&channel.tail);
        if channel.tail.len() > 4 * TAIL {
            let mut cut = channel.tail.len() - TAIL.max(channel.end() - channel.settled);
            while !channel.tail.is_char_boundary(cut) {
                cut -= 1;
            }
            channel.tail.drain(..cut);
            channel.base += cut;
        }
        None
    }

    /// Notes that `start..end` of a channel is to be cut out of the events that hold it.
    fn cut(&mut self, channel: &str, start: usize, end: usize, category: Category) {
        let mut first = true;
        for piece in self.waiting.iter_mut().flat_map(|e| &mut e.pieces) {
            let span = (piece.start, piece.start + piece.delta.text.len());
            if piece.delta.channel != channel || span.1 <= start || end <= span.0 {
                continue;
            }
            let cut = (start.max(span.0) - span.0, end.min(span.1) - span.0);
            let with = if first { placeholder(category.as_str()) } else { String::new() };
            first = false;
            // A finding that grew replaces what was noted for its beginning; findings that overlap are
            // both cut out, and become one when the event is written.
            if piece.cuts.iter().any(|(s, e, _)| *s <= cut.0 && cut.1 <= *e) {
                continue;
            }
            piece.cuts.retain(|(s, e, _)| *s < cut.0 || cut.1 < *e);
            piece.cuts.push((cut.0, cut.1, with));
        }
    }

    /// Moves events whose texts are finished words to `out`; all of them at the end.
    fn release(&mut self, out: &mut Vec<u8>, all: bool) {
        while let Some(event) = self.waiting.front() {
            let settled = event.pieces.iter().all(|p| {
                let end = p.start + p.delta.text.len();
                self.channels.get(&p.delta.channel).is_none_or(|c| end <= c.settled)
            });
            // One text that pauses within a word must not hold back what others say meanwhile.
            let full =
                self.held.text - event.text() > MOST_HELD || self.held.bytes - event.bytes.len() > WINDOW;
            if !all && !settled && !full && self.held.ends == 0 {
                return;
            }
            if let Some(event) = self.waiting.pop_front() {
                self.held.bytes -= event.bytes.len();
                self.held.text -= event.text();
                self.held.ends -= usize::from(event.ends);
                out.extend_from_slice(&event.finish());
            }
        }
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

    /// The event by which a client of this stream's API knows that it ended in an error.
    fn terminal(&self, verdict: &Verdict, id: &str) -> Vec<u8> {
        let error = error_body(verdict, id, &self.answers);
        match &self.answers {
            Protocol::Mcp { .. } => format!("event: message\ndata: {error}\n\n"),
            // OpenAI's clients raise on a `data:` event with `error`, and wait for `[DONE]`; Anthropic's
            // raise on the event named `error`. Both read this.
            _ => format!("event: error\ndata: {error}\n\ndata: [DONE]\n\n"),
        }
        .into_bytes()
    }
}

impl Event {
    /// Bytes of the texts that it holds pieces of.
    fn text(&self) -> usize {
        self.pieces.iter().map(|p| p.delta.text.len()).sum()
    }

    fn finish(mut self) -> Vec<u8> {
        let mut cuts: Vec<(usize, usize, String)> = Vec::new();
        for p in &mut self.pieces {
            for (start, end, with) in p.cuts.drain(..) {
                let (s, e) = p.delta.map.as_ref().map_or((start, end), |m| m.back(start, end));
                let (s, e) = self.map.back(p.delta.bytes.start + s, p.delta.bytes.start + e);
                cuts.push((s, e, with));
            }
        }
        if cuts.is_empty() {
            return self.bytes;
        }
        let edits = cuts.into_iter().map(|(start, end, with)| redact::Edit { start, end, with }).collect();
        redact::apply(&self.bytes, edits)
    }
}

/// The pieces of longer texts in an event's data.
fn pieces(data: &str) -> Vec<Delta> {
    Doc::parse(data).map_or_else(|_| Vec::new(), |doc| sse::deltas(&doc))
}

/// The event with other data.
fn with_data(event: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out: Vec<u8> = lines(event)
        .filter(|l| sse::data_line(l).is_none() && l.iter().any(|b| !matches!(b, b'\n' | b'\r')))
        .flatten()
        .copied()
        .collect();
    for line in data.split(|b| matches!(b, b'\n' | b'\r')) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.push(b'\n');
    }
    out.push(b'\n');
    out
}

/// What an event holds besides its data, save what can hold no text: names of events, and numbers.
fn other_lines(event: &[u8]) -> Vec<u8> {
    let dull = |line: &[u8]| {
        let line = line.trim_ascii();
        if let Some(name) = line.strip_prefix(b"event:") {
            let name = name.trim_ascii();
            return name.len() <= LONGEST_NAME
                && name.iter().all(|b| b.is_ascii_lowercase() || b"._-".contains(b));
        }
        let number = [&b"id:"[..], b"retry:", b":"].iter().find_map(|f| line.strip_prefix(*f));
        let number = number.unwrap_or(line).trim_ascii();
        number.len() <= SHORT_NUMBER && number.iter().all(u8::is_ascii_digit)
    };
    lines(event).filter(|l| sse::data_line(l).is_none() && !dull(l)).flatten().copied().collect()
}

fn lines(event: &[u8]) -> impl Iterator<Item = &[u8]> {
    event.split_inclusive(|b| matches!(b, b'\n' | b'\r'))
}

fn is_comment(event: &[u8]) -> bool {
    event.starts_with(b":") || event.iter().all(u8::is_ascii_whitespace)
}

/// Bytes of the unfinished word at the end of a text: a run without white space, or of digits in groups.
fn unfinished(text: &str) -> usize {
    let word = text.len() - text.trim_end_matches(|c: char| !c.is_whitespace()).len();
    let digits = text.len()
        - text
            .trim_end_matches(|c: char| c.is_ascii_digit() || matches!(c, ' ' | '-' | '.' | '(' | ')' | '+'))
            .len();
    word.max(if text[text.len() - digits..].bytes().any(|b| b.is_ascii_digit()) { digits } else { 0 })
        .min(MOST_HELD)
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
