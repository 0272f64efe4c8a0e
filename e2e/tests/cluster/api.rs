//! The AgentPolicy API on the real API server: every case file is taken or refused as it says.

use std::path::Path;

use sallyport_e2e::cluster::{Namespace, installed, kubectl};

fn cases(kind: &str) -> Vec<(String, String)> {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crds/cases")).join(kind);
    let mut cases: Vec<_> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.display().to_string(), std::fs::read_to_string(&path).unwrap()))
        .collect();
    cases.sort();
    assert!(!cases.is_empty());
    cases
}

#[test]
fn valid_cases_are_taken_by_the_api_server() {
    let namespace = Namespace::plain("valid");
    for (file, text) in cases("valid") {
        if let Err(e) = namespace.apply_text(&text) {
            panic!("{file}: {e}");
        }
    }
}

#[test]
fn invalid_cases_are_refused_with_the_message_they_expect() {
    let namespace = Namespace::plain("invalid");
    for (file, text) in cases("invalid") {
        let expected = text.lines().next().and_then(|l| l.strip_prefix("# expect: "));
        let expected = expected.unwrap_or_else(|| panic!("{file} expects nothing"));
        match namespace.apply_text(&text) {
            Ok(_) => panic!("{file} was taken"),
            Err(e) => assert!(e.to_string().contains(expected), "{file}: {e}"),
        }
    }
}

#[test]
fn the_kind_shows_what_a_user_looks_for() {
    let namespace = Namespace::plain("columns");
    installed();
    namespace.usual_policy();
    let table = namespace.kubectl(&["get", "ap"]).unwrap().stdout;
    for column in ["NAME", "MODE", "ACCEPTED", "ENFORCED", "CPU/POD", "AGE"] {
        assert!(table.contains(column), "{table}");
    }
    let explained = kubectl(&["explain", "agentpolicy.spec.egress"]).unwrap().stdout;
    assert!(explained.contains("rules"), "{explained}");
}
