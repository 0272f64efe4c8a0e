//! Rendering, compared with files that people can read in a review.
//!
//! `SALLYPORT_BLESS=1 cargo test -p sallyport-plan` writes them anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use sallyport_api::{AgentPolicySpec, FailurePolicy, Limits, Mode};
use sallyport_plan::{AccessLog, BaseUrl, ProxyListener, Settings, render};
use serde_json::Value;

fn cases() -> Vec<(&'static str, AgentPolicySpec, Settings)> {
    let laptop = Settings {
        proxy: Some(ProxyListener::loopback(15001)),
        access_log: AccessLog::File("run/access.log".into()),
        ..Settings::new("run")
    };
    let base_urls = Settings {
        proxy: None,
        base_urls: vec![
            BaseUrl { port: 15101, upstream: "https://api.openai.com".parse().unwrap() },
            BaseUrl { port: 15102, upstream: "http://tools.agents.svc:8080".parse().unwrap() },
            BaseUrl { port: 15103, upstream: "https://[2001:db8::1]:8443".parse().unwrap() },
        ],
        message_timeout: Duration::from_millis(50),
        ..Settings::new("run")
    };
    let all = Settings { base_urls: base_urls.base_urls.clone(), intercept_tls: true, ..laptop.clone() };
    let closed = AgentPolicySpec::default();
    let open = AgentPolicySpec { failure_policy: FailurePolicy::Open, ..closed.clone() };
    let observe =
        AgentPolicySpec { mode: Mode::Observe, limits: Limits { max_body_bytes: 8 << 10 }, ..closed.clone() };
    vec![
        ("proxy-closed", closed.clone(), laptop.clone()),
        ("proxy-tls", closed.clone(), Settings { intercept_tls: true, ..laptop }),
        ("base-urls-open", open, base_urls),
        ("all-observe", observe, all),
    ]
}

#[test]
fn rendering_matches_the_golden_files() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, spec, settings) in cases() {
        let got = render(&spec, &settings);
        let file = dir.join(format!("{name}.json"));
        if std::env::var_os("SALLYPORT_BLESS").is_some() {
            std::fs::write(&file, serde_json::to_string_pretty(&got).unwrap() + "\n").unwrap();
        }
        let want: Value = serde_json::from_str(&std::fs::read_to_string(&file).expect(name)).unwrap();
        assert!(got == want, "{name} differs; bless with SALLYPORT_BLESS=1 and read the diff");
    }
}

fn find<'a>(v: &'a Value, key: &str, out: &mut Vec<&'a Value>) {
    match v {
        Value::Object(m) => {
            for (k, v) in m {
                if k == key {
                    out.push(v);
                }
                find(v, key, out);
            }
        }
        Value::Array(a) => a.iter().for_each(|v| find(v, key, out)),
        _ => {}
    }
}

/// One value, the same wherever the key stands.
fn the(v: &Value, key: &str) -> Value {
    let mut all = Vec::new();
    find(v, key, &mut all);
    assert!(!all.is_empty(), "no {key}");
    assert!(all.iter().all(|x| *x == all[0]), "{key} differs between listeners");
    all[0].clone()
}

#[test]
fn only_open_or_observe_let_a_dead_filter_pass() {
    let settings = Settings { proxy: Some(ProxyListener::loopback(1)), ..Settings::new("run") };
    for (failure_policy, mode, allow) in [
        (FailurePolicy::Closed, Mode::Enforce, false),
        (FailurePolicy::Open, Mode::Enforce, true),
        (FailurePolicy::Closed, Mode::Observe, true),
        (FailurePolicy::Open, Mode::Observe, true),
    ] {
        let spec = AgentPolicySpec { failure_policy, mode, ..AgentPolicySpec::default() };
        assert_eq!(the(&render(&spec, &settings), "failure_mode_allow"), Value::Bool(allow));
    }
}

#[test]
fn the_message_timeout_has_a_floor() {
    for (asked, given) in [(0, "0.200s"), (199, "0.200s"), (1000, "1.000s"), (61_005, "61.005s")] {
        let settings = Settings {
            proxy: Some(ProxyListener::loopback(1)),
            message_timeout: Duration::from_millis(asked),
            ..Settings::new("run")
        };
        assert_eq!(the(&render(&AgentPolicySpec::default(), &settings), "message_timeout"), given);
    }
}

#[test]
fn upstreams_are_read_from_urls_and_nothing_is_dropped_silently() {
    use sallyport_plan::Upstream;
    for (url, back) in [
        ("https://api.openai.com", "https://api.openai.com:443"),
        ("http://LOCALHOST:8080/", "http://localhost:8080"),
        ("http://[::1]", "http://[::1]:80"),
        ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443"),
    ] {
        assert_eq!(url.parse::<Upstream>().unwrap().url(), back);
    }
    for bad in
        ["api.openai.com", "ftp://x", "https://", "https://x/v1", "http://u@x", "http://x:0", "http://x:y"]
    {
        bad.parse::<Upstream>().unwrap_err();
    }
}
