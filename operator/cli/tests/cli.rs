//! The built command, from outside: what other programs rely on.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at what it did not expect")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Nothing here takes a second; a hang is a failure.
const DEADLINE: Duration = Duration::from_secs(30);

fn sallyport(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sallyport"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn within_deadline(child: &mut Child) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("still running after {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn run(args: &[&str], input: &[u8]) -> Output {
    let mut child = sallyport(args).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).map(|_| bytes)
    });
    let err = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).map(|_| bytes)
    });
    let status = within_deadline(&mut child);
    writer.join().unwrap();
    Output { status, stdout: out.join().unwrap().unwrap(), stderr: err.join().unwrap().unwrap() }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn scan_answers_every_line_in_order_and_says_so_in_its_status() {
    let good = br#"{"id":"a","surface":"text","text":"hello"}
{"id":2,"surface":"mcp_response","json":{"jsonrpc":"2.0","id":1,"result":{}}}
"#;
    let out = run(&["scan"], good);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let answers = lines(&out);
    assert_eq!(answers.iter().map(|a| &a["id"]).collect::<Vec<_>>(), [&json!("a"), &json!(2)]);
    for a in &answers {
        assert_eq!(a["decision"], "allow");
        assert_eq!(a["findings"], json!([]));
        assert!(a["micros"].is_u64() && a["score"].is_u64(), "{a}");
    }

    let mut mixed = b"nonsense\n{\"id\":\"b\",\"surface\":\"nowhere\",\"text\":\"x\"}\n\xff\n".to_vec();
    mixed.extend_from_slice(good);
    let out = run(&["scan", "-"], &mixed);
    assert_eq!(out.status.code(), Some(2));
    let answers = lines(&out);
    let ids: Vec<_> = answers.iter().map(|a| a["id"].clone()).collect();
    assert_eq!(ids, [Value::Null, json!("b"), Value::Null, json!("a"), json!(2)]);
    assert!(answers[..3].iter().all(|a| a["error"].is_string()));
    assert!(answers[1]["error"].as_str().unwrap().starts_with("line 2: `surface`"), "{}", answers[1]);
    assert!(answers[3..].iter().all(|a| a["error"].is_null()));
}

#[test]
fn scan_answers_while_its_input_is_still_open() {
    let mut child = sallyport(&["scan"]).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let (answered, answers) = mpsc::channel();
    std::thread::spawn(move || stdout.lines().try_for_each(|l| answered.send(l.unwrap())));
    for id in 0..3 {
        writeln!(stdin, "{{\"id\":{id},\"surface\":\"text\",\"text\":\"hello\"}}").unwrap();
        let answer: Value = serde_json::from_str(&answers.recv_timeout(DEADLINE).unwrap()).unwrap();
        assert_eq!(answer["id"], id);
    }
    drop(stdin);
    assert!(within_deadline(&mut child).success());
}

#[test]
fn a_file_or_policy_that_is_not_there_is_named() {
    for args in [&["scan", "/nowhere/x.jsonl"][..], &["scan", "--policy", "/nowhere/x.jsonl"]] {
        let out = run(args, b"");
        assert_eq!(out.status.code(), Some(1));
        assert!(text(&out.stderr).starts_with("error: /nowhere/x.jsonl: can't be read"), "{out:?}");
    }
}

#[test]
fn an_unknown_policy_field_is_named_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    let policy =
        "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {name: x}\nspec:\n  egres: {}\n";
    std::fs::write(&path, policy).unwrap();
    let out = run(&["scan", "--policy", path.to_str().unwrap()], b"");
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    for part in ["policy.yaml", "egres", "line 5"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// A corpus of three rows: one attack that nothing can see, one benign row, one counted apart; plain
/// and gzipped.
fn corpus(dir: &Path) {
    let row = |id: &str, label: &str, category: &str, more: Value| {
        let mut row = json!({"id": id, "source": "test", "surface": "prompt", "text": "good morning",
            "label": label, "category": category, "family": "f"});
        row.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        format!("{row}\n")
    };
    let plain = row("a1", "attack", "prompt_injection", json!({}))
        + &row("b1", "benign", "benign_prompt", json!({"benign_for": ["injection", "mcp"]}));
    std::fs::write(dir.join("one.jsonl"), plain).unwrap();
    let file = std::fs::File::create(dir.join("two.jsonl.gz")).unwrap();
    let mut gz = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    let apart = row("a2", "attack", "prompt_injection", json!({"difficulty": "implicit"}));
    gz.write_all(apart.as_bytes()).unwrap();
    gz.finish().unwrap();
    std::fs::write(dir.join("README.md"), "not a corpus").unwrap();
}

#[test]
fn eval_counts_prints_and_compares() {
    let dir = tempfile::tempdir().unwrap();
    corpus(dir.path());
    let (json, here) = (dir.path().join("out.json"), dir.path().to_str().unwrap());
    let out = run(&["eval", here, "--json", json.to_str().unwrap()], b"");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let table = text(&out.stdout);
    assert!(table.contains("2 corpora, 2 attacks, 1 benign rows"), "{table}");
    assert!(table.contains("prompt_injection      0     1  0.0"), "{table}");
    assert!(table.contains("prompt_injection (1): a1"), "{table}");

    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let scores = &report["scores"];
    assert_eq!(scores["recall_by_corpus"]["one"]["rows"], 1);
    assert!(scores["recall_by_corpus"]["two"].is_null());
    assert_eq!(scores["recall_apart"]["implicit"]["rows"], 1);
    assert_eq!(scores["false_positives"]["injection"]["rows"], 1);
    assert!(scores["false_positives"]["secret"].is_null());
    assert_eq!(scores["missed"]["prompt_injection"], json!(["a1"]));

    let out = run(&["eval", here, "--compare", json.to_str().unwrap()], b"");
    assert!(text(&out.stdout).contains("no rate changed"), "{}", text(&out.stdout));
    assert!(text(&out.stdout).contains("newly missed: 0"), "{}", text(&out.stdout));
}

#[test]
fn eval_refuses_what_it_can_not_score() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().to_str().unwrap();
    let out = run(&["eval", here], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("holds no *.jsonl"), "{out:?}");

    std::fs::write(dir.path().join("bad.jsonl"), "\n{\"id\": 1}\n").unwrap();
    let out = run(&["eval", here], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("bad.jsonl: line 2: "), "{out:?}");

    let old = dir.path().join("old.json");
    std::fs::write(&old, "{\"schema\": 99}").unwrap();
    let out = run(&["eval", here, "--compare", old.to_str().unwrap()], b"");
    assert!(text(&out.stderr).contains("old.json: schema 99"), "{out:?}");
}

#[test]
fn rules_are_listed_explained_and_tested() {
    let out = run(&["rules", "list", "--pack", "core"], b"");
    let list = text(&out.stdout);
    let id = list.split_whitespace().find(|w| w.starts_with("SLP-")).unwrap().to_owned();
    assert!(list.starts_with("core (version ") && list.trim_end().ends_with(" rules"), "{list}");

    let packs: Value = serde_json::from_slice(&run(&["rules", "list", "--json"], b"").stdout).unwrap();
    assert_eq!(packs[0]["pack"], "core");

    let out = run(&["rules", "explain", &id.to_lowercase()], b"");
    let said = text(&out.stdout);
    for part in [&id, "category", "severity", "gate", "tests", "What the shipped policies make of it"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let out = run(&["rules", "explain", "SLP-CORE-9999"], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("close are SLP-CORE-"), "{out:?}");
    let out = run(&["rules", "list", "--pack", "cor"], b"");
    assert!(text(&out.stderr).contains("no pack is called `cor`"), "{out:?}");
}

#[test]
fn a_pack_file_is_tested_and_its_failures_have_a_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.yaml");
    let pack = |word: &str| {
        format!(
            "pack: mine\nversion: 1\ntitle: Mine\nrules:\n  - id: MINE-0001\n    title: A word\n    \
             category: confidential\n    severity: low\n    score: 80\n    pattern: 'alpha-[0-9]{{3}}'\n    \
             tests:\n      positive: ['alpha-123', '{word}']\n      negative: ['alpha', 'alpha-1x']\n"
        )
    };
    let file = path.to_str().unwrap();
    std::fs::write(&path, pack("alpha-456")).unwrap();
    let out = run(&["rules", "test", "--pack-file", file], b"");
    assert_eq!((out.status.code(), text(&out.stdout)), (Some(0), "4 passed, 0 failed\n"), "{out:?}");

    std::fs::write(&path, pack("beta")).unwrap();
    let out = run(&["rules", "test", "--pack-file", file], b"");
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("mine.yaml: MINE-0001 positive[1]"), "{out:?}");
    assert!(text(&out.stdout).ends_with("3 passed, 1 failed\n"), "{out:?}");

    std::fs::write(&path, "pack: mine\nversion: 1\ntitle: t\nrule: []\n").unwrap();
    let out = run(&["rules", "test", "--pack-file", file], b"");
    assert!(text(&out.stderr).contains("mine.yaml: ") && text(&out.stderr).contains("line 4"), "{out:?}");
}

#[test]
fn lint_says_ok_or_where() {
    let dir = tempfile::tempdir().unwrap();
    let (good, bad) = (dir.path().join("good.yaml"), dir.path().join("bad.yaml"));
    let head = "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {name: x}\nspec:\n";
    std::fs::write(&good, format!("{head}  mode: Observe\n")).unwrap();
    std::fs::write(&bad, format!("{head}  detection: {{packs: [nonsense]}}\n")).unwrap();
    let (good, bad) = (good.to_str().unwrap(), bad.to_str().unwrap());
    assert_eq!(run(&["lint", good], b"").status.code(), Some(0));
    let out = run(&["lint", bad, good], b"");
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stdout);
    assert!(said.contains("bad.yaml: spec.detection.packs[0]"), "{said}");
    assert!(said.contains("good.yaml: ok"), "{said}");
}

/// With an engine behind it, the contract has findings.
#[test]
fn a_finding_has_the_fields_of_the_contract() {
    // In two parts, so that nothing takes this file for a leak.
    let key = format!("AK{}", "IAQ3EGRIFBYTEXAMP7");
    let line = json!({"id": 1, "surface": "text", "text": format!("é key {key}")});
    let answer = lines(&run(&["scan"], line.to_string().as_bytes())).remove(0);
    assert_ne!(answer["decision"], "allow", "{answer}");
    let finding = &answer["findings"][0];
    assert_eq!(finding["category"], "secret");
    let keys: Vec<_> = finding.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys.len(), 7);
    for name in ["rule", "category", "severity", "score", "path", "start", "end"] {
        assert!(keys.contains(&name), "{name}: {finding}");
    }
    // The letter with its accent is one character and two bytes.
    assert_eq!((finding["start"].as_u64(), finding["end"].as_u64()), (Some(7), Some(27)), "{finding}");
}
