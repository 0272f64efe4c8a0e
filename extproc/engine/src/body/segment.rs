//! One string out of a message.

use std::borrow::Cow;

use crate::finding::Surface;
use crate::text::map::{Derived, SpanMap};

/// Whose words a segment holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// Not known, or without meaning here.
    #[default]
    None,
    System,
    User,
    Assistant,
    Tool,
    /// A member's name.
    Key,
    /// A header that is there to carry a credential.
    Credential,
}

impl Role {
    /// The role's name, as Cedar policies read it.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::None => "",
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::Key => "key",
            Self::Credential => "credential",
        }
    }

    pub(crate) fn of(name: &str) -> Self {
        match name {
            "system" | "developer" => Self::System,
            "user" | "human" => Self::User,
            "assistant" | "model" | "ai" => Self::Assistant,
            "tool" | "function" => Self::Tool,
            _ => Self::None,
        }
    }
}

/// What the names of a URL's parameters begin with in a segment's place.
pub(crate) const PARAMETER: &str = "query/";

/// What names a segment's place in its message.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// The whole text.
    Whole,
    /// A header or a part of a URL.
    Name(String),
    /// A value (or its name) of a JSON document.
    Json { doc: usize, node: usize },
}

/// The way back from a segment's text to the bytes of the body.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// It starts at that byte; the map leads over escapes.
    Body {
        at: usize,
        map: Option<SpanMap>,
        /// The bytes are a bare JSON number: its placeholder needs quotes.
        bare: bool,
    },
    /// It stands in no body (a header, a URL), so nothing can be cut out of it.
    Elsewhere,
}

/// One string out of a message.
#[derive(Clone, Debug)]
pub(crate) struct Segment<'a> {
    pub(crate) surface: Surface,
    pub(crate) role: Role,
    pub(crate) place: Place,
    pub(crate) text: Cow<'a, str>,
    pub(crate) origin: Origin,
}

impl<'a> Segment<'a> {
    /// A segment that stands in no body.
    pub(crate) fn elsewhere(surface: Surface, role: Role, name: &str, text: &'a str) -> Self {
        Self {
            surface,
            role,
            place: Place::Name(name.to_owned()),
            text: Cow::Borrowed(text),
            origin: Origin::Elsewhere,
        }
    }

    /// Whether it is a parameter of a URL, taken out of it.
    pub(crate) fn is_parameter(&self) -> bool {
        self.surface == Surface::Url && matches!(&self.place, Place::Name(n) if n.starts_with(PARAMETER))
    }

    /// The range of the body behind a range of the text.
    pub(crate) fn body_range(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        match &self.origin {
            Origin::Body { at, map, .. } => {
                let (s, e) = map.as_ref().map_or((start, end), |m| m.back(start, end));
                Some((at + s, at + e))
            }
            Origin::Elsewhere => None,
        }
    }
}

/// Whether [`as_text`] reads a body as UTF-16 or UTF-32. A placeholder is ASCII and would shift what stands
/// behind it, so nothing is cut out of such a body.
pub(crate) fn is_wide(body: &[u8]) -> bool {
    utf16_mark(body).is_some()
        || match body {
            [0, 0, 0xfe, 0xff, ..] => true,
            [0, 0, 0, b, ..] | [b, 0, 0, 0, ..] => *b != 0 && body.len() >= 8,
            _ => false,
        }
}

/// The byte order mark of a body in UTF-16, whether it stands there or not.
pub(crate) fn utf16_mark(body: &[u8]) -> Option<[u8; 2]> {
    const LITTLE: [u8; 2] = [0xff, 0xfe];
    const BIG: [u8; 2] = [0xfe, 0xff];
    match body {
        [0xff, 0xfe, ..] => Some(LITTLE),
        [0xfe, 0xff, ..] => Some(BIG),
        [0, b, ..] if *b != 0 && half_zero(body, 0) => Some(BIG),
        [b, 0, ..] if *b != 0 && half_zero(body, 1) => Some(LITTLE),
        _ => None,
    }
}

/// A body's bytes as text: what is not UTF-8 is replaced, UTF-16 is read, and the way back is kept.
pub(crate) fn as_text(body: &[u8]) -> (Cow<'_, str>, Option<SpanMap>) {
    match body {
        [0xff, 0xfe, 0, 0, rest @ ..] => utf32(rest, 4, u32::from_le_bytes),
        [0, 0, 0xfe, 0xff, rest @ ..] => utf32(rest, 4, u32::from_be_bytes),
        // UTF-32 without its mark: no character has a higher byte than 0x10, and Latin ones have three zeros.
        [0, 0, 0, b, ..] if *b != 0 && body.len() >= 8 => utf32(body, 0, u32::from_be_bytes),
        [b, 0, 0, 0, ..] if *b != 0 && body.len() >= 8 => utf32(body, 0, u32::from_le_bytes),
        [0xff, 0xfe, rest @ ..] => utf16(rest, 2, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => utf16(rest, 2, u16::from_be_bytes),
        // UTF-16 without its mark: every other byte of Latin text is zero.
        [0, b, ..] if *b != 0 && half_zero(body, 0) => utf16(body, 0, u16::from_be_bytes),
        [b, 0, ..] if *b != 0 && half_zero(body, 1) => utf16(body, 0, u16::from_le_bytes),
        _ => match std::str::from_utf8(body) {
            Ok(text) => (Cow::Borrowed(text), None),
            Err(_) => lossy(body),
        },
    }
}

fn half_zero(body: &[u8], phase: usize) -> bool {
    let head = &body[..body.len().min(256)];
    let zeros = head.iter().skip(phase).step_by(2).filter(|b| **b == 0).count();
    zeros * 2 * 10 >= head.len() * 8
}

fn utf16(bytes: &[u8], base: usize, read: fn([u8; 2]) -> u16) -> (Cow<'_, str>, Option<SpanMap>) {
    let units = bytes.chunks_exact(2).map(|c| read([c[0], c[1]]));
    let mut out = Derived::with_capacity(bytes.len() / 2);
    let mut at = base;
    for c in char::decode_utf16(units) {
        let c = c.unwrap_or('\u{fffd}');
        let len = c.len_utf16() * 2;
        out.unit_char(c, at, at + len);
        at += len;
    }
    let (text, map) = out.finish();
    (Cow::Owned(text), Some(map))
}

fn utf32(bytes: &[u8], base: usize, read: fn([u8; 4]) -> u32) -> (Cow<'_, str>, Option<SpanMap>) {
    let mut out = Derived::with_capacity(bytes.len() / 4);
    let mut at = base;
    for unit in bytes.chunks(4) {
        let c = unit.try_into().ok().and_then(|u| char::from_u32(read(u))).unwrap_or('\u{fffd}');
        out.unit_char(c, at, at + unit.len());
        at += unit.len();
    }
    let (text, map) = out.finish();
    (Cow::Owned(text), Some(map))
}

fn lossy(bytes: &[u8]) -> (Cow<'_, str>, Option<SpanMap>) {
    let mut out = Derived::with_capacity(bytes.len());
    let mut at = 0;
    for chunk in bytes.utf8_chunks() {
        out.keep(chunk.valid(), at);
        at += chunk.valid().len();
        if !chunk.invalid().is_empty() {
            out.unit("\u{fffd}", at, at + chunk.invalid().len());
            at += chunk.invalid().len();
        }
    }
    let (text, map) = out.finish();
    (Cow::Owned(text), Some(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utf16_is_read_with_and_without_its_mark() {
        let le: Vec<u8> = "ignore all".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let be: Vec<u8> = "ignore all".encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert_eq!(as_text(&le).0, "ignore all");
        assert_eq!(as_text(&be).0, "ignore all");
        let marked = [&[0xff, 0xfe][..], &le].concat();
        let (text, map) = as_text(&marked);
        assert_eq!(text, "ignore all");
        assert_eq!(map.unwrap().back(0, 6), (2, 14));
    }

    #[test]
    fn utf32_is_read_with_and_without_its_mark() {
        let le: Vec<u8> = "ignore all".chars().flat_map(|c| (c as u32).to_le_bytes()).collect();
        let be: Vec<u8> = "ignore all".chars().flat_map(|c| (c as u32).to_be_bytes()).collect();
        assert_eq!(as_text(&le).0, "ignore all");
        assert_eq!(as_text(&be).0, "ignore all");
        let marked = [&[0xff, 0xfe, 0, 0][..], &le, &[1]].concat();
        let (text, map) = as_text(&marked);
        assert_eq!(text, "ignore all\u{fffd}");
        assert_eq!(map.unwrap().back(0, 6), (4, 28));
    }

    #[test]
    fn broken_utf8_is_replaced_and_mapped() {
        let (text, map) = as_text(b"a\xff\xfeb ignore");
        assert!(text.ends_with("ignore"), "{text}");
        assert_eq!(map.unwrap().back(text.len() - 6, text.len()), (5, 11));
    }
}
