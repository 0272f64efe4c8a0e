//! `sallyport scan`: JSON lines in, JSON lines out, in order.
//!
//! A stable contract: other programs drive the engine through it. One line in is one line out; a line
//! that can't be understood is answered with an error and never stops the lines after it.

use std::io::{self, BufRead, BufReader, IsTerminal as _, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use jiff::Timestamp;
use sallyport_engine::{Engine, Finding, Surface, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::{EXIT_BAD_INPUT, note, policy};

/// The longest line that is read: the largest body a policy may let through (64 MiB), with room for
/// JSON's escapes. Longer lines are answered with an error instead of filling the memory.
const MAX_LINE: u64 = 160 << 20;

const EXAMPLES: &str = "\
Input, one JSON object a line:
  {\"id\": 1, \"surface\": \"text\", \"text\": \"...\"}
  {\"id\": \"b\", \"surface\": \"mcp_response\", \"json\": {...}}
Output, in the same order:
  {\"id\", \"decision\", \"score\", \"findings\": [{\"rule\", \"category\", \"severity\", \"score\",
   \"path\", \"start\", \"end\"}], \"micros\"}
  {\"id\", \"error\"} for a line that can't be read; the exit status is then 2.
Surfaces: url headers prompt tool_call tool_result mcp_request mcp_response request_body
  response_body dns exec; also text (= request_body), sql (= tool_call), shell (= exec).
`start` and `end` are UTF-8 byte offsets into `text`, or into the decoded leaf that `path` names.

Examples:
  echo '{\"id\":1,\"surface\":\"shell\",\"text\":\"ls -l\"}' | sallyport scan
  sallyport scan --policy policies/samples/support-bot.yaml traffic.jsonl";

/// Looks at texts, one JSON object a line, and prints what was found and decided.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The AgentPolicy to decide by; left out, everything that ships is on
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// The file to read; `-` or nothing is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    input: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let engine = policy::engine(args.policy.as_deref())?;
    let input: Box<dyn Read> = if args.input == Path::new("-") {
        let stdin = io::stdin();
        if stdin.is_terminal() {
            note("reading JSON lines from the terminal; end with Ctrl-D (see `sallyport scan --help`)");
        }
        Box::new(stdin)
    } else {
        let file = std::fs::File::open(&args.input)
            .with_context(|| format!("{}: can't be read", args.input.display()))?;
        Box::new(file)
    };
    let bad = scan(&engine, BufReader::with_capacity(1 << 16, input), io::stdout().lock(), MAX_LINE)
        .with_context(|| format!("while scanning {}", args.input.display()))?;
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_BAD_INPUT) })
}

/// Answers every line; returns how many were bad.
fn scan<R: Read, W: Write>(
    engine: &Engine,
    mut input: BufReader<R>,
    output: W,
    max_line: u64,
) -> io::Result<u64> {
    let mut output = io::BufWriter::new(output);
    let (mut line, mut number, mut bad) = (Vec::new(), 0_u64, 0_u64);
    loop {
        line.clear();
        number += 1;
        let whole = read_line(&mut input, &mut line, max_line)?;
        if line.is_empty() {
            break;
        }
        let text = line.trim_ascii();
        if text.is_empty() {
            continue; // a blank line carries no question
        }
        let answer = if whole {
            answer(engine, text)
        } else {
            Err(BadLine { id: Value::Null, error: format!("longer than {max_line} bytes") })
        };
        match answer {
            Ok(answer) => serde_json::to_writer(&mut output, &answer)?,
            Err(mut e) => {
                bad += 1;
                e.error = format!("line {number}: {}", e.error);
                serde_json::to_writer(&mut output, &e)?;
            }
        }
        output.write_all(b"\n")?;
        // Whoever waits for this answer before asking again must not wait for a full buffer.
        if !input.buffer().contains(&b'\n') {
            output.flush()?;
        }
    }
    output.flush()?;
    Ok(bad)
}

/// Reads up to and including the next newline. Returns false, with the rest skipped, for a line that is
/// longer than `max`.
fn read_line<R: BufRead>(input: &mut R, line: &mut Vec<u8>, max: u64) -> io::Result<bool> {
    input.by_ref().take(max).read_until(b'\n', line)?;
    if (line.len() as u64) < max || line.ends_with(b"\n") {
        return Ok(true);
    }
    input.skip_until(b'\n')?;
    Ok(false)
}

#[derive(Debug, Serialize)]
struct Answer {
    id: Value,
    decision: &'static str,
    score: u8,
    findings: Vec<Found>,
    micros: u64,
}

#[derive(Debug, Serialize)]
struct BadLine {
    id: Value,
    error: String,
}

/// A finding as the contract shows it; the engine's own type carries more.
#[derive(Debug, Serialize)]
struct Found {
    rule: String,
    category: &'static str,
    severity: &'static str,
    score: u8,
    path: String,
    start: usize,
    end: usize,
}

impl From<Finding> for Found {
    fn from(f: Finding) -> Self {
        Self {
            rule: f.rule,
            category: f.category.as_str(),
            severity: f.severity.as_str(),
            score: f.score,
            path: f.path,
            start: f.start,
            end: f.end,
        }
    }
}

/// The members of a line, each still raw, so that one bad member does not hide the id. Others are
/// ignored: rows of a corpus carry their labels along.
#[derive(Debug, Deserialize)]
struct Line<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    surface: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    text: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    json: Option<&'a RawValue>,
}

/// Tells a member that is `null` from one that is not there: `null` is a JSON document too.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(d).map(Some)
}

fn answer(engine: &Engine, line: &[u8]) -> Result<Answer, BadLine> {
    let no_id = |error: String| BadLine { id: Value::Null, error };
    let text = std::str::from_utf8(line).map_err(|e| no_id(format!("not UTF-8: {e}")))?;
    if !text.starts_with('{') {
        return Err(no_id("not a JSON object".into())); // serde takes an array for a struct, too
    }
    let line: Line<'_> =
        serde_json::from_str(text).map_err(|e| no_id(format!("not a JSON object: {}", column(&e))))?;
    let id = line.id.ok_or_else(|| no_id("no `id`".into()))?;
    let id: Value = serde_json::from_str(id.get()).map_err(|e| no_id(format!("`id`: {}", column(&e))))?;
    match look(engine, &line) {
        Ok((verdict, micros)) => Ok(Answer {
            id,
            decision: verdict.decision.as_str(),
            score: verdict.score,
            findings: verdict.findings.into_iter().map(Found::from).collect(),
            micros,
        }),
        Err(error) => Err(BadLine { id, error }),
    }
}

fn look(engine: &Engine, line: &Line<'_>) -> Result<(Verdict, u64), String> {
    let surface = line.surface.ok_or("no `surface`; see `sallyport scan --help` for the names")?;
    let surface: Surface = serde_json::from_str(surface.get()).map_err(|_| {
        let names: Vec<_> = Surface::ALL.iter().map(|s| s.as_str()).collect();
        format!(
            "`surface`: {} is none; use one of {} text sql shell",
            shorten(surface.get()),
            names.join(" ")
        )
    })?;
    let now = Timestamp::now();
    let timed = |look: &dyn Fn() -> Verdict| {
        let start = Instant::now();
        let verdict = look();
        (verdict, u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX))
    };
    match (line.text, line.json) {
        (Some(text), None) => {
            let text: String =
                serde_json::from_str(text.get()).map_err(|e| format!("`text`: {}", column(&e)))?;
            Ok(timed(&|| engine.scan_text(surface, &text, now)))
        }
        (None, Some(json)) => Ok(timed(&|| engine.scan_json(surface, json.get().as_bytes(), now))),
        (None, None) => Err("neither `text` nor `json`".into()),
        (Some(_), Some(_)) => Err("both `text` and `json`; give one of them".into()),
    }
}

/// serde_json says "at line 1 column 7" of what is one line here already.
fn column(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", " at column ")
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((i, _)) => format!("{}...", &text[..i]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sallyport_api::AgentPolicySpec;

    fn answers(input: &[u8], max: u64) -> (Vec<Value>, u64) {
        let engine = Engine::new(&AgentPolicySpec::default()).unwrap();
        let mut out = Vec::new();
        let bad = scan(&engine, BufReader::new(input), &mut out, max).unwrap();
        let lines = String::from_utf8(out).unwrap();
        (lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect(), bad)
    }

    #[test]
    fn every_kind_of_bad_line_is_answered_with_its_id_where_that_is_known() {
        for (line, id, error) in [
            (&b"nonsense"[..], Value::Null, "not a JSON object"),
            (b"[1]", Value::Null, "not a JSON object"),
            (b"7", Value::Null, "not a JSON object"),
            (b"\xff\xfe", Value::Null, "not UTF-8"),
            (br#"{"surface":"text","text":"x"}"#, Value::Null, "no `id`"),
            (br#"{"id":1,"id":2,"surface":"text","text":"x"}"#, Value::Null, "duplicate field"),
            (br#"{"id":"a","text":"x"}"#, "a".into(), "no `surface`"),
            (br#"{"id":"a","surface":"mail","text":"x"}"#, "a".into(), "\"mail\" is none"),
            (br#"{"id":"a","surface":7,"text":"x"}"#, "a".into(), "`surface`: 7"),
            (br#"{"id":"a","surface":"text"}"#, "a".into(), "neither"),
            (br#"{"id":"a","surface":"text","text":"x","json":1}"#, "a".into(), "both"),
            (br#"{"id":"a","surface":"text","text":7}"#, "a".into(), "`text`: invalid type"),
            (br#"{"id":"a","surface":"text","text":"\ud800"}"#, "a".into(), "`text`: "),
        ] {
            let (out, bad) = answers(line, MAX_LINE);
            assert_eq!((out.len(), bad), (1, 1), "{}", String::from_utf8_lossy(line));
            assert_eq!(out[0]["id"], id);
            let said = out[0]["error"].as_str().unwrap();
            assert!(said.starts_with("line 1: ") && said.contains(error), "{said}");
        }
    }

    #[test]
    fn every_surface_and_alias_is_known_and_ids_come_back_as_they_were() {
        let names = Surface::ALL.iter().map(|s| s.as_str()).chain(["text", "sql", "shell"]);
        let line = |(i, s)| format!("{{\"id\":{i},\"surface\":\"{s}\",\"text\":\"hello\",\"label\":\"x\"}}");
        let input: Vec<_> = names.enumerate().map(line).collect();
        let (out, bad) = answers(input.join("\n").as_bytes(), MAX_LINE);
        assert_eq!((out.len(), bad), (14, 0));
        for (i, line) in out.iter().enumerate() {
            assert_eq!(line["id"], i);
            let mut keys: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
            keys.sort_unstable();
            assert_eq!(keys, ["decision", "findings", "id", "micros", "score"]);
        }
    }

    #[test]
    fn a_long_line_is_an_error_and_the_next_one_is_answered() {
        let long = format!("{{\"id\":1,\"surface\":\"text\",\"text\":\"{}\"}}\n\n  \n", "x".repeat(200));
        let input = long + r#"{"id":2,"surface":"text","text":"x"}"#;
        let (out, bad) = answers(input.as_bytes(), 100);
        assert_eq!((out.len(), bad), (2, 1));
        assert!(out[0]["error"].as_str().unwrap().contains("longer than 100 bytes"));
        assert_eq!(out[1]["id"], 2);
    }

    #[test]
    fn json_null_is_a_document_and_deep_nesting_is_not_our_limit() {
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        let input = format!(
            "{{\"id\":1,\"surface\":\"text\",\"json\":null}}\n{{\"id\":2,\"surface\":\"text\",\"json\":{deep}}}"
        );
        let (out, bad) = answers(input.as_bytes(), MAX_LINE);
        assert_eq!((out.len(), bad), (2, 0), "{out:?}");
    }
}
