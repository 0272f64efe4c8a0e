//! Server-sent events: cutting a stream into events, and finding the text in them.
//!
//! Source: the WHATWG HTML standard, section 9.2 (server-sent events).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;

use super::json::{Doc, Kind};
use crate::finding::Surface;
use crate::message::ResponseHead;
use crate::text::map::{Derived, SpanMap};

/// Whether a stream's first bytes are those of an event stream.
pub(crate) fn sniff(head: &[u8]) -> bool {
    let head = head.strip_prefix(BOM).unwrap_or(head);
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

/// What may stand before the first byte of any text.
pub(crate) const BOM: &[u8] = b"\xef\xbb\xbf";

/// How far a search for the end of an event has come, so that an event that arrives in small chunks is
/// read once, not once per chunk.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    /// Where the line starts that is not known to be whole.
    line: usize,
    /// Up to where that line holds no end.
    at: usize,
}

/// The length of the first whole event in `bytes`, its blank line included. Where there is none, `cursor`
/// says where to go on once more bytes are there.
pub(crate) fn event_end(bytes: &[u8], cursor: &mut Cursor) -> Option<usize> {
    while let Some(n) = memchr::memchr2(b'\n', b'\r', &bytes[cursor.at..]) {
        let line_end = cursor.at + n;
        let next = if bytes[line_end..].starts_with(b"\r\n") { line_end + 2 } else { line_end + 1 };
        // A lone CR at the very end may be half of a CRLF.
        if bytes[line_end] == b'\r' && next == bytes.len() {
            cursor.at = line_end;
            return None;
        }
        if line_end == cursor.line {
            *cursor = Cursor::default();
            return Some(next);
        }
        *cursor = Cursor { line: next, at: next };
    }
    cursor.at = bytes.len();
    None
}

/// One string of an event that is part of a longer text.
#[derive(Debug)]
pub(crate) struct Delta {
    /// What the pieces of one text have in common.
    pub(crate) channel: String,
    pub(crate) surface: Surface,
    pub(crate) text: String,
    /// The string's bytes in the event's data, between its quotes.
    pub(crate) bytes: Range<usize>,
    /// The way back over escapes.
    pub(crate) map: Option<SpanMap>,
}

/// What a line of an event says, where it is a `data:` line.
pub(crate) fn data_line(line: &[u8]) -> Option<&[u8]> {
    // Readers skip the mark at the start of a stream only; that we skip it everywhere hides nothing.
    let rest = line.strip_prefix(BOM).unwrap_or(line).strip_prefix(b"data:")?;
    let rest = rest.strip_prefix(b" ").unwrap_or(rest);
    let end = rest.iter().rposition(|b| !matches!(b, b'\n' | b'\r')).map_or(0, |n| n + 1);
    Some(&rest[..end])
}

/// The data of an event: its `data:` lines, joined as readers join them, and the way back to its bytes.
pub(crate) fn data(event: &[u8]) -> (String, SpanMap) {
    let mut out = Derived::default();
    let mut at = 0;
    let mut first = true;
    for line in event.split_inclusive(|b| matches!(b, b'\n' | b'\r')) {
        if let Some(data) = data_line(line) {
            let end = at + line.iter().rposition(|b| !matches!(b, b'\n' | b'\r')).map_or(0, |n| n + 1);
            let mut from = end - data.len();
            if !first {
                out.unit("\n", from, from);
            }
            first = false;
            for chunk in data.utf8_chunks() {
                out.keep(chunk.valid(), from);
                from += chunk.valid().len();
                if !chunk.invalid().is_empty() {
                    out.unit("\u{fffd}", from, from + chunk.invalid().len());
                    from += chunk.invalid().len();
                }
            }
        }
        at += line.len();
    }
    out.finish()
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

/// The pieces of longer texts that an event's data holds.
pub(crate) fn deltas(doc: &Doc<'_>) -> Vec<Delta> {
    let mut out = Vec::new();
    // Looking a member up reads all of its object: once for each object, however many pieces it holds.
    let mut indices: HashMap<usize, String> = HashMap::new();
    let mut of_root: Option<String> = None;
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
            channel.push_str(of_root.get_or_insert_with(|| {
                let mut all = String::new();
                for name in ["index", "output_index", "content_index"] {
                    index(doc, Doc::ROOT, name, &mut all);
                }
                all
            }));
        }
        for holder in doc.ancestors(id).filter(|a| *a != Doc::ROOT) {
            channel.push_str(indices.entry(holder).or_insert_with(|| {
                let mut one = String::new();
                index(doc, holder, "index", &mut one);
                one
            }));
        }
        let tool = matches!(&*name, "arguments" | "partial_json") || pointer.contains("tool_calls");
        let surface = if tool { Surface::ToolCall } else { Surface::ResponseBody };
        out.push(Delta {
            channel,
            surface,
            text: text.into_owned(),
            bytes: node.span().start + 1..node.span().end - 1,
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
        for (text, end) in [
            ("data: a\n\ndata: b", Some(9)),
            ("data: a\r\n\r\nx", Some(11)),
            ("data: a\r\rx", Some(9)),
            ("data: a\n", None),
            ("data: a\r\n\r", None),
            ("\n", Some(1)),
        ] {
            assert_eq!(event_end(text.as_bytes(), &mut Cursor::default()), end, "{text:?}");
            // Byte by byte the same end is found, as soon as it can be.
            let mut cursor = Cursor::default();
            let found = (0..=text.len()).find_map(|n| event_end(&text.as_bytes()[..n], &mut cursor));
            assert_eq!(found, end, "{text:?} byte by byte");
        }
    }

    #[test]
    fn data_lines_are_joined_and_lead_back_to_their_bytes() {
        let event = b"\xef\xbb\xbfdata: one\r\nevent: x\ndata:two \xff!\n\n";
        let (text, map) = data(event);
        assert_eq!(text, "one\ntwo \u{fffd}!");
        let (start, end) = map.back(4, 11);
        assert_eq!(&event[start..end], b"two \xff");
    }

    #[test]
    fn an_event_stream_is_known_by_its_bytes() {
        assert!(sniff(b"data: {"));
        assert!(sniff(b"\n: ping"));
        assert!(!sniff(b"{\"data\":1}"));
        assert!(!sniff(b"<html>"));
    }
}
