//! A strict JSON reader that keeps the place of every value.
//!
//! Redaction rewrites a body in place, so what is needed is not a tree of values but every value's bytes.
//! Accepts what RFC 8259 allows (checked against `serde_json` by a property test), and what common readers
//! take beyond it: halves of surrogate pairs (JavaScript, Python) and `NaN` and `Infinity` (Python). A body
//! that they read and we don't could hide its texts from us. Members of one name twice in an object are
//! accepted and reported, because two readers of such a body may disagree.

use std::borrow::Cow;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::ops::Range;

use crate::text::map::{Derived, SpanMap};

/// Deeper nesting is refused: no honest message has it, and readers behind us may overflow their stack.
pub(crate) const MAX_DEPTH: usize = 96;
/// More values are refused: a node costs 32 bytes, so this bounds a body's tree to 8 MiB.
pub(crate) const MAX_NODES: usize = 1 << 18;

/// Why a text is not JSON, or not JSON that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonError {
    /// It breaks the grammar at this byte.
    Syntax(usize),
    /// It is nested deeper than [`MAX_DEPTH`] or has more values than [`MAX_NODES`].
    Limits,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Array,
    String,
    Number,
    /// `true`, `false`, `null`.
    Word,
}

/// One value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    parent: u32,
    /// The value's bytes, quotes included.
    start: u32,
    end: u32,
    /// The member's name between its quotes; for elements of arrays, their index and `u32::MAX`.
    key: (u32, u32),
    /// One past the last descendant.
    next: u32,
}

/// A parsed document.
#[derive(Debug)]
pub(crate) struct Doc<'a> {
    text: &'a str,
    nodes: Vec<Node>,
    /// The first member whose name stands twice in its object.
    pub(crate) duplicate: Option<usize>,
}

impl Node {
    pub(crate) const fn span(&self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
    /// The bytes of the member's name, without quotes.
    pub(crate) const fn name_span(&self) -> Option<Range<usize>> {
        if self.key.1 == u32::MAX { None } else { Some(self.key.0 as usize..self.key.1 as usize) }
    }
}

const NO_PARENT: u32 = u32::MAX;

impl<'a> Doc<'a> {
    /// Parses one document; white space around it is allowed.
    pub(crate) fn parse(text: &'a str) -> Result<Self, JsonError> {
        // Offsets are 32 bits wide; bodies are capped far below.
        if text.len() >= u32::MAX as usize {
            return Err(JsonError::Limits);
        }
        let mut reader = Reader { bytes: text.as_bytes(), at: 0 };
        let mut doc = Doc { text, nodes: Vec::new(), duplicate: None };
        doc.read(&mut reader)?;
        reader.space();
        if reader.at < text.len() { Err(JsonError::Syntax(reader.at)) } else { Ok(doc) }
    }

    fn read(&mut self, r: &mut Reader<'a>) -> Result<(), JsonError> {
        /// An object or array still open.
        struct Open {
            node: usize,
            count: u32,
            names: Vec<(u64, u32)>,
        }
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let mut open: Vec<Open> = Vec::new();
        loop {
            // Before a value: within a container, its key comes first.
            let mut key = (0, u32::MAX);
            let mut parent = NO_PARENT;
            r.space();
            if let Some(o) = open.last_mut() {
                parent = o.node as u32;
                if self.nodes[o.node].kind == Kind::Object {
                    if r.peek() != Some(b'"') {
                        return Err(JsonError::Syntax(r.at));
                    }
                    let name = r.string()?;
                    key = (name.start as u32 + 1, name.end as u32 - 1);
                    let text = unescape(&self.text[name.start + 1..name.end - 1]).0;
                    o.names.push((hasher.hash_one(text.as_bytes()), self.nodes.len() as u32));
                    r.space();
                    r.expect(b':')?;
                    r.space();
                } else {
                    key = (o.count, u32::MAX);
                }
                o.count += 1;
            }
            if self.nodes.len() >= MAX_NODES {
                return Err(JsonError::Limits);
            }
            let start = r.at;
            let kind = match r.peek() {
                Some(b'{') => Kind::Object,
                Some(b'[') => Kind::Array,
                Some(b'"') => Kind::String,
                Some(b't' | b'f' | b'n' | b'N' | b'I') => Kind::Word,
                Some(b'-') if r.bytes.get(r.at + 1) == Some(&b'I') => Kind::Word,
                Some(b'-' | b'0'..=b'9') => Kind::Number,
                _ => return Err(JsonError::Syntax(r.at)),
            };
            let node = self.nodes.len();
            self.nodes.push(Node { kind, parent, start: start as u32, end: 0, key, next: node as u32 + 1 });
            let mut opened = false;
            match kind {
                Kind::String => {
                    r.string()?;
                }
                Kind::Number => r.number()?,
                Kind::Word => r.word()?,
                Kind::Object | Kind::Array => {
                    r.at += 1;
                    r.space();
                    let close = if kind == Kind::Object { b'}' } else { b']' };
                    if r.peek() == Some(close) {
                        r.at += 1;
                    } else {
                        if open.len() >= MAX_DEPTH {
                            return Err(JsonError::Limits);
                        }
                        open.push(Open { node, count: 0, names: Vec::new() });
                        opened = true;
                    }
                }
            }
            if opened {
                continue;
            }
            self.nodes[node].end = r.at as u32;
            // After a value: a comma, or ends of containers.
            loop {
                let Some(o) = open.last_mut() else { return Ok(()) };
                r.space();
                let close = if self.nodes[o.node].kind == Kind::Object { b'}' } else { b']' };
                match r.peek() {
                    Some(b',') => {
                        r.at += 1;
                        break;
                    }
                    Some(c) if c == close => {
                        r.at += 1;
                        let node = o.node;
                        o.names.sort_unstable();
                        if let Some(w) = o.names.windows(2).find(|w| w[0].0 == w[1].0) {
                            self.duplicate.get_or_insert(w[1].1 as usize);
                        }
                        open.pop();
                        self.nodes[node].end = r.at as u32;
                        self.nodes[node].next = self.nodes.len() as u32;
                    }
                    _ => return Err(JsonError::Syntax(r.at)),
                }
            }
        }
    }

    /// The document's value is the first.
    pub(crate) const ROOT: usize = 0;

    /// All values, in the order of the text.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn node(&self, id: usize) -> Node {
        self.nodes[id]
    }

    /// The member or element directly below `id`, in order.
    pub(crate) fn children(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        let end = self.nodes[id].next as usize;
        let mut at = id + 1;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let this = at;
                at = self.nodes[at].next as usize;
                this
            })
        })
    }

    /// The values that hold `id`, innermost first.
    pub(crate) fn ancestors(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(id), |n| match self.nodes[*n].parent {
            NO_PARENT => None,
            p => Some(p as usize),
        })
        .skip(1)
    }

    /// All values below `id`, itself included.
    pub(crate) fn subtree(&self, id: usize) -> Range<usize> {
        id..self.nodes[id].next as usize
    }

    /// The member of that name; the last one where there are several, as most readers take it.
    pub(crate) fn get(&self, id: usize, name: &str) -> Option<usize> {
        if self.nodes[id].kind != Kind::Object {
            return None;
        }
        self.children(id).filter(|c| self.name(*c).is_some_and(|n| n == name)).last()
    }

    /// The member's name, unescaped.
    pub(crate) fn name(&self, id: usize) -> Option<Cow<'a, str>> {
        self.nodes[id].name_span().map(|s| unescape(&self.text[s]).0)
    }

    /// The value's bytes as they stand.
    pub(crate) fn raw(&self, id: usize) -> &'a str {
        &self.text[self.nodes[id].span()]
    }

    /// A string's value, with the way back to its bytes between the quotes where it held escapes.
    pub(crate) fn string(&self, id: usize) -> Option<(Cow<'a, str>, Option<SpanMap>)> {
        let node = self.nodes[id];
        (node.kind == Kind::String)
            .then(|| unescape(&self.text[node.start as usize + 1..node.end as usize - 1]))
    }

    /// A string's value, where `id` is one.
    pub(crate) fn str(&self, id: usize) -> Option<Cow<'a, str>> {
        self.string(id).map(|(s, _)| s)
    }

    /// The value's place as a JSON Pointer (RFC 6901).
    pub(crate) fn pointer(&self, id: usize) -> String {
        let mut steps = Vec::new();
        let mut at = id;
        while self.nodes[at].parent != NO_PARENT {
            steps.push(match self.name(at) {
                Some(name) => name.replace('~', "~0").replace('/', "~1"),
                None => self.nodes[at].key.0.to_string(),
            });
            at = self.nodes[at].parent as usize;
        }
        steps.iter().rev().fold(String::new(), |p, s| p + "/" + s)
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), JsonError> {
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            Err(JsonError::Syntax(self.at))
        }
    }

    /// Reads a string that starts here; returns its bytes, quotes included.
    fn string(&mut self) -> Result<Range<usize>, JsonError> {
        let start = self.at;
        self.at += 1;
        loop {
            let rest = &self.bytes[self.at..];
            let Some(n) = rest.iter().position(|b| matches!(b, b'"' | b'\\' | 0..=0x1f)) else {
                return Err(JsonError::Syntax(self.bytes.len()));
            };
            self.at += n;
            match self.bytes[self.at] {
                b'"' => {
                    self.at += 1;
                    return Ok(start..self.at);
                }
                b'\\' => self.escape()?,
                _ => return Err(JsonError::Syntax(self.at)),
            }
        }
    }

    fn escape(&mut self) -> Result<(), JsonError> {
        let bad = JsonError::Syntax(self.at);
        match self.bytes.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
            Some(b'u') => {
                let unit = hex4(self.bytes, self.at + 2).ok_or(bad)?;
                self.at += 6;
                // A high surrogate goes with its low half; a lone half reads as a replacement character.
                if (0xd800..0xdc00).contains(&unit) && low_half(self.bytes, self.at).is_some() {
                    self.at += 6;
                }
            }
            _ => return Err(bad),
        }
        Ok(())
    }

    fn number(&mut self) -> Result<(), JsonError> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits()?,
            _ => return Err(JsonError::Syntax(self.at)),
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(JsonError::Syntax(start)) } else { Ok(()) }
    }

    fn word(&mut self) -> Result<(), JsonError> {
        for word in ["true", "false", "null", "NaN", "Infinity", "-Infinity"] {
            if self.bytes[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(());
            }
        }
        Err(JsonError::Syntax(self.at))
    }
}

fn hex4(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.iter().try_fold(0, |v, b| Some(v * 16 + (*b as char).to_digit(16)?))
}

/// The low half of a surrogate pair, if its escape starts here.
fn low_half(bytes: &[u8], at: usize) -> Option<u32> {
    let low = (bytes.get(at..at + 2)? == br"\u").then(|| hex4(bytes, at + 2))??;
    (0xdc00..0xe000).contains(&low).then_some(low)
}

/// A string's bytes without its escapes. The input has passed [`Reader::string`].
fn unescape(raw: &str) -> (Cow<'_, str>, Option<SpanMap>) {
    let bytes = raw.as_bytes();
    let Some(first) = memchr::memchr(b'\\', bytes) else { return (Cow::Borrowed(raw), None) };
    let mut out = Derived::with_capacity(raw.len());
    let mut kept = 0;
    let mut next = Some(first);
    while let Some(at) = next {
        out.keep(&raw[kept..at], kept);
        let (c, len) = match bytes.get(at + 1) {
            Some(b'b') => ('\u{8}', 2),
            Some(b'f') => ('\u{c}', 2),
            Some(b'n') => ('\n', 2),
            Some(b'r') => ('\r', 2),
            Some(b't') => ('\t', 2),
            Some(b'u') => {
                let hi = hex4(bytes, at + 2).unwrap_or(0xfffd);
                match (0xd800..0xdc00).contains(&hi).then(|| low_half(bytes, at + 6)).flatten() {
                    Some(lo) => {
                        let c = 0x10000 + ((hi - 0xd800) << 10) + lo.wrapping_sub(0xdc00);
                        (char::from_u32(c).unwrap_or('\u{fffd}'), 12)
                    }
                    None => (char::from_u32(hi).unwrap_or('\u{fffd}'), 6),
                }
            }
            Some(c) => (*c as char, 2),
            None => ('\\', 1),
        };
        let end = (at + len).min(raw.len());
        out.unit_char(c, at, end);
        kept = end;
        next = memchr::memchr(b'\\', &bytes[kept..]).map(|n| kept + n);
    }
    out.keep(&raw[kept..], kept);
    let (text, map) = out.finish();
    (Cow::Owned(text), Some(map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_value_keeps_its_place() {
        let text = r#" {"a": [1, "x\ny", {"b/c": true}], "a~": null} "#;
        let doc = Doc::parse(text).unwrap();
        let places: Vec<_> = (0..doc.len()).map(|i| (doc.pointer(i), doc.raw(i))).collect();
        assert_eq!(places[0].0, "");
        assert_eq!(places[2], ("/a/0".into(), "1"));
        assert_eq!(places[3], ("/a/1".into(), r#""x\ny""#));
        assert_eq!(places[5], ("/a/2/b~1c".into(), "true"));
        assert_eq!(places[6], ("/a~0".into(), "null"));
        assert_eq!(doc.str(3).unwrap(), "x\ny");
        let a = doc.get(Doc::ROOT, "a").unwrap();
        assert_eq!(doc.children(a).count(), 3);
    }

    #[test]
    fn escapes_map_back_to_their_bytes() {
        let doc = Doc::parse(r#""a\u00e9\ud83d\ude00b""#).unwrap();
        let (text, map) = doc.string(0).unwrap();
        assert_eq!(text, "aé😀b");
        assert_eq!(map.unwrap().back(1, 3), (1, 7));
    }

    #[test]
    fn what_lax_readers_take_is_taken() {
        let doc = Doc::parse(r#"["\ud800x","\udc00","\ud800\u0041",NaN,-Infinity,Infinity]"#).unwrap();
        assert_eq!(doc.str(1).unwrap(), "\u{fffd}x");
        assert_eq!(doc.str(2).unwrap(), "\u{fffd}");
        assert_eq!(doc.str(3).unwrap(), "\u{fffd}A");
        assert_eq!(doc.raw(5), "-Infinity");
    }

    #[test]
    fn duplicates_are_seen_through_escapes_and_at_any_depth() {
        assert!(Doc::parse(r#"{"a":1,"b":2}"#).unwrap().duplicate.is_none());
        assert!(Doc::parse(r#"{"a":1,"\u0061":2}"#).unwrap().duplicate.is_some());
        assert!(Doc::parse(r#"[{"x":{"k":1,"k":1}}]"#).unwrap().duplicate.is_some());
    }

    #[test]
    fn hostile_shapes_end_in_an_error() {
        assert_eq!(Doc::parse(&"[".repeat(100_000)).unwrap_err(), JsonError::Limits);
        assert_eq!(Doc::parse(&format!("[{}1]", "1,".repeat(MAX_NODES))).unwrap_err(), JsonError::Limits);
        for bad in ["", "{", "[1,]", "{\"a\":}", "\"\\ud80\"", "01", "1.", "+1", "tru", "{} x", "\"\n\""] {
            assert!(matches!(Doc::parse(bad), Err(JsonError::Syntax(_))), "{bad}");
        }
    }

    proptest! {
        /// What we accept is what serde_json accepts, on texts made of JSON's own pieces.
        #[test]
        fn agrees_with_serde_json(pieces in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"a\"", "\"\\u0041\"", "\"\\ud800\\udc00\"", "1", "-0", "1e5", ".5", "true", "null", " ", "\"", "\\", "é", "\u{1}",
        ]), 0..12)) {
            let text = pieces.concat();
            let theirs = serde_json::from_str::<serde_json::Value>(&text).is_ok();
            prop_assert_eq!(Doc::parse(&text).is_ok(), theirs, "{}", text);
        }

        #[test]
        fn strings_read_as_serde_json_reads_them(s in any::<String>()) {
            let text = serde_json::to_string(&s).unwrap();
            let doc = Doc::parse(&text).unwrap();
            prop_assert_eq!(doc.str(0).unwrap().into_owned(), s);
        }
    }

    /// What `serde_json` takes is what is taken here, and every text and name in it is read the same.
    #[test]
    fn bent_documents_are_read_as_serde_json_reads_them() {
        use serde_json::Value;
        fn same(doc: &Doc<'_>, id: usize, theirs: &Value) -> bool {
            match theirs {
                Value::Object(members) => {
                    doc.node(id).kind == Kind::Object
                        && members.iter().all(|(n, v)| doc.get(id, n).is_some_and(|c| same(doc, c, v)))
                        && doc.children(id).all(|c| doc.name(c).is_some_and(|n| members.contains_key(&*n)))
                }
                Value::Array(items) => {
                    doc.node(id).kind == Kind::Array
                        && doc.children(id).count() == items.len()
                        && doc.children(id).zip(items).all(|(c, v)| same(doc, c, v))
                }
                Value::String(text) => doc.str(id).is_some_and(|s| s == *text),
                Value::Number(_) => doc.node(id).kind == Kind::Number,
                Value::Bool(b) => doc.raw(id) == if *b { "true" } else { "false" },
                Value::Null => doc.raw(id) == "null",
            }
        }
        let seeds: Vec<_> = ["request", "response"].into_iter().flat_map(sallyport_fuzz::corpus).collect();
        let words: Vec<Vec<u8>> =
            ["\"a\":", "[[", "]]", "{\"k\":{", "-0", "1E+9", "1e999", "0.0", "nulll", "\\/", "\\b"]
                .iter()
                .map(|w| w.as_bytes().to_vec())
                .collect();
        sallyport_fuzz::fuzz("json", &seeds, &words, |input| {
            let text = String::from_utf8_lossy(input);
            let theirs = serde_json::from_str::<Value>(&text);
            match (Doc::parse(&text), theirs) {
                (Ok(doc), Ok(theirs)) => {
                    for id in 0..doc.len() {
                        let pointer = doc.pointer(id);
                        if doc.duplicate.is_none() && theirs.pointer(&pointer).is_none() {
                            return Err(format!("{pointer} leads nowhere"));
                        }
                    }
                    same(&doc, Doc::ROOT, &theirs).then_some(()).ok_or_else(|| "read in another way".into())
                }
                (Err(JsonError::Limits), _) | (Err(JsonError::Syntax(_)), Err(_)) => Ok(()),
                // Its numbers are limited to what a double holds; RFC 8259's grammar is not.
                (Ok(_), Err(e)) if e.to_string().starts_with("number out of range") => Ok(()),
                // What is taken here beyond the standard.
                (Ok(_), Err(_)) if ["NaN", "Infinity", "\\ud", "\\uD"].iter().any(|w| text.contains(w)) => {
                    Ok(())
                }
                (ours, theirs) => Err(format!("{:?}, theirs {:?}", ours.err(), theirs.err())),
            }
        });
    }
}
