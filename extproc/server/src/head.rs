//! Envoy's header messages, read into the engine's terms.

use std::net::SocketAddr;

use sallyport_engine::{RequestHead, ResponseHead, TransportFailure, Verdict};
use sallyport_proto::ext_proc::{HeaderMap, ProcessingRequest};

use crate::tls::Inside;

/// The destination of a base-URL listener: its client talks to us, and the listener says whom for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    scheme: &'static str,
    host: String,
    port: u16,
}

impl Upstream {
    /// Reads `https://host[:port]`; nothing else may follow.
    pub fn parse(url: &str) -> Option<Self> {
        let (scheme, authority) = url.split_once("://")?;
        let scheme = known_scheme(scheme)?;
        let (host, port) = authority_parts(authority)?;
        Some(Self { scheme, host, port: port.unwrap_or(default_port(scheme)) })
    }
}

/// A request's head, and the two facts about it that the engine has no field for.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) request: RequestHead,
    /// Envoy's id of the request, empty where it gave none.
    pub(crate) id: String,
    /// Why the head makes no sense, if it makes none.
    pub(crate) bad: Option<&'static str>,
}

/// The methods that are let through, all of IANA's registry that is in use. A method is the client's free
/// text otherwise, over HTTP/2 at least: it would go out unread, and `get` would be judged as `GET`.
const METHODS: [&str; 27] = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "CONNECT",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "QUERY",
    "PROPFIND",
    "PROPPATCH",
    "MKCOL",
    "COPY",
    "MOVE",
    "LOCK",
    "UNLOCK",
    "SEARCH",
    "REPORT",
    "MKCALENDAR",
    "MKACTIVITY",
    "CHECKOUT",
    "MERGE",
    "ACL",
    "PURGE",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
];

/// Reads a request's headers. A head that makes no sense is still returned, so that its record has a
/// method and whatever else could be read.
pub(crate) fn request(map: Option<HeaderMap>, upstream: Option<&Upstream>, inside: Inside) -> Head {
    let mut head = RequestHead::default();
    let (mut scheme, mut authority, mut id) = (String::new(), String::new(), String::new());
    let mut method = String::new();
    let headers = map.map(|m| m.headers).unwrap_or_default();
    head.headers.reserve(headers.len());
    for header in headers {
        let value = text(&header.raw_value, header.value);
        match header.key.as_str() {
            ":method" => {
                head.method = value.to_ascii_uppercase();
                method = value;
            }
            ":scheme" => scheme = value,
            ":authority" => authority = value,
            ":path" => head.path = value,
            // Extended CONNECT names what it upgrades to here; to the engine it is an upgrade like another.
            ":protocol" => head.headers.push(("upgrade".to_owned(), value)),
            key if key.starts_with(':') => {}
            key => {
                if key == "x-request-id" && id.is_empty() {
                    id.clone_from(&value);
                }
                head.headers.push((header.key, value));
            }
        }
    }
    let connect = head.method == "CONNECT";
    let bad = if let Some(upstream) = upstream {
        upstream.scheme.clone_into(&mut head.scheme);
        head.host.clone_from(&upstream.host);
        head.port = upstream.port;
        None
    } else {
        // What came in over TLS leaves over TLS, whatever the client calls it.
        destination(&mut head, if connect || inside.is_tls() { "https" } else { &scheme }, &authority)
    };
    let bad = bad.or_else(|| {
        let path_ok = connect || head.path.starts_with('/') || (head.method == "OPTIONS" && head.path == "*");
        (!path_ok).then_some("the path does not start with `/`")
    });
    let bad = match method.as_str() {
        "" => Some("the request has no method"),
        m if !METHODS.contains(&m) => Some("the method is none that is known"),
        _ => bad,
    };
    Head { request: head, id, bad }
}

fn destination(head: &mut RequestHead, scheme: &str, authority: &str) -> Option<&'static str> {
    let Some(scheme) = known_scheme(scheme) else {
        return Some("the scheme is neither http nor https");
    };
    scheme.clone_into(&mut head.scheme);
    let Some((host, port)) = authority_parts(authority) else {
        return Some("the authority is not `host` or `host:port`");
    };
    head.host = host;
    head.port = port.unwrap_or(default_port(scheme));
    None
}

/// Reads a response's headers; a status that is no number reads as 0.
pub(crate) fn response(map: Option<HeaderMap>) -> ResponseHead {
    let headers = map.map(|m| m.headers).unwrap_or_default();
    let mut head = ResponseHead { status: 0, headers: Vec::with_capacity(headers.len()) };
    for header in headers {
        let value = text(&header.raw_value, header.value);
        if header.key == ":status" {
            head.status = value.parse().unwrap_or(0);
        } else if !header.key.starts_with(':') {
            head.headers.push((header.key, value));
        }
    }
    head
}

/// Envoy's own id of the request, which it sends as an attribute where the listener asks for it.
pub(crate) fn id_attribute(message: &ProcessingRequest) -> Option<&str> {
    attribute(message, "request.id")
}

/// Where a captured connection was made to.
pub(crate) fn destination_attribute(message: &ProcessingRequest) -> Option<SocketAddr> {
    let address: SocketAddr = attribute(message, "destination.address")?.parse().ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

/// A text among the attributes that the listener asks for.
pub(crate) fn attribute<'a>(message: &'a ProcessingRequest, name: &str) -> Option<&'a str> {
    use prost_types::value::Kind;
    message.attributes.values().find_map(|s| match s.fields.get(name)?.kind.as_ref()? {
        Kind::StringValue(text) => Some(text.as_str()),
        _ => None,
    })
}

/// The verdict on a head that makes no sense.
pub(crate) fn bad_url(why: &str) -> Verdict {
    Verdict { message: why.to_owned(), ..TransportFailure::BadUrl.verdict() }
}

/// What a `content-length` says. Two that differ, or one that is no number, say nothing that could be
/// relied on: the body is then treated as one of unknown length.
pub(crate) fn content_length(headers: &[(String, String)]) -> Option<u64> {
    let mut lengths = headers.iter().filter(|(n, _)| n == "content-length").map(|(_, v)| {
        let digits = !v.is_empty() && v.bytes().all(|b| b.is_ascii_digit());
        if digits { v.parse::<u64>().ok() } else { None }
    });
    let first = lengths.next()??;
    lengths.all(|l| l == Some(first)).then_some(first)
}

/// Whether the request asks to turn the connection into something else.
pub(crate) fn is_upgrade(head: &RequestHead) -> bool {
    head.header("upgrade").is_some()
}

fn known_scheme(scheme: &str) -> Option<&'static str> {
    ["http", "https"].into_iter().find(|s| scheme.eq_ignore_ascii_case(s))
}

fn default_port(scheme: &str) -> u16 {
    if scheme == "https" { 443 } else { 80 }
}

/// Splits `host[:port]`. The host comes back in lower case without a trailing dot, because that is how
/// policies are compared; user information, empty labels and everything that is no host are refused,
/// because the next reader of the same bytes may read another host in them.
pub(crate) fn authority_parts(authority: &str) -> Option<(String, Option<u16>)> {
    let (host, port) = if authority.starts_with('[') {
        let end = authority.find(']')? + 1;
        let (host, rest) = authority.split_at(end);
        let inside = &host[1..host.len() - 1];
        let address = inside.parse::<std::net::Ipv6Addr>().ok()?;
        // An IPv4 address in other clothes would pass by the rules for it.
        if address.is_unspecified() || (address.to_ipv4().is_some() && !address.is_loopback()) {
            return None;
        }
        (format!("[{address}]"), if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
    } else {
        let (host, port) = match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        let host = host.strip_suffix('.').unwrap_or(host);
        let honest = |label: &str| {
            !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        if host.len() > 253 || !host.split('.').all(honest) {
            return None;
        }
        // The resolver reads `127.1`, `0x7f.1`, `017700000001` and `2130706433` as addresses; rules don't.
        let last = host.rsplit('.').next().unwrap_or_default();
        let numeric =
            last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x") || last.starts_with("0X");
        // `0.0.0.0` is this machine, as no rule for the loopback says.
        if numeric && !host.parse::<std::net::Ipv4Addr>().is_ok_and(|a| a.octets()[0] != 0) {
            return None;
        }
        (host.to_ascii_lowercase(), port)
    };
    let port = match port {
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
            Some(digits.parse::<u16>().ok().filter(|p| *p != 0)?)
        }
        Some(_) => return None,
        None => None,
    };
    Some((host, port))
}

/// A header's value. Envoy fills `raw_value`; bytes that are not UTF-8 are shown as replacement characters
/// to the rules only: the header itself is forwarded as it came.
fn text(raw: &[u8], value: String) -> String {
    if raw.is_empty() { value } else { String::from_utf8_lossy(raw).into_owned() }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use sallyport_proto::ext_proc::HeaderValue;

    use super::*;

    fn map(headers: &[(&str, &str)]) -> HeaderMap {
        let headers = headers
            .iter()
            .map(|(k, v)| HeaderValue {
                key: (*k).to_owned(),
                raw_value: Bytes::copy_from_slice(v.as_bytes()),
                ..HeaderValue::default()
            })
            .collect();
        HeaderMap { headers }
    }

    fn read(authority: &str, scheme: &str) -> Head {
        let headers = [(":method", "GET"), (":scheme", scheme), (":authority", authority), (":path", "/a?b")];
        request(Some(map(&headers)), None, Inside::Clear)
    }

    #[test]
    fn an_authority_is_read_as_host_and_port() {
        for (authority, scheme, host, port) in [
            ("API.Example.com", "http", "api.example.com", 80),
            ("api.example.com.", "https", "api.example.com", 443),
            ("a.b:8443", "https", "a.b", 8443),
            ("[2001:DB8::1]:8080", "http", "[2001:db8::1]", 8080),
            ("[::1]", "https", "[::1]", 443),
            ("my_svc", "HTTP", "my_svc", 80),
        ] {
            let read = read(authority, scheme);
            assert_eq!(read.bad, None, "{authority}");
            assert_eq!((read.request.host.as_str(), read.request.port), (host, port), "{authority}");
            assert_eq!((read.request.method.as_str(), read.request.path.as_str()), ("GET", "/a?b"));
        }
    }

    #[test]
    fn an_authority_that_two_readers_could_read_differently_is_bad() {
        for authority in [
            "",
            ":80",
            "a.b:",
            "a.b:0",
            "a.b:65536",
            "a.b:+80",
            "user@a.b",
            "a.b@c.d",
            "a..b",
            "a.b..",
            ".a",
            "a b",
            "a.b/c",
            "[::1",
            "[::1]80",
            "[x]",
            "::1",
            "a.b:80:90",
            "ä.b",
            "a%2eb",
            "a.b\\c",
            "a,b",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "127.0.0.1.1",
            "0.0.0.0",
            "0",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::7f00:1]",
        ] {
            assert!(read(authority, "http").bad.is_some(), "{authority:?}");
        }
        assert!(read("a.b", "ftp").bad.is_some());
        let long = format!("{}.b", "a".repeat(253));
        assert!(read(&long, "http").bad.is_some());
    }

    #[test]
    fn the_listener_s_upstream_replaces_the_client_s_authority() {
        let upstream = Upstream::parse("https://api.example.com").unwrap();
        let headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x@y"), (":path", "/")];
        let read = request(Some(map(&headers)), Some(&upstream), Inside::Clear);
        assert_eq!(read.bad, None);
        assert_eq!(
            (read.request.scheme.as_str(), read.request.host.as_str(), read.request.port),
            ("https", "api.example.com", 443)
        );
        assert_eq!(Upstream::parse("https://a.b/c"), None);
        assert_eq!(Upstream::parse("a.b"), None);
    }

    #[test]
    fn what_came_over_tls_is_https_whatever_it_calls_itself() {
        let headers = [(":method", "GET"), (":scheme", "http"), (":authority", "a.b"), (":path", "/")];
        let inside = request(Some(map(&headers)), None, Inside::Tunnel).request;
        assert_eq!((inside.scheme.as_str(), inside.port), ("https", 443));
    }

    #[test]
    fn an_extended_connect_reads_as_an_upgrade() {
        let headers =
            [(":method", "CONNECT"), (":protocol", "websocket"), (":authority", "a.b"), (":path", "/")];
        assert!(is_upgrade(&request(Some(map(&headers)), None, Inside::Clear).request));
    }

    #[test]
    fn lengths_that_contradict_each_other_say_nothing() {
        let length = |values: &[&str]| {
            let headers: Vec<_> =
                values.iter().map(|v| ("content-length".to_owned(), (*v).to_owned())).collect();
            content_length(&headers)
        };
        assert_eq!(length(&["12"]), Some(12));
        assert_eq!(length(&["12", "12"]), Some(12));
        assert_eq!(length(&["12", "13"]), None);
        assert_eq!(length(&["+12"]), None);
        assert_eq!(length(&["12, 12"]), None);
        assert_eq!(length(&[]), None);
    }
}
