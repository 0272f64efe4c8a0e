//! Attempts to get bytes past the filter on the way out: framing, encodings, charsets, odd HTTP.
//!
//! The adversary is code in the agent's container that knows our source. Every case carries the same key,
//! which the filter refuses in plain form, to an upstream that keeps every byte it is sent.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use sallyport_e2e::client::{Body, Call};
use sallyport_e2e::rig::{Filter, Plan, Rig};
use sallyport_e2e::scripted::Scripted;
use sallyport_e2e::upstream::fake_key;
use serde_json::{Value, json};

fn honest() -> Rig {
    Plan::new(Filter::Honest).start()
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut e = GzEncoder::new(Vec::new(), Compression::default());
    e.write_all(data).unwrap();
    e.finish().unwrap()
}

fn prompt() -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": format!("my key is {}", fake_key())}]})
        .to_string()
}

fn holds(haystack: &[u8], needle: &str) -> bool {
    haystack.windows(needle.len()).any(|w| w == needle.as_bytes())
}

/// Writes bytes and reads what comes until the other side closes or says nothing more for a while.
fn exchange(address: SocketAddr, pieces: &[&[u8]]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    for piece in pieces {
        if stream.write_all(piece).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let (mut got, mut buffer, start) = (Vec::new(), [0; 16 << 10], Instant::now());
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    while start.elapsed() < Duration::from_secs(5) {
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => {
                got.extend_from_slice(&buffer[..n]);
                stream.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
            }
            _ => break,
        }
    }
    String::from_utf8_lossy(&got).into_owned()
}

/// The key is never found in what the upstream was sent, and the statuses are as said.
fn check(upstream: &Scripted, name: &str, got: &str, statuses: &[&str]) {
    assert!(!holds(&upstream.got(), &fake_key()), "{name}: the key has left; {got}");
    let status = got.split(' ').nth(1).unwrap_or("none");
    assert!(statuses.contains(&status), "{name}: {got}");
}

#[test]
fn whatever_a_body_says_it_is_it_is_read() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let text = prompt();
    let form = format!("a=b&note={}", fake_key());
    let part = format!(
        "--x\r\ncontent-disposition: form-data; name=\"f\"; filename=\"a.png\"\r\ncontent-type: image/png\r\n\r\n{}\r\n--x--\r\n",
        fake_key()
    );
    for (kind, body) in [
        ("", &text),
        ("image/png", &text),
        ("application/octet-stream", &text),
        ("text/event-stream", &text),
        ("application/grpc", &text),
        ("application/x-www-form-urlencoded", &text),
        ("application/json", &form),
        ("text/plain; charset=utf-16", &text),
        ("multipart/form-data; boundary=x", &part),
        ("multipart/form-data; boundary=y", &part),
        ("multipart/form-data", &part),
        ("application/json", &part),
    ] {
        let mut call = Call::new("POST", up.url("/x")).via(rig.proxy);
        if !kind.is_empty() {
            call = call.header("content-type", kind);
        }
        let answer = call.body(Body::Sized(body.clone().into())).send().unwrap();
        let grpc = kind == "application/grpc";
        assert_eq!(answer.status, if grpc { 200 } else { 403 }, "{kind}: {}", answer.text());
        assert!(!holds(&up.got(), &fake_key()), "{kind}");
    }
    assert!(up.got().is_empty(), "refused before anything was dialled");
}

#[test]
fn encodings_are_undone_as_far_as_they_can_be_and_refused_beyond() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let text = prompt().into_bytes();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
    zlib.write_all(&text).unwrap();
    let mut raw = DeflateEncoder::new(Vec::new(), Compression::default());
    raw.write_all(&text).unwrap();
    let (zlib, raw, zipped) = (zlib.finish().unwrap(), raw.finish().unwrap(), gzip(&text));
    let members = [gzip(b"{\"model\":\"m\"}"), zipped.clone()].concat();
    let trailing = [gzip(b"{}"), text.clone()].concat();
    for (name, coding, body, status) in [
        ("gzip", "gzip", &zipped, 403),
        ("capitals", "GZIP", &zipped, 403),
        ("zlib", "deflate", &zlib, 403),
        ("raw deflate", "deflate", &raw, 403),
        ("identity first", "identity, gzip", &zipped, 403),
        ("gzip first", "gzip, identity", &zipped, 403),
        ("two members", "gzip", &members, 403),
        ("twice", "gzip, gzip", &gzip(&zipped), 415),
        ("trailing text", "gzip", &trailing, 415),
        ("plain under gzip", "gzip", &text, 415),
        ("parameter", "gzip;q=1", &zipped, 415),
        ("unknown", "br", &text, 415),
        ("empty elements", ", ,", &text, 403),
        ("cut short", "gzip", &zipped[..zipped.len() - 9].to_vec(), 415),
        ("bomb", "gzip", &gzip(&vec![b' '; 8 << 20]), 415),
    ] {
        let call = Call::new("POST", up.url("/x")).via(rig.proxy).header("content-encoding", coding);
        let answer = call.body(Body::Sized(body.clone())).send().unwrap();
        assert_eq!(answer.status, status, "{name}: {}", answer.text());
    }
    // One header is one list, in however many lines.
    let twice = Call::new("POST", up.url("/x")).via(rig.proxy).header("content-encoding", "identity");
    let twice = twice.header("content-encoding", "gzip").body(Body::Sized(zipped));
    assert_eq!(twice.send().unwrap().status, 403);
    assert!(up.got().is_empty());
}

#[test]
fn charsets_hide_nothing() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let text = prompt();
    let le: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let be: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let wide: Vec<u8> = text.chars().flat_map(|c| (c as u32).to_le_bytes()).collect();
    let wide_be: Vec<u8> = text.chars().flat_map(|c| (c as u32).to_be_bytes()).collect();
    let broken = [&b"\xff\xc3"[..], text.as_bytes()].concat();
    for (name, kind, body, status) in [
        ("mark", "application/json", [b"\xef\xbb\xbf", text.as_bytes()].concat(), 403),
        ("utf-16le", "application/json", le.clone(), 403),
        ("utf-16be", "application/json; charset=utf-8", be.clone(), 403),
        ("utf-16le, marked", "text/plain", [&b"\xff\xfe"[..], &le].concat(), 403),
        ("utf-16be, marked", "text/plain", [&b"\xfe\xff"[..], &be].concat(), 403),
        ("utf-32le", "text/plain", wide.clone(), 403),
        ("utf-32be", "text/plain", wide_be, 403),
        ("utf-32, marked", "text/plain", [&b"\xff\xfe\0\0"[..], &wide].concat(), 403),
        ("broken utf-8", "text/plain", broken, 403),
        ("utf-7", "text/plain; charset=UTF-7", text.replace('A', "+AEE-").into_bytes(), 415),
        ("ebcdic", "text/plain;charset=\"cp037\"", vec![0xc1; 40], 415),
    ] {
        let call = Call::new("POST", up.url("/x")).via(rig.proxy).header("content-type", kind);
        let answer = call.body(Body::Sized(body)).send().unwrap();
        assert_eq!(answer.status, status, "{name}: {}", answer.text());
    }
    assert!(up.got().is_empty());
}

/// JSON that our strict reader refuses and a lax one (JavaScript, Python, Go) takes.
#[test]
fn lax_json_hides_nothing() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let escaped: String =
        fake_key().bytes().flat_map(|b| format!("\\u{b:04x}").into_bytes()).map(char::from).collect();
    for (name, body) in [
        ("escapes", format!("{{\"content\":\"{escaped}\"}}")),
        ("trailing text", format!("{{\"content\":\"{escaped}\"}} x")),
        ("NaN", format!("{{\"a\":NaN,\"content\":\"{escaped}\"}}")),
        ("lone surrogate", format!("{{\"a\":\"\\ud800\",\"content\":\"{escaped}\"}}")),
        ("trailing comma", format!("{{\"content\":\"{escaped}\",}}")),
        ("comment", format!("/**/{{\"content\":\"{escaped}\"}}")),
        ("duplicate", format!("{{\"content\":\"{escaped}\",\"content\":\"\"}}")),
        ("key", format!("{{\"{escaped}\":1}}")),
        ("depth", format!("{}{{\"content\":\"{escaped}\"}}{}", "[".repeat(120), "]".repeat(120))),
        ("batch", format!("[{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}},{{\"x\":\"{escaped}\"}}]")),
    ] {
        let call = Call::new("POST", up.url("/x")).via(rig.proxy).header("content-type", "application/json");
        let answer = call.body(Body::Sized(body.into_bytes())).send().unwrap();
        let rpc = name == "batch";
        assert_eq!(answer.status, if rpc { 200 } else { 403 }, "{name}: {}", answer.text());
    }
    assert!(up.got().is_empty());
}

#[test]
fn framing_that_two_readers_could_read_differently_is_refused() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let (url, host, text) = (up.url("/x"), up.address, prompt());
    let n = text.len();
    let chunk = format!("{n:x}\r\n{text}\r\n0\r\n\r\n");
    for (name, head, body) in [
        ("both", "content-length: 4\r\ntransfer-encoding: chunked\r\n".into(), chunk.clone()),
        ("two lengths", format!("content-length: 0\r\ncontent-length: {n}\r\n"), text.clone()),
        ("length list", format!("content-length: 0, {n}\r\n"), text.clone()),
        ("signed length", format!("content-length: +{n}\r\n"), text.clone()),
        ("negative length", "content-length: -1\r\n".into(), text.clone()),
        ("hex length", format!("content-length: 0x{n:x}\r\n"), text.clone()),
        ("huge length", "content-length: 99999999999999999999\r\n".into(), text.clone()),
        ("wrapping length", "content-length: 18446744073709551616\r\n".into(), text.clone()),
        ("largest length", "content-length: 18446744073709551615\r\n".into(), text.clone()),
        ("unknown coding", "transfer-encoding: gzip, chunked\r\n".into(), chunk.clone()),
        ("chunked last but one", "transfer-encoding: chunked, identity\r\n".into(), chunk.clone()),
        ("almost chunked", "transfer-encoding: xchunked\r\n".into(), chunk.clone()),
        ("folded coding", "transfer-encoding:\r\n chunked\r\n".into(), chunk.clone()),
        ("space before colon", "transfer-encoding : chunked\r\n".into(), chunk.clone()),
        ("control in name", "transfer-encoding\x0b: chunked\r\n".into(), chunk.clone()),
        ("folded header", format!("x-a: 1\r\n\t{}\r\ncontent-length: 0\r\n", fake_key()), String::new()),
        ("bad chunk size", "transfer-encoding: chunked\r\n".into(), format!("-1\r\n{text}\r\n0\r\n\r\n")),
        (
            "chunk size wraps",
            "transfer-encoding: chunked\r\n".into(),
            format!("1{n:016x}\r\n{text}\r\n0\r\n\r\n"),
        ),
        ("chunked", "transfer-encoding: chunked\r\n".into(), chunk.clone()),
        ("Chunked", "Transfer-Encoding: Chunked\r\n".into(), chunk.clone()),
        ("two hosts", format!("host: {host}\r\ncontent-length: {n}\r\n"), text.clone()),
        ("nul in header", format!("x-a: a\0b\r\ncontent-length: {n}\r\n"), text.clone()),
        ("bare cr in header", format!("x-a: a\rx-b: b\r\ncontent-length: {n}\r\n"), text.clone()),
    ] {
        let request = format!("POST {url} HTTP/1.1\r\nhost: {host}\r\n{head}\r\n");
        let got = exchange(rig.proxy, &[request.as_bytes(), body.as_bytes()]);
        check(&up, name, &got, &["400", "403", "413", "501", "none"]);
    }
    for (name, line) in [
        ("0.9", format!("GET {url}?{}", fake_key())),
        ("1.0", format!("GET {url}?{} HTTP/1.0", fake_key())),
        ("2.0", format!("GET {url}?{} HTTP/2.0", fake_key())),
        ("lower case", format!("get {url}?{} HTTP/1.1", fake_key())),
        ("own method", format!("{} {url} HTTP/1.1", fake_key())),
        ("fragment", format!("GET {url}#{} HTTP/1.1", fake_key())),
        ("tab", format!("GET\t{url}?{}\tHTTP/1.1", fake_key())),
        ("encoded", format!("GET {url}?{} HTTP/1.1", fake_key().replace('A', "%41"))),
        ("encoded twice", format!("GET {url}?{} HTTP/1.1", fake_key().replace('A', "%2541"))),
        ("path", format!("GET {url}/{}/y HTTP/1.1", fake_key())),
    ] {
        let got = exchange(rig.proxy, &[format!("{line}\r\nhost: {host}\r\n\r\n").as_bytes()]);
        // What Envoy itself refuses for its path reaches the filter as an answer without a request: 500.
        check(&up, name, &got, &["400", "403", "426", "500", "505", "none"]);
    }
    assert!(up.got().is_empty(), "{}", String::from_utf8_lossy(&up.got()));
}

/// What passes does so without the part that was not inspected.
#[test]
fn what_is_dropped_does_not_carry_anything_out() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let (url, host, key) = (up.url("/x"), up.address, fake_key());
    for (name, request) in [
        (
            "chunk extension",
            format!(
                "POST {url} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n2;k={key}\r\nok\r\n0;k={key}\r\n\r\n"
            ),
        ),
        ("given request id", format!("GET {url} HTTP/1.1\r\nhost: {host}\r\nx-request-id: {key}\r\n\r\n")),
        (
            "forwarded proto",
            format!("GET {url} HTTP/1.1\r\nhost: {host}\r\nx-forwarded-proto: {key}\r\n\r\n"),
        ),
        (
            "upgrade h2c",
            format!(
                "GET {url} HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: {key}\r\n\r\n"
            ),
        ),
        (
            "trailer",
            format!(
                "POST {url} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-note: {key}\r\n\r\n"
            ),
        ),
        (
            "trailer named as Envoy's own",
            format!(
                "POST {url} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-request-id: {key}\r\n\r\n"
            ),
        ),
        (
            "trailer named host",
            format!(
                "POST {url} HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nhost: {key}\r\n\r\n"
            ),
        ),
        (
            "named by connection",
            format!("GET {url} HTTP/1.1\r\nhost: {host}\r\nconnection: x-note\r\nx-note: {key}\r\n\r\n"),
        ),
        ("te", format!("GET {url} HTTP/1.1\r\nhost: {host}\r\nte: {key}\r\n\r\n")),
        (
            "get with body",
            format!("GET {url} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {}\r\n\r\n{key}", key.len()),
        ),
        (
            "head with body",
            format!("HEAD {url} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {}\r\n\r\n{key}", key.len()),
        ),
        (
            "options *",
            format!("OPTIONS * HTTP/1.1\r\nhost: {host}\r\ncontent-length: {}\r\n\r\n{key}", key.len()),
        ),
        (
            "expect",
            format!(
                "POST {url} HTTP/1.1\r\nhost: {host}\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n{key}",
                key.len()
            ),
        ),
        ("bare lf", format!("GET {url} HTTP/1.1\nhost: {host}\nx-note: {key}\n\n")),
        ("userinfo", format!("GET http://{key}@{host}/x HTTP/1.1\r\nhost: {host}\r\n\r\n")),
        ("host", format!("GET {url} HTTP/1.1\r\nhost: {key}.example\r\n\r\n")),
        ("behind the end", format!("GET {url} HTTP/1.1\r\nhost: {host}\r\n\r\n{key}")),
    ] {
        let got = exchange(rig.proxy, &[request.as_bytes()]);
        assert!(!holds(&up.got(), &key), "{name}: the key has left; {got}");
    }
}

#[test]
fn a_headers_name_is_read_too() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let token = format!("dop_v1_{}", "11816892b73936114d53e1253df9a933920ec8d968b70bdbd2fa10e67af6658e");
    let plain = Call::get(up.url("/x")).via(rig.proxy).header("x-note", token.clone()).send().unwrap();
    let _ = plain.expect_refusal(403, "policy_denied");
    let named = Call::get(up.url("/x")).via(rig.proxy).header(&token, "1").send().unwrap();
    let _ = named.expect_refusal(403, "policy_denied");
    assert!(up.got().is_empty());
}

/// A connection that is used on after a refusal, or that carries a request inside another's body.
#[test]
fn requests_behind_requests_are_inspected_each() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let (url, host, key) = (up.url("/x"), up.address, fake_key());
    let good = format!("GET {url} HTTP/1.1\r\nhost: {host}\r\n\r\n");
    let bad = format!("GET {url}?k={key} HTTP/1.1\r\nhost: {host}\r\n\r\n");
    for (name, pieces) in [
        ("pipelined", vec![format!("{good}{bad}")]),
        ("refused first", vec![format!("{bad}{bad}")]),
        ("one by one", vec![good.clone(), bad.clone(), bad.clone()]),
        (
            "inside a refused body",
            vec![format!(
                "POST http://denied.example/ HTTP/1.1\r\nhost: denied.example\r\ncontent-length: {}\r\n\r\n{bad}",
                bad.len()
            )],
        ),
        (
            "inside a body over the cap",
            vec![
                format!("POST {url} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 99999999\r\n\r\n"),
                bad.clone(),
                bad.clone(),
            ],
        ),
        (
            "inside a refused chunked body",
            vec![
                format!(
                    "POST http://denied.example/ HTTP/1.1\r\nhost: denied.example\r\ntransfer-encoding: chunked\r\n\r\n5\r\n"
                ),
                bad.clone(),
                bad.clone(),
            ],
        ),
    ] {
        let pieces: Vec<&[u8]> = pieces.iter().map(String::as_bytes).collect();
        let got = exchange(rig.proxy, &pieces);
        assert!(!holds(&up.got(), &key), "{name}: {got}");
    }
}

#[test]
fn bodies_at_the_cap_are_read_to_their_last_byte() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let (cap, key) = (1 << 20, fake_key());
    let full = |n: usize| [vec![b' '; n - key.len()], key.clone().into_bytes()].concat();
    for (n, status) in [(cap - 1, 403), (cap, 403), (cap + 1, 413), (cap + (64 << 10), 413)] {
        for body in
            [Body::Sized(full(n)), Body::Chunked(full(n).chunks(60_000).map(<[u8]>::to_vec).collect())]
        {
            let call = Call::new("POST", up.url("/x")).via(rig.proxy).body(body);
            let answer = call.send().unwrap();
            assert!(answer.status == status, "{n}: {} {}", answer.status, answer.text());
        }
    }
    assert!(up.got().is_empty());
}

/// Our own metadata comes from the configuration, whatever a client writes into headers of that name.
#[test]
fn our_metadata_can_not_be_written_by_a_client() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    for listener in [rig.proxy, rig.base] {
        let request = "GET http://denied.example/ HTTP/1.1\r\nhost: denied.example\r\nsallyport-upstream: http://127.0.0.1\r\n\
            sallyport-listener: base_url_1\r\nx-sallyport-decision: allow\r\nx-envoy-original-dst-host: 127.0.0.1\r\n\r\n";
        let got = exchange(listener, &[request.as_bytes()]);
        // The base URL's listener goes to its own upstream, whoever is named.
        let expected = if listener == rig.proxy { "403" } else { "404" };
        assert_eq!(got.split(' ').nth(1), Some(expected), "{got}");
    }
    assert!(up.got().is_empty());
}

/// The id of an MCP call is echoed as raw JSON: it must stay one value of the answer.
#[test]
fn a_refusal_stays_json_whatever_is_echoed() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    for id in [
        r#""a\",\"result\":{\"x\":1},\"b\":\"""#,
        r#""\n\r\ndata: x\n\n""#,
        r#""\u0022,\u000a""#,
        "1e999",
        "-0",
        "123456789012345678901234567890",
        "\"\u{2028}\u{2029}é\"",
    ] {
        let body = format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"tools/call\",\"params\":{{\"name\":\"x\",\"arguments\":{{\"k\":\"{}\"}}}}}}",
            fake_key()
        );
        let call = Call::new("POST", up.url("/x")).via(rig.proxy).body(Body::Sized(body.into_bytes()));
        let answer = call.send().unwrap();
        assert_eq!(answer.status, 200, "{id}");
        let text = answer.text();
        assert!(text.starts_with(&format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{")), "{text}");
        // Numbers beyond a double are JSON, though not to this reader.
        let readable = text.replacen("1e999", "1", 1);
        let message: Value = serde_json::from_str(&readable).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(message.get("result").is_none() && message["error"]["code"] == -32001, "{text}");
        assert!(!text.contains(&fake_key()), "{text}");
    }
    // Whatever else of the request stands in a refusal.
    for request in [
        "GET http://a\"b\\c.example/ HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET http://denied.example/\"},\"x\":{\" HTTP/1.1\r\nhost: x\r\nx-request-id: \"},{\"\r\n\r\n",
        "M\"ETHOD http://denied.example/ HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        let got = exchange(rig.proxy, &[request.as_bytes()]);
        let (head, body) = got.split_once("\r\n\r\n").unwrap_or((&got, ""));
        if head.contains("application/json") {
            let _: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {got}"));
        }
        assert!(head.is_empty() || head.starts_with("HTTP/1.1 4"), "{got}");
    }
    // A member that is named by what it is refused for.
    let key = fake_key();
    for body in [json!({&key: &key}), json!({"x": {&key: {"y": &key}}})] {
        let answer = Call::post_json(up.url("/x"), &body).via(rig.proxy).send().unwrap();
        let answer = answer.expect_refusal(403, "policy_denied");
        assert!(!answer.text().contains(&key), "{}", answer.text());
    }
    assert!(up.got().is_empty());
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Sends one HTTP/2 request by prior knowledge; the status, or none where the stream was refused.
fn h2(address: SocketAddr, request: hyper::Request<()>, body: &[u8]) -> Option<u16> {
    runtime().block_on(async {
        let tcp = tokio::net::TcpStream::connect(address).await.ok()?;
        let (mut client, connection) = h2::client::handshake(tcp).await.ok()?;
        tokio::spawn(connection);
        let (answer, mut stream) = client.send_request(request, body.is_empty()).ok()?;
        if !body.is_empty() {
            let _ = stream.send_data(bytes::Bytes::copy_from_slice(body), true);
        }
        let answer = tokio::time::timeout(Duration::from_secs(5), answer).await.ok()?.ok()?;
        Some(answer.status().as_u16())
    })
}

#[test]
fn http2_by_prior_knowledge_is_inspected_alike() {
    let (rig, up) = (honest(), Scripted::start().unwrap());
    let key = fake_key();
    let get = || hyper::Request::get(up.url("/x"));
    let own_method = hyper::Method::from_bytes(key.as_bytes()).unwrap();
    for (name, request, body) in [
        ("body", hyper::Request::post(up.url("/x")).body(()).unwrap(), key.as_str()),
        (
            "body under a false length",
            hyper::Request::post(up.url("/x")).header("content-length", "0").body(()).unwrap(),
            key.as_str(),
        ),
        ("get with body", get().body(()).unwrap(), key.as_str()),
        ("header", get().header("x-note", &key).body(()).unwrap(), ""),
        ("query", hyper::Request::get(up.url(&format!("/x?{key}"))).body(()).unwrap(), ""),
        ("method", get().method(own_method).body(()).unwrap(), ""),
        ("userinfo", hyper::Request::get(format!("http://{key}@{}/", up.address)).body(()).unwrap(), ""),
        (
            "denied authority",
            hyper::Request::get("http://denied.example/")
                .header("host", up.address.to_string())
                .body(())
                .unwrap(),
            "",
        ),
        ("ftp", hyper::Request::get(format!("ftp://{}/x", up.address)).body(()).unwrap(), ""),
        ("connect", hyper::Request::connect(up.address.to_string()).body(()).unwrap(), ""),
        ("https", hyper::Request::get(format!("https://{}/x", up.address)).body(()).unwrap(), ""),
        // Last: it passes, without the host that was not judged.
        ("second host", get().header("host", format!("{key}.example")).body(()).unwrap(), ""),
    ] {
        let status = h2(rig.proxy, request, body.as_bytes());
        assert!(status.is_none_or(|s| s >= 400), "{name}: {status:?}");
        assert!(!holds(&up.got(), &key), "{name}");
        if name != "second host" {
            assert!(up.got().is_empty(), "{name}: {:?}", String::from_utf8_lossy(&up.got()));
        }
    }
}

/// `https` without a port is judged as port 443 and would be dialled at 80: it is not dialled at all.
#[test]
fn a_scheme_does_not_change_the_port_that_is_judged() {
    let rig = Plan::new(Filter::Honest).policy(|s| s.egress.rules[0].ports = vec![443]).start();
    let request = hyper::Request::get("https://127.0.0.1/x").body(()).unwrap();
    assert_eq!(h2(rig.proxy, request, b""), Some(403));
    let got = exchange(rig.proxy, &[b"GET https://127.0.0.1/x HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"]);
    assert!(!got.starts_with("HTTP/1.1 2"), "{got}");
    assert_eq!(rig.stat("cluster.by_name.upstream_cx_total"), 0);
}
