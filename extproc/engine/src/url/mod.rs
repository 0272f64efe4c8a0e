//! URLs: where they lead, and what they carry.
//!
//! A text is taken for a URL on the surface of URLs, and where a value that should be data is one as a whole.
//! URLs inside prose are left to the rules with patterns.

mod address;
mod host;
mod payload;

use std::borrow::Cow;

use crate::rules::Scanner;
use unicode_normalization::UnicodeNormalization;

pub(crate) use payload::{is_encoded_text, links};

/// Schemes of readers, not of web servers: a request for one is a request to something else.
const ODD_SCHEMES: [&str; 34] = [
    "gopher",
    "dict",
    "tftp",
    "ldap",
    "ldaps",
    "ldapi",
    "jar",
    "netdoc",
    "php",
    "phar",
    "expect",
    "ogg",
    "zlib",
    "zip",
    "rar",
    "glob",
    "ssh2",
    "compress.zlib",
    "compress.bzip2",
    "javascript",
    "vbscript",
    "livescript",
    "local_file",
    "url",
    "telnet",
    "finger",
    "sftp",
    "rsync",
    "nfs",
    "smb",
    "imap",
    "pop3",
    "mysql",
    "fcgi",
];
/// Further ones that a tool may be given, and a web server may not.
const OWN_SCHEMES: [&str; 8] = ["file", "data", "blob", "about", "view-source", "ssh", "cifs", "redis"];

/// Names of parameters that hold a destination.
const DESTINATIONS: [&str; 24] = [
    "url",
    "uri",
    "u",
    "host",
    "hostname",
    "dest",
    "destination",
    "target",
    "redirect",
    "redirect_uri",
    "redirect_url",
    "next",
    "callback",
    "proxy",
    "src",
    "feed",
    "image",
    "link",
    "site",
    "domain",
    "server",
    "endpoint",
    "webhook",
    "continue",
];

/// Decodings of a part that are undone; a request that needs more was made to wear readers out.
const MOST_DECODINGS: usize = 3;
/// A URL longer than this is refused for its length, or is none.
const LONGEST: usize = 8 << 10;
/// Parameters that are looked at.
const MOST_PARAMETERS: usize = 64;

/// The parts of a URL, as they stand.
#[derive(Clone, Copy, Debug, Default)]
struct Parts<'a> {
    scheme: &'a str,
    /// What stands between `//` and the path.
    authority: &'a str,
    path: &'a str,
    query: &'a str,
    fragment: &'a str,
    /// Where path, query and fragment start in the text.
    at: [usize; 3],
}

fn parts(text: &str) -> Parts<'_> {
    let mut p = Parts::default();
    let mut at = 0;
    if let Some(n) = scheme_end(text) {
        p.scheme = &text[..n];
        at = n + 1;
    }
    if text[at..].starts_with("//") {
        at += 2;
        let end = memchr::memchr3(b'/', b'?', b'#', &text.as_bytes()[at..]).map_or(text.len(), |n| at + n);
        p.authority = &text[at..end];
        at = end;
    }
    let path_end = memchr::memchr2(b'?', b'#', &text.as_bytes()[at..]).map_or(text.len(), |n| at + n);
    p.path = &text[at..path_end];
    p.at[0] = at;
    let mut rest = path_end;
    if text[rest..].starts_with('?') {
        let end = text[rest..].find('#').map_or(text.len(), |n| rest + n);
        p.query = &text[rest + 1..end];
        p.at[1] = rest + 1;
        rest = end;
    }
    if text[rest..].starts_with('#') {
        p.fragment = &text[rest + 1..];
        p.at[2] = rest + 1;
    }
    p
}

/// Where a scheme's `:` stands, if the text begins with a scheme.
fn scheme_end(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let n =
        bytes.iter().position(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.' | b'_')))?;
    (n > 0 && n <= 20 && bytes[n] == b':' && bytes[0].is_ascii_alphabetic()).then_some(n)
}

/// Whether a value is a URL as a whole.
fn is_url(text: &str) -> bool {
    match scheme_end(text) {
        Some(n) => {
            let rest = &text[n + 1..];
            rest.starts_with("//")
                || ODD_SCHEMES.iter().any(|s| text[..n].eq_ignore_ascii_case(s)) && !rest.starts_with(' ')
        }
        None => text.starts_with("//") && text.len() > 4 && !text[2..].starts_with(['/', ' ']),
    }
}

/// Calls `found` for whatever is wrong with the URL in `text`. `sole` says that the text is one, whatever it
/// looks like.
pub(crate) fn scan(text: &str, sole: bool, mut found: impl FnMut(Scanner, usize, usize)) {
    let lead = text.len() - text.trim_start().len();
    let url = text.trim();
    if url.is_empty()
        || url.len() > LONGEST
        || !(sole || is_url(url))
        || (!sole && url.contains(char::is_whitespace))
    {
        return;
    }
    let mut note = |s, from: usize, to: usize| found(s, lead + from, lead + to.max(from + 1));
    look(url, sole, &mut note);
}

fn look(url: &str, sole: bool, found: &mut impl FnMut(Scanner, usize, usize)) {
    let p = parts(url);
    let odd = |list: &[&str]| list.iter().any(|s| p.scheme.eq_ignore_ascii_case(s));
    if !is_web(p.scheme) && (odd(&ODD_SCHEMES) || (sole && odd(&OWN_SCHEMES)) || secret_file(&p)) {
        found(Scanner::UrlScheme, 0, p.scheme.len());
    }
    let authority = p.scheme.len() + usize::from(!p.scheme.is_empty()) + 2;
    if !p.authority.is_empty() {
        if confusing(p.authority) {
            found(Scanner::UrlConfusion, authority, authority + p.authority.len());
        }
        let host = host_of(p.authority);
        if let Some(s) = destination(&host) {
            found(s, authority, authority + p.authority.len());
        }
        if host::lookalike(&host) {
            found(Scanner::HostLookalike, authority, authority + p.authority.len());
        }
        if host::carries(&host) {
            found(Scanner::HostLabels, authority, authority + p.authority.len());
        }
    } else if !p.scheme.is_empty()
        && is_web(p.scheme)
        && (p.path.starts_with('/') || p.path.starts_with('\\'))
    {
        // `http:/host`, `http:\\host`, `http:///host`: some readers go there.
        found(Scanner::UrlConfusion, 0, url.len());
    }
    if climbs(p.path) {
        found(Scanner::UrlTraversal, p.at[0], p.at[0] + p.path.len());
    }
    nested(&p, found);
    carried(&p, found);
}

fn is_web(scheme: &str) -> bool {
    ["http", "https", "ws", "wss"].iter().any(|s| scheme.eq_ignore_ascii_case(s))
}

/// `file:///etc/passwd` and its kin, which no tool needs to be given.
fn secret_file(p: &Parts<'_>) -> bool {
    p.scheme.eq_ignore_ascii_case("file")
        && ["/etc/", "/proc/", "/root/", "/var/run/", "/dev/", "/c:/windows", "/windows/"].iter().any(|d| {
            p.path.len() >= d.len() && p.path.as_bytes()[..d.len()].eq_ignore_ascii_case(d.as_bytes())
        })
}

/// The host of an authority, decoded and folded the way readers do: no user, no port, no width, lower case.
fn host_of(authority: &str) -> Cow<'_, str> {
    let host = &authority[memchr::memrchr(b'@', authority.as_bytes()).map_or(0, |n| n + 1)..];
    let host = if host.starts_with('[') {
        host.find(']').map_or(host, |n| &host[..=n])
    } else {
        &host[..memchr::memchr(b':', host.as_bytes()).unwrap_or(host.len())]
    };
    if host.bytes().all(|b| {
        b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'[' | b']' | b':')
    }) {
        return Cow::Borrowed(host);
    }
    let decoded = if host.starts_with('[') { Cow::Borrowed(host) } else { decode(host) };
    Cow::Owned(decoded.to_lowercase())
}

/// What is wrong with the destination that a host names, as [`host_of`] has it.
fn destination(host: &str) -> Option<Scanner> {
    let folded: Cow<'_, str> = if host.is_ascii() {
        Cow::Borrowed(host)
    } else {
        // Digits in circles, full width, ideographic stops.
        Cow::Owned(host.replace(['\u{3002}', '\u{ff0e}', '\u{ff61}'], ".").nfkc().collect())
    };
    let changed = folded != host;
    if let Some((ip, plain)) = address::parse(&folded) {
        if !address::special(ip) {
            return None;
        }
        return Some(if plain && !changed { Scanner::UrlPrivate } else { Scanner::UrlSpelling });
    }
    if address::inside_name(&folded) {
        return Some(if changed { Scanner::UrlSpelling } else { Scanner::UrlPrivate });
    }
    let host = folded.strip_suffix('.').unwrap_or(&folded);
    if address::in_name(host).is_some_and(|a| address::special(a.into()))
        || (host.contains('.')
            && address::WILDCARD.iter().any(|w| address::under(host, w) && !public_site(host, w)))
    {
        return Some(Scanner::UrlRebinding);
    }
    None
}

/// The site of such a service itself.
fn public_site(host: &str, service: &str) -> bool {
    matches!(service, "nip.io" | "sslip.io" | "xip.io" | "1u.ms" | "traefik.me" | "backname.io")
        && (host == service || host.strip_prefix("www.") == Some(service) || address::in_name(host).is_some())
}

/// Whether two readers find two hosts in an authority.
fn confusing(authority: &str) -> bool {
    let bytes = authority.as_bytes();
    if bytes.iter().any(|b| matches!(b, b'\\' | b' ' | b'\t' | b'<' | b'>' | b'|' | b'^' | b'"')) {
        return true;
    }
    if memchr::memchr(b'%', bytes).is_some() && !authority.starts_with('[') && {
        let lower = authority.to_ascii_lowercase();
        ["%2f", "%5c", "%23", "%3f", "%40", "%00", "%0a", "%0d", "%09", "%20", "%25"]
            .iter()
            .any(|e| lower.contains(e))
    } {
        return true;
    }
    let ats = memchr::memchr_iter(b'@', bytes).count();
    if ats == 0 {
        // `http://good#@bad`, `http://good?@bad` end up in other parts; a port that is none does not.
        let host_end = if authority.starts_with('[') { authority.find(']').map_or(0, |n| n + 1) } else { 0 };
        return authority[host_end..].split_once(':').is_some_and(|(_, port)| {
            !port.is_empty() && !port.bytes().all(|b| b.is_ascii_digit()) && !port.starts_with(['{', '$'])
        });
    }
    if ats > 1 {
        return true;
    }
    let user = authority.split('@').next().unwrap_or_default();
    // A user that is a host.
    hostlike(user.split(':').next().unwrap_or_default())
}

/// Whether a name in front of `@` is meant to be read as the host.
fn hostlike(user: &str) -> bool {
    let Some((_, last)) = user.trim_end_matches(['#', '?', '&']).rsplit_once('.') else {
        return user.eq_ignore_ascii_case("localhost");
    };
    address::parse(user).is_some()
        || [
            "com", "net", "org", "io", "gov", "edu", "internal", "local", "dev", "ai", "app", "co", "uk",
            "de", "tld", "example", "corp",
        ]
        .iter()
        .any(|t| last.eq_ignore_ascii_case(t))
}

/// A text with its percent-encoding undone, as often as it was done.
fn decode(text: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(text);
    for _ in 0..MOST_DECODINGS {
        if memchr::memchr(b'%', text.as_bytes()).is_none() {
            break;
        }
        let bytes = text.as_bytes();
        let mut out = Vec::with_capacity(bytes.len());
        let mut at = 0;
        while at < bytes.len() {
            let digit = |i: usize| bytes.get(i).and_then(|b| (*b as char).to_digit(16));
            if bytes[at] == b'%'
                && let (Some(h), Some(l)) = (digit(at + 1), digit(at + 2))
            {
                out.push((h << 4 | l) as u8);
                at += 3;
            } else {
                out.push(bytes[at]);
                at += 1;
            }
        }
        let next = String::from_utf8_lossy(&out).into_owned();
        if *next == *text {
            break;
        }
        text = Cow::Owned(next);
    }
    text
}

/// Whether a path goes up past where it started, or hides that it goes up.
fn climbs(path: &str) -> bool {
    let bytes = path.as_bytes();
    if memchr::memchr2(b'.', b'%', bytes).is_none() {
        return false;
    }
    if !bytes.windows(2).any(|w| w == b"..")
        && !bytes.windows(3).any(|w| w[0] == b'%' && w[1] == b'2' && w[2] | 32 == b'e')
        && memchr::memmem::find(bytes, b"%25").is_none()
    {
        return false;
    }
    let decoded = decode(path);
    let hidden = *decoded != *path;
    let mut depth = 0i32;
    let mut ups = 0;
    for step in decoded.split(['/', '\\']) {
        match step.split(';').next().unwrap_or_default() {
            "" | "." => {}
            ".." => {
                ups += 1;
                depth -= 1;
                if depth < 0 {
                    return true;
                }
            }
            _ => depth += 1,
        }
    }
    // Servers of a static site resolve `/docs/../api/` in their own links; nobody encodes it.
    ups > 0 && hidden && !path.split('/').any(|s| s == "..") || ups > 2
}

/// URLs and hosts inside the URL.
fn nested(p: &Parts<'_>, found: &mut impl FnMut(Scanner, usize, usize)) {
    let bad = |value: &str, named: bool| {
        let value = decode(value);
        let value = value.trim();
        let inner = parts(value);
        if is_url(value) {
            let odd = ODD_SCHEMES.iter().chain(&OWN_SCHEMES).any(|s| inner.scheme.eq_ignore_ascii_case(s));
            return odd
                || (!inner.authority.is_empty()
                    && (destination(&host_of(inner.authority)).is_some() || meta(inner.authority)));
        }
        // `?host=127.0.0.1:22`
        let host = value.split(['/', '?', '#']).next().unwrap_or_default();
        named
            && !host.is_empty()
            && (host.contains('.') || host.contains(':') || host.len() > 7)
            && destination(&host_of(host)).is_some()
    };
    if !p.query.is_empty() {
        for (name, value, at) in parameters(p.query) {
            let named = DESTINATIONS.iter().any(|d| name.eq_ignore_ascii_case(d));
            if value.len() >= 3 && bad(value, named) {
                found(Scanner::UrlNested, p.at[1] + at, p.at[1] + at + value.len());
            }
        }
    }
    // `/proxy/http://10.0.0.1/`
    if memchr::memchr2(b':', b'%', p.path.as_bytes()).is_none() {
        return;
    }
    for scheme in ["http:/", "https:/", "http%3a", "https%3a", "gopher:", "file:/"] {
        if let Some(n) = p.path.find(scheme) {
            let inner = decode(&p.path[n..]).into_owned();
            let inner = if inner.contains("://") { inner } else { inner.replacen(":/", "://", 1) };
            if bad(&inner, false) {
                found(Scanner::UrlNested, p.at[0] + n, p.at[0] + p.path.len());
            }
        }
    }
}

/// A metadata service, which the core finds in the whole URL unless it is encoded.
fn meta(authority: &str) -> bool {
    let host = host_of(authority);
    host.starts_with("metadata.google") || host.starts_with("metadata.goog")
}

/// Names and values of a query with the place of each value.
fn parameters(query: &str) -> impl Iterator<Item = (&str, &str, usize)> {
    let mut at = 0;
    query.split('&').take(MOST_PARAMETERS).map(move |pair| {
        let start = at;
        at += pair.len() + 1;
        match pair.split_once('=') {
            Some((name, value)) => (name, value, start + name.len() + 1),
            None => ("", pair, start),
        }
    })
}

/// Names of parameters whose values are made by machines to be unreadable.
const OPAQUE: [&str; 12] = [
    "token",
    "state",
    "code",
    "sig",
    "signature",
    "cursor",
    "nonce",
    "hash",
    "after",
    "before",
    "pagetoken",
    "policy",
];

/// Names of parameters that are for what people write.
const WRITTEN: [&str; 26] = [
    "q",
    "query",
    "search",
    "s",
    "text",
    "title",
    "description",
    "body",
    "subject",
    "message",
    "prompt",
    "question",
    "input",
    "content",
    "comment",
    "name",
    "keywords",
    "term",
    "address",
    "location",
    "quote",
    "summary",
    "caption",
    "note",
    "labels",
    "filter",
];

/// Texts that the URL carries in an encoding, and texts that it should not carry.
fn carried(p: &Parts<'_>, found: &mut impl FnMut(Scanner, usize, usize)) {
    let mut at = p.at[0];
    let steps = if p.path.len() >= 20 { p.path } else { "" };
    for step in steps.split('/') {
        if step.len() >= 20 {
            let name = step.split('.').next().unwrap_or(step);
            if is_encoded_text(&decode(name)) {
                found(Scanner::UrlPayload, at, at + step.len());
            }
        }
        at += step.len() + 1;
    }
    if p.fragment.len() >= 20 && is_encoded_text(&decode(p.fragment)) {
        found(Scanner::UrlPayload, p.at[2], p.at[2] + p.fragment.len());
    }
    if p.path.len() >= 40 && p.path.matches('/').count() > 2 {
        let pieces: String = p
            .path
            .split('/')
            .filter(|s| s.len() >= 8 && s.bytes().all(|b| b.is_ascii_alphanumeric()))
            .collect();
        if pieces.len() >= 40 && is_encoded_text(&pieces) {
            found(Scanner::UrlPayload, p.at[0], p.at[0] + p.path.len());
        }
    }
    if p.query.len() < 16 {
        return;
    }
    let mut joined = String::new();
    let mut count = 0;
    for (name, value, at) in parameters(p.query) {
        if OPAQUE.iter().any(|o| name.eq_ignore_ascii_case(o)) || name.starts_with("X-Amz-") {
            continue;
        }
        if value.len() >= 20 && is_encoded_text(&decode(value)) {
            found(Scanner::UrlPayload, p.at[1] + at, p.at[1] + at + value.len());
        }
        if value.len() >= 8 {
            joined.push_str(value.trim_end_matches('='));
            count += 1;
        }
    }
    // A text in pieces.
    if count > 1 && is_encoded_text(&decode(&joined)) {
        found(Scanner::UrlPayload, p.at[1], p.at[1] + p.query.len());
    }
    // A sentence, or a line of settings, in a parameter that is for neither.
    if p.query.len() < 24 {
        return;
    }
    let picture =
        [".png", ".gif", ".jpg", ".jpeg", ".svg", ".webp", ".ico"].iter().any(|e| p.path.ends_with(e));
    for (name, value, at) in parameters(p.query) {
        let written = picture || !WRITTEN.iter().any(|w| name.eq_ignore_ascii_case(w));
        if value.len() >= 24 && written && payload::is_written(&decode(value).replace('+', " ")) {
            found(Scanner::UrlPayload, p.at[1] + at, p.at[1] + at + value.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Vec<Scanner> {
        let mut out = Vec::new();
        scan(url, true, |s, from, to| {
            assert!(from < to && to <= url.len() + 1, "{url}: {from}..{to}");
            if !out.contains(&s) {
                out.push(s);
            }
        });
        out
    }

    #[test]
    fn each_layer_finds_its_own() {
        for (url, wanted) in [
            ("gopher://h/_x", Scanner::UrlScheme),
            ("http://0x7f.1/", Scanner::UrlSpelling),
            ("http://\u{2460}\u{2461}\u{2466}.0.0.1/", Scanner::UrlSpelling),
            ("http://10.1.2.3/", Scanner::UrlPrivate),
            ("http://LOCALHOST:8080/x", Scanner::UrlPrivate),
            ("http://a.example\\@b.example/", Scanner::UrlConfusion),
            ("http://good.com@evil.example/", Scanner::UrlConfusion),
            ("https://good.example/?next=http%3A%2F%2F127.0.0.1%2F", Scanner::UrlNested),
            ("https://good.example/?host=10.0.0.1:22", Scanner::UrlNested),
            ("https://good.example/fetch/http://192.168.0.1/x", Scanner::UrlNested),
            ("http://10.0.0.1.nip.io/", Scanner::UrlRebinding),
            ("http://h.example/a/%2e%2e/%2e%2e/b", Scanner::UrlTraversal),
            ("http://h.example/a?x=VGhlIG9yZGVyIGlzIGxhdGUgYW5kIG5vYm9keSBjYWxsZWQ", Scanner::UrlPayload),
            ("http://546865206f72646572206973206c617465.x.example.net/", Scanner::HostLabels),
            ("http://g00gle.com/", Scanner::HostLookalike),
        ] {
            assert!(of(url).contains(&wanted), "{url}: {:?}", of(url));
        }
    }

    #[test]
    fn ordinary_urls_are_clean() {
        for url in [
            "https://api.example.org/v1/items?limit=20&sort=name",
            "http://orders.shop.svc.cluster.local:8080/v1",
            "https://user@dev.azure.com/org/project",
            "https://1.1.1.1/dns-query",
            "https://en.wikipedia.org/wiki/127.0.0.1",
            "https://web.archive.org/web/2024/https://example.com/",
            "https://example.org/login?next=https%3A%2F%2Fexample.org%2Fhome",
            "https://[2606:4700::1111]/",
            "https://nip.io/",
            "wss://example.org/socket",
            "/v1/items/4711",
            "a=b c",
        ] {
            assert_eq!(of(url), [], "{url}");
        }
    }
}
