//! HTTPS through the explicit proxy: opened, inspected, and closed again towards the upstream.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use sallyport_api::{DefaultAction, EgressAction, EgressRule};
use sallyport_e2e::client::{Body, Call, End};
use sallyport_e2e::rig::{Filter, Plan, Rig, unanswered};
use sallyport_e2e::upstream::fake_key;
use serde_json::json;

const SOON: Duration = Duration::from_secs(20);

fn honest() -> Rig {
    Plan::new(Filter::Honest).tls().start()
}

fn allow(hosts: &[&str], ports: &[u16], paths: &[&str]) -> EgressRule {
    EgressRule {
        hosts: hosts.iter().map(|h| (*h).to_owned()).collect(),
        ports: ports.to_vec(),
        methods: vec![],
        paths: paths.iter().map(|p| (*p).to_owned()).collect(),
        action: EgressAction::Allow,
    }
}

#[test]
fn https_passes_and_leaves_a_line_of_its_own() {
    let rig = honest();
    let body = json!({"a": "café"});
    let answer = rig.post("/echo?x=1", &body).send().unwrap().expect_status(200);
    assert_eq!(answer.json()["target"], "/echo?x=1");
    assert_eq!(answer.end, End::Clean);
    let log = rig.access_log(2);
    let inner = log.iter().find(|l| l["listener"] == "tunnel").expect("the call inside");
    assert_eq!((inner["path"].as_str(), inner["status"].as_u64()), (Some("/echo"), Some(200)));
    assert!(log.iter().all(|l| !unanswered(l)), "{log:?}");
    // The tunnel costs one message, its request's headers.
    let outer = log.iter().find(|l| l["method"] == "CONNECT").expect("the tunnel");
    assert!(outer["extproc"].as_str().unwrap().starts_with("rh:"), "{outer}");
    assert!(!outer["extproc"].as_str().unwrap().contains("sh:"), "{outer}");
}

#[test]
fn the_key_of_the_authority_is_its_owner_s_alone() {
    let rig = honest();
    let mode =
        |file: &str| std::fs::metadata(rig.authority_dir().join(file)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("ca.key"), 0o600);
}

#[test]
fn a_key_in_a_prompt_never_leaves_over_tls() {
    let rig = honest();
    let prompt = json!({"model": "m", "messages": [{"role": "user", "content": fake_key()}]});
    let _ = rig.post("/v1/chat/completions", &prompt).send().unwrap().expect_refusal(403, "policy_denied");
    assert_eq!(rig.upstream.seen.requests("/v1/chat/completions"), 0);
}

#[test]
fn a_host_that_is_not_allowed_is_refused_before_tls() {
    let rig = honest();
    let answer = rig.trusting(Call::get("https://elsewhere.test/").via(rig.proxy)).send().unwrap();
    let _ = answer.expect_refusal(403, "egress_denied");
}

#[test]
fn a_port_that_is_not_allowed_is_refused_before_tls() {
    let rig = Plan::new(Filter::Honest)
        .tls()
        .policy(|spec| spec.egress.rules = vec![allow(&["localhost"], &[443], &[])])
        .start();
    let _ = rig.get("/echo").send().unwrap().expect_refusal(403, "egress_denied");
}

#[test]
fn the_requests_of_a_tunnel_are_judged_one_by_one() {
    let rig = Plan::new(Filter::Honest)
        .tls()
        .policy(|spec| spec.egress.rules = vec![allow(&["localhost"], &[], &["/api/*"])])
        .start();
    let _ = rig.get("/api/orders").send().unwrap().expect_status(200);
    let _ = rig.get("/page/clean").send().unwrap().expect_refusal(403, "egress_denied");
    assert_eq!(rig.upstream.seen.requests("/page/clean"), 0);
}

/// SNI, CONNECT and Host must name one server.
#[test]
fn a_request_for_another_server_than_its_connection_is_misdirected() {
    let rig = Plan::new(Filter::Honest)
        .tls()
        .policy(|spec| spec.egress.rules = vec![allow(&["localhost", "*.test"], &[], &[])])
        .start();
    let port = rig.upstream.address.port();
    for (what, call) in [
        ("Host", rig.get("/echo").host("b.test")),
        ("the port in Host", rig.get("/echo").host("localhost:1")),
        ("no port in Host", rig.get("/echo").host("localhost")),
        ("SNI", rig.get("/echo").server_name("b.test")),
        ("CONNECT", rig.get("/echo").tunnel_to(&format!("b.test:{port}"))),
        ("CONNECT's port", rig.get("/echo").tunnel_to("localhost:1")),
    ] {
        let answer = call.send().unwrap_or_else(|e| panic!("{what}: {e}"));
        let _ = answer.expect_refusal(421, "misdirected");
    }
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
    let _ = rig.get("/echo").host(&format!("LOCALHOST:{port}")).send().unwrap().expect_status(200);
}

/// `http://` in the request line of a request inside TLS changes neither where it goes nor how.
#[test]
fn what_came_over_tls_leaves_over_tls() {
    let rig = honest();
    let port = rig.upstream.address.port();
    let absolute = rig.get("/").target(format!("http://localhost:{port}/echo"));
    let answer = absolute.send().unwrap().expect_status(200);
    assert_eq!(answer.json()["target"], "/echo");
    // The upstream speaks nothing but TLS, so that is how it was reached.
    assert_eq!(rig.stat("cluster.by_name.upstream_cx_total"), 0);
    // Without a port it is port 443 that is meant, whatever the scheme says, and not the tunnel's.
    let without = rig.get("/").target("http://localhost/echo");
    let _ = without.send().unwrap().expect_refusal(421, "misdirected");
}

#[test]
fn a_name_that_is_not_allowed_gets_no_certificate() {
    let rig = honest();
    let start = Instant::now();
    for name in ["b.test", "127.0.0.1"] {
        let refused = rig.get("/echo").server_name(name).send();
        assert!(refused.is_err(), "{name}: a handshake for a name that nobody may call");
    }
    assert!(start.elapsed() < SOON, "refused, not left to wait: {:?}", start.elapsed());
    // What stands for a name that is missing is no name either.
    assert!(rig.get("/echo").server_name("-").send().is_err());
    let _ = rig.get("/echo").send().unwrap().expect_status(200);
    assert_eq!(rig.upstream.seen.requests("/echo"), 1);
}

#[test]
fn a_tunnel_carries_nothing_but_tls() {
    let rig = honest();
    let port = rig.upstream.address.port();
    let mut tunnel = TcpStream::connect(rig.proxy).unwrap();
    tunnel.set_read_timeout(Some(SOON)).unwrap();
    write!(tunnel, "CONNECT localhost:{port} HTTP/1.1\r\nhost: localhost:{port}\r\n\r\n").unwrap();
    let mut head = [0; 12];
    tunnel.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    tunnel.write_all(b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut rest = Vec::new();
    let _ = tunnel.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("HTTP/1.1"));
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
    assert_eq!(rig.stat("cluster.by_name.upstream_cx_total"), 0);
}

/// Python before 3.12 asks so, without a Host.
#[test]
fn a_tunnel_may_be_asked_for_by_http_1_0() {
    let rig = honest();
    let port = rig.upstream.address.port();
    for (host, status) in [("localhost", "200"), ("elsewhere.test", "403")] {
        let mut tunnel = TcpStream::connect(rig.proxy).unwrap();
        tunnel.set_read_timeout(Some(SOON)).unwrap();
        write!(tunnel, "CONNECT {host}:{port} HTTP/1.0\r\n\r\n").unwrap();
        let mut head = [0; 12];
        tunnel.read_exact(&mut head).unwrap();
        assert_eq!(String::from_utf8_lossy(&head).split(' ').nth(1), Some(status), "{host}");
    }
}

#[test]
fn a_connect_inside_tls_and_an_upgrade_are_refused() {
    let rig = honest();
    let _ = rig
        .get("/echo")
        .header("upgrade", "websocket")
        .header("connection", "upgrade")
        .send()
        .unwrap()
        .expect_refusal(403, "tunnel_denied");
    let call = rig.call("CONNECT", "/echo").send().unwrap();
    assert!([400, 403, 404, 0].contains(&call.status), "{}", call.status);
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
    assert_eq!(rig.stat("cluster.by_name_tls.upstream_cx_total"), 0);
}

#[test]
fn an_upstream_with_a_wrong_certificate_is_not_talked_to() {
    let called = Plan::new(Filter::Honest).tls().upstream_called("other.test").start();
    let _ = called.get("/echo").send().unwrap().expect_refusal(503, "upstream_untrusted");
    let unknown = Plan::new(Filter::Honest).tls().upstream_untrusted().start();
    let _ = unknown.get("/echo").send().unwrap().expect_refusal(503, "upstream_untrusted");
    for rig in [called, unknown] {
        assert_eq!(rig.upstream.seen.requests("/echo"), 0);
    }
}

/// What is refused by the address is refused where TLS would be spoken to it, too.
#[test]
fn a_call_over_tls_does_not_come_back_to_our_own_listeners() {
    let rig = honest();
    let own = Call::get(format!("https://localhost:{}/", rig.proxy.port())).via(rig.proxy);
    let answer = rig.trusting(own).send().unwrap().expect_refusal(403, "egress_denied");
    assert!(answer.json()["error"]["reason"].as_str().unwrap().starts_with("rbac"), "{}", answer.text());
    assert_eq!(rig.stat("cluster.by_name_tls.upstream_cx_total"), 0);
}

#[test]
fn a_stream_arrives_as_it_is_written_and_is_cut_where_it_must_be() {
    let rig = honest();
    let ask =
        |words: &str| json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": words}]});
    let good = rig.post("/v1/chat/completions", &ask("hello")).send().unwrap().expect_status(200);
    assert_eq!(good.end, End::Clean);
    assert!(good.pieces.len() > 2, "{:?}", good.pieces);
    let (first, last) = (good.pieces[0].0, good.pieces[good.pieces.len() - 1].0);
    assert!(last > first + Duration::from_millis(50), "not all at once: {:?}", good.pieces);
    let log = rig.access_log(2);
    assert!(log.iter().all(|l| !unanswered(l)), "{log:?}");
}

#[test]
fn in_observe_nothing_changes_but_the_record() {
    let rig = Plan::new(Filter::Honest).tls().observe().start();
    let prompt = json!({"model": "m", "messages": [{"role": "user", "content": fake_key()}]});
    let _ = rig.post("/v1/chat/completions", &prompt).send().unwrap().expect_status(200);
    let port = rig.upstream.address.port();
    // A name that egress does not allow has a certificate too, and the upstream is judged as ever.
    let _ = rig.get("/echo").server_name("b.test").send().unwrap().expect_status(200);
    let _ = rig.get("/echo").tunnel_to(&format!("b.test:{port}")).send().unwrap().expect_status(200);
}

/// As `trap_13` of `traps.rs` has it for clear HTTP.
#[test]
fn a_body_that_comes_while_a_name_is_resolved_arrives_whole_over_tls() {
    for rig in [Plan::new(Filter::Honest).tls().observe().start(), honest()] {
        let body = vec![b'x'; 500];
        for round in 0..300_u16 {
            // Envoy remembers names as they are written, so that each of these is resolved anew.
            let spelled: String = "localhost"
                .char_indices()
                .map(|(i, c)| if round >> i & 1 == 1 { c.to_ascii_uppercase() } else { c })
                .collect();
            let url = format!("https://{spelled}:{}/echo", rig.upstream.address.port());
            let framed =
                if round % 2 == 0 { Body::Sized(body.clone()) } else { Body::Chunked(vec![body.clone()]) };
            let pause = Duration::from_micros(u64::from(round) * 37 % 4_000);
            let call = rig.trusting(Call::new("POST", url).body(framed).body_after(pause).via(rig.proxy));
            let answer = call.send().unwrap_or_else(|e| panic!("round {round}: {e}"));
            assert_eq!((answer.status, answer.end), (200, End::Clean), "round {round}: {}", answer.text());
            assert_eq!(answer.json()["length"], 500, "round {round}");
        }
        assert!(rig.stat("dns_cache.by_name.host_added") >= 300, "each name was resolved");
    }
}

/// With a filter that is gone nothing passes; with one that is back everything does at once.
#[test]
fn a_filter_that_is_gone_opens_no_tls_and_one_that_is_back_does() {
    let mut rig = honest();
    let _ = rig.get("/echo").send().unwrap().expect_status(200);
    rig.kill_filter();
    let _ = rig.get("/echo").send().unwrap().expect_refusal(503, "filter_unavailable");
    rig.start_filter();
    let start = Instant::now();
    loop {
        if rig.get("/echo").send().is_ok_and(|a| a.status == 200) {
            break;
        }
        assert!(start.elapsed() < SOON, "no TLS since the filter is back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Open keeps no handshake from needing a certificate: what is not inspected is at least not forged blindly.
#[test]
fn a_dead_filter_under_open_still_mints_nothing() {
    let mut rig = Plan::new(Filter::Honest).tls().open().start();
    rig.kill_filter();
    assert!(rig.get("/echo").deadline(Duration::from_secs(3)).send().is_err());
}

#[test]
fn names_are_bounded_and_an_evicted_one_comes_back() {
    let rig = Plan::new(Filter::Honest)
        .tls()
        .most_names(4)
        .policy(|spec| {
            spec.egress.default = DefaultAction::Deny;
            spec.egress.rules = vec![allow(&["localhost", "*.test"], &[], &[])];
        })
        .start();
    let secrets = |rig: &Rig| {
        let (_, dump) = rig.admin("GET", "/config_dump?resource=dynamic_active_secrets&mask=name");
        dump.matches("\"name\"").count()
    };
    let call = |name: &str| rig.get("/echo").server_name(name).send().unwrap().status;
    for i in 0..12 {
        assert_eq!(call(&format!("n{i}.test")), 421, "a certificate for n{i}.test");
    }
    assert!(secrets(&rig) <= 4, "{} certificates are held", secrets(&rig));
    // Taken away long ago, and minted again.
    assert_eq!(call("n0.test"), 421);
    let _ = rig.get("/echo").send().unwrap().expect_status(200);
    assert!(secrets(&rig) <= 4, "{} certificates are held", secrets(&rig));
}
