//! Messages that agents send, and what is expected of the refusals that come back.

use serde_json::{Value, json};

use crate::client::Answer;

/// A chat completion.
pub fn chat(model: &str, prompt: &str, stream: bool) -> Value {
    json!({"model": model, "stream": stream, "messages": [
        {"role": "system", "content": "You are a support agent."},
        {"role": "user", "content": prompt},
    ]})
}

/// A call of an MCP tool.
pub fn tool(name: &str, arguments: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": name, "arguments": arguments}})
}

/// How many rules an error names.
pub fn rules(error: &Value) -> usize {
    error["rules"].as_array().map_or(0, Vec::len)
}

/// A refusal of an MCP call: JSON-RPC's own shape, with the call's id. Gives the error's data.
pub fn expect_rpc_refusal(answer: Answer) -> Value {
    let answer = answer.expect_status(200);
    let message = answer.json();
    assert_eq!(message["jsonrpc"], "2.0", "{}", answer.text());
    assert_eq!(message["id"], 7, "{}", answer.text());
    assert!(message.get("result").is_none(), "{}", answer.text());
    assert!(
        message["error"]["code"].is_i64() && message["error"]["message"].is_string(),
        "{}",
        answer.text()
    );
    assert_eq!(answer.header("content-type"), Some("application/json"));
    message["error"]["data"].clone()
}
