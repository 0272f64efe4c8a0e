//! What passes, as it came or redacted.

use super::*;

#[test]
fn an_exchange_without_bodies_costs_two_answers() {
    let mut b = Bench::enforce();
    assert_eq!(b.take(request_headers(&[], true)), [REQUEST]);
    assert!(b.settled());
    assert_eq!(b.take(response_headers(&[], true)), ["response headers"]);
    assert!(b.settled());
    assert_eq!(b.memory.lines(), ["request allow -", "response allow -"]);
    let seen = &b.memory.all()[0];
    assert_eq!((seen.path.as_str(), seen.id.as_str(), seen.enforced), ("/v1", "id-1", true));
}

#[test]
fn bodies_of_known_length_are_asked_for_as_a_whole() {
    let mut b = Bench::enforce();
    assert_eq!(b.take(request_headers(&[], false)), [format!("{REQUEST} mode=buffered/none")]);
    assert!(!b.settled(), "a body that was asked for is still to come");
    assert_eq!(b.take(request_body("hello", true)), ["request body"]);
    assert!(b.settled());
    let headers = response_headers(&[("content-length", "5")], false);
    assert_eq!(b.take(headers), ["response headers mode=none/buffered"]);
    assert!(!b.settled());
    assert_eq!(b.take(response_body("hello", true)), ["response body"]);
    assert!(b.settled());
    assert_eq!(b.memory.lines(), ["request allow -", "response allow -"]);
    assert_eq!(b.memory.all()[0].bytes, 5);
    assert_eq!(b.budget.used(), 0);
}

#[test]
fn partial_answers_are_not_asked_for() {
    let mut b = Bench::enforce();
    let headers = request_headers(&[("range", "bytes=0-1"), ("if-range", "x")], true);
    assert_eq!(b.take(headers), [format!("{REQUEST} -range -if-range")]);
}

#[test]
fn the_upstream_is_the_listener_s_where_it_names_one() {
    let upstream = Upstream::parse("https://api.example.com");
    let mut b = Bench::new(Mode::Enforce, |cx| cx.upstream = upstream);
    assert_eq!(b.take(request_headers(&[(":authority", "what@ever")], true)), [REQUEST]);
}

#[test]
fn a_streamed_response_loses_its_length_and_leaves_as_it_passes() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let headers = response_headers(&[("content-length", "100001")], false);
    assert_eq!(b.take(headers), ["response headers -content-length mode=none/duplex"]);
    assert_eq!(b.take(response_body("one\ntw", false)), ["response body emit=one\n"]);
    assert!(!b.settled());
    assert_eq!(b.budget.used(), 2, "what is held back is accounted for");
    assert_eq!(b.take(response_body("o", false)), [HELD]);
    assert_eq!(b.take(response_body("", true)), ["response body emit=two end"]);
    assert!(b.settled());
    assert_eq!(b.take(response_body("", true)), [""; 0], "the end may come twice");
    assert_eq!(b.memory.lines(), ["request allow -", "response allow -"]);
    assert_eq!((b.memory.all()[1].bytes, b.budget.used()), (7, 0));
}

#[test]
fn the_end_of_a_streamed_body_goes_before_its_trailers() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    assert_eq!(b.take(response_body("held", false)), [HELD]);
    let answers = b.take(response_trailers(&[("x", "y")]));
    assert_eq!(answers, ["response body emit=held", "response trailers"]);
    assert!(b.settled());
    assert_eq!(b.memory.lines(), ["request allow -", "response allow -"]);
}

#[test]
fn trailers_of_whole_bodies_pass_after_them() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], false));
    assert_eq!(b.take(request_body("hello", false)), ["request body"]);
    assert_eq!(b.memory.lines(), [""; 0], "the message goes on");
    assert_eq!(b.take(request_trailers(&[("x", "y")])), ["request trailers"]);
    let _ = b.take(response_headers(&[("content-length", "1")], false));
    assert_eq!(b.take(response_body("x", false)), ["response body"]);
    assert_eq!(b.take(response_trailers(&[("x", "y")])), ["response trailers"]);
    assert_eq!(b.memory.lines(), ["request allow -", "response allow -"]);
}

#[test]
fn a_flag_is_told_to_the_access_log_once() {
    let mut b = Bench::enforce();
    let told = |answers: Vec<ProcessingResponse>| answers[0].dynamic_metadata.is_some();
    assert!(told(b.answers(request_headers(&[("x", "FLAG")], false))));
    assert!(!told(b.answers(request_body("hello", true))), "nothing new");
    assert!(!told(b.answers(response_headers(&[], false))));
    assert!(told(b.answers(response_body("FLAG\n", false))));
    assert!(!told(b.answers(response_body("fine\n", true))));
    assert_eq!(b.memory.lines(), ["request flag -", "response flag -"]);
}

// === what is redacted ===

#[test]
fn a_redacted_body_brings_its_length() {
    let described = "-content-encoding -content-digest -repr-digest -digest -content-md5 -etag";
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[("content-length", "13")], false));
    assert_eq!(
        b.take(request_body("REDACT SECRET", true)),
        [format!("request body +content-length=17 {described} body=REDACT [REDACTED]")]
    );
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[("transfer-encoding", "chunked")], false));
    assert_eq!(
        b.take(request_body("REDACT SECRET", true)),
        [format!("request body {described} body=REDACT [REDACTED]")],
        "one framing, not two"
    );
    assert_eq!(b.memory.lines(), ["request redact -"]);
}

#[test]
fn an_encoded_body_is_judged_decoded_and_forwarded_encoded_only_as_it_came() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[("content-encoding", "gzip")], false));
    assert_eq!(b.take(request_body(gzip("fine"), true)), ["request body"]);
    let _ = b.take(response_headers(&[("content-encoding", "gzip"), ("content-length", "50")], false));
    let answer = &b.take(response_body(gzip("REDACT SECRET"), true))[0];
    assert!(answer.contains("+content-length=17 -content-encoding"), "{answer}");
    assert!(answer.ends_with("body=REDACT [REDACTED]"), "{answer}");
    assert_eq!(b.budget.used(), 0);
}

#[test]
fn an_encoded_response_of_unknown_length_is_held_and_leaves_decoded() {
    for (text, emitted) in [("fine", "fine"), ("REDACT SECRET", "REDACT [REDACTED]")] {
        let mut b = Bench::enforce();
        let _ = b.take(request_headers(&[], true));
        let headers = response_headers(&[("content-encoding", "gzip")], false);
        let removed = "-content-length -content-encoding -etag";
        assert_eq!(b.take(headers), [format!("response headers {removed} mode=none/duplex")]);
        let body = gzip(text);
        assert_eq!(b.take(response_body(body[..9].to_vec(), false)), [HELD]);
        assert_eq!(b.budget.used(), 9);
        assert!(!b.settled());
        assert_eq!(
            b.take(response_body(body[9..].to_vec(), true)),
            [format!("response body emit={emitted} end")]
        );
        assert!(b.settled());
    }
    // The same, ended by trailers.
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[("content-encoding", "gzip")], false));
    let _ = b.take(response_body(gzip("fine"), false));
    let answers = b.take(response_trailers(&[("x", "y")]));
    assert_eq!(answers, ["response body emit=fine", "response trailers"]);
}

#[test]
fn a_streamed_response_is_redacted_as_it_leaves() {
    let mut b = Bench::enforce();
    let _ = b.take(request_headers(&[], true));
    let _ = b.take(response_headers(&[], false));
    assert_eq!(b.take(response_body("REDACT SECRET\n", false)), ["response body emit=REDACT [REDACTED]\n"]);
    assert_eq!(b.take(response_body("rest", true)), ["response body emit=rest end"]);
    assert_eq!(b.memory.lines(), ["request allow -", "response redact -"]);
}
