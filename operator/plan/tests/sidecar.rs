//! Envoy's configuration in a pod and the capture rules, compared with files that people can read.
//!
//! `SALLYPORT_BLESS=1 cargo test -p sallyport-plan` writes them anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;

use sallyport_api::{AgentPolicySpec, Capture, CaptureMode, Limits};
use sallyport_plan::capture::{SCRIPT, nft_rules};
use sallyport_plan::sidecar::render_sidecar;
use serde_json::json;

fn golden(file: &str, got: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(file);
    if std::env::var_os("SALLYPORT_BLESS").is_some() {
        std::fs::write(&file, got).unwrap();
    }
    let want = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    assert!(got == want, "{} differs; bless with SALLYPORT_BLESS=1 and read the diff", file.display());
}

fn spec(mode: CaptureMode) -> AgentPolicySpec {
    AgentPolicySpec { capture: Capture { mode, ..Capture::default() }, ..AgentPolicySpec::default() }
}

#[test]
fn the_sidecars_configuration_matches_the_golden_files() {
    // Who writes the rules makes no difference to Envoy.
    for (name, mode) in
        [("init", CaptureMode::Init), ("init", CaptureMode::Cni), ("explicit", CaptureMode::Explicit)]
    {
        let got = render_sidecar(&spec(mode));
        // The version is a digest of the rest, and would make two lines of every diff.
        let mut shown = got.clone();
        shown["listeners"]["version_info"] = "(digest)".into();
        golden(&format!("sidecar/{name}.json"), &(serde_json::to_string_pretty(&shown).unwrap() + "\n"));
    }
}

#[test]
fn the_version_follows_the_listeners_and_nothing_else() {
    let version = |spec: &AgentPolicySpec| render_sidecar(spec)["listeners"]["version_info"].clone();
    let plain = spec(CaptureMode::Init);
    assert_eq!(version(&plain), version(&plain.clone()));
    let smaller = AgentPolicySpec { limits: Limits { max_body_bytes: 8 << 10 }, ..plain.clone() };
    assert_ne!(version(&plain), version(&smaller));
    let mut hot = plain.clone();
    hot.cedar.inline = "// nothing".into();
    assert_eq!(version(&plain), version(&hot), "a Hot field changes no listener");
}

#[test]
fn no_listener_of_a_pod_is_static() {
    for mode in [CaptureMode::Cni, CaptureMode::Init, CaptureMode::Explicit] {
        let bootstrap = &render_sidecar(&spec(mode))["bootstrap"];
        assert_eq!(bootstrap["static_resources"]["listeners"], json!([]));
    }
}

#[test]
fn the_capture_rules_match_the_golden_files() {
    golden("capture/plain.nft", &nft_rules(&Capture::default()));
    let excluded = Capture {
        exclude_cidrs: ["10.1.2.3/8", "192.0.2.7", "2001:db8::1/32", "::1/128"].map(str::to_owned).to_vec(),
        exclude_ports: vec![5432, 6379],
        ..Capture::default()
    };
    golden("capture/excluded.nft", &nft_rules(&excluded));
}

/// Kubernetes replaces `$(NAME)` and `$$` in commands and arguments.
#[test]
fn nothing_of_the_script_is_taken_for_a_variable_of_kubernetes() {
    for text in [SCRIPT.to_owned(), nft_rules(&Capture::default())] {
        assert!(!text.contains("$(") && !text.contains("$$"));
    }
}

#[test]
fn what_is_no_network_never_becomes_a_rule() {
    for bad in
        ["10.0.0.0/33", "10.0.0.0/8 } accept {", "", "/8", "::/129", "10.0.0.0/-1", "any", "10.0.0.0/8;"]
    {
        let capture = Capture { exclude_cidrs: vec![bad.into()], ..Capture::default() };
        assert_eq!(nft_rules(&capture), nft_rules(&Capture::default()), "{bad:?}");
    }
}
