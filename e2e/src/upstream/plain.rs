//! Web pages, and HTTP for its own sake: lengths, chunks, encodings, trailers, ranges, upgrades.

use std::fmt::Write as _;
use std::io::Write as _;

use bytes::Bytes;
use hyper::body::Frame;
use hyper::header::{
    ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_RANGE, HeaderMap, HeaderValue, RANGE, TRAILER, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::mcp::POISON;
use super::{Reply, Seen, fake_key, framed_reply, json_reply, paced_reply, pause, text_reply};

/// Everything that is neither chat nor MCP.
pub(super) fn route(head: &Parts, path: &str, body: &Bytes, seen: &Seen) -> Reply {
    // A server that speaks websocket would switch here; it must never be asked to.
    if head.headers.contains_key(UPGRADE) {
        let mut reply = text_reply(StatusCode::SWITCHING_PROTOCOLS, "text/plain", Bytes::new());
        reply.headers_mut().insert(UPGRADE, HeaderValue::from_static("websocket"));
        return reply;
    }
    match path {
        "/page/clean" => page(""),
        "/page/poisoned" => page(&format!(
            "<!-- {POISON} -->\n<div style=\"display:none\" aria-hidden=\"true\">{POISON}</div>"
        )),
        "/api/secret" => json_reply(
            StatusCode::OK,
            &json!({"region": "eu-central-1", "aws_access_key_id": fake_key(), "note": "rotate monthly"}),
        ),
        "/api/orders" => json_reply(StatusCode::OK, &json!({"orders": [{"id": 1042, "state": "shipped"}]})),
        "/echo" => echo(head, body),
        "/gzip" => gzip(),
        "/trailers" => trailers(head, seen),
        "/slow" => {
            let pieces = (0..5).map(|i| Bytes::from(format!("piece {i}\n"))).collect();
            paced_reply("text/plain", pieces, pause(head, 50), seen)
        }
        _ => numbered(head, path, seen),
    }
}

fn numbered(head: &Parts, path: &str, seen: &Seen) -> Reply {
    let (name, number) = path.rsplit_once('/').unwrap_or((path, ""));
    let Ok(n) = number.parse::<usize>() else {
        return json_reply(StatusCode::NOT_FOUND, &json!({"error": {"message": "no such page"}}));
    };
    match name {
        "/bytes" => bytes(head, n),
        "/chunked" => {
            let all = Bytes::from(pattern(n));
            let pieces = (0..n).step_by(8 << 10).map(|at| all.slice(at..n.min(at + (8 << 10)))).collect();
            paced_reply("text/plain", pieces, pause(head, 0), seen)
        }
        "/sse" => {
            let events = (0..n).map(|i| Bytes::from(format!("data: event {i}\n\n"))).collect();
            paced_reply("text/event-stream", events, pause(head, 50), seen)
        }
        "/status" => {
            let status = u16::try_from(n).ok().and_then(|n| StatusCode::from_u16(n).ok());
            json_reply(status.unwrap_or(StatusCode::NOT_FOUND), &json!({"from": "upstream"}))
        }
        _ => json_reply(StatusCode::NOT_FOUND, &json!({"error": {"message": "no such page"}})),
    }
}

fn page(extra: &str) -> Reply {
    text_reply(
        StatusCode::OK,
        "text/html; charset=utf-8",
        format!(
            "<!doctype html>\n<html><head><title>Opening hours</title></head><body>\n<h1>Opening hours</h1>\n\
             <p>Monday to Friday, 9 to 17.</p>\n{extra}\n</body></html>\n"
        ),
    )
}

/// What arrived, in full: the means to prove that a call went through untouched.
fn echo(head: &Parts, body: &Bytes) -> Reply {
    let headers: Vec<_> = head
        .headers
        .iter()
        .map(|(n, v)| json!([n.as_str(), String::from_utf8_lossy(v.as_bytes())]))
        .collect();
    json_reply(
        StatusCode::OK,
        &json!({
            "method": head.method.as_str(),
            "target": head.uri.to_string(),
            "headers": headers,
            "length": body.len(),
            "sha256": hex(body),
            "body": String::from_utf8_lossy(body),
        }),
    )
}

/// SHA-256 in hex digits.
pub fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// Harmless text of a length.
pub fn pattern(n: usize) -> Vec<u8> {
    b"all quiet here. ".iter().copied().cycle().take(n).collect()
}

fn bytes(head: &Parts, n: usize) -> Reply {
    let all = Bytes::from(pattern(n));
    let range = head.headers.get(RANGE).and_then(|v| v.to_str().ok()).and_then(|v| {
        let (from, to) = v.strip_prefix("bytes=")?.split_once('-')?;
        let from: usize = from.parse().ok()?;
        let to = if to.is_empty() { n.checked_sub(1)? } else { to.parse().ok()? };
        (from <= to && to < n).then_some((from, to))
    });
    let mut reply = match range {
        Some((from, to)) => {
            let mut reply = text_reply(StatusCode::PARTIAL_CONTENT, "text/plain", all.slice(from..=to));
            let value = HeaderValue::from_str(&format!("bytes {from}-{to}/{n}")).expect("digits");
            reply.headers_mut().insert(CONTENT_RANGE, value);
            reply
        }
        None => text_reply(StatusCode::OK, "text/plain", all),
    };
    reply.headers_mut().insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    reply
}

/// Always gzip, whatever the client accepts: some servers are like that.
fn gzip() -> Reply {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(format!("{{\"aws_access_key_id\": \"{}\"}}", fake_key()).as_bytes()).expect("memory");
    let mut reply = text_reply(StatusCode::OK, "application/json", encoder.finish().expect("memory"));
    reply.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    reply
}

fn trailers(head: &Parts, seen: &Seen) -> Reply {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", HeaderValue::from_static("ok"));
    let frames = vec![Frame::data(Bytes::from_static(b"body\n")), Frame::trailers(trailers)];
    let mut reply: Response<_> = framed_reply("text/plain", frames, pause(head, 0), seen);
    reply.headers_mut().insert(TRAILER, HeaderValue::from_static("x-checksum"));
    reply
}
