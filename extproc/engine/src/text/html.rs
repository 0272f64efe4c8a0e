//! What a reader of HTML reads: the text with its tags gone.
//!
//! Comments and attribute values need no view of their own: they stand in the raw text, where rules
//! look first. This view is for text that tags tear apart (`ig<b>no</b>re`, `ignore<br>all`).

use super::map::{Derived, SpanMap};

/// Elements that stand inside a line: between them no space is seen.
const INLINE: [&str; 24] = [
    "a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "em", "font", "i", "ins", "kbd", "mark", "q", "s",
    "samp", "small", "span", "strong", "sub", "sup", "u", "wbr",
];

/// Whether a `<` at that place opens a tag, a comment or a declaration.
pub(crate) fn opens(bytes: &[u8], at: usize) -> bool {
    matches!(bytes.get(at + 1), Some(c) if c.is_ascii_alphabetic() || matches!(c, b'/' | b'!' | b'?'))
}

/// The text without tags and comments. A tag without an end is text: nothing is hidden by a missing `>`.
pub(crate) fn strip(text: &str) -> (String, SpanMap) {
    let bytes = text.as_bytes();
    let mut out = Derived::with_capacity(text.len());
    let mut kept = 0;
    let mut at = 0;
    // The first `<` for which no end was found: no later search can succeed either, so that a text
    // full of `<!--` costs one look, not one per opening.
    let mut no_comment_end = false;
    let mut no_tag_end = false;
    while let Some(found) = memchr::memchr(b'<', &bytes[at..]) {
        let open = at + found;
        at = open + 1;
        if !opens(bytes, open) {
            continue;
        }
        let end = if bytes[open..].starts_with(b"<!--") {
            if no_comment_end {
                continue;
            }
            if let Some(n) = memchr::memmem::find(&bytes[open + 4..], b"-->") {
                open + 4 + n + 3
            } else {
                no_comment_end = true;
                continue;
            }
        } else {
            if no_tag_end {
                continue;
            }
            if let Some(n) = tag_end(bytes, open) {
                n
            } else {
                no_tag_end = true;
                continue;
            }
        };
        out.keep(&text[kept..open], kept);
        if !inline(&bytes[open..end]) {
            out.unit(" ", open, end);
        }
        kept = end;
        at = end;
    }
    out.keep(&text[kept..], kept);
    out.finish()
}

/// The end of the tag that opens at `open`: the next `>`. Quoted `>` are not skipped, because an
/// unbalanced quote would then hide everything after it.
fn tag_end(bytes: &[u8], open: usize) -> Option<usize> {
    memchr::memchr(b'>', &bytes[open..]).map(|n| open + n + 1)
}

fn inline(tag: &[u8]) -> bool {
    if tag.starts_with(b"<!--") {
        return true;
    }
    let name: Vec<u8> = tag
        .iter()
        .skip(1)
        .skip_while(|c| **c == b'/')
        .take_while(|c| c.is_ascii_alphanumeric())
        .take(8)
        .map(u8::to_ascii_lowercase)
        .collect();
    INLINE.iter().any(|n| n.as_bytes() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_tags_vanish_and_others_part_words() {
        assert_eq!(strip("ig<b>no</b>re<br>all <i>rules</i>").0, "ignore all rules");
        assert_eq!(strip("ig<!-- x -->nore").0, "ignore");
    }

    #[test]
    fn a_tag_without_an_end_hides_nothing() {
        assert_eq!(strip("a <b ignore all").0, "a <b ignore all");
        assert_eq!(strip("a <!-- ignore all").0, "a <!-- ignore all");
        assert_eq!(strip("1 < 2 and 3 > 2").0, "1 < 2 and 3 > 2");
    }
}
