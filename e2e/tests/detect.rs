//! What the shipped rules and policies do to traffic, through the real Envoy and the real filter.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::Write;
use std::time::Duration;

use sallyport_e2e::client::{Body, Call, End};
use sallyport_e2e::messages::{chat, expect_rpc_refusal, rules, tool};
use sallyport_e2e::rig::{Filter, Plan, Rig};
use sallyport_e2e::upstream::{DESTRUCTIVE_SQL, GOOD_WORDS, POISON, fake_key};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);

fn honest() -> Rig {
    Plan::new(Filter::Honest).start()
}

#[test]
fn ordinary_calls_pass() {
    let rig = honest();
    let answer =
        rig.post("/v1/chat/completions", &chat("demo", "Where is order 1042?", false)).send().unwrap();
    assert!(answer.expect_status(200).text().contains("1042"));
    for call in [
        json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18",
            "capabilities": {}, "clientInfo": {"name": "e2e", "version": "1"}}}),
        json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"}),
        tool("search_docs", &json!({"query": "cancel an order"})),
        tool("run_sql", &json!({"query": "SELECT state FROM orders WHERE id = 1042"})),
    ] {
        let answer = rig.post("/mcp", &call).send().unwrap().expect_status(200);
        assert!(answer.json().get("result").is_some(), "{call}: {}", answer.text());
    }
}

#[test]
fn a_prompt_with_a_key_never_reaches_the_upstream() {
    let rig = honest();
    let prompt = format!("Please debug this: aws_access_key_id = {}", fake_key());
    for stream in [false, true] {
        let answer = rig.post("/v1/chat/completions", &chat("demo", &prompt, stream)).send().unwrap();
        let answer = answer.expect_refusal(403, "policy_denied");
        let error = &answer.json()["error"];
        assert!(rules(error) > 0, "{error}");
        assert!(!answer.text().contains(&fake_key()), "the refusal repeats the key");
    }
    assert_eq!(rig.upstream.seen.requests("/v1/chat/completions"), 0);
}

#[test]
fn a_key_is_found_under_gzip_and_in_chunks() {
    let rig = honest();
    let text = chat("demo", &format!("my key is {}", fake_key()), false).to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    let zipped = rig
        .call("POST", "/v1/chat/completions")
        .header("content-type", "application/json")
        .header("content-encoding", "gzip")
        .body(Body::Sized(encoder.finish().unwrap()))
        .send()
        .unwrap();
    let _ = zipped.expect_refusal(403, "policy_denied");
    let chunked = rig
        .call("POST", "/v1/chat/completions")
        .header("content-type", "application/json")
        .body(Body::Chunked(text.as_bytes().chunks(3).map(<[u8]>::to_vec).collect()))
        .send()
        .unwrap();
    let _ = chunked.expect_refusal(403, "policy_denied");
    assert_eq!(rig.upstream.seen.requests("/v1/chat/completions"), 0);
}

#[test]
fn an_encoding_that_can_not_be_undone_is_refused() {
    let rig = honest();
    let answer = rig
        .call("POST", "/echo")
        .header("content-encoding", "compress")
        .body(Body::Sized(b"whatever".to_vec()))
        .send()
        .unwrap();
    let _ = answer.expect_refusal(415, "bad_encoding");
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
}

#[test]
fn a_key_in_a_url_or_a_header_does_not_leave() {
    let rig = honest();
    let in_url = rig.get(&format!("/echo?note={}", fake_key())).send().unwrap();
    let _ = in_url.expect_refusal(403, "policy_denied");
    let in_header = rig.get("/echo").header("x-note", fake_key()).send().unwrap();
    let _ = in_header.expect_refusal(403, "policy_denied");
    assert_eq!(rig.upstream.seen.requests("/echo"), 0);
}

#[test]
fn a_key_in_a_response_is_cut_out_and_the_length_is_right() {
    let rig = honest();
    let answer = rig.get("/api/secret").send().unwrap().expect_status(200);
    assert_eq!(answer.end, End::Clean);
    assert!(!answer.text().contains(&fake_key()), "{}", answer.text());
    assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
    let body = answer.json();
    assert_eq!(body["region"], "eu-central-1", "still JSON, the rest untouched: {}", answer.text());
    assert_eq!(body["note"], "rotate monthly");
}

#[test]
fn a_key_in_an_encoded_response_is_cut_out() {
    let rig = honest();
    let answer = rig.get("/gzip").send().unwrap().expect_status(200);
    assert_eq!(answer.end, End::Clean);
    assert_eq!(answer.header("content-encoding"), None, "forwarded as it was inspected");
    assert!(answer.json().is_object(), "{}", answer.text());
    assert!(!answer.text().contains(&fake_key()), "{}", answer.text());
}

#[test]
fn a_page_with_a_hidden_instruction_does_not_reach_the_agent() {
    let rig = honest();
    let _ = rig.get("/page/clean").send().unwrap().expect_status(200);
    let answer = rig.get("/page/poisoned").send().unwrap().expect_refusal(403, "policy_denied");
    assert!(!answer.text().contains("credentials"), "{}", answer.text());
}

#[test]
fn a_tool_result_with_an_instruction_is_refused_in_the_protocols_own_shape() {
    let rig = honest();
    let clean =
        rig.post("/mcp", &tool("read_page", &json!({"url": "http://shop.example/clean"}))).send().unwrap();
    assert!(clean.expect_status(200).text().contains("Opening hours"));
    let answer =
        rig.post("/mcp", &tool("read_page", &json!({"url": "http://shop.example/hours"}))).send().unwrap();
    assert!(!answer.text().contains(POISON));
    let data = expect_rpc_refusal(answer);
    assert_eq!(data["code"], "policy_denied");
    assert!(rules(&data) > 0, "{data}");
}

#[test]
fn a_destructive_tool_call_never_reaches_the_server() {
    let rig = honest();
    let answer = rig.post("/mcp", &tool("run_sql", &json!({"query": DESTRUCTIVE_SQL}))).send().unwrap();
    let data = expect_rpc_refusal(answer);
    assert_eq!(data["code"], "policy_denied");
    assert_eq!(rig.upstream.seen.requests("/mcp"), 0);
}

#[test]
fn a_destructive_tool_call_of_the_model_is_refused() {
    let rig = honest();
    let answer =
        rig.post("/v1/chat/completions", &chat("demo-tool-call", "Clean up.", false)).send().unwrap();
    let answer = answer.expect_refusal(403, "policy_denied");
    assert!(!answer.text().contains("DROP"), "{}", answer.text());
}

#[test]
fn a_stream_that_turns_bad_is_cut_cleanly_and_the_upstream_is_cancelled() {
    let rig = honest();
    let answer = rig
        .post("/v1/chat/completions", &chat("demo-stream-bad", "Tidy up the database.", true))
        .header("x-demo-pause-ms", "100")
        .deadline(SOON)
        .send()
        .unwrap()
        .expect_status(200);
    let text = answer.text();
    assert_eq!(answer.end, End::Clean, "{text}");
    // The last one may be held back when the cut comes.
    for word in &GOOD_WORDS[..5] {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
    assert!(!text.contains("DROP"), "{text}");
    assert!(!text.contains("more."), "{text}");
    assert!(text.contains("error"), "{text}");
    assert!(rig.upstream.seen.wait_for_cut(SOON), "the upstream still writes");
    assert_eq!(rig.upstream.seen.finished(), 0);
}

#[test]
fn a_key_in_a_stream_is_cut_out_and_the_stream_goes_on() {
    let rig = honest();
    for model in ["demo-stream-secret", "demo-stream-split-secret"] {
        let answer = rig
            .post("/v1/chat/completions", &chat(model, "What is the key?", true))
            .send()
            .unwrap()
            .expect_status(200);
        let text = answer.text();
        assert_eq!(answer.end, End::Clean, "{model}: {text}");
        // Whole or in pieces: what the client puts together must not hold it.
        let said: String = text
            .lines()
            .filter_map(|l| serde_json::from_str::<Value>(l.strip_prefix("data: ")?).ok())
            .filter_map(|v| v["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert!(!said.contains(&fake_key()), "{model}: {text}");
        assert!(said.starts_with(&GOOD_WORDS.concat()), "{model}: {text}");
    }
}

#[test]
fn observe_lets_a_key_pass_and_says_what_it_would_have_done() {
    let rig = Plan::new(Filter::Honest).observe().start();
    let body = chat("demo", &format!("my key is {}", fake_key()), false);
    let _ = rig.post("/v1/chat/completions", &body).send().unwrap().expect_status(200);
    let _ = Call::get(rig.upstream.url("/api/secret")).via(rig.proxy).send().unwrap().expect_status(200);
    assert_eq!(rig.upstream.seen.requests("/v1/chat/completions"), 1);
}
