//! CONNECT that is opened, and requests inside TLS.

use std::collections::HashMap;

use sallyport_extproc::tls::Inside;
use sallyport_proto::ext_proc::ProcessingRequest;

use super::*;

const CONNECT: [(&str, &str); 3] = [(":method", "CONNECT"), (":authority", "a.test:443"), (":path", "")];

fn at(mode: Mode, inside: Inside) -> Bench {
    Bench::new(mode, |cx| cx.inside = inside)
}

/// A request inside TLS, with what Envoy tells of its connection.
fn inside(authority: &str, sni: Option<&str>, connect: Option<&str>) -> ProcessingRequest {
    let told = [("connection.requested_server_name", sni), ("filter_state['sallyport.connect']", connect)];
    let fields = told.into_iter().filter_map(|(name, text)| {
        let kind = Some(prost_types::value::Kind::StringValue(text?.to_owned()));
        Some((name.to_owned(), prost_types::Value { kind }))
    });
    let attributes = prost_types::Struct { fields: fields.collect() };
    let mut message = request_headers(&[(":authority", authority)], true);
    message.attributes = HashMap::from([("envoy.filters.http.ext_proc".to_owned(), attributes)]);
    message
}

#[test]
fn connect_passes_where_it_is_opened_and_nowhere_else() {
    for mode in [Mode::Enforce, Mode::Observe] {
        let mut b = at(mode, Inside::Proxy);
        let answers = b.take(request_headers(&CONNECT, false));
        assert!(answers[0].starts_with("request headers"), "{answers:?}");
        assert_eq!(b.memory.lines(), ["request allow -"]);
        assert!(b.settled(), "a tunnel needs no further message");
    }
    for inside in [Inside::Clear, Inside::Tunnel] {
        let mut b = at(Mode::Enforce, inside);
        let answers = b.answers(request_headers(&CONNECT, false));
        assert!(refusal(&answers[0]).status.unwrap().code >= 400, "{inside:?}");
    }
    let extended = [&CONNECT[..], &[(":protocol", "websocket")]].concat();
    let mut b = at(Mode::Enforce, Inside::Proxy);
    let answers = b.answers(request_headers(&extended, false));
    assert_eq!(refusal_json(&answers[0])["error"]["code"], "tunnel_denied");
}

#[test]
fn connect_is_judged_by_its_headers() {
    let mut b = at(Mode::Enforce, Inside::Proxy);
    let answers = b.answers(request_headers(&[&CONNECT[..], &[("x", "BLOCK")]].concat(), false));
    assert_eq!(refusal_json(&answers[0])["error"]["code"], "policy_denied");
}

#[test]
fn a_request_for_another_server_is_refused_and_only_noted_in_observe() {
    let rows = [
        ("a.test", Some("b.test"), Some("a.test:443")),
        ("a.test", Some("a.test"), Some("b.test:443")),
        ("a.test:8443", Some("a.test"), Some("a.test:443")),
        ("a.test", None, Some("a.test:443")),
        ("a.test", Some("a.test"), None),
        ("a.test", None, None),
    ];
    for (authority, sni, connect) in rows {
        let mut b = at(Mode::Enforce, Inside::Tunnel);
        let answers = b.answers(inside(authority, sni, connect));
        assert_eq!(refusal(&answers[0]).status.unwrap().code, 421, "{sni:?} {connect:?}");
        assert_eq!(refusal_json(&answers[0])["error"]["code"], "misdirected");
        let mut b = at(Mode::Observe, Inside::Tunnel);
        assert!(b.take(inside(authority, sni, connect))[0].starts_with("request headers"));
        assert_eq!(b.memory.lines(), ["request block misdirected"]);
    }
    let mut b = at(Mode::Enforce, Inside::Tunnel);
    assert_eq!(b.take(inside("a.test", Some("a.test"), Some("a.test:443"))), [REQUEST]);
}
