//! Cutting findings out of a body, in place.

use super::segment::{Origin, Segment};

/// A range of the body and what stands there instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) with: String,
}

/// What stands in place of a finding. Free of quotes and backslashes, so that it fits into JSON as it is.
pub(crate) fn placeholder(category: &str) -> String {
    format!("[redacted:{category}]")
}

/// The edit that cuts `start..end` of a segment's text; `None` where the segment stands in no body.
pub(crate) fn edit(segment: &Segment<'_>, start: usize, end: usize, category: &str) -> Option<Edit> {
    let with = placeholder(category);
    if let Origin::Body { at, bare: true, .. } = segment.origin {
        // A bare number becomes a string as a whole: half a number would be another one.
        return Some(Edit { start: at, end: at + segment.text.len(), with: format!("\"{with}\"") });
    }
    segment.body_range(start, end).map(|(start, end)| Edit { start, end, with })
}

/// The body with the edits made; edits that touch become one.
pub(crate) fn apply(body: &[u8], mut edits: Vec<Edit>) -> Vec<u8> {
    edits.sort_by_key(|e| (e.start, std::cmp::Reverse(e.end)));
    let mut out = Vec::with_capacity(body.len() + 16 * edits.len());
    let mut done = 0;
    for e in edits {
        if e.start < done {
            // Inside or across the last edit: what it has not covered yet goes too.
            done = done.max(e.end.min(body.len()));
            continue;
        }
        out.extend_from_slice(&body[done..e.start]);
        out.extend_from_slice(e.with.as_bytes());
        done = e.end.min(body.len());
    }
    out.extend_from_slice(&body[done..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn e(start: usize, end: usize, with: &str) -> Edit {
        Edit { start, end, with: with.into() }
    }

    #[test]
    fn edits_that_overlap_become_one() {
        assert_eq!(apply(b"0123456789", vec![e(6, 9, "Y"), e(1, 4, "X"), e(3, 5, "Z")]), b"0X5Y9");
        assert_eq!(apply(b"0123456789", vec![e(1, 3, "a"), e(1, 5, "b")]), b"0b56789");
        assert_eq!(apply(b"01", vec![]), b"01");
    }
}
