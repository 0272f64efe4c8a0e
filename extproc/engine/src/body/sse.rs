//! Server-sent events: cutting a stream into events, and finding the text in them.
//!
//! Source: the WHATWG HTML standard, section 9.2 (server-sent events).

use std::fmt::Write as _;
use std::ops::Range;

use super::json::{Doc, Kind};
use crate::finding::Surface;
use crate::message::ResponseHead;
use crate::text::map::SpanMap;

/// Whether a stream's first bytes are those of an event stream.
pub(crate) fn sniff(head: &[u8]) -> bool {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let start = head.iter().position(|b| !matches!(b, b'\r' | b'\n')).unwrap_or(head.len());
    let line = &head[start..];
    line.starts_with(b":")
        || ["data:", "event:", "id:", "retry:"].iter().any(|f| line.starts_with(f.as_bytes()))
}

/// Whether a body is to be read as an event stream: by its declared type, by how it begins, or by a line
/// that holds an event's JSON. Readers of events skip what they don't know, so that a stream may begin with
/// anything; and clients of the LLM APIs read events whatever the type says.
pub(crate) fn is_stream(declared: bool, body: &[u8]) -> bool {
    declared
        || sniff(body)
        || memchr::memmem::find_iter(body, b"data:").any(|at| {
            let line_start = at == 0 || matches!(body[at - 1], b'\n' | b'\r');
            let rest = &body[at + 5..];
            line_start && rest.strip_prefix(b" ").unwrap_or(rest).starts_with(b"{")
        })
}

/// Whether a response says of itself that it is an event stream.
pub(crate) fn declared(response: &ResponseHead) -> bool {
    response.header("content-type").is_some_and(|t| {
        let t = t.split(';').next().unwrap_or_default().trim();
        t.eq_ignore_ascii_case("text/event-stream")
    })
}

/// How far a search for an event's end has come: the start of the line it is in, and the first byte that
/// was not looked at. Without it, an event that arrives byte by byte would cost the square of its length.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Looked {
    line: usize,
    at: usize,
}

/// The length of the first whole event in `bytes`, its blank line included.
pub(crate) fn event_end(bytes: &[u8], looked: &mut Looked) -> Option<usize> {
    while let Some(n) = memchr::memchr2(b'\n', b'\r', &bytes[looked.at..]) {
        let line_end = looked.at + n;
        let next = if bytes[line_end..].starts_with(b"\r\n") { line_end + 2 } else { line_end + 1 };
        // A lone CR at the very end may be half of a CRLF.
        if bytes[line_end] == b'\r' && next == bytes.len() {
            looked.at = line_end;
            return None;
        }
        if line_end == looked.line {
            *looked = Looked::default();
            return Some(next);
        }
        *looked = Looked { line: next, at: next };
    }
    looked.at = bytes.len();
    None
}

/// One string of an event that is part of a longer text.
#[derive(Debug)]
pub(crate) struct Delta {
    /// What the pieces of one text have in common.
    pub(crate) channel: String,
    pub(crate) surface: Surface,
    pub(crate) text: String,
    /// The string's bytes in the event, between its quotes.
    pub(crate) bytes: Range<usize>,
    /// The way back over escapes.
    pub(crate) map: Option<SpanMap>,
}

/// Where the data of an event stands in it: the ranges of its `data:` lines.
pub(crate) fn data(event: &[u8]) -> Vec<Range<usize>> {
    let mut out = Vec::new();
    let mut at = 0;
    for line in event.split_inclusive(|b| matches!(b, b'\n' | b'\r')) {
        if let Some(rest) = line.strip_prefix(b"data:") {
            let skip = usize::from(rest.first() == Some(&b' '));
            let end = at + line.len() - line.iter().rev().take_while(|b| matches!(b, b'\n' | b'\r')).count();
            out.push((at + 5 + skip).min(end)..end);
        }
        at += line.len();
    }
    out
}

/// Names of members whose strings are pieces of a longer text, in the streams of the LLM APIs.
const PIECES: [&str; 16] = [
    "content",
    "text",
    "delta",
    "arguments",
    "partial_json",
    "thinking",
    "reasoning",
    "reasoning_content",
    "response",
    "refusal",
    "completion",
    "generated_text",
    "generation",
    "outputText",
    "output",
    "input",
];

/// The pieces of longer texts that an event's data holds. `at` is where the data starts in the event.
pub(crate) fn deltas(doc: &Doc<'_>, at: usize) -> Vec<Delta> {
    let mut out = Vec::new();
    for id in 0..doc.len() {
        let node = doc.node(id);
        if node.kind != Kind::String {
            continue;
        }
        let Some(name) = doc.name(id).filter(|n| PIECES.contains(&n.as_ref())) else { continue };
        let Some((text, map)) = doc.string(id).filter(|(t, _)| !t.is_empty()) else { continue };
        let pointer = doc.pointer(id);
        // Pieces of several texts interleave: choices, output items and tool calls carry their index. Only
        // where the API has it there: a member that its clients skip must not part what they put together.
        let mut channel = pointer.clone();
        if !pointer.starts_with("/choices/") {
            for name in ["index", "output_index", "content_index"] {
                index(doc, Doc::ROOT, name, &mut channel);
            }
        }
        for holder in doc.ancestors(id).filter(|a| *a != Doc::ROOT) {
            index(doc, holder, "index", &mut channel);
        }
        let tool = matches!(&*name, "arguments" | "partial_json") || pointer.contains("tool_calls");
        let surface = if tool { Surface::ToolCall } else { Surface::ResponseBody };
        out.push(Delta {
            channel,
            surface,
            text: text.into_owned(),
            bytes: at + node.span().start + 1..at + node.span().end - 1,
            map,
        });
    }
    out
}

/// Adds an index to a channel's name. `1`, `1.0` and `"1"` are one index to a client.
fn index(doc: &Doc<'_>, holder: usize, name: &str, channel: &mut String) {
    if let Some(n) = doc.get(holder, name) {
        let number = doc.raw(n).trim_matches('"').parse::<f64>();
        let number = number.map_or_else(|_| "?".to_owned(), |n| (n + 0.0).to_string());
        let _ = write!(channel, "#{number}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_end_at_a_blank_line_whatever_its_line_ends() {
        assert_eq!(event_end(b"data: a\n\ndata: b"), Some(9));
        assert_eq!(event_end(b"data: a\r\n\r\nx"), Some(11));
        assert_eq!(event_end(b"data: a\r\rx"), Some(9));
        assert_eq!(event_end(b"data: a\n"), None);
        assert_eq!(event_end(b"data: a\r\n\r"), None);
        assert_eq!(event_end(b"\n"), Some(1));
    }

    fn event_end(bytes: &[u8]) -> Option<usize> {
        // Byte by byte and at once must agree.
        let mut looked = Looked::default();
        let slow = (0..=bytes.len()).find_map(|n| super::event_end(&bytes[..n], &mut looked));
        let once = super::event_end(bytes, &mut Looked::default());
        assert!(slow.is_none() || slow == once || slow == once.map(|n| n - 1), "{slow:?} {once:?}");
        once
    }

    #[test]
    fn data_lines_are_found() {
        let event = b"event: x\ndata: one\ndata:two\n\n";
        let lines: Vec<&[u8]> = data(event).into_iter().map(|r| &event[r]).collect();
        assert_eq!(lines, [&b"one"[..], b"two"]);
    }

    #[test]
    fn an_event_stream_is_known_by_its_bytes() {
        assert!(sniff(b"data: {"));
        assert!(sniff(b"\n: ping"));
        assert!(!sniff(b"{\"data\":1}"));
        assert!(!sniff(b"<html>"));
    }
}
