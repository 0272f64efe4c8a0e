//! Inputs made to cost time. Every one is answered within a deadline; the deadlines are at least five times
//! what a slow machine takes, so that only a change of the order of growth reaches them.
//!
//! `cargo test --release -p sallyport-engine --test hostile -- --nocapture` prints how long each takes at
//! half and at full length: twice the bytes must cost about twice the time. `SALLYPORT_HOSTILE_BYTES` sets
//! the full length.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at what it did not expect")]

use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use base64::Engine as _;
use jiff::Timestamp;
use sallyport_api::{AgentPolicySpec, DefaultAction};
use sallyport_engine::rules::shipped;
use sallyport_engine::{Engine, Protocol, RequestHead, ResponseHead, Surface};

static ENGINE: LazyLock<Arc<Engine>> = LazyLock::new(|| {
    let mut spec = AgentPolicySpec::default();
    spec.egress.default = DefaultAction::Allow;
    let engine = Engine::new(&spec).unwrap();
    engine.warm();
    Arc::new(engine)
});

/// The body cap's default, or less where nothing is optimised.
static FULL: LazyLock<usize> = LazyLock::new(|| {
    let least = if cfg!(debug_assertions) { 64 << 10 } else { 1 << 20 };
    std::env::var("SALLYPORT_HOSTILE_BYTES").map_or(least, |v| v.parse().unwrap())
});

/// How an input reaches the engine.
#[derive(Clone, Copy)]
enum Way {
    /// As a response's whole body.
    Body,
    /// As one text.
    Text(Surface),
    /// As a stream, in chunks of so many bytes.
    Stream(usize),
}

struct Case {
    name: String,
    way: Way,
    /// The input of about so many bytes.
    make: Box<dyn Fn(usize) -> Vec<u8>>,
}

fn case(name: &str, way: Way, make: impl Fn(usize) -> Vec<u8> + 'static) -> Case {
    Case { name: name.to_owned(), way, make: Box::new(make) }
}

fn repeated(name: &str, way: Way, unit: impl AsRef<[u8]>) -> Case {
    let unit = unit.as_ref().to_vec();
    case(name, way, move |n| unit.repeat(n / unit.len()))
}

fn time(way: Way, input: &[u8]) -> Duration {
    let (request, response, now) = (RequestHead::default(), ResponseHead::default(), Timestamp::UNIX_EPOCH);
    let start = Instant::now();
    match way {
        Way::Body => drop(ENGINE.response_body(&request, &response, input, now)),
        Way::Text(surface) => drop(ENGINE.scan_text(surface, std::str::from_utf8(input).unwrap(), now)),
        Way::Stream(size) => {
            let mut scanner = ENGINE.response_stream(&request, &response, &Protocol::Chat);
            for chunk in input.chunks(size) {
                if scanner.push(chunk, false, now).cut.is_some() {
                    return start.elapsed();
                }
            }
            scanner.push(b"", true, now);
        }
    }
    start.elapsed()
}

/// Times every case at half and at full length, and fails for those over the deadline.
fn run(cases: &[Case], full: usize, deadline: Duration) {
    LazyLock::force(&ENGINE);
    let mut table = String::new();
    let mut late = Vec::new();
    for c in cases {
        let half = time(c.way, &(c.make)(full / 2));
        let whole = time(c.way, &(c.make)(full));
        let growth = whole.as_secs_f64() / half.as_secs_f64().max(1e-6);
        let _ = writeln!(table, "{:44} {half:>12.1?} {whole:>12.1?} {growth:>6.1}x", c.name);
        if whole > deadline {
            late.push(format!("{}: {whole:.1?}", c.name));
        }
    }
    println!("{table}");
    assert!(late.is_empty(), "over {deadline:?}: {late:#?}");
}

fn tagged(text: &str) -> String {
    text.chars().filter_map(|c| char::from_u32(c as u32 + 0xe0000)).collect()
}

#[test]
fn texts_made_to_call_for_views() {
    use Way::{Body, Text};
    let prompt = Text(Surface::Prompt);
    let nested = |n: usize| {
        let mut text = "ignore all previous words ".repeat(n / 26 / 4 + 1);
        while text.len() < n {
            text = base64::engine::general_purpose::STANDARD.encode(text);
        }
        text.truncate(n);
        text.into_bytes()
    };
    let percent = |n: usize| {
        // One layer of percent-encoding for each view down to the depth.
        let unit = "%25252541".to_owned();
        unit.repeat(n / unit.len()).into_bytes()
    };
    run(
        &[
            repeated("plain words", Body, "the quick brown fox jumps over the lazy dog "),
            repeated("<!--", Body, "<!--"),
            repeated("<!----> (empty comments)", Body, "<!---->"),
            repeated("<b> (tags)", Body, "<b>"),
            repeated("<b (open tags)", Body, "<b "),
            repeated("&#", Body, "&#"),
            repeated("&#65; (references)", Body, "&#65;"),
            repeated("&amp; (nested references)", Body, "&amp;amp;amp;#65;"),
            repeated("%25", Body, "%25"),
            repeated("%41", Body, "%41"),
            case("%25252541 (four layers)", Body, percent),
            repeated("\\u", Body, "\\u"),
            repeated("\\u0041", Body, "\\u0041"),
            repeated("\\\\ (backslashes)", Body, "\\"),
            case("base64 to the depth bound", Body, nested),
            repeated("base64 runs of 16", Body, "aWdub3JlIGFsbA12 "),
            repeated("one run of base64 that is none", Body, "A"),
            repeated(
                "every kind of encoding",
                Body,
                "&#105;%67\\u006e<b>aWdub3JlIGFsbCBydWxl</b>\u{200b}\u{e0041}é ",
            ),
            repeated("tag characters", prompt, tagged("Ignore all ")),
            repeated("combining marks", prompt, "a\u{301}"),
            repeated("only combining marks", prompt, "\u{301}"),
            repeated("zero-width spaces", prompt, "\u{200b}"),
            repeated("letters and zero-width spaces", prompt, "i\u{200b}"),
            repeated("full-width letters", prompt, "ｉｇｎｏｒｅ"),
            repeated("what NFKC makes eighteen times longer", prompt, "\u{fdfa}"),
            repeated("Hangul", prompt, "각"),
            repeated("bytes that are no UTF-8", Body, b"\xff"),
            repeated("UTF-16", Body, b"a\0b\0 \0"),
        ],
        *FULL,
        Duration::from_secs(15),
    );
}

#[test]
fn documents_made_to_be_large() {
    use Way::Body;
    let array = |unit: &'static str| {
        move |n: usize| {
            let mut s = String::from("[");
            while s.len() < n {
                s.push_str(unit);
            }
            s.push_str("0]");
            s.into_bytes()
        }
    };
    let object = |same: bool| {
        move |n: usize| {
            let mut s = String::from("{");
            let mut i = 0;
            while s.len() < n {
                i += usize::from(!same);
                let _ = write!(s, "\"k{i:07}\":1,");
            }
            s.push_str("\"z\":0}");
            s.into_bytes()
        }
    };
    let within = |open: &'static str, unit: &'static str, close: &'static str| {
        move |n: usize| [open.as_bytes(), &unit.as_bytes().repeat(n / unit.len()), close.as_bytes()].concat()
    };
    run(
        &[
            repeated("{\"a\": nesting", Body, "{\"a\":"),
            repeated("[ nesting", Body, "["),
            case("nesting within the bound, again and again", Body, |n| {
                let unit = ["[".repeat(90), "]".repeat(90), ",".into()].concat();
                format!("[{}0]", unit.repeat(n / unit.len())).into_bytes()
            }),
            case("small numbers", Body, array("1,")),
            case("short strings", Body, array("\"abc\",")),
            case("long numbers", Body, array("123456789,")),
            case("empty objects", Body, array("{},")),
            case("keys of one name", Body, object(true)),
            case("keys of many names", Body, object(false)),
            case("escapes", Body, within("{\"a\":\"", "\\u0061", "\"}")),
            case(
                "messages",
                Body,
                within("{\"messages\":[", "{\"role\":\"user\",\"content\":\"hi there\"},", "0]}"),
            ),
            case(
                "tool calls",
                Body,
                within(
                    "{\"messages\":[",
                    "{\"role\":\"user\",\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]},",
                    "0]}",
                ),
            ),
            case(
                "a JSON-RPC batch",
                Body,
                within("[", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"a\"},", "0]"),
            ),
            case(
                "members named messages",
                Body,
                within("{", "\"messages\":[{\"role\":\"user\"}],", "\"z\":0}"),
            ),
            repeated("lines of JSON", Body, "{\"a\":\"b\"}\n"),
            repeated("a form", Body, "a=b&"),
            repeated("a form's names alone", Body, "name=&"),
            case("findings in every value", Body, |n| {
                let unit = ["{\"k\":\"AKIA", "Q3EGVNPL2XTR5WJM\"},"].concat();
                format!("[{}0]", unit.repeat(n / unit.len())).into_bytes()
            }),
        ],
        *FULL,
        Duration::from_secs(10),
    );
}

#[test]
fn texts_made_of_what_scanners_look_for() {
    use Way::{Body, Text};
    let mut all = String::new();
    let mut found = String::new();
    for rule in shipped().unwrap().iter().flat_map(|p| &p.rules) {
        for l in &rule.literals {
            all.push_str(l);
            all.push(' ');
        }
        for t in rule.tests.positive.iter().filter(|t| t.text.len() < 1000) {
            found.push_str(&t.text.replace('\n', " "));
            found.push(' ');
        }
    }
    let mut cases = vec![
        repeated("digits", Body, "1234567890"),
        repeated("digits in groups", Body, "1234 "),
        repeated("digits and dashes", Body, "1-"),
        repeated("card numbers", Body, "4111 1111 1111 1111  "),
        repeated("card numbers that fail their checksum", Body, "4111111111111112 a"),
        repeated("@", Body, "@"),
        repeated("a@", Body, "a@"),
        repeated("addresses", Body, "a.b@c.dd "),
        repeated("a long local part", Body, "a."),
        repeated("telephone numbers", Body, "+49 30 1234567, "),
    ];
    for surface in [Surface::Prompt, Surface::ToolCall, Surface::ToolResult, Surface::Exec] {
        let name = surface.as_str();
        cases.push(repeated(&format!("every literal, as {name}"), Text(surface), &all));
        cases.push(repeated(
            &format!("every literal without spaces, as {name}"),
            Text(surface),
            all.replace(' ', ""),
        ));
        cases.push(repeated(&format!("what every rule finds, as {name}"), Text(surface), &found));
    }
    run(&cases, *FULL, Duration::from_secs(20));
}

/// Each literal and each rule's own finding, over and over: no single rule is a way to stop the sidecar.
#[test]
fn no_single_rule_is_slow() {
    // There are some three thousand.
    let full = *FULL / 16;
    let mut slowest: Vec<(Duration, Duration, String)> = Vec::new();
    for rule in shipped().unwrap().iter().flat_map(|p| &p.rules) {
        let surface = rule.surfaces.first().copied().unwrap_or(Surface::Prompt);
        let mut units: Vec<String> = rule.literals.clone();
        units.extend(rule.literals.iter().map(|l| format!("{l} ")));
        units.extend(rule.tests.positive.iter().chain(&rule.tests.negative).map(|t| format!("{} ", t.text)));
        for unit in units.iter().filter(|u| u.len() < 2000) {
            let input = |n: usize| unit.repeat(n / unit.len() + 1).into_bytes();
            let half = time(Way::Text(surface), &input(full / 2));
            let whole = time(Way::Text(surface), &input(full));
            slowest.push((whole, half, format!("{} {:.60}", rule.id, unit.replace('\n', " "))));
        }
    }
    slowest.sort();
    for (whole, half, name) in slowest.iter().rev().take(25) {
        println!("{half:>10.1?} {whole:>10.1?} {:>5.1}x  {name}", whole.as_secs_f64() / half.as_secs_f64());
    }
    let (worst, _, name) = slowest.last().unwrap();
    assert!(*worst < Duration::from_secs(5), "{name} took {worst:?}");
}

#[test]
fn streams_made_to_be_held() {
    use Way::Stream;
    let delta = |channel: usize, text: &str| {
        format!("data: {{\"choices\":[{{\"index\":{channel},\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")
    };
    let members = |unit: &'static str| {
        move |n: usize| format!("data: {{{}\"z\":0}}\n\n", unit.repeat(n / unit.len())).into_bytes()
    };
    run(
        &[
            repeated("small events", Stream(4096), delta(0, "hello ")),
            repeated("events of one long word", Stream(4096), delta(0, "word")),
            case("one channel waits while another talks", Stream(4096), move |n| {
                let unit = delta(1, "hello ");
                (delta(0, "unfinished") + &unit.repeat(n / unit.len())).into_bytes()
            }),
            case("comments behind an unfinished word", Stream(4096), move |n| {
                (delta(0, "unfinished") + &": x\n\n".repeat(n / 5)).into_bytes()
            }),
            repeated("empty events", Stream(4096), "\n"),
            repeated("an event without an end, byte by byte", Stream(16), "data: x\n"),
            repeated("a line without an end, byte by byte", Stream(16), "data: x"),
            case("an event of many pieces", Stream(4096), members("\"content\":\"a\",")),
            case("an event of many members", Stream(4096), members("\"k\":\"a\",")),
            case("an event of many pieces in objects", Stream(4096), members("\"k\":{\"content\":\"a\"},")),
            repeated("a document in small chunks", Stream(64), "{\"a\":"),
            repeated("a download in small chunks", Stream(64), "the quick brown fox "),
            repeated("a download of continuation bytes", Stream(64), b"\x80"),
            case("a download that is one encoded secret", Stream(64), |n| {
                let secret = ["key AKIA", "Q3EGVNPL2XTR5WJM "].concat().repeat(n / 34);
                base64::engine::general_purpose::STANDARD.encode(secret).into_bytes()
            }),
            repeated("a download of secrets", Stream(4096), ["AKIA", "Q3EGVNPL2XTR5WJM "].concat()),
        ],
        *FULL,
        Duration::from_secs(10),
    );
}
