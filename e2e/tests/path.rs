//! The request path through the real Envoy and the real filter, as far as no rule matters: what passes
//! passes unchanged, what can't be inspected does not pass. What rules find is `detect.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rustix::process::Signal;
use sallyport_e2e::client::{Answer, Body, Call, End, raw};
use sallyport_e2e::rig::{Filter, Plan, Rig, unanswered};
use sallyport_e2e::upstream::{hex, pattern};
use serde_json::json;

const SOON: Duration = Duration::from_secs(10);

fn honest() -> Rig {
    Plan::new(Filter::Honest).start()
}

fn small() -> Plan {
    Plan::new(Filter::Honest).policy(|spec| spec.limits.max_body_bytes = 64 << 10)
}

/// The same call straight to the upstream.
fn direct(rig: &Rig, path: &str) -> Answer {
    Call::get(rig.upstream.url(path)).send().unwrap()
}

#[test]
fn the_sockets_are_for_their_owner_only() {
    let rig = honest();
    for socket in ["admin.sock", "extproc.sock"] {
        let mode = std::fs::symlink_metadata(rig.run_dir().join(socket)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }
}

#[test]
fn a_benign_request_arrives_byte_for_byte() {
    let rig = honest();
    // Spaces, order and escapes that a parser and printer would not keep.
    let odd = br#"{ "b" : 1.50,"a":"caf\u00e9 \/ tea" ,  "z":[ ] }"#.to_vec();
    let bodies = [odd, Vec::new(), pattern(100_000), vec![0xff, 0x00, 0xfe]];
    for body in bodies {
        for framed in
            [Body::Sized(body.clone()), Body::Chunked(body.chunks(7_000).map(<[u8]>::to_vec).collect())]
        {
            let answer = rig
                .call("POST", "/echo?a=1&b=%20x")
                .header("content-type", "application/json")
                .header("x-mine", "kept")
                .body(framed)
                .send()
                .unwrap()
                .expect_status(200);
            let echo = answer.json();
            assert_eq!(echo["sha256"], hex(&body));
            assert_eq!(echo["target"], "/echo?a=1&b=%20x");
            let headers = echo["headers"].as_array().unwrap();
            assert!(headers.contains(&json!(["x-mine", "kept"])));
            assert!(headers.contains(&json!(["host", rig.upstream.address.to_string()])));
        }
    }
}

#[test]
fn a_benign_response_arrives_byte_for_byte_with_its_headers() {
    let rig = honest();
    for path in
        ["/page/clean", "/bytes/0", "/bytes/1", "/bytes/100000", "/api/orders", "/status/404", "/status/500"]
    {
        let (through, straight) = (rig.get(path).send().unwrap(), direct(&rig, path));
        assert_eq!(through.status, straight.status, "{path}");
        assert_eq!(through.body, straight.body, "{path}");
        assert_eq!(through.end, End::Clean, "{path}");
        for (name, value) in &straight.headers {
            if name != "date" {
                assert_eq!(through.header(name), Some(value.as_str()), "{path} {name}");
            }
        }
    }
}

#[test]
fn a_benign_response_without_a_length_or_over_the_cap_arrives_byte_for_byte() {
    let rig = small().start();
    for path in ["/chunked/30000", "/chunked/1000000", "/bytes/4000000", "/slow"] {
        let (through, straight) = (rig.get(path).send().unwrap(), direct(&rig, path));
        assert_eq!((through.status, through.end), (200, End::Clean), "{path}");
        assert_eq!(hex(&through.body), hex(&straight.body), "{path}");
    }
}

#[test]
fn a_base_url_listener_names_its_upstream_and_no_other() {
    let rig = honest();
    // What the client calls the host does not matter: this listener stands for one upstream.
    let got =
        raw(rig.base, b"GET /echo HTTP/1.1\r\nhost: attacker.example\r\nconnection: close\r\n\r\n", SOON);
    let got = String::from_utf8(got.unwrap().0).unwrap();
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
    assert!(got.contains(&format!("[\"host\",\"{}\"]", rig.upstream.address)), "{got}");
}

#[test]
fn events_pass_while_the_stream_goes_on() {
    let rig = honest();
    let answer = rig.get("/sse/10").header("x-demo-pause-ms", "100").send().unwrap().expect_status(200);
    assert_eq!(answer.end, End::Clean);
    assert_eq!(answer.body, direct(&rig, "/sse/10").body);
    let (first, _) = answer.pieces[0];
    // Ten pauses of 100 ms: were the stream held to its end, the first piece would come with the last.
    assert!(answer.took > first + Duration::from_millis(500), "first after {first:?} of {:?}", answer.took);
}

#[test]
fn a_client_that_hangs_up_ends_the_upstreams_stream() {
    let rig = honest();
    let answer = rig.get("/sse/200").header("x-demo-pause-ms", "100").give_up_after(30).send().unwrap();
    assert_eq!(answer.end, End::GaveUp);
    assert!(rig.upstream.seen.wait_for_cut(SOON), "the upstream still writes");
}

#[test]
fn a_denied_host_is_refused_before_anything_is_resolved() {
    let rig = honest();
    let resolved = "dns_cache.by_name.dns_query_attempt";
    let port = rig.upstream.address.port();
    let _ =
        Call::get(format!("http://localhost:{port}/echo")).via(rig.proxy).send().unwrap().expect_status(200);
    assert_eq!(rig.stat(resolved), 1);
    let answer = Call::get("http://denied.example/echo").via(rig.proxy).send().unwrap();
    let _ = answer.expect_refusal(403, "egress_denied");
    assert_eq!(rig.stat(resolved), 1);
}

#[test]
fn a_denied_host_is_refused_with_its_body_unread() {
    let rig = honest();
    let answer = Call::new("POST", "http://denied.example/echo")
        .via(rig.proxy)
        .body(Body::Sized(pattern(500_000)))
        .send()
        .unwrap();
    let _ = answer.expect_refusal(403, "egress_denied");
}

#[test]
fn a_body_over_the_cap_is_refused_by_its_length() {
    let rig = small().start();
    for size in [(64 << 10) + 1, 100_000] {
        let answer = rig.call("POST", "/echo").body(Body::Sized(pattern(size))).send().unwrap();
        let _ = answer.expect_refusal(413, "body_too_large");
    }
    let exact = rig.call("POST", "/echo").body(Body::Sized(pattern(64 << 10))).send().unwrap();
    assert_eq!(exact.expect_status(200).json()["length"], 64 << 10);
    assert_eq!(rig.upstream.seen.requests("/echo"), 1);
}

/// Envoy refuses this one before the filter hears of the request; the filter sees only Envoy's answer.
#[test]
fn a_body_over_everything_that_envoy_would_hold_is_refused_by_its_length() {
    let rig = small().start();
    let answer = rig.call("POST", "/echo").body(Body::Sized(pattern(4_000_000))).send().unwrap();
    let _ = answer.expect_refusal(413, "body_too_large");
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
}

#[test]
fn a_chunked_body_over_the_cap_is_refused_soon() {
    let rig = small().start();
    for size in [(64 << 10) + 1, 120_000, 140_000, 4_000_000] {
        let chunks = pattern(size).chunks(9_000).map(<[u8]>::to_vec).collect();
        let answer = rig.call("POST", "/echo").body(Body::Chunked(chunks)).deadline(SOON).send().unwrap();
        let _ = answer.expect_refusal(413, "body_too_large");
    }
    let exact = pattern(64 << 10).chunks(9_000).map(<[u8]>::to_vec).collect();
    let answer = rig.call("POST", "/echo").body(Body::Chunked(exact)).send().unwrap();
    assert_eq!(answer.expect_status(200).json()["length"], 64 << 10);
    assert_eq!(rig.upstream.seen.requests("/echo"), 1);
}

#[test]
fn connect_is_refused_by_the_filter() {
    let rig = honest();
    let authority = rig.upstream.address;
    let answer =
        Call::new("CONNECT", format!("http://{authority}")).via(rig.proxy).deadline(SOON).send().unwrap();
    let _ = answer.expect_refusal(403, "tunnel_denied");
}

#[test]
fn websocket_is_refused() {
    let rig = honest();
    let answer = rig
        .get("/ws")
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "x3JJHMbDL1EzLkh9GBhXDw==")
        .deadline(SOON)
        .send()
        .unwrap();
    let _ = answer.expect_refusal(403, "tunnel_denied");
    assert_eq!(rig.upstream.seen.requests("/ws"), 0);
}

#[test]
fn an_https_url_in_the_clear_is_refused() {
    let rig = honest();
    let authority = rig.upstream.address;
    let request = format!("GET https://{authority}/echo HTTP/1.1\r\nhost: {authority}\r\n\r\n");
    let (got, closed) = raw(rig.proxy, request.as_bytes(), SOON).unwrap();
    assert!(!got.starts_with(b"HTTP/1.1 2"), "{}", String::from_utf8_lossy(&got));
    assert!(closed.is_some());
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
}

/// A part of a body can't be judged, so the whole is asked for.
#[test]
fn a_range_is_not_forwarded() {
    let rig = honest();
    let answer = rig.get("/bytes/1000").header("range", "bytes=10-19").send().unwrap().expect_status(200);
    assert_eq!(answer.body, pattern(1000));
}

#[test]
fn trailers_of_a_response_pass() {
    let rig = honest();
    for pause in ["0", "1", "20"] {
        for _ in 0..10 {
            let call = rig.get("/trailers").header("te", "trailers").header("x-demo-pause-ms", pause);
            let answer = call.deadline(SOON).send().unwrap().expect_status(200);
            assert_eq!((answer.text().as_str(), answer.end), ("body\n", End::Clean));
            assert_eq!(answer.trailers, [("x-checksum".to_owned(), "ok".to_owned())]);
        }
    }
}

#[test]
fn errors_of_the_upstream_keep_their_bodies() {
    let rig = honest();
    for status in [403, 413, 500, 503, 504] {
        let answer = rig.get(&format!("/status/{status}")).send().unwrap().expect_status(status);
        assert_eq!(answer.json()["from"], "upstream");
    }
    let dead = Call::get("http://127.0.0.1:1/").via(rig.proxy).send().unwrap();
    let _ = dead.expect_refusal(503, "upstream_unavailable");
}

/// Trap 1, the filter's half: told to end, it ends what is open by an error, never by OK.
#[test]
fn a_filter_told_to_end_never_lets_a_call_pass_uninspected() {
    let rig = honest();
    let call = rig.get("/sse/200").header("x-demo-pause-ms", "100").deadline(Duration::from_secs(60));
    let thread = std::thread::spawn(move || call.send().unwrap());
    std::thread::sleep(Duration::from_millis(700));
    rig.signal_filter(Signal::TERM);
    let stream = thread.join().unwrap();
    assert_eq!((stream.status, stream.end), (200, End::Cut));
    let after = rig.post("/echo", &json!({"a": 1})).send().unwrap();
    let _ = after.expect_refusal(503, "filter_unavailable");
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
}

#[test]
fn a_filter_killed_in_the_middle_of_a_stream_cuts_it() {
    let mut rig = honest();
    let call = rig.get("/sse/100").header("x-demo-pause-ms", "100").deadline(Duration::from_secs(30));
    let thread = std::thread::spawn(move || call.send().unwrap());
    std::thread::sleep(Duration::from_millis(700));
    rig.kill_filter();
    let answer = thread.join().unwrap();
    assert_eq!((answer.status, answer.end), (200, End::Cut));
    assert!(rig.upstream.seen.wait_for_cut(SOON));

    rig.start_filter();
    let _ = rig.post("/echo", &json!({"a": 1})).send().unwrap().expect_status(200);
}

/// Envoy's default breaker and the filter's default stream limit both end far below this.
#[test]
fn more_streams_than_any_default_allows_are_open_at_once() {
    const STREAMS: usize = 1_200;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let wanted = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, wanted).unwrap();
    assert!(limit.maximum.is_none_or(|m| m >= 4 * STREAMS as u64), "the hard limit of open files is too low");

    // 1,200 heads at once on a busy machine may wait longer for their turn than one may.
    let rig = Plan::new(Filter::Honest).message_timeout(Duration::from_secs(20)).start();
    let request = format!(
        "GET {} HTTP/1.1\r\nhost: {}\r\nx-demo-pause-ms: 60000\r\n\r\n",
        rig.upstream.url("/sse/2"),
        rig.upstream.address
    );
    let mut open = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = TcpStream::connect(rig.proxy).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        open.push(stream);
    }
    for (i, stream) in open.iter().enumerate() {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), "HTTP/1.1 200 OK", "stream {i}");
    }
}

// === Observe

#[test]
fn observe_changes_neither_a_byte_nor_a_status() {
    let rig = small().observe().start();
    for path in ["/api/secret", "/page/poisoned", "/gzip", "/bytes/4000000", "/chunked/200000", "/sse/5"] {
        let (through, straight) = (rig.get(path).send().unwrap(), direct(&rig, path));
        assert_eq!((through.status, through.end), (straight.status, End::Clean), "{path}");
        assert_eq!(hex(&through.body), hex(&straight.body), "{path}");
    }
    let ranged = rig.get("/bytes/1000").header("range", "bytes=10-19").send().unwrap().expect_status(206);
    assert_eq!(ranged.body, &pattern(1000)[10..20]);
}

#[test]
fn observe_lets_bodies_over_the_cap_pass() {
    let rig = small().observe().start();
    let body = pattern(4_000_000);
    for framed in
        [Body::Sized(body.clone()), Body::Chunked(body.chunks(50_000).map(<[u8]>::to_vec).collect())]
    {
        let answer = rig.call("POST", "/echo").body(framed).send().unwrap().expect_status(200);
        assert_eq!(answer.json()["sha256"], hex(&body));
    }
}

#[test]
fn observe_lets_denied_hosts_pass() {
    let rig = Plan::new(Filter::Honest).observe().policy(|spec| spec.egress.rules.clear()).start();
    let _ = rig.post("/echo", &json!({"a": 1})).send().unwrap().expect_status(200);
}

/// Observe resolves before the filter, which hears of Envoy's answer only. Nothing is judged, and the access log has
/// the one line that names the host.
#[test]
fn observe_judges_no_call_whose_name_does_not_resolve() {
    let rig = Plan::new(Filter::Honest).observe().policy(|spec| spec.egress.rules.clear()).start();
    let answer = Call::get("http://nowhere.invalid/x").via(rig.proxy).send().unwrap();
    assert_eq!(answer.expect_status(503).json()["error"]["code"], "upstream_unavailable");
    let log = rig.access_log(1);
    assert_eq!((&log[0]["authority"], &log[0]["status"]), (&json!("nowhere.invalid"), &json!(503)));
    assert_eq!(log[0]["sallyport"], json!(null), "no verdict: {log:?}");
    let records = std::fs::read_to_string(rig.run_dir().join("../filter.log")).unwrap();
    assert!(!records.contains("sallyport::verdict"), "it is judged now: say so in limitations.md: {records}");
}

#[test]
fn the_access_log_names_the_request_and_the_verdict() {
    let rig = honest();
    let _ = rig.post("/echo", &json!({"a": 1})).send().unwrap();
    let refused = Call::get("http://denied.example/x?key=1").via(rig.proxy).send().unwrap();
    let log = rig.access_log(2);
    assert_eq!(log[0]["status"], 200);
    assert_eq!(log[1]["status"], 403);
    assert_eq!(log[1]["sallyport"]["code"], "egress_denied");
    assert_eq!(log[1]["details"], "sallyport_egress_denied");
    assert_eq!(log[1]["path"], "/x", "the query is not logged");
    assert_eq!(log[1]["request_id"], refused.json()["error"]["request_id"]);
    assert!(log.iter().all(|e| !e["extproc"].as_str().unwrap_or_default().is_empty()), "{log:?}");
    assert!(!log.iter().any(unanswered), "{log:?}");
}
