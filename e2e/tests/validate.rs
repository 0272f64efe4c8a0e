//! Envoy itself reads every golden bootstrap of `sallyport-plan`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use sallyport_e2e::rig::envoy_binary;

/// Validates a bootstrap in a directory of its own: (accepted, what Envoy said).
fn validate(bootstrap: &str) -> (bool, String) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("run")).unwrap();
    // Machines differ in where they keep their authorities; any PEM will do for reading the configuration.
    let ca = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ca.pem");
    std::fs::copy(ca, dir.path().join("ca.pem")).unwrap();
    let bootstrap = bootstrap
        .replace("/etc/ssl/certs/ca-certificates.crt", "ca.pem")
        .replace("run/upstream.pem", "ca.pem");
    std::fs::write(dir.path().join("bootstrap.json"), bootstrap).unwrap();
    let out = Command::new(envoy_binary())
        .args(["--mode", "validate", "-c", "bootstrap.json", "--disable-hot-restart", "-l", "warning"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
}

fn goldens() -> Vec<(String, String)> {
    files("golden")
}

fn files(kind: &str) -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../operator/plan/tests").join(kind);
    let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path());
    files.map(|f| (f.display().to_string(), std::fs::read_to_string(&f).unwrap())).collect()
}

#[test]
fn envoy_accepts_every_golden_bootstrap_without_a_warning() {
    let goldens = goldens();
    assert!(goldens.len() >= 3);
    for (name, text) in goldens {
        let (accepted, said) = validate(&text);
        assert!(accepted, "{name}: {said}");
        assert!(!said.contains("[warning]"), "{name}: {said}");
    }
}

/// In a pod the listeners are a file of their own, which `--mode validate` does not read; so they are put into
/// the bootstrap here.
#[test]
fn envoy_accepts_what_a_sidecar_gets_without_a_warning() {
    let sidecars = files("sidecar");
    assert_eq!(sidecars.len(), 2);
    for (name, text) in sidecars {
        let golden: serde_json::Value = serde_json::from_str(&text.replace("/run/sallyport", "run")).unwrap();
        let mut bootstrap = golden["bootstrap"].clone();
        let (accepted, said) = validate(&bootstrap.to_string());
        assert!(accepted && !said.contains("[warning]"), "{name}: {said}");
        let mut listeners = golden["listeners"]["resources"].clone();
        for listener in listeners.as_array_mut().unwrap() {
            listener.as_object_mut().unwrap().remove("@type");
        }
        bootstrap["dynamic_resources"].as_object_mut().unwrap().remove("lds_config");
        bootstrap["static_resources"]["listeners"] = listeners;
        let (accepted, said) = validate(&bootstrap.to_string());
        assert!(accepted && !said.contains("[warning]"), "{name}: {said}");
    }
}

/// Trap 7: a typo in a safety field must never be read as "not set".
#[test]
fn trap_07_envoy_refuses_a_bootstrap_with_an_unknown_field() {
    for (_, text) in goldens() {
        let typo = text.replace("\"failure_mode_allow\"", "\"failure_mode_alow\"");
        assert_ne!(typo, text);
        let (accepted, said) = validate(&typo);
        assert!(!accepted, "{said}");
        assert!(said.contains("failure_mode_alow"), "{said}");
    }
}
