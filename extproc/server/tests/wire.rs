//! A real gRPC client on a real socket: the stream never ends as OK before its verdict, whoever ends it
//! and wherever.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use sallyport_api::Mode;
use support::*;
use tonic::Code;

const CAP: u32 = 1 << 20;

fn words() -> Arc<Words> {
    Words::with(Mode::Enforce, CAP)
}

/// How far an exchange has come when something happens to it.
const POINTS: [&str; 5] = [
    "after the request's headers",
    "in the middle of the request's body",
    "after the request's body",
    "after the response's headers",
    "in the middle of a streamed response",
];

/// Brings an exchange to a point.
async fn to(point: &str, rig: &Rig) -> Call {
    let mut call = rig.call().await;
    call.ask(request_headers(&[], false)).await;
    if point == POINTS[0] {
        return call;
    }
    if point == POINTS[1] {
        // Sent and not answered: the scan of a large body is under way.
        call.send(request_body(stalling(), true)).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        return call;
    }
    call.ask(request_body("hello", true)).await;
    if point == POINTS[2] {
        return call;
    }
    call.ask(response_headers(&[], false)).await;
    if point == POINTS[3] {
        return call;
    }
    call.ask(response_body("one\n", false)).await;
    assert_eq!(call.ask_line(response_body("held back", false)).await, "response body emit=");
    call
}

/// A body whose scan leaves the thread that answers, and takes two seconds there.
fn stalling() -> Vec<u8> {
    let mut body = b"STALL".to_vec();
    body.resize(300 << 10, b'x');
    body
}

fn patient(change: &mut sallyport_extproc::Config) {
    change.scan_timeout = Duration::from_secs(10);
}

#[tokio::test]
async fn shutting_down_ends_every_exchange_by_an_error() {
    for point in POINTS {
        let mut rig = Rig::with(words(), Arc::default(), patient);
        let mut call = to(point, &rig).await;
        rig.shut_down();
        let ended = call.next().await.unwrap_or_else(|| panic!("{point}: ended as OK"));
        let status = ended.expect_err(point);
        assert_eq!(status.code(), Code::Unavailable, "{point}");
        assert_eq!(status.message(), "shutting_down", "{point}");
        let served = tokio::time::timeout(DEADLINE, rig.served).await.expect(point).unwrap();
        assert!(served.is_ok(), "{point}: {served:?}");
        assert!(!rig.dir.path().join("s").exists(), "{point}: the socket is gone");
    }
}

#[tokio::test]
async fn a_peer_that_stops_asking_gets_an_ok_end_only_where_nothing_is_open() {
    for point in POINTS {
        let rig = Rig::with(words(), Arc::default(), patient);
        let mut call = to(point, &rig).await;
        call.half_close();
        loop {
            match call.next().await {
                // The scan that was under way.
                Some(Ok(_)) => assert_eq!(point, POINTS[1]),
                Some(Err(status)) => {
                    assert_eq!(status.code(), Code::Aborted, "{point}");
                    assert_ne!(point, POINTS[2], "everything was answered");
                    break;
                }
                None => {
                    assert!(point == POINTS[1] || point == POINTS[2], "{point}: ended as OK");
                    break;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_peer_that_goes_away_leaves_a_record_of_how_far_it_came() {
    let expected: [&[&str]; 5] = [
        &["request allow - incomplete"],
        &["request allow - incomplete"],
        &["request allow -"],
        &["request allow -", "response allow - incomplete"],
        &["request allow -", "response allow - incomplete"],
    ];
    for (point, expected) in POINTS.into_iter().zip(expected) {
        let rig = Rig::with(words(), Arc::default(), patient);
        drop(to(point, &rig).await);
        assert_eq!(rig.memory.wait(expected.len()).await, expected, "{point}");
    }
}

#[tokio::test]
async fn an_observer_that_panics_ends_the_exchange_by_an_error() {
    let memory = Arc::new(Memory { broken: true, ..Memory::default() });
    let rig = Rig::with(words(), memory, |_| {});
    let mut call = rig.call().await;
    call.send(request_headers(&[], true)).await;
    let status = call.next().await.expect("not an OK end").unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Internal, "internal"));
}

#[tokio::test]
async fn a_large_chunk_of_a_stream_is_scanned_aside_and_in_bounded_time() {
    let rig = Rig::start(words());
    let mut call = to(POINTS[3], &rig).await;
    let start = Instant::now();
    let mut chunk = stalling();
    chunk.push(b'\n');
    call.send(response_body(chunk, false)).await;
    let mut other = rig.call().await;
    other.ask(request_headers(&[], true)).await;
    assert!(start.elapsed() < STALL, "another exchange goes on: {:?}", start.elapsed());
    let answer = call.next().await.expect("an answer").expect("no error: nothing has left yet");
    assert!(format!("{answer:?}").contains("scan_timeout"), "{answer:?}");
    assert!(start.elapsed() < STALL, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_judge_that_panics_refuses_and_the_server_goes_on() {
    let rig = Rig::start(words());
    let mut call = rig.call().await;
    let answer = call.ask(request_headers(&[("x", "PANIC")], true)).await;
    assert_eq!(refusal_json(&answer)["error"]["code"], "internal");
    let mut call = rig.call().await;
    call.ask(request_headers(&[], true)).await;
    call.ask(response_headers(&[], false)).await;
    call.ask(response_body("one\n", false)).await;
    call.send(response_body("PANIC\n", false)).await;
    let status = call.next().await.expect("not an OK end").unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    let mut call = rig.call().await;
    assert_eq!(call.ask_line(request_headers(&[], true)).await, "request headers +accept-encoding=identity");
}

#[tokio::test]
async fn a_scan_that_does_not_end_is_refused_and_keeps_nobody_waiting() {
    let rig = Rig::start(words());
    let mut slow = rig.call().await;
    slow.ask(request_headers(&[], false)).await;
    let started = Instant::now();
    slow.send(request_body(stalling(), true)).await;
    let mut other = rig.call().await;
    other.ask(request_headers(&[], true)).await;
    assert!(started.elapsed() < STALL, "another exchange waited for the scan");
    let answer = slow.next().await.unwrap().unwrap();
    assert!(started.elapsed() < STALL, "the scan was waited for");
    assert_eq!(refusal_json(&answer)["error"]["code"], "scan_timeout");
    assert_eq!(rig.memory.lines().last().unwrap(), "request block scan_timeout");
}

#[tokio::test]
async fn bytes_of_scans_that_nobody_waits_for_count_until_they_end() {
    let rig = Rig::with(words(), Arc::default(), |c| c.budget_bytes = 400 << 10);
    let mut slow = rig.call().await;
    slow.ask(request_headers(&[], false)).await;
    let answer = slow.ask(request_body(stalling(), true)).await;
    assert_eq!(refusal_json(&answer)["error"]["code"], "scan_timeout");
    let mut next = rig.call().await;
    next.ask(request_headers(&[], false)).await;
    let answer = next.ask(request_body(vec![b'x'; 200 << 10], true)).await;
    assert_eq!(refusal_json(&answer)["error"]["code"], "overloaded");
}

#[tokio::test]
async fn a_large_body_is_judged_like_a_small_one() {
    let rig = Rig::start(words());
    for (tail, expected) in [("", "request body"), ("BLOCK", "refused 403")] {
        let mut body = vec![b'x'; 300 << 10];
        body.extend_from_slice(tail.as_bytes());
        let mut call = rig.call().await;
        call.ask(request_headers(&[], false)).await;
        assert_eq!(call.ask_line(request_body(body, true)).await, expected);
    }
}

#[tokio::test]
async fn a_message_longer_than_any_policy_allows_is_an_error_with_a_record() {
    let rig = Rig::start(words());
    let mut call = rig.call().await;
    call.ask(request_headers(&[], false)).await;
    call.send(request_body(vec![0; 66 << 20], true)).await;
    let status = call.next().await.expect("not an OK end").unwrap_err();
    assert_eq!(status.code(), Code::Aborted);
    assert_eq!(rig.memory.lines(), ["request block body_too_large incomplete"]);
}

#[tokio::test]
async fn a_swapped_policy_holds_for_exchanges_that_begin_after_it() {
    let rig = Rig::start(words());
    let mut before = rig.call().await;
    before.ask(request_headers(&[], false)).await;
    rig.policy.swap(Words::with(Mode::Observe, CAP));
    let mut after = rig.call().await;
    let observed = after.ask_line(request_headers(&[("x", "BLOCK")], true)).await;
    assert_eq!(observed, "request headers");
    assert_eq!(before.ask_line(request_body("BLOCK", true)).await, "refused 403");
}

#[tokio::test]
async fn observe_records_after_it_has_answered() {
    let rig = Rig::start(Words::with(Mode::Observe, CAP));
    let mut call = rig.call().await;
    call.ask(request_headers(&[], false)).await;
    let started = Instant::now();
    assert_eq!(call.ask_line(request_body("STALL BLOCK", true)).await, "request body");
    assert!(started.elapsed() < STALL, "the scan was waited for");
    assert_eq!(rig.memory.wait(1).await, ["request block policy_denied"]);
}

#[tokio::test]
async fn a_listener_s_upstream_must_make_sense() {
    let rig = Rig::start(words());
    let socket = rig.dir.path().join("s");
    for bad in ["api.example.com", "https://a@b", "https://a.b/path", "ftp://a.b"] {
        let refused = Call::try_open(&socket, &[("sallyport-upstream", bad)]).await;
        assert_eq!(refused.err().map(|s| s.code()), Some(Code::InvalidArgument), "{bad}");
    }
    let good = [("sallyport-upstream", "https://api.example.com")];
    let mut call = Call::open(&socket, &good).await;
    let client = request_headers(&[(":authority", "localhost:1")], true);
    assert!(call.ask_line(client).await.starts_with("request headers"));
}

#[tokio::test]
async fn an_exchange_that_is_open_at_shutdown_may_end_in_peace() {
    let mut rig = Rig::with(words(), Arc::default(), |c| c.drain = Duration::from_secs(10));
    let mut call = to(POINTS[2], &rig).await;
    let started = Instant::now();
    rig.shut_down();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!rig.dir.path().join("s").exists(), "nobody new");
    call.ask(response_headers(&[("content-length", "2")], false)).await;
    assert_eq!(call.ask_line(response_body("ok", true)).await, "response body");
    call.half_close();
    assert!(call.next().await.is_none());
    drop(call);
    tokio::time::timeout(DEADLINE, rig.served).await.unwrap().unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "the drain ends with the last exchange");
}

#[tokio::test]
async fn the_baseline_asks_for_the_same_and_decides_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let path = socket.clone();
    let served = tokio::spawn(async move {
        let shutdown = async {
            let _ = stopped.await;
        };
        sallyport_extproc::noop::serve_noop(&path, shutdown).await
    });
    while !socket.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let rig = Rig::start(words());
    let (mut noop, mut real) = (Call::open(&socket, &[]).await, rig.call().await);
    for message in [
        request_headers(&[], false),
        request_body("hello", true),
        response_headers(&[], false),
        response_body("one\n", false),
        response_body("two", true),
    ] {
        assert_eq!(noop.ask_line(message.clone()).await, real.ask_line(message).await);
    }
    assert!(noop.ask_line(request_headers(&[("x", "BLOCK")], true)).await.starts_with("request headers"));
    drop((noop, stop));
    tokio::time::timeout(DEADLINE, served).await.unwrap().unwrap().unwrap();
}
