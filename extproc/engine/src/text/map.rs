//! From a position in a derived text back to the text it was derived from.
//!
//! Redaction cuts the bytes that were on the wire, whatever view showed the finding, so every view
//! carries the way back.

/// One run of a derived text.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Where the run starts in the derived text.
    at: usize,
    /// Where its source starts.
    from: usize,
    /// Where its source ends.
    to: usize,
    /// Whether the run's bytes are the source's bytes, one for one. Otherwise the run is one unit: no
    /// part of it has a place of its own in the source.
    verbatim: bool,
}

/// The way back from a derived text.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanMap {
    runs: Vec<Run>,
}

impl SpanMap {
    /// The source range behind `start..end` of the derived text: the smallest that holds it whole.
    pub(crate) fn back(&self, start: usize, end: usize) -> (usize, usize) {
        let from = match self.run_at(start) {
            Some(r) if r.verbatim => (r.from + (start - r.at)).min(r.to),
            Some(r) => r.from,
            None => 0,
        };
        let to = match self.run_at(end.saturating_sub(1).max(start)) {
            Some(r) if r.verbatim => (r.from + (end - r.at)).min(r.to),
            Some(r) => r.to,
            None => from,
        };
        (from, to.max(from))
    }

    fn run_at(&self, at: usize) -> Option<Run> {
        let after = self.runs.partition_point(|r| r.at <= at);
        self.runs.get(after.checked_sub(1)?).copied()
    }
}

/// Builds a derived text together with its map.
#[derive(Debug, Default)]
pub(crate) struct Derived {
    /// The derived text so far.
    pub(crate) text: String,
    map: SpanMap,
}

impl Derived {
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self { text: String::with_capacity(n), map: SpanMap::default() }
    }

    /// Appends source bytes as they are; `from` is where `text` starts in the source.
    pub(crate) fn keep(&mut self, text: &str, from: usize) {
        if text.is_empty() {
            return;
        }
        let at = self.text.len();
        match self.map.runs.last_mut() {
            // Grow the run when source and text both just go on.
            Some(r) if r.verbatim && r.to == from && r.at + (r.to - r.from) == at => r.to += text.len(),
            _ => self.map.runs.push(Run { at, from, to: from + text.len(), verbatim: true }),
        }
        self.text.push_str(text);
    }

    /// Appends what the source range `from..to` stands for.
    pub(crate) fn unit(&mut self, text: &str, from: usize, to: usize) {
        if text.is_empty() {
            return;
        }
        self.map.runs.push(Run { at: self.text.len(), from, to, verbatim: false });
        self.text.push_str(text);
    }

    pub(crate) fn unit_char(&mut self, c: char, from: usize, to: usize) {
        self.unit(c.encode_utf8(&mut [0; 4]), from, to);
    }

    pub(crate) fn finish(self) -> (String, SpanMap) {
        (self.text, self.map)
    }
}

/// Derives a text of raw bytes (as percent-decoding yields them), replacing what is not UTF-8.
#[derive(Debug, Default)]
pub(crate) struct DerivedBytes {
    bytes: Vec<u8>,
    /// Source range of each byte.
    spans: Vec<(u32, u32)>,
}

impl DerivedBytes {
    pub(crate) fn push(&mut self, byte: u8, from: usize, to: usize) {
        self.bytes.push(byte);
        self.spans.push((from as u32, to as u32));
    }

    pub(crate) fn finish(self) -> (String, SpanMap) {
        let mut out = Derived::with_capacity(self.bytes.len());
        let mut at = 0;
        for chunk in self.bytes.utf8_chunks() {
            for c in chunk.valid().chars() {
                let (from, to) = (self.spans[at].0, self.spans[at + c.len_utf8() - 1].1);
                if (to - from) as usize == c.len_utf8() {
                    out.keep(c.encode_utf8(&mut [0; 4]), from as usize);
                } else {
                    out.unit_char(c, from as usize, to as usize);
                }
                at += c.len_utf8();
            }
            if !chunk.invalid().is_empty() {
                let last = at + chunk.invalid().len() - 1;
                out.unit_char('\u{fffd}', self.spans[at].0 as usize, self.spans[last].1 as usize);
                at = last + 1;
            }
        }
        out.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_map_back_whole_and_verbatim_runs_byte_for_byte() {
        // source: "ab%41cd", derived: "abAcd"
        let mut d = Derived::default();
        d.keep("ab", 0);
        d.unit("A", 2, 5);
        d.keep("cd", 5);
        let (text, map) = d.finish();
        assert_eq!(text, "abAcd");
        assert_eq!(map.back(0, 2), (0, 2));
        assert_eq!(map.back(2, 3), (2, 5));
        assert_eq!(map.back(1, 4), (1, 6));
        assert_eq!(map.back(3, 5), (5, 7));
    }

    #[test]
    fn removed_characters_stay_inside_a_finding() {
        // source: "a\u{200b}b" with the invisible character removed
        let mut d = Derived::default();
        d.keep("a", 0);
        d.keep("b", 4);
        assert_eq!(d.finish().1.back(0, 2), (0, 5));
    }

    #[test]
    fn decoded_bytes_that_are_not_utf8_are_replaced_and_mapped() {
        let mut d = DerivedBytes::default();
        d.push(b'a', 0, 1);
        d.push(0xff, 1, 4);
        d.push(0xc3, 4, 7);
        d.push(0xa9, 7, 10);
        let (text, map) = d.finish();
        assert_eq!(text, "a\u{fffd}é");
        assert_eq!(map.back(4, 6), (4, 10));
    }
}
