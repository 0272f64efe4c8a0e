//! Server-sent events: cutting a stream into events, and finding the text in them.
//!
//! Source: the WHATWG HTML standard, section 9.2 (server-sent events).

use std::ops::Range;

use super::json::{Doc, Kind};
use crate::finding::Surface;
use crate::text::map::SpanMap;

/// Whether a stream's first bytes are those of an event stream.
pub(crate) fn sniff(head: &[u8]) -> bool {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let start = head.iter().position(|b| !matches!(b, b'\r' | b'\n')).unwrap_or(head.len());
    let line = &head[start..];
    line.starts_with(b":")
        || ["data:", "event:", "id:", "retry:"].iter().any(|f| line.starts_with(f.as_bytes()))
}

/// The length of the first whole event in `bytes`, its blank line included.
pub(crate) fn event_end(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(n) = bytes[at..].iter().position(|b| matches!(b, b'\n' | b'\r')) {
        let line_end = at + n;
        let next = if bytes[line_end..].starts_with(b"\r\n") { line_end + 2 } else { line_end + 1 };
        // A lone CR at the very end may be half of a CRLF.
        if bytes[line_end] == b'\r' && next == bytes.len() {
            return None;
        }
        if n == 0 {
            return Some(next);
        }
        at = next;
    }
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
const PIECES: [&str; 8] =
    ["content", "text", "delta", "arguments", "partial_json", "thinking", "reasoning_content", "response"];

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
        // Pieces of several texts interleave: choices, output items and tool calls carry their index.
        let mut channel = pointer.clone();
        for index in ["index", "output_index", "content_index", "item_id"] {
            if let Some(n) = doc.get(Doc::ROOT, index) {
                channel.push('#');
                channel.push_str(doc.raw(n));
            }
        }
        for step in tool_index(doc, id) {
            channel.push('#');
            channel.push_str(&step);
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

/// The `index` members of the objects that hold `id`: OpenAI's choices and tool calls have one each.
fn tool_index(doc: &Doc<'_>, id: usize) -> Vec<String> {
    doc.ancestors(id).filter_map(|a| doc.get(a, "index")).map(|n| doc.raw(n).to_owned()).collect()
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
