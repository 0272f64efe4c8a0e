//! Bending inputs.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

/// A small generator of even numbers (splitmix64, S. Vigna): what matters is that a case is a function of
/// its number, on every machine and for ever.
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that starts at that number.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A generator that an input itself gives: for choices beside the input, such as chunk sizes, so that
    /// the input alone is enough to see a failure again.
    pub fn of(input: &[u8]) -> Self {
        // FNV-1a
        Self(
            input
                .iter()
                .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)),
        )
    }

    /// The next number.
    #[allow(clippy::should_implement_trait, reason = "an endless source is no iterator worth having")]
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 for 0.
    pub const fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    /// A range within `len`, mostly short.
    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        let most = if self.below(4) == 0 { len } else { 24 };
        start..(start + self.below(most + 1)).min(len)
    }
}

/// Bytes that mean something to the parsers of this project.
const PIECES: [&[u8]; 44] = [
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b"\r\n",
    b"\r",
    b"\n\n",
    b" ",
    b"\t",
    b"\0",
    b"=",
    b"&",
    b"%",
    b"%25",
    b"%2",
    b"<",
    b"<!--",
    b"-->",
    b">",
    b"<b>",
    b"&#",
    b"&#x41;",
    b"&amp;",
    b"\\u0041",
    b"\\ud83d\\ude00",
    b"\\ud800",
    b"\\u",
    b"\\\"",
    b"data: ",
    b"event: x\n",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xff",
    b"\xe2\x80\x8b",
    b"\xcc\x81",
    b"\xd0\xbe",
    b"\xf3\xa0\x81\x81",
    b"@",
    b"1e5",
];

/// Inputs do not grow beyond this, so that a run sees many.
const MOST: usize = 1 << 16;

/// A seed bent in one to six places. `words` are put in whole.
pub fn mutate(rng: &mut Rng, seeds: &[Vec<u8>], words: &[Vec<u8>]) -> Vec<u8> {
    let pick = |rng: &mut Rng, from: &[Vec<u8>]| {
        if from.is_empty() { Vec::new() } else { from[rng.below(from.len())].clone() }
    };
    let mut out = pick(rng, seeds);
    for _ in 0..=rng.below(6) {
        let range = rng.range(out.len());
        let with: Vec<u8> = match rng.below(14) {
            0 => vec![],
            1 => vec![rng.next() as u8],
            2 => out[range.clone()].iter().map(|b| b ^ (1 << rng.below(8))).collect(),
            3 | 4 => PIECES[rng.below(PIECES.len())].to_vec(),
            5..=7 => pick(rng, words),
            8 => {
                let other = pick(rng, seeds);
                other[rng.range(other.len())].to_vec()
            }
            9 => out[rng.range(out.len())].to_vec(),
            10 => {
                let most = if rng.below(8) == 0 { 2000 } else { 8 };
                out[range.clone()].repeat(1 + rng.below(most))
            }
            11 => PIECES[rng.below(PIECES.len())].repeat(1 + rng.below(200)),
            12 => {
                // A word in a disguise.
                let word = pick(rng, words);
                encoded(rng, &word)
            }
            _ => encoded(rng, &out[range.clone()]),
        };
        // As often put in as put in place of something.
        let range = if rng.below(2) == 0 { range.start..range.start } else { range };
        if out.len() + with.len() <= MOST {
            out.splice(range, with);
        }
    }
    // The whole in UTF-16, now and then: nothing else reaches that reader.
    if rng.below(64) == 0 {
        let units: Vec<u16> = String::from_utf8_lossy(&out).encode_utf16().collect();
        let bytes = units.iter().flat_map(|u| u.to_le_bytes());
        out =
            if rng.below(2) == 0 { [0xff, 0xfe].into_iter().chain(bytes).collect() } else { bytes.collect() };
    }
    out
}

/// The bytes as one of the encodings writes them that agents and attackers use.
fn encoded(rng: &mut Rng, bytes: &[u8]) -> Vec<u8> {
    let each = |f: &dyn Fn(u8) -> String| bytes.iter().map(|b| f(*b)).collect::<String>().into_bytes();
    match rng.below(8) {
        0 => STANDARD.encode(bytes).into_bytes(),
        1 => URL_SAFE_NO_PAD.encode(bytes).into_bytes(),
        2 => each(&|b| format!("%{b:02x}")),
        3 => each(&|b| format!("&#{b};")),
        4 => each(&|b| format!("\\u{b:04x}")),
        5 => each(&|b| char::from_u32(0xe0000 + u32::from(b & 0x7f)).unwrap_or('?').to_string()),
        6 => each(&|b| format!("{}\u{200b}", char::from(b))),
        _ => each(&|b| format!("<b>{}</b>", char::from(b))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_a_function_of_its_number() {
        let seeds = [b"{\"a\": 1}".to_vec(), b"data: x\n\n".to_vec()];
        let words = [b"word".to_vec()];
        let all: Vec<_> = (0..200).map(|n| mutate(&mut Rng::new(n), &seeds, &words)).collect();
        let again: Vec<_> = (0..200).map(|n| mutate(&mut Rng::new(n), &seeds, &words)).collect();
        assert_eq!(all, again);
        assert!(all.iter().any(|i| i.len() > 100) && all.iter().all(|i| i.len() <= 4 * MOST));
    }
}
