//! Events of a stream: put together per channel, held until their last word is whole.

use std::collections::HashSet;
use std::ops::Deref;

use jiff::Timestamp;

use super::{
    LONGEST_NAME, MOST_CHANNELS, MOST_HELD, OVERLAP, SHORT_NUMBER, StreamScanner, TAIL, WINDOW, note,
};
use crate::body::json::Doc;
use crate::body::redact::{self, placeholder};
use crate::body::sse::{self, Delta};
use crate::engine::Engine;
use crate::finding::{Category, Surface};
use crate::text::map::SpanMap;
use crate::verdict::{Decision, Protocol, StreamStep, TransportFailure, Verdict, error_body};

pub(super) struct Event {
    bytes: Vec<u8>,
    /// From its data back to its bytes.
    map: SpanMap,
    pieces: Vec<Piece>,
    /// Whether it says that the texts before it are over. Kept, because comments may be added to its bytes.
    ends: bool,
}

/// Sums over the events that wait: counting them anew for each would cost the square of their number.
#[derive(Default)]
pub(super) struct Held {
    pub(super) bytes: usize,
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
pub(super) struct Channel {
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
    pub(super) fn events(&mut self, end: bool, now: Timestamp) -> StreamStep {
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

    /// The event by which a client of this stream's API knows that it ended in an error.
    pub(super) fn terminal(&self, verdict: &Verdict, id: &str) -> Vec<u8> {
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
