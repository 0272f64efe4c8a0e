//! From a message's head to its segments: the URL and the headers.

use super::extract::{Extracted, Structural};
use super::segment::{Origin, PARAMETER, Place, Role, Segment};
use crate::finding::Surface;
use crate::message::RequestHead;
use crate::rules::Scanner;
use crate::value::suspicious;

/// A URL longer than this is refused: servers accept 8 KiB at most as a rule.
pub(crate) const LONGEST_URL: usize = 8 << 10;

/// The URL as an agent would write it.
pub(crate) fn url_of(head: &RequestHead) -> String {
    let default = if head.scheme == "https" { 443 } else { 80 };
    if head.port == default || head.port == 0 {
        format!("{}://{}{}", head.scheme, head.host, head.path)
    } else {
        format!("{}://{}:{}{}", head.scheme, head.host, head.port, head.path)
    }
}

pub(crate) fn url_structure(url: &str) -> Option<Structural> {
    let scanner = if url.len() > LONGEST_URL {
        Scanner::UrlLength
    } else if holds_control(url.split(['?', '#']).next().unwrap_or_default()) {
        Scanner::UrlControl
    } else {
        return None;
    };
    Some(Structural { scanner, surface: Surface::Url, path: "url".into() })
}

/// A label longer than this is no word: the longest that clouds make up have 46.
const LONGEST_LABEL: usize = 50;
/// Three times the longest name that is seen in practice.
const LONGEST_NAME: usize = 120;
/// Shorter labels hold too little to measure.
const LEAST_MEASURED: usize = 16;

/// What the shape of a name gives away; `most` is `dns.maxLabelEntropy`.
pub(crate) fn name_structure(name: &str, most: u32) -> Vec<Structural> {
    let mut found = Vec::new();
    let mut add = |scanner| found.push(Structural { scanner, surface: Surface::Dns, path: String::new() });
    let random = |l: &str| l.len() >= LEAST_MEASURED && tenths_of_bits(l) > f64::from(most);
    if name.split('.').any(random) {
        add(Scanner::DnsEntropy);
    }
    if name.len() > LONGEST_NAME || name.split('.').any(|l| l.len() > LONGEST_LABEL) {
        add(Scanner::DnsLength);
    }
    found
}

/// Shannon's entropy of a label, in tenths of a bit per character.
fn tenths_of_bits(label: &str) -> f64 {
    let mut counts = [0u32; 256];
    label.bytes().for_each(|b| counts[usize::from(b)] += 1);
    let length = label.len() as f64;
    let share = |c: &u32| f64::from(*c) / length;
    -10. * counts.iter().filter(|c| **c > 0).map(share).map(|p| p * p.log2()).sum::<f64>()
}

/// A control character before the query, raw or percent-encoded once or twice. In a query a line break
/// is an ordinary part of a text.
pub(crate) fn holds_control(path: &str) -> bool {
    let bytes = path.as_bytes();
    bytes.iter().any(u8::is_ascii_control)
        || memchr::memchr_iter(b'%', bytes).any(|at| {
            let mut rest = &bytes[at + 1..];
            while rest.starts_with(b"25") {
                rest = &rest[2..];
            }
            matches!(rest, [b'0' | b'1', h, ..] if h.is_ascii_hexdigit())
                || rest.starts_with(b"7f")
                || rest.starts_with(b"7F")
        })
}

/// Parameters of a query that are read one by one.
const MOST_PARAMETERS: usize = 64;

/// The parameters of a URL whose values hold more than words, each as a value of its own. The rules for all
/// texts have read them in the URL; these are for the rules that ask whether a value is data.
pub(crate) fn parameter_segments(ex: &mut Extracted<'_>, url: &str) {
    let Some((_, query)) = url.split_once('?') else { return };
    let query = query.split('#').next().unwrap_or_default();
    for pair in query.split('&').take(MOST_PARAMETERS) {
        let (name, value) = pair.split_once('=').unwrap_or(("", pair));
        if value.len() >= 3 && suspicious(value) {
            ex.segments.push(Segment {
                surface: Surface::Url,
                role: Role::None,
                place: Place::Name(format!("{PARAMETER}{name}")),
                text: value.replace('+', " ").into(),
                origin: Origin::Elsewhere,
            });
        }
    }
}

/// Headers whose purpose is to carry a credential to the host they are sent to.
const CREDENTIAL_HEADERS: [&str; 10] = [
    "authorization",
    "proxy-authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "x-auth-token",
    "cookie",
    "set-cookie",
    "x-amz-security-token",
    "x-csrf-token",
];
/// A name shorter than this holds no secret and no order.
const LEAST_NAME: usize = 16;
/// Long names that everybody sends.
const COMMON_NAMES: [&str; 8] = [
    "transfer-encoding",
    "access-control-allow-origin",
    "x-forwarded-proto",
    "strict-transport-security",
    "content-security-policy",
    "x-content-type-options",
    "upgrade-insecure-requests",
    "x-ratelimit-remaining-requests",
];

/// Every header, whoever is meant to write it: responses and trailers may hold any.
pub(crate) fn header_segments<'a>(ex: &mut Extracted<'a>, headers: &'a [(String, String)]) {
    for (name, value) in headers {
        // A name is the client's free choice too.
        if name.len() >= LEAST_NAME && !COMMON_NAMES.contains(&name.as_str()) {
            ex.segments.push(Segment::elsewhere(Surface::Headers, Role::Key, "name", name));
        }
        if value.len() < 3 || name.starts_with(':') {
            continue;
        }
        let role = if CREDENTIAL_HEADERS.contains(&name.as_str()) { Role::Credential } else { Role::None };
        ex.segments.push(Segment::elsewhere(Surface::Headers, role, name, value));
    }
}
