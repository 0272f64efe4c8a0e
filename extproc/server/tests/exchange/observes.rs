//! Observe: nothing changes, and everything is recorded.

use super::*;

#[test]
fn observe_changes_nothing_and_records_what_would_have_been() {
    let mut b = Bench::observe();
    let headers = request_headers(&[("range", "bytes=0-1"), ("x", "FLAG")], false);
    assert_eq!(b.take(headers), ["request headers mode=streamed/none"]);
    assert_eq!(b.take(request_body("BLO", false)), ["request body"]);
    assert_eq!(b.take(request_body("CK", true)), ["request body"]);
    let headers = response_headers(&[("content-length", "13"), ("content-encoding", "identity")], false);
    assert_eq!(b.take(headers), ["response headers mode=none/streamed"]);
    assert_eq!(b.take(response_body("REDACT SECRET", true)), ["response body"]);
    assert!(b.settled());
    assert_eq!(b.memory.lines(), ["request block policy_denied", "response redact -"]);
    assert!(b.memory.all().iter().all(|s| !s.enforced && s.complete));
    assert_eq!(b.budget.used(), 0);
}

#[test]
fn observe_passes_what_enforce_refuses_and_names_it() {
    let over = || "x".repeat(CAP as usize + 1);
    let rows: Vec<(&str, Vec<ProcessingRequest>, &str)> = vec![
        ("head", vec![request_headers(&[("x", "BLOCK")], true)], "policy_denied"),
        ("head, panic", vec![request_headers(&[("x", "PANIC")], true)], "internal"),
        ("authority", vec![request_headers(&[(":authority", "a@b")], true)], "bad_url"),
        ("upgrade", vec![request_headers(&[("upgrade", "websocket")], false)], "tunnel_denied"),
        (
            "announced length",
            vec![request_headers(&[("content-length", "100001")], false), request_body(over(), true)],
            "body_too_large",
        ),
        ("length", vec![request_headers(&[], false), request_body(over(), true)], "body_too_large"),
        ("panic", vec![request_headers(&[], false), request_body("PANIC", true)], "internal"),
        (
            "encoding",
            vec![request_headers(&[("content-encoding", "br")], false), request_body("x", true)],
            "bad_encoding",
        ),
        (
            "trailers",
            vec![request_headers(&[], false), request_body("x", false), request_trailers(&[("x", "BLOCK")])],
            "policy_denied",
        ),
        ("Envoy gave up", vec![response_headers(&[(":status", "413")], false)], "body_too_large"),
        ("body twice", vec![request_body("x", true)], "protocol_error"),
    ];
    for (name, messages, code) in rows {
        let mut b = Bench::observe();
        for message in messages {
            let answers = b.answers(message);
            assert_eq!(answers.len(), 1, "{name}");
            let line = line(&answers[0]);
            assert!(
                !line.starts_with("refused") && !line.contains('+') && !line.contains(" -"),
                "{name}: {line}"
            );
        }
        let record = b.memory.all().remove(0);
        assert_eq!(
            (record.code.map(sallyport_engine::Code::as_str), record.enforced),
            (Some(code), false),
            "{name}"
        );
        assert!(b.settled(), "{name}");
    }
}

#[test]
fn observe_scans_streams_without_holding_them() {
    let mut b = Bench::observe();
    let _ = b.take(request_headers(&[], true));
    assert_eq!(b.take(response_headers(&[], false)), ["response headers mode=none/streamed"]);
    for chunk in ["a", "b\n", "BLOCK\n", "c\n"] {
        assert_eq!(b.take(response_body(chunk, false)), ["response body"]);
    }
    assert_eq!(b.take(response_body("", true)), ["response body"]);
    assert_eq!(b.memory.lines(), ["request allow -", "response block policy_denied"]);

    let mut b = Bench::observe();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[("x-scanner", "panic")], false));
    assert_eq!(b.take(response_body("x", true)), ["response body"]);
    assert_eq!(b.memory.lines(), ["request allow -", "response block internal"]);

    let mut b = Bench::observe();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    let _ = b.take(response_body("x", false));
    assert_eq!(b.take(response_trailers(&[("x", "BLOCK")])), ["response trailers"]);
    assert_eq!(b.memory.lines(), ["request allow -", "response block policy_denied"]);
}

#[test]
fn observe_lets_pass_what_the_budget_does_not_hold() {
    let mut b = Bench::new(Mode::Observe, |cx| cx.budget = Budget::new(3));
    let _ = b.take(request_headers(&[], false));
    assert_eq!(b.take(request_body("hello", true)), ["request body"]);
    assert_eq!(b.memory.lines(), ["request block overloaded"]);
}
