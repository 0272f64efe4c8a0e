//! What an agent in a guarded pod gets through, and what it does not.

use std::sync::OnceLock;
use std::time::Duration;

use sallyport_e2e::client::{Answer, Body, Call, End};
use sallyport_e2e::cluster::{Namespace, Pod};
use sallyport_e2e::messages::{chat, expect_rpc_refusal, rules, tool};
use sallyport_e2e::upstream::{DESTRUCTIVE_SQL, GOOD_WORDS, POISON, fake_key, hex, pattern};
use serde_json::json;

struct Fixture {
    _namespace: Namespace,
    pod: Pod,
    host: String,
}

/// One guarded agent and one upstream for all tests here: none of them changes either.
fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let namespace = Namespace::enabled("traffic");
        namespace.usual_policy();
        let host = namespace.upstream();
        let pod = namespace.agent("agent");
        Fixture { _namespace: namespace, pod, host }
    })
}

fn url(path: &str) -> String {
    format!("http://{}{path}", fixture().host)
}

fn call(call: &Call) -> Answer {
    fixture().pod.agent.call(call).unwrap()
}

#[test]
fn an_ordinary_call_passes_byte_for_byte() {
    let body = pattern(100_000);
    let answer = call(&Call::new("POST", url("/echo")).body(Body::Sized(body.clone()))).expect_status(200);
    assert_eq!(answer.json()["sha256"], hex(&body));
    let answer = call(&Call::get(url("/bytes/50000"))).expect_status(200);
    assert_eq!(answer.body, pattern(50_000));
}

#[test]
fn a_key_in_a_prompt_is_refused_and_the_error_says_why() {
    let body = chat("demo", &format!("why does this fail? aws_access_key_id = {}", fake_key()), false);
    let answer =
        call(&Call::post_json(url("/v1/chat/completions"), &body)).expect_refusal(403, "policy_denied");
    assert!(rules(&answer.json()["error"]) > 0, "{}", answer.text());
    assert!(!answer.text().contains(&fake_key()), "the refusal repeats the key");
}

#[test]
fn a_poisoned_page_is_stopped() {
    let answer = call(&Call::get(url("/page/poisoned"))).expect_refusal(403, "policy_denied");
    assert!(!answer.text().contains(POISON));
    let _ = call(&Call::get(url("/page/clean"))).expect_status(200);
}

#[test]
fn a_poisoned_tool_result_is_stopped() {
    let clean = tool("read_page", &json!({"url": "http://shop.example/clean"}));
    let clean = call(&Call::post_json(url("/mcp"), &clean)).expect_status(200);
    assert!(clean.text().contains("Opening hours"));
    let answer =
        call(&Call::post_json(url("/mcp"), &tool("read_page", &json!({"url": "http://shop.example/hours"}))));
    assert!(!answer.text().contains(POISON));
    assert_eq!(expect_rpc_refusal(answer)["code"], "policy_denied");
}

#[test]
fn a_destructive_tool_call_is_stopped() {
    let answer = call(&Call::post_json(url("/mcp"), &tool("run_sql", &json!({"query": DESTRUCTIVE_SQL}))));
    assert_eq!(expect_rpc_refusal(answer)["code"], "policy_denied");
}

#[test]
fn a_stream_that_turns_bad_is_cut_cleanly() {
    let body = chat("demo-stream-bad", "Tidy up the database.", true);
    let answer = call(&Call::post_json(url("/v1/chat/completions"), &body)).expect_status(200);
    let text = answer.text();
    assert_eq!(answer.end, End::Clean, "{text}");
    assert!(text.contains(GOOD_WORDS[0]) && text.contains("error"), "{text}");
    assert!(!text.contains("DROP"), "{text}");
}

#[test]
fn a_secret_in_a_response_is_redacted() {
    let answer = call(&Call::get(url("/api/secret"))).expect_status(200);
    assert!(!answer.text().contains(&fake_key()), "{}", answer.text());
    assert_eq!(answer.json()["note"], "rotate monthly");
}

#[test]
fn a_stream_comes_piece_by_piece() {
    let answer = call(&Call::get(url("/sse/10")).header("x-demo-pause-ms", "200")).expect_status(200);
    assert_eq!(answer.end, End::Clean);
    assert!(answer.text().contains("data: event 9\n\n"), "{}", answer.text());
    let first = answer.pieces.first().unwrap().0;
    assert!(answer.took > first + Duration::from_millis(500), "first after {first:?} of {:?}", answer.took);
}

#[test]
fn a_destination_that_no_rule_allows_is_refused() {
    let answer = call(&Call::get("http://example.com/").connect_to("192.0.2.1:80".parse().unwrap()));
    let _ = answer.expect_refusal(403, "egress_denied");
}

#[test]
fn a_host_that_is_allowed_is_called_at_its_own_address_only() {
    let _ = call(&Call::get(url("/api/orders"))).expect_status(200);
    // The name is what egress judges; the address must be one of its own.
    let to = "192.0.2.1:80".parse().unwrap();
    let _ = call(&Call::get(url("/api/orders")).connect_to(to)).expect_refusal(403, "destination_not_bound");
}
