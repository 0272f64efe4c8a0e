//! What the engine does with texts that are clean, for `valgrind --tool=callgrind`: instructions, which a busy
//! machine does not change.
//!
//! `cost` lists the inputs; `cost NAME` reads that one, twice to compile what it calls for and then 20 times
//! inside [`measured`], which is all that `--toggle-collect='*measured*'` counts. Records stand in
//! `docs/benchmarks/`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a program for one's own terminal"
)]

use std::hint::black_box;

use jiff::Timestamp;
use sallyport_api::AgentPolicySpec;
use sallyport_engine::{Engine, RequestHead, Surface};
use serde_json::json;

/// How often an input is read while it is measured.
const TIMES: usize = 20;

enum Input {
    Text(Surface, String),
    Json(Surface, String),
    Body(String),
    Head(Box<RequestHead>),
}

fn head(path: &str) -> RequestHead {
    RequestHead {
        method: "POST".into(),
        scheme: "https".into(),
        host: "api.example.org".into(),
        port: 443,
        path: path.into(),
        headers: vec![
            ("content-type".into(), "application/json".into()),
            ("user-agent".into(), "bench/1".into()),
        ],
        ..RequestHead::default()
    }
}

/// The clean inputs of the benches, and a few of the shapes that rules about values and URLs read.
fn inputs() -> Vec<(String, Input)> {
    let mut all = Vec::new();
    for line in include_str!("../benches/haystacks/peers.jsonl").lines() {
        let h: serde_json::Value = serde_json::from_str(line).unwrap();
        if h["wanted"] != "clean" {
            continue;
        }
        let surface: Surface = serde_json::from_value(h["surface"].clone()).unwrap();
        let text = h["text"].as_str().unwrap().to_owned();
        let input =
            if text.starts_with('{') { Input::Json(surface, text) } else { Input::Text(surface, text) };
        all.push((h["name"].as_str().unwrap().to_owned(), input));
    }
    let sentence = "Please summarise the delivery terms of order 4711 and list the open points in a table. ";
    for (kib, bytes) in [("0.5", 512), ("10", 10_240)] {
        let text: String = sentence.chars().cycle().take(bytes - 80).collect();
        let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
        all.push((format!("body/chat_{kib}k"), Input::Body(body.to_string())));
    }
    let code = "def total(rows):\n    \"\"\"Sum of the open ones.\"\"\"\n    return sum(r.price * r.count for r in rows if r.state != 'done')\n\n\
                for name, value in os.environ.items():\n    print(f\"{name}={value}\")  # see https://example.org/docs?page=2\n";
    let result = json!({"messages": [{"role": "user", "content": "Look it up."},
        {"role": "tool", "tool_call_id": "a", "content": code.repeat(10)}]});
    all.push(("body/code_2k".into(), Input::Body(result.to_string())));
    let order = json!({"order": 4711, "customer": {"name": "Ada O'Neil", "email": "ada@example.org", "city": "Bad Homburg v. d. H."},
        "lines": (0..20).map(|i| json!({"sku": format!("AB-{i:04}"), "label": "Desk lamp, 12 V (white & grey)", "price": "19.90 EUR",
            "link": format!("https://shop.example.org/items/{i}?ref=mail")})).collect::<Vec<_>>()});
    all.push(("body/order_2k".into(), Input::Body(order.to_string())));
    let call = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "book",
        "arguments": {"from": "2026-03-01", "to": "2026-03-04", "guests": "2 adults, 1 child", "city": "Lyon (France)",
            "remark": "ground floor; quiet & dark, if possible"}}});
    all.push(("body/tools_call".into(), Input::Body(call.to_string())));
    all.push(("head/plain".into(), Input::Head(Box::new(head("/v1/chat/completions")))));
    all.push((
        "head/query".into(),
        Input::Head(Box::new(head("/v3/items?q=rust+benches&since=2026-01-01&sort=-price&page=7"))),
    ));
    all
}

#[inline(never)]
fn measured(engine: &Engine, input: &Input, times: usize) {
    let now = Timestamp::UNIX_EPOCH;
    let post = head("/v1/chat/completions");
    for _ in 0..times {
        let verdict = match input {
            Input::Text(surface, text) => engine.scan_text(*surface, black_box(text), now),
            Input::Json(surface, text) => engine.scan_json(*surface, black_box(text.as_bytes()), now),
            Input::Body(body) => engine.request_body(&post, black_box(body.as_bytes()), now).verdict,
            Input::Head(head) => engine.request_head(black_box(head), now),
        };
        assert!(verdict.findings.is_empty(), "not clean: {:?}", verdict.findings);
    }
}

fn main() {
    let wanted = std::env::args().nth(1);
    let mut spec = AgentPolicySpec::default();
    spec.egress.default = sallyport_api::DefaultAction::Allow;
    let inputs = inputs();
    let Some(wanted) = wanted else {
        for (name, _) in &inputs {
            println!("{name}");
        }
        return;
    };
    let Some((_, input)) = inputs.iter().find(|(name, _)| *name == wanted) else {
        panic!("no input is called {wanted}");
    };
    let engine = Engine::new(&spec).unwrap();
    warm(&engine, input);
    measured(&engine, input, TIMES);
}

/// The same work, uncounted: patterns are compiled at their first candidate.
#[inline(never)]
fn warm(engine: &Engine, input: &Input) {
    let post = head("/v1/chat/completions");
    for _ in 0..2 {
        let now = Timestamp::UNIX_EPOCH;
        black_box(match input {
            Input::Text(surface, text) => engine.scan_text(*surface, text, now),
            Input::Json(surface, text) => engine.scan_json(*surface, text.as_bytes(), now),
            Input::Body(body) => engine.request_body(&post, body.as_bytes(), now).verdict,
            Input::Head(head) => engine.request_head(head, now),
        });
    }
}
