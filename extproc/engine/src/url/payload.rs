//! Parts of a URL that carry a text or bytes of somebody's choice.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Shorter parts hide nothing worth a finding.
const LEAST: usize = 20;
/// Longer parts are decoded up to here.
const MOST: usize = 4096;

const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_allow_trailing_bits(true)
    .with_decode_padding_mode(DecodePaddingMode::Indifferent);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Whether a word is text in base64, base32 or hex: not an id, not a token, not a URL, but something that was
/// written down by somebody.
pub(crate) fn is_encoded_text(word: &str) -> bool {
    let word = word.trim_end_matches('=');
    if word.len() < LEAST {
        return false;
    }
    let word = word.get(..word.len().min(MOST)).unwrap_or_default();
    let bytes = word.as_bytes();
    if bytes.iter().all(u8::is_ascii_hexdigit) {
        return word.len() >= 2 * LEAST - 8 && is_text(&hex(bytes));
    }
    if bytes.iter().all(|b| b.is_ascii_alphabetic() || matches!(b, b'2'..=b'7'))
        && (bytes.iter().all(|b| !b.is_ascii_lowercase()) || bytes.iter().all(|b| !b.is_ascii_uppercase()))
    {
        return is_text(&base32(bytes));
    }
    if !bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'-' | b'_'))
        // A name or a sentence in words: base64 of a text has both cases and mixes them.
        || !bytes.iter().any(u8::is_ascii_uppercase)
        || !bytes.iter().any(u8::is_ascii_lowercase)
    {
        return false;
    }
    let engine = if bytes.iter().any(|b| matches!(b, b'-' | b'_')) { URL_SAFE } else { STANDARD };
    // A stray sign at the end is the cutter's, not the encoder's.
    let whole = bytes.len() - usize::from(bytes.len() % 4 == 1);
    engine.decode(&bytes[..whole]).is_ok_and(|d| is_text(&d))
}

/// Shorter parts of a URL inside a text are left alone: prose links to many pages.
const LEAST_IN_TEXT: usize = 24;
/// Longest URL in a text whose parts are looked at, in bytes behind its scheme.
const LONGEST_LINK: usize = 4096;

/// Calls `found` for each part of a URL in `text` that is a text in an encoding. The host is left out.
pub(crate) fn links(text: &str, mut found: impl FnMut(usize, usize)) {
    let bytes = text.as_bytes();
    let coded = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'-' | b'_');
    // A URL inside a URL was read with it.
    let mut past = 0;
    for sign in memchr::memmem::find_iter(bytes, b"://") {
        if sign < past || !(bytes[..sign].ends_with(b"http") || bytes[..sign].ends_with(b"https")) {
            continue;
        }
        let most = bytes.len().min(sign + 3 + LONGEST_LINK);
        let ends = |b: &u8| b.is_ascii_whitespace() || matches!(b, b'"' | b'\'' | b'<' | b'>' | b')');
        let end = bytes[sign + 3..most].iter().position(ends).map_or(most, |n| sign + 3 + n);
        past = end;
        let Some(host) = memchr::memchr3(b'/', b'?', b'#', &bytes[sign + 3..end]) else { continue };
        let mut at = sign + 3 + host;
        while at < end {
            let run = bytes[at..end].iter().position(|b| !coded(*b)).map_or(end, |n| at + n);
            let from = at + usize::from(bytes[at] == b'/');
            // As a whole, because base64 has the slash among its letters, and else step by step.
            if run - from.min(run) >= LEAST_IN_TEXT && is_encoded_text(&text[from.min(run)..run]) {
                found(from, run);
            } else if run - at >= LEAST_IN_TEXT {
                let mut step = at;
                for part in text[at..run].split('/') {
                    if part.len() >= LEAST_IN_TEXT && is_encoded_text(part) {
                        found(step, step + part.len());
                    }
                    step += part.len() + 1;
                }
            }
            at = run.max(at) + 1;
        }
    }
}

/// Whether a decoded parameter is a sentence or a line of settings.
pub(super) fn is_written(text: &str) -> bool {
    if text.starts_with("http://") || text.starts_with("https://") || text.starts_with(['{', '[', '<']) {
        return false;
    }
    let words = text
        .split(' ')
        .filter(|w| w.len() > 1 && w.bytes().all(|b| b.is_ascii_alphabetic() || b",.:;'!?".contains(&b)));
    let setting = text.split_once('=').is_some_and(|(name, value)| {
        name.len() > 5
            && value.len() > 5
            && name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
    });
    words.count() >= 6 || setting || text.starts_with("root:x:0:0") || text.contains("-----BEGIN ")
}

fn hex(bytes: &[u8]) -> Vec<u8> {
    let digit = |b: u8| (b as char).to_digit(16).unwrap_or(0) as u8;
    bytes.chunks_exact(2).map(|c| digit(c[0]) << 4 | digit(c[1])).collect()
}

fn base32(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() * 5 / 8);
    let (mut held, mut bits) = (0u32, 0);
    for b in bytes {
        let value = match b | 32 {
            c @ b'a'..=b'z' => c - b'a',
            _ => b - b'2' + 26,
        };
        held = held << 5 | u32::from(value);
        bits += 5;
        if bits >= 8 {
            bits -= 8;
            out.push((held >> bits) as u8);
            held &= (1 << bits) - 1;
        }
    }
    out
}

/// Whether decoded bytes are something written: all printable, with the spaces or signs of a text. A name of
/// a record (`User:4711`) is not, nor what other machines put there: JSON and URLs.
fn is_text(bytes: &[u8]) -> bool {
    if bytes.len() < 12
        || bytes.starts_with(b"{\"")
        || bytes.starts_with(b"http://")
        || bytes.starts_with(b"https://")
    {
        return false;
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let printable = |c: char| c == '\n' || c == '\t' || c == '\r' || !c.is_control();
    if !text.chars().all(printable) || text.bytes().filter(u8::is_ascii_graphic).count() * 2 < text.len() {
        return false;
    }
    let mut seen = [0u8; 8];
    let mut kinds = 0;
    let mut signs = 0;
    let mut letters = 0;
    for b in bytes {
        if b.is_ascii_alphabetic() {
            letters += 1;
        } else if !b.is_ascii_digit() {
            signs += 1;
            if kinds < seen.len() && !seen[..kinds].contains(b) {
                seen[kinds] = *b;
                kinds += 1;
            }
        }
    }
    let spaces = bytes.iter().filter(|b| b.is_ascii_whitespace()).count();
    letters >= 4 && (spaces >= 2 || (kinds >= 2 && signs >= 3) || text.starts_with("-----BEGIN"))
}

#[cfg(test)]
mod tests {
    use super::{is_encoded_text, links};

    #[test]
    fn parts_of_urls_inside_a_text_are_read_one_by_one() {
        let code = "VGhlIG9yZGVyIGlzIGxhdGUgYW5kIG5vYm9keSBjYWxsZWQ";
        for text in [
            format!("see https://h.example/{code} now"),
            format!("![x](http://h.example/a/b/{code}.png)"),
            format!("\u{e9}\u{2014}<https://h.example/p?x=1&d={code}==>"),
            format!("\"https://h.example#{code}\u{e9}\""),
            format!("https://h.example/?u=https://i.example/{code}"),
        ] {
            let mut found = Vec::new();
            links(&text, |from, to| found.push(&text[from..to]));
            assert_eq!(found, [code], "{text}");
        }
        for text in [
            format!("https://{code}/x"),
            format!("https://h.example/ {code}"),
            format!("ftp://h.example/{code}"),
            "https://h.example/getting-started-with-the-command-line/index.html".to_owned(),
            "https://".to_owned(),
            "://http://\u{e9}/\u{e9}".to_owned(),
        ] {
            links(&text, |from, to| panic!("{text}: {from}..{to}"));
        }
    }

    #[test]
    fn text_in_an_encoding_is_told_from_ids() {
        for word in [
            "VGhlIG9yZGVyIGlzIGxhdGUgYW5kIG5vYm9keSBjYWxsZWQ",
            "RFJJVkVSPXBnOi8vdXNlcjpwd0BkYi5pbnQvcHJvZA==",
            "546865206f72646572206973206c61746520746f646179",
            "krugkidpojsgk4ranfzsa3dborssaylomqqg433cn5shsiddmfwgyzle",
        ] {
            assert!(is_encoded_text(word), "{word}");
        }
        for word in [
            "da39a3ee5e6b4b0d3255bfef95601890afd80709",
            "MDQ6VXNlcjU4MzIzMTIzNDU2Nzg5",
            "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9",
            "aHR0cHM6Ly9leGFtcGxlLm9yZy9pbWFnZXMvbG9nby5wbmc",
            "invoking-the-installer-from-a-script",
            "GettingStartedWithTheCommandLineInterface",
            "550e8400-e29b-41d4-a716-446655440000",
        ] {
            assert!(!is_encoded_text(word), "{word}");
        }
    }
}
