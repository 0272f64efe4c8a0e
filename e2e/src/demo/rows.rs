//! What the demo's agent sends, and what must come of it.

use serde_json::{Value, json};

use super::guard::{Record, Routes};
use crate::client::{Answer, Call, End};
use crate::upstream::{DESTRUCTIVE_SQL, GOOD_WORDS, fake_key};

/// One row of the demo.
pub(super) struct Row {
    /// What is sent, in words.
    pub(super) what: &'static str,
    /// The path at the upstream, to tell whether it was reached.
    pub(super) path: &'static str,
    /// The call.
    pub(super) call: fn(&Routes) -> Call,
    /// What of the answer is worth showing.
    pub(super) words: fn(&Answer) -> String,
    /// The decision that must be recorded.
    pub(super) decision: &'static str,
    /// The status that must come back.
    pub(super) status: u16,
    /// Whether the call is refused, so that its time is not a call's.
    pub(super) refused: bool,
    /// Whether the upstream must not even have been reached.
    pub(super) kept_from_upstream: bool,
    /// Whether the answer is a stream.
    pub(super) streams: bool,
    /// What the answer must hold.
    pub(super) has: &'static [&'static str],
    /// What it must not.
    pub(super) lacks: &'static [&'static str],
}

impl Row {
    /// What is not as expected, if anything.
    pub(super) fn check(&self, answer: &Answer, record: Option<&Record>, reached: bool) -> Option<String> {
        let decision = record.map_or("allow", |r| r.decision.as_str());
        let text = answer.text();
        if answer.status != self.status {
            return Some(format!(
                "status {} instead of {}: {}",
                answer.status,
                self.status,
                first_words(&text)
            ));
        }
        if answer.end != End::Clean {
            return Some(format!("the answer did not end cleanly ({:?})", answer.end));
        }
        if decision != self.decision {
            return Some(format!("decision {decision} instead of {}", self.decision));
        }
        if self.kept_from_upstream && reached {
            return Some("the upstream was reached".into());
        }
        if let Some(missing) = self.has.iter().find(|w| !text.contains(**w)) {
            return Some(format!("`{missing}` is missing from the answer"));
        }
        if text.contains(&fake_key()) {
            return Some("the key came through".into());
        }
        self.lacks.iter().find(|w| text.contains(**w)).map(|leaked| format!("`{leaked}` came through"))
    }
}

/// A refused call's row.
const REFUSED: Row = Row {
    what: "",
    path: "",
    call: |_| Call::get(""),
    words: refusal,
    decision: "block",
    status: 403,
    refused: true,
    kept_from_upstream: false,
    streams: false,
    has: &["\"code\""],
    lacks: &[],
};

/// A passing call's row.
const PASSES: Row = Row { decision: "allow", status: 200, refused: false, has: &[], ..REFUSED };

/// The rows, in the order of a story.
pub(super) fn rows() -> Vec<Row> {
    vec![
        Row {
            what: "ordinary chat call",
            path: "/v1/chat/completions",
            call: |to| chat(to, "demo", "Where is order 1042?", false),
            words: |a| a.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned(),
            has: &["1042"],
            ..PASSES
        },
        Row {
            what: "ordinary tool call (MCP)",
            path: "/mcp",
            call: |to| tool(to, "search_docs", &json!({"query": "cancel an order"})),
            words: |a| a.json()["result"]["content"][0]["text"].as_str().unwrap_or_default().to_owned(),
            has: &["cancelled"],
            ..PASSES
        },
        Row {
            what: "prompt that carries an AWS key",
            path: "/v1/chat/completions",
            call: |to| {
                let prompt = format!("Why does this fail? aws_access_key_id = {}", fake_key());
                chat(to, "demo", &prompt, false)
            },
            kept_from_upstream: true,
            ..REFUSED
        },
        Row {
            what: "web page with a hidden instruction",
            path: "/page/poisoned",
            call: |to| to.by_proxy(Call::get(format!("{}/page/poisoned", to.upstream))),
            lacks: &["credentials"],
            ..REFUSED
        },
        Row {
            what: "tool result with an instruction (MCP)",
            path: "/mcp",
            call: |to| tool(to, "read_page", &json!({"url": "http://shop.example/hours"})),
            words: rpc_refusal,
            status: 200,
            has: &["jsonrpc", "error"],
            lacks: &["credentials", "result\":{"],
            ..REFUSED
        },
        Row {
            what: "destructive tool call (MCP run_sql)",
            path: "/mcp",
            call: |to| tool(to, "run_sql", &json!({"query": DESTRUCTIVE_SQL})),
            words: rpc_refusal,
            status: 200,
            kept_from_upstream: true,
            has: &["jsonrpc", "error"],
            ..REFUSED
        },
        Row {
            what: "a host no policy allows",
            path: "/paste",
            call: |to| to.by_proxy(Call::get("http://paste.example/paste")),
            kept_from_upstream: true,
            has: &["egress_denied"],
            ..REFUSED
        },
        Row {
            what: "an answer that holds a key",
            path: "/api/secret",
            call: |to| to.by_proxy(Call::get(format!("{}/api/secret", to.upstream))),
            words: |a| format!("key: {}", a.json()["aws_access_key_id"].as_str().unwrap_or("?")),
            decision: "redact",
            has: &["eu-central-1", "rotate monthly"],
            ..PASSES
        },
        Row {
            what: "a stream that turns bad half way",
            path: "/v1/chat/completions",
            call: |to| chat(to, "demo-stream-bad", "Tidy up the database.", true),
            words: |a| {
                let good = GOOD_WORDS.iter().filter(|w| a.text().contains(**w)).count();
                format!("{good} good events, then an error event")
            },
            decision: "block",
            streams: true,
            // The last good words may be held back when the cut comes.
            has: &["Your ", "left ", "error"],
            lacks: &["DROP", "more."],
            ..PASSES
        },
    ]
}

fn chat(to: &Routes, model: &str, prompt: &str, stream: bool) -> Call {
    Call::post_json(
        format!("{}/v1/chat/completions", to.base),
        &json!({"model": model, "stream": stream, "messages": [
            {"role": "system", "content": "You are a support agent."},
            {"role": "user", "content": prompt},
        ]}),
    )
}

fn tool(to: &Routes, name: &str, arguments: &Value) -> Call {
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}});
    to.by_proxy(Call::post_json(format!("{}/mcp", to.upstream), &message))
}

fn refusal(answer: &Answer) -> String {
    let error = &answer.json()["error"];
    format!("{}: {}", error["code"].as_str().unwrap_or("?"), error["reason"].as_str().unwrap_or("?"))
}

fn rpc_refusal(answer: &Answer) -> String {
    let data = &answer.json()["error"]["data"];
    format!(
        "JSON-RPC error, {}: {}",
        data["code"].as_str().unwrap_or("?"),
        data["reason"].as_str().unwrap_or("?")
    )
}

/// The beginning of a text, on one line.
pub(super) fn first_words(text: &str) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(120).collect();
    line
}
