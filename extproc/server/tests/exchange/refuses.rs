//! What is refused, and by what name.

use super::*;

/// A message sequence up to the one that is refused, the code it is refused with, and the status.
#[test]
fn every_refusal_has_its_code_and_status() {
    let request = |h: &[(&str, &str)]| request_headers(h, false);
    let over = "x".repeat(CAP as usize + 1);
    let bomb = gzip(&"0".repeat(CAP as usize + 1));
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket")];
    let rows: Vec<(&str, Vec<ProcessingRequest>, &str, i32)> = vec![
        ("head", vec![request(&[("x", "BLOCK")])], "policy_denied", 403),
        ("held", vec![request(&[("x", "HOLD")])], "held", 403),
        ("a head can't be redacted", vec![request(&[("x", "REDACT")])], "policy_denied", 403),
        ("head, panic", vec![request(&[("x", "PANIC")])], "internal", 500),
        ("authority", vec![request(&[(":authority", "a@b")])], "bad_url", 400),
        ("path", vec![request(&[(":path", "a")])], "bad_url", 400),
        ("scheme", vec![request(&[(":scheme", "ftp")])], "bad_url", 400),
        ("upgrade", vec![request(&upgrade)], "tunnel_denied", 403),
        (
            "connect",
            vec![request(&[(":method", "CONNECT"), (":authority", "a.b:443")])],
            "tunnel_denied",
            403,
        ),
        ("announced length", vec![request(&[("content-length", "100001")])], "body_too_large", 413),
        ("length", vec![request(&[]), request_body(over.clone(), true)], "body_too_large", 413),
        ("body", vec![request(&[]), request_body("BLOCK", true)], "policy_denied", 403),
        ("body, panic", vec![request(&[]), request_body("PANIC", true)], "internal", 500),
        ("redaction without bytes", vec![request(&[]), request_body("LIAR", true)], "internal", 500),
        (
            "unknown encoding",
            vec![request(&[("content-encoding", "br")]), request_body("x", true)],
            "bad_encoding",
            415,
        ),
        (
            "broken encoding",
            vec![request(&[("content-encoding", "gzip")]), request_body("x", true)],
            "bad_encoding",
            415,
        ),
        (
            "bomb",
            vec![request(&[("content-encoding", "gzip")]), request_body(bomb, true)],
            "bad_encoding",
            415,
        ),
        (
            "trailers",
            vec![request(&[]), request_body("x", false), request_trailers(&[("x", "BLOCK")])],
            "policy_denied",
            403,
        ),
        (
            "body twice",
            vec![request(&[]), request_body("x", true), request_body("x", true)],
            "protocol_error",
            500,
        ),
        ("headers twice", vec![request_headers(&[], true), request(&[])], "protocol_error", 500),
        ("body without headers", vec![request_body("x", true)], "protocol_error", 500),
        ("trailers without headers", vec![request_trailers(&[])], "protocol_error", 500),
        ("response without request", vec![response_headers(&[], true)], "protocol_error", 500),
        ("response before the body", vec![request(&[]), response_headers(&[], true)], "protocol_error", 500),
        (
            "Envoy gave up before us",
            vec![response_headers(&[(":status", "413")], false)],
            "body_too_large",
            413,
        ),
        ("no Host", vec![response_headers(&[(":status", "400")], false)], "bad_url", 400),
        (
            "400 before the body",
            vec![request(&[]), response_headers(&[(":status", "400")], true)],
            "protocol_error",
            500,
        ),
        (
            "Envoy gave up on the body",
            vec![request(&[]), response_headers(&[(":status", "413")], false)],
            "body_too_large",
            413,
        ),
    ];
    for (name, messages, code, status) in rows {
        let mut b = Bench::enforce();
        let mut answers = Vec::new();
        for message in messages {
            answers = b.answers(message);
        }
        let refusal = refusal(&answers[0]);
        assert_eq!(refusal.status.unwrap().code, status, "{name}");
        assert_eq!(refusal.details, format!("sallyport_{code}"), "{name}");
        let json = refusal_json(&answers[0]);
        assert_eq!(json["error"]["code"], code, "{name}");
        assert!(answers[0].dynamic_metadata.is_some(), "{name}");
        let record = b.memory.all().pop().unwrap();
        assert_eq!(record.code.unwrap().as_str(), code, "{name}");
        assert!(record.complete && record.enforced && record.decision.refuses(), "{name}");
        assert!(b.settled(), "{name}");
        assert_eq!(b.take(request_body("BLOCK", true)), [""; 0], "{name}: nothing follows a refusal");
        drop(b.exchange);
        assert_eq!(b.budget.used(), 0, "{name}");
    }
}

#[test]
fn every_refusal_of_a_response_has_its_code_and_status() {
    let length = ("content-length", "5");
    let rows: Vec<(&str, Vec<ProcessingRequest>, &str, Option<i32>)> = vec![
        ("head", vec![response_headers(&[("x", "BLOCK")], true)], "policy_denied", Some(403)),
        ("head, panic", vec![response_headers(&[("x", "PANIC")], true)], "internal", Some(500)),
        ("101", vec![response_headers(&[(":status", "101")], false)], "tunnel_denied", Some(403)),
        (
            "encoding",
            vec![response_headers(&[("content-encoding", "zstd")], false)],
            "bad_encoding",
            Some(415),
        ),
        ("scanner, panic", vec![response_headers(&[("x-scanner", "panic")], false)], "internal", Some(500)),
        (
            "body",
            vec![response_headers(&[length], false), response_body("BLOCK", true)],
            "policy_denied",
            Some(403),
        ),
        (
            "body, panic",
            vec![response_headers(&[length], false), response_body("PANIC", true)],
            "internal",
            Some(500),
        ),
        (
            "a longer body than announced",
            vec![response_headers(&[length], false), response_body("x".repeat(CAP as usize + 1), true)],
            "body_too_large",
            Some(413),
        ),
        (
            "first chunk",
            vec![response_headers(&[], false), response_body("BLOCK\n", false)],
            "policy_denied",
            None,
        ),
        (
            "chunk, panic",
            vec![response_headers(&[], false), response_body("PANIC\n", false)],
            "internal",
            None,
        ),
        (
            "encoded, too long",
            vec![
                response_headers(&[("content-encoding", "gzip")], false),
                response_body("x".repeat(CAP as usize + 1), false),
            ],
            "body_too_large",
            None,
        ),
        (
            "encoded, blocked",
            vec![
                response_headers(&[("content-encoding", "gzip")], false),
                response_body(gzip("BLOCK"), true),
            ],
            "policy_denied",
            None,
        ),
        ("body before headers", vec![response_body("x", true)], "protocol_error", Some(500)),
        ("trailers before headers", vec![response_trailers(&[])], "protocol_error", Some(500)),
        (
            "headers twice",
            vec![response_headers(&[], true), response_headers(&[], true)],
            "protocol_error",
            Some(500),
        ),
        (
            "more after the end",
            vec![response_headers(&[], true), response_body("x", true)],
            "protocol_error",
            Some(500),
        ),
    ];
    for (name, mut messages, code, status) in rows {
        let mut b = Bench::enforce();
        let _ = b.take(request_headers(&[], true));
        let last = messages.pop().unwrap();
        for message in messages {
            let _ = b.take(message);
        }
        let answers = b.answers(last);
        let (got, json) = error(&answers[0]);
        assert_eq!((got, &json["error"]["code"]), (status, &code.into()), "{name}");
        let record = b.memory.all().pop().unwrap();
        assert_eq!((record.direction, record.code.unwrap().as_str()), ("response", code), "{name}");
        drop(b.exchange);
        assert_eq!(b.budget.used(), 0, "{name}");
    }
}

#[test]
fn a_response_whose_head_has_left_is_ended_by_an_error_where_its_trailers_are_refused() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    let _ = b.take(response_body("held", false));
    assert_eq!(b.fails(response_trailers(&[("x", "BLOCK")])), "policy_denied");
}

#[test]
fn an_mcp_call_is_refused_in_its_own_terms() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], false));
    let answers = b.answers(request_body("MCP BLOCK", true));
    assert_eq!(refusal(&answers[0]).status.unwrap().code, 200);
    let json = refusal_json(&answers[0]);
    assert_eq!((&json["jsonrpc"], &json["id"]), (&"2.0".into(), &7.into()));
    assert_eq!(json["error"]["code"], -32001);
    assert_eq!(json["error"]["data"]["code"], "policy_denied");
    assert_eq!(json["error"]["data"]["policies"][0], "test-words");

    // The answer to a call too.
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], false));
    let _ = b.take(request_body("MCP", true));
    let _ = b.take(response_headers(&[("content-length", "5")], false));
    let json = refusal_json(&b.answers(response_body("BLOCK", true))[0]);
    assert_eq!(json["id"], 7);

    // Nobody waits for an answer to a notification.
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], false));
    let answers = b.answers(request_body("MCP-NOTE BLOCK", true));
    assert_eq!(refusal(&answers[0]).status.unwrap().code, 403);
}

#[test]
fn a_grpc_call_is_refused_with_its_own_status() {
    let mut b = Bench::enforce();
    let answers =
        b.answers(request_headers(&[("content-type", "application/grpc+proto"), ("x", "BLOCK")], false));
    assert_eq!(refusal(&answers[0]).grpc_status.unwrap().status, 7);
    let answers = Bench::enforce().answers(request_headers(&[("x", "BLOCK")], false));
    assert_eq!(refusal(&answers[0]).grpc_status, None);
}

#[test]
fn a_refusal_says_which_policy_and_why() {
    let mut b = Bench::enforce();
    let json = refusal_json(&b.answers(request_headers(&[("x", "BLOCK")], true))[0]);
    assert_eq!(
        json,
        serde_json::json!({"error": {
            "code": "policy_denied",
            "decision": "block",
            "rules": [],
            "policies": ["test-words"],
            "reason": "a word was seen",
            "request_id": "id-1",
            "message": "Sallyport refused this message: a word was seen",
        }})
    );
}

#[test]
fn an_event_stream_is_cut_by_its_own_terminal_event() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[("content-type", "text/event-stream")], false));
    assert_eq!(b.take(response_body("data: a\n\n", false)), ["response body emit=data: a\n\n"]);
    let cut = b.take(response_body("data: BLOCK\n\n", false));
    assert_eq!(cut, ["response body emit=event: error\ndata: cut\n\n end"]);
    assert_eq!(b.take(response_body("data: more\n\n", false)), [""; 0], "what still comes is dropped");
    assert_eq!(b.take(response_trailers(&[])), [""; 0]);
    assert!(b.settled());
    assert_eq!(b.memory.lines(), ["request allow -", "response block policy_denied"]);
}

#[test]
fn another_stream_that_was_forwarded_in_part_is_ended_by_an_error() {
    for (chunk, code) in [("BLOCK\n", "policy_denied"), ("HOLD\n", "held"), ("PANIC\n", "internal")] {
        let mut b = Bench::enforce();
        let _ = b.take(request_headers(&[], true));
        let _ = b.take(response_headers(&[], false));
        let _ = b.take(response_body("fine\n", false));
        assert_eq!(b.fails(response_body(chunk, false)), code);
        assert_eq!(b.memory.all()[1].code.unwrap().as_str(), code);
    }
    // Its trailers too.
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    let _ = b.take(response_body("fine\n", false));
    assert_eq!(b.fails(response_trailers(&[("x", "BLOCK")])), "policy_denied");
}

#[test]
fn bytes_beyond_the_budget_are_refused_wherever_they_come_from() {
    let tight = || Bench::new(Mode::Enforce, |cx| cx.budget = Budget::new(10));
    let overloaded = |answers: Vec<ProcessingResponse>| {
        let (status, json) = error(&answers[0]);
        assert_eq!(json["error"]["code"], "overloaded");
        assert!(matches!(status, None | Some(503)), "{status:?}");
    };
    // Announced by a request, by a response.
    overloaded(tight().answers(request_headers(&[("content-length", "11")], false)));
    let mut b = tight();
    let _ = b.take(request_headers(&[], true));
    overloaded(b.answers(response_headers(&[("content-length", "11")], false)));
    // Received.
    let mut b = tight();
    let _ = b.take(request_headers(&[], false));
    overloaded(b.answers(request_body("12345678901", true)));
    // Held back from a stream.
    let mut b = tight();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    overloaded(b.answers(response_body("12345678901", false)));
    // Unpacked: a few bytes in, room for what may come out.
    let mut b = tight();
    let _ = b.take(request_headers(&[("content-encoding", "gzip")], false));
    overloaded(b.answers(request_body("x", true)));
    assert_eq!(b.budget.used(), 0);
}

#[test]
fn a_scan_that_does_not_end_is_refused_by_its_name() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], false));
    let Step::Judge(_) = b.exchange.take(request_body("x", true)) else { panic!("no work") };
    assert!(!b.settled(), "the verdict is out");
    let step = b.exchange.judged(Outcome::from(TransportFailure::ScanTimeout));
    let Step::Answer(answer) = step else { panic!("not answered: {step:?}") };
    assert_eq!(refusal_json(&answer)["error"]["code"], "scan_timeout");
    assert_eq!(refusal(&answer).status.unwrap().code, 504);
    assert_eq!(b.memory.lines(), ["request block scan_timeout"]);
}

// === what can't be enforced ===

#[test]
fn a_configuration_that_lets_bytes_pass_unjudged_is_not_worked_with() {
    let config = |change: fn(&mut ProtocolConfiguration)| {
        let mut message = request_headers(&[], true);
        change(message.protocol_config.as_mut().unwrap());
        message
    };
    let mut looking_on = request_headers(&[], true);
    looking_on.observability_mode = true;
    for message in [
        looking_on,
        config(|c| c.send_body_without_waiting_for_header_response = true),
        config(|c| c.request_body_mode = 1),
        config(|c| c.request_body_mode = 3),
        config(|c| c.response_body_mode = 4),
    ] {
        let mut b = Bench::enforce();
        assert_eq!(b.fails(message), "protocol_error");
        assert_eq!(b.memory.lines(), ["request block protocol_error"]);
    }
    let buffered = config(|c| c.request_body_mode = 2);
    assert_eq!(Bench::enforce().take(buffered), [REQUEST]);
}

#[test]
fn a_message_of_an_unknown_kind_fails() {
    assert_eq!(Bench::enforce().fails(ProcessingRequest::default()), "protocol_error");
}

#[test]
fn a_decision_that_leaves_no_trace_is_not_carried_out() {
    let memory = Arc::new(Memory { broken: true, ..Memory::default() });
    let mut b = Bench::told(Mode::Enforce, memory, |_| {});
    assert_eq!(b.fails(request_headers(&[], true)), "internal");
}

#[test]
fn an_abandoned_exchange_says_how_far_it_came() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], false));
    drop(b.exchange);
    assert_eq!(b.memory.lines(), ["request allow - incomplete"]);

    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    let _ = b.take(response_body("one\n", false));
    b.exchange.abandon(Some(TransportFailure::ShuttingDown));
    drop(b.exchange);
    assert_eq!(b.memory.lines(), ["request allow -", "response block shutting_down incomplete"]);
}
