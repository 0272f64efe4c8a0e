//! Attempts to reach a destination that the policy denies: what Envoy dials must be what was judged.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use sallyport_api::{DefaultAction, Egress, EgressAction, EgressRule};
use sallyport_e2e::rig::{Filter, Plan, Rig};
use sallyport_e2e::scripted::Scripted;

fn rule(hosts: &[&str], paths: &[&str], action: EgressAction) -> EgressRule {
    let strings = |s: &[&str]| s.iter().map(|s| (*s).to_owned()).collect();
    EgressRule { hosts: strings(hosts), ports: vec![], methods: vec![], paths: strings(paths), action }
}

fn rig(default: DefaultAction, rules: Vec<EgressRule>) -> Rig {
    Plan::new(Filter::Honest).policy(|s| s.egress = Egress { default, rules, ..Egress::default() }).start()
}

/// Sends a head as it is; the answer, however it ends.
fn send(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    let (mut got, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        got.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&got).into_owned()
}

fn refused(got: &str) -> bool {
    got.is_empty() || got.starts_with("HTTP/1.1 4") || got.starts_with("HTTP/1.1 5")
}

/// Everything is allowed save the loopback: no way of writing it gets there.
#[test]
fn a_denied_address_is_denied_in_every_notation() {
    let up = Scripted::start().unwrap();
    let loopback = rule(&["127.0.0.1", "localhost", "[::1]"], &[], EgressAction::Deny);
    let rig = rig(DefaultAction::Allow, vec![loopback]);
    let port = up.address.port();
    for host in [
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0X7F.1",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.01",
        "127.0.0.1.",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST",
        "LocalHost.",
        "localhost..",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[0::1]",
        "[::ffff:127.0.0.1]",
        "[::FFFF:7f00:1]",
        "[::127.0.0.1]",
        "[::]",
        "[::1%25lo]",
        "[::1%lo]",
        "user@127.0.0.1",
        "allowed.example@127.0.0.1",
        "allowed.example:80@127.0.0.1",
        "127.0.0.1%00",
        "%31%32%37.0.0.1",
        "127。0。0。1",
        "①②⑦.0.0.1",
        "127.0.0.1\\@allowed.example",
        "127.0.0.1#",
        "127.0.0.1?",
        "[127.0.0.1]",
        "127.0.0.1,allowed.example",
    ] {
        for request in [
            format!("GET http://{host}:{port}/x HTTP/1.1\r\nhost: allowed.example\r\n\r\n"),
            format!("GET /x HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n"),
        ] {
            let got = send(rig.proxy, &request);
            assert!(refused(&got), "{host}: {got}");
            assert!(up.got().is_empty(), "{host}: {}", String::from_utf8_lossy(&up.got()));
        }
    }
    for port in ["", ":0", ":00", ":+80", ":-1", ":65536", ":80a", ":0x50", ":80:80", ": 80"] {
        let got = send(rig.proxy, &format!("GET http://localhost{port}/x HTTP/1.1\r\nhost: a\r\n\r\n"));
        assert!(refused(&got), "{port}: {got}");
    }
    assert!(up.got().is_empty());
}

/// Only one name is allowed: what else a request says of its destination changes nothing.
#[test]
fn the_judged_host_is_the_dialled_host() {
    let (up, other) = (Scripted::start().unwrap(), Scripted::start().unwrap());
    let mut allowed = rule(&["127.0.0.1"], &[], EgressAction::Allow);
    allowed.ports = vec![up.address.port()];
    let rig = rig(DefaultAction::Deny, vec![allowed]);
    let (good, bad) = (up.address, other.address);
    for (name, request, passes) in [
        ("host differs", format!("GET http://{good}/x HTTP/1.1\r\nhost: {bad}\r\n\r\n"), true),
        ("target differs", format!("GET http://{bad}/x HTTP/1.1\r\nhost: {good}\r\n\r\n"), false),
        ("two hosts", format!("GET /x HTTP/1.1\r\nhost: {good}\r\nhost: {bad}\r\n\r\n"), false),
        ("host list", format!("GET /x HTTP/1.1\r\nhost: {good}, {bad}\r\n\r\n"), false),
        (
            "forwarded host",
            format!(
                "GET /x HTTP/1.1\r\nhost: {good}\r\nx-forwarded-host: {bad}\r\nforwarded: host={bad}\r\nx-host: {bad}\r\nx-envoy-original-dst-host: {bad}\r\n\r\n"
            ),
            true,
        ),
        ("path is a url", format!("GET //{bad}/x HTTP/1.1\r\nhost: {good}\r\n\r\n"), true),
        ("backslash", format!("GET http://{good}\\@{bad}/x HTTP/1.1\r\nhost: {good}\r\n\r\n"), false),
        ("userinfo", format!("GET http://{good}@{bad}/x HTTP/1.1\r\nhost: {good}\r\n\r\n"), false),
        ("no host", "GET /x HTTP/1.1\r\n\r\n".to_owned(), false),
        ("HTTP/1.0", "GET /x HTTP/1.0\r\n\r\n".to_owned(), false),
        ("empty host", "GET /x HTTP/1.1\r\nhost:\r\n\r\n".to_owned(), false),
        ("https", format!("GET https://{good}/x HTTP/1.1\r\nhost: {good}\r\n\r\n"), false),
        ("scheme of capitals", format!("GET HTTP://{good}/x HTTP/1.1\r\nhost: {bad}\r\n\r\n"), true),
        ("other scheme", format!("GET ftp://{good}/x HTTP/1.1\r\nhost: {good}\r\n\r\n"), false),
    ] {
        let before = up.got().len();
        let got = send(rig.proxy, &request);
        assert!(other.got().is_empty(), "{name}: the other host was dialled; {got}");
        let text = String::from_utf8_lossy(&up.got()[before..]).into_owned();
        assert_eq!(got.starts_with("HTTP/1.1 2"), passes, "{name}: {got}");
        assert_eq!(text.is_empty(), !passes, "{name}: {text}");
        if name == "no host" {
            assert!(got.starts_with("HTTP/1.1 400") && got.contains("bad_url"), "{name}: {got}");
        }
        if name.contains("differs") && passes {
            assert!(text.contains(&format!("host: {good}")) && !text.contains(&bad.to_string()), "{text}");
        }
    }
}

/// A path that is denied stays denied in whatever way it is written, and one that is allowed does not open
/// others.
#[test]
fn a_denied_path_is_denied_in_every_notation() {
    let up = Scripted::start().unwrap();
    let paths = [
        "/admin/x",
        "//admin/x",
        "/./admin/x",
        "/a/../admin/x",
        "/a/%2e%2e/admin/x",
        "/a/%2E./admin/x",
        "/a/..%2fadmin/x",
        "/%61dmin/x",
        "/admi%6e/x",
        "/%2fadmin/x",
        "/a/..;/admin/x",
        "/a\\..\\admin\\x",
        "/%5cadmin/x",
        "/admin%2fx",
        "/%2561dmin/x",
        "/admin/x?y",
        "/admin/../admin/x",
    ];
    let closed = rig(DefaultAction::Allow, vec![rule(&["127.0.0.1"], &["/admin/*"], EgressAction::Deny)]);
    let opened = rig(DefaultAction::Deny, vec![rule(&["127.0.0.1"], &["/a/*"], EgressAction::Allow)]);
    for path in paths {
        for rig in [&closed, &opened] {
            let got = send(rig.proxy, &format!("GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", up.address));
            assert!(refused(&got), "{path}: {got}");
            assert!(up.got().is_empty(), "{path}: {}", String::from_utf8_lossy(&up.got()));
        }
    }
    let got = send(closed.proxy, &format!("GET /docs/a%20b HTTP/1.1\r\nhost: {}\r\n\r\n", up.address));
    assert!(got.starts_with("HTTP/1.1 2"), "{got}");
}
