//! Values that should be data, and URLs: where the same words are an attack, and where they are what was
//! asked for.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at what it did not expect")]

use jiff::Timestamp;
use sallyport_api::load_policy;
use sallyport_engine::{Decision, Engine, RequestHead, Surface};

fn engine(egress: &str) -> Engine {
    let policy = format!(
        "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {{name: t}}\nspec:\n  egress: {egress}\n"
    );
    Engine::new(&load_policy(&policy).unwrap().spec).unwrap()
}

fn any() -> Engine {
    engine("{default: Allow}")
}

fn head(host: &str, path: &str) -> RequestHead {
    RequestHead {
        method: "GET".into(),
        scheme: "http".into(),
        host: host.into(),
        port: 80,
        path: path.into(),
        ..RequestHead::default()
    }
}

fn call(arguments: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"t","arguments":{arguments}}}}}"#
    )
}

fn decision(e: &Engine, body: &str) -> Decision {
    e.request_body(&head("tools.example.com", "/"), body.as_bytes(), Timestamp::UNIX_EPOCH).verdict.decision
}

const SQL: &str = "x' or 1=1 --";

#[test]
fn the_name_of_an_argument_decides_whether_its_value_should_be_data() {
    let e = any();
    for name in ["user_id", "city", "name", "zip_code", "path"] {
        let body = call(&format!(r#"{{"{name}":"{SQL}"}}"#));
        assert_eq!(decision(&e, &body), Decision::Block, "{name}");
    }
    for name in ["sql", "query", "where_clause_sql", "content", "message", "description", "source_code"] {
        let body = call(&format!(r#"{{"{name}":"{SQL}"}}"#));
        assert_eq!(decision(&e, &body), Decision::Allow, "{name}");
    }
    // A member above it says so too.
    assert_eq!(decision(&e, &call(&format!(r#"{{"query":{{"term":"{SQL}"}}}}"#))), Decision::Allow);
    assert_eq!(decision(&e, &call(&format!(r#"{{"user":{{"term":["{SQL}"]}}}}"#))), Decision::Block);
}

#[test]
fn the_same_words_pass_in_a_tool_result_and_in_a_prompt() {
    let e = any();
    let chat = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"why is {SQL} bad? also ; cat ../../../etc/hostname"}}]}}"#
    );
    assert_eq!(decision(&e, &chat), Decision::Allow);
    let text = format!("Attackers send {SQL} or {{{{7*7}}}} and <script>alert(1)</script>.");
    for surface in [Surface::ToolResult, Surface::McpResponse, Surface::ResponseBody, Surface::Prompt] {
        let v = e.scan_text(surface, &text, Timestamp::UNIX_EPOCH);
        assert_eq!(v.decision, Decision::Allow, "{surface:?}: {:?}", v.findings);
    }
}

#[test]
fn commands_and_statements_pass_where_they_are_asked_for() {
    let e = any();
    for (surface, text) in [
        (Surface::Exec, "ls -l | grep x && cat a.txt; echo done"),
        (Surface::ToolCall, "SELECT a, b FROM t WHERE a = 1 OR b = 2 UNION SELECT 1, 2"),
    ] {
        let v = e.scan_text(surface, text, Timestamp::UNIX_EPOCH);
        assert_eq!(v.decision, Decision::Allow, "{text}: {:?}", v.findings);
    }
    assert_eq!(decision(&e, &call(r#"{"command":"ls -l | grep x; cat a.txt"}"#)), Decision::Allow);
    assert_eq!(decision(&e, &call(r#"{"host":"8.8.8.8; cat a.txt"}"#)), Decision::Block);
}

#[test]
fn arguments_that_came_as_a_string_are_read_by_their_names() {
    let e = any();
    let body = |arguments: &str| {
        let quoted = serde_json::to_string(arguments).unwrap();
        format!(
            r#"{{"model":"m","messages":[{{"role":"assistant","content":null,"tool_calls":[{{"id":"c","function":{{"name":"f","arguments":{quoted}}}}}]}}]}}"#
        )
    };
    assert_eq!(decision(&e, &body(&format!(r#"{{"city":"{SQL}"}}"#))), Decision::Block);
    assert_eq!(decision(&e, &body(&format!(r#"{{"sql":"{SQL}"}}"#))), Decision::Allow);
    assert_eq!(decision(&e, &body(r#"{"city":"Li\u00e8ge"}"#)), Decision::Allow);
    // The place is that of the value, escapes and all.
    let text = body(r#"{"a":"b","city":"\u0078' or 1=1 --"}"#);
    let v = e.request_body(&head("a", "/"), text.as_bytes(), Timestamp::UNIX_EPOCH).verdict;
    assert!(v.findings.iter().any(|f| f.rule == "SLP-WEB-0001" && f.path.ends_with("/arguments")), "{v:?}");
}

#[test]
fn fields_of_forms_and_parameters_of_urls_are_values() {
    let e = any();
    assert_eq!(decision(&e, "user=x%27+or+1%3D1+--&b=c"), Decision::Block);
    assert_eq!(decision(&e, "query=x%27+or+1%3D1+--&b=c"), Decision::Allow);
    let url = |path: &str| e.request_head(&head("h.example.com", path), Timestamp::UNIX_EPOCH).decision;
    assert_eq!(url("/find?id=7%27%20union%20select%20null%2Cnull--"), Decision::Block);
    assert_eq!(url("/find?sql=select%201%20union%20select%202"), Decision::Allow);
    assert_eq!(url("/find?q=rock+%26+roll&page=2"), Decision::Allow);
}

#[test]
fn a_long_body_of_no_known_shape_is_a_document() {
    let e = any();
    let short = format!("{SQL} {}", "word ".repeat(100));
    let long = format!("{SQL} {}", "word ".repeat(4000));
    assert_ne!(decision(&e, &short), Decision::Allow);
    assert_eq!(decision(&e, &long), Decision::Allow);
}

#[test]
fn a_private_destination_is_marked_unless_egress_lists_it() {
    let now = Timestamp::UNIX_EPOCH;
    let at = |e: &Engine, host: &str, path: &str| e.request_head(&head(host, path), now).decision;
    let unlisted = any();
    assert_eq!(at(&unlisted, "10.0.0.7", "/"), Decision::Flag);
    assert_eq!(at(&unlisted, "2130706433", "/"), Decision::Block);
    assert_eq!(at(&unlisted, "orders.shop.svc.cluster.local", "/"), Decision::Allow);
    let any_host = engine("{rules: [{hosts: ['*'], action: Allow}]}");
    assert_eq!(at(&any_host, "10.0.0.7", "/"), Decision::Flag);
    let listed = engine("{rules: [{hosts: ['10.0.0.7', localhost, 169.254.169.254], action: Allow}]}");
    assert_eq!(at(&listed, "10.0.0.7", "/"), Decision::Allow);
    assert_eq!(at(&listed, "localhost", "/"), Decision::Allow);
    assert_eq!(at(&listed, "10.0.0.8", "/"), Decision::Block, "egress does not list it");
    // What is listed is the destination, not what stands inside the URL; metadata is the core's.
    assert_eq!(at(&listed, "10.0.0.7", "/f?u=http://10.0.0.8/"), Decision::Block);
    assert_eq!(at(&listed, "169.254.169.254", "/"), Decision::Block);
}

#[test]
fn a_url_in_an_argument_is_taken_apart_and_one_in_prose_is_not() {
    let e = any();
    for url in [
        "gopher://10.0.0.1/_x",
        "http://0x7f000001/",
        "http://good.com@evil.example/",
        "http://a.10.0.0.1.nip.io/",
    ] {
        assert_eq!(decision(&e, &call(&format!(r#"{{"url":"{url}"}}"#))), Decision::Block, "{url}");
    }
    assert_eq!(decision(&e, &call(r#"{"url":"http://localhost:3000/"}"#)), Decision::Flag);
    assert_eq!(decision(&e, &call(r#"{"url":"http://orders.shop.svc:8080/v1"}"#)), Decision::Allow);
    assert_eq!(decision(&e, &call(r#"{"note":"open http://localhost:3000/ to see it"}"#)), Decision::Allow);
}
