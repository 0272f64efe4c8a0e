//! An OpenAI-style chat API. The model's name picks the scenario.

use bytes::Bytes;
use hyper::StatusCode;
use serde_json::{Value, json};

use super::{Reply, Seen, fake_key, json_reply, paced_reply, pause};

/// The SQL that no support agent should run.
pub const DESTRUCTIVE_SQL: &str = "DROP TABLE customers; --";

/// `POST /v1/chat/completions`.
pub(super) fn completions(head: &hyper::http::request::Parts, body: &[u8], seen: &Seen) -> Reply {
    let Ok(call) = serde_json::from_slice::<Value>(body) else {
        return json_reply(StatusCode::BAD_REQUEST, &json!({"error": {"message": "not JSON"}}));
    };
    let model = call["model"].as_str().unwrap_or("demo").to_owned();
    if call["stream"] == true {
        let pause = pause(head, 30);
        return paced_reply("text/event-stream", stream(&model), pause, seen);
    }
    let message = match model.as_str() {
        "demo-secret" => json!({"role": "assistant", "content": format!("The key is {}.", fake_key())}),
        "demo-tool-call" => json!({"role": "assistant", "content": null, "tool_calls": [tool_call(0)]}),
        _ => json!({"role": "assistant", "content": "Your order 1042 left our warehouse this morning."}),
    };
    json_reply(
        StatusCode::OK,
        &json!({
            "id": "chatcmpl-demo", "object": "chat.completion", "created": 1_700_000_000, "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 9, "total_tokens": 21},
        }),
    )
}

fn tool_call(index: u32) -> Value {
    json!({"index": index, "id": "call_1", "type": "function", "function": {
        "name": "run_sql", "arguments": json!({"query": DESTRUCTIVE_SQL}).to_string(),
    }})
}

/// The words of a good answer, one event each.
pub const GOOD_WORDS: [&str; 6] = ["Your ", "order ", "1042 ", "left ", "this ", "morning."];

fn stream(model: &str) -> Vec<Bytes> {
    let event = |delta: Value| {
        Bytes::from(format!(
            "data: {}\n\n",
            json!({
                "id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": 1_700_000_000,
                "model": model, "choices": [{"index": 0, "delta": delta, "finish_reason": null}],
            })
        ))
    };
    let mut events: Vec<Bytes> = GOOD_WORDS.iter().map(|w| event(json!({"content": w}))).collect();
    match model {
        // Turns bad half way: a tool call that destroys, then more words.
        "demo-stream-bad" => events.push(event(json!({"tool_calls": [tool_call(0)]}))),
        "demo-stream-secret" => events.push(event(json!({"content": format!("Key: {} ", fake_key())}))),
        // The key comes in pieces that mean nothing alone.
        "demo-stream-split-secret" => {
            let key = fake_key();
            let (a, b) = key.split_at(9);
            events.push(event(json!({"content": format!("Key: {a}")})));
            events.push(event(json!({"content": format!("{b} ")})));
        }
        _ => {}
    }
    events.extend(["And ", "there ", "is ", "more."].map(|w| event(json!({"content": w}))));
    events.push(Bytes::from_static(b"data: [DONE]\n\n"));
    events
}
