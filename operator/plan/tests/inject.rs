//! Injection, compared with files that people can read: `tests/inject/NAME.yaml` says what is given,
//! `NAME.out.yaml` what becomes of it. Every reason for which a pod is refused or left alone has a case.
//!
//! `SALLYPORT_BLESS=1 cargo test -p sallyport-plan` writes the second anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{LimitRange, Pod};
use sallyport_api::{AgentPolicyObject, AgentPolicySpec, Capture, CaptureMode, Isolation};
use sallyport_plan::inject::{
    Facts, Images, InjectSettings, Outcome, Refusal, check_created, check_update, inject, pod_fields_digest,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// What is given.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Case {
    /// The namespace's label.
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    policies: Vec<AgentPolicyObject>,
    #[serde(default)]
    limit_ranges: Vec<LimitRange>,
    pod: Pod,
    /// Whether this installation has no CNI plugin on its nodes.
    #[serde(default)]
    no_cni: bool,
    /// An update of the pod as it was injected: a JSON merge patch.
    #[serde(default)]
    update: Option<Value>,
    /// The same, for a webhook that changes the pod after injection.
    #[serde(default)]
    altered: Option<Value>,
}

fn settings() -> InjectSettings {
    InjectSettings {
        images: Images {
            extproc: "registry.test/sallyport-extproc:1".into(),
            envoy: "registry.test/sallyport-envoy:1".into(),
            capture: "registry.test/sallyport-capture:1".into(),
        },
        image_pull_policy: None,
        image_pull_secrets: vec!["pull".into()],
        cni: true,
        discovery: "https://sallyport-operator.sallyport-system.svc:8443".into(),
    }
}

fn cases() -> Vec<(String, PathBuf, Case)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/inject");
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|f| f.unwrap().path())
        .filter(|f| !f.display().to_string().ends_with(".out.yaml"))
        .collect();
    files.sort();
    let read = |file: PathBuf| {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&file).unwrap();
        let case = serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name, file, case)
    };
    files.into_iter().map(read).collect()
}

fn facts(case: &Case) -> Facts<'_> {
    Facts {
        namespace: "agents",
        namespace_inject: case.namespace.as_deref(),
        policies: &case.policies,
        limit_ranges: &case.limit_ranges,
    }
}

fn patched(pod: &Pod, patch: &Value) -> Pod {
    fn merge(into: &mut Value, patch: &Value) {
        let Value::Object(fields) = patch else {
            *into = patch.clone();
            return;
        };
        if !into.is_object() {
            *into = json!({});
        }
        let map = into.as_object_mut().unwrap();
        for (key, value) in fields {
            if value.is_null() {
                map.remove(key);
            } else {
                merge(map.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }
    let mut value = serde_json::to_value(pod).unwrap();
    // `initContainers.0.image` and the like: lists by index, which a merge patch can't say.
    for (path, change) in patch.as_object().unwrap() {
        if let Some(pointer) = path.strip_prefix('/') {
            let pointer = format!("/{pointer}");
            if change == "REMOVE" {
                let (list, index) = pointer.rsplit_once('/').unwrap();
                value.pointer_mut(list).unwrap().as_array_mut().unwrap().remove(index.parse().unwrap());
            } else if let Some(list) = pointer.strip_suffix("/PREPEND") {
                value.pointer_mut(list).unwrap().as_array_mut().unwrap().insert(0, change.clone());
            } else if let Some(there) = value.pointer_mut(&pointer) {
                *there = change.clone();
            } else {
                let (parent, key) = pointer.rsplit_once('/').unwrap();
                value.pointer_mut(parent).unwrap()[key] = change.clone();
            }
        } else {
            merge(&mut value, &json!({path: change}));
        }
    }
    serde_json::from_value(value).unwrap()
}

fn outcome(case: &Case) -> (Value, Option<&'static str>) {
    let facts = facts(case);
    let refused = |r: &Refusal| (json!({"refused": r.reason(), "message": r.to_string()}), Some(r.reason()));
    let settings = InjectSettings { cni: !case.no_cni, ..settings() };
    match inject(&case.pod, &facts, &settings) {
        Outcome::Skipped(skip) => {
            (json!({"skipped": skip.reason(), "message": skip.to_string()}), Some(skip.reason()))
        }
        Outcome::Refused(refusal) => refused(&refusal),
        Outcome::Guarded(injection) => {
            let checked = match (&case.update, &case.altered) {
                (Some(update), _) => {
                    Some(check_update(&injection.pod, &patched(&injection.pod, update), &facts))
                }
                (_, Some(patch)) => Some(check_created(&patched(&injection.pod, patch), &facts, &settings)),
                _ => None,
            };
            match checked {
                Some(Ok(())) => (json!({"accepted": true}), None),
                Some(Err(refusal)) => refused(&refusal),
                None => {
                    check_created(&injection.pod, &facts, &settings).unwrap();
                    let out = json!({"policy": injection.policy, "warnings": injection.warnings,
                                     "pod": injection.pod});
                    (out, None)
                }
            }
        }
    }
}

#[test]
fn injection_matches_the_golden_files() {
    let mut bad = Vec::new();
    for (name, file, case) in cases() {
        let (got, _) = outcome(&case);
        let text = serde_saphyr::to_string(&got).unwrap();
        let out = file.with_extension("out.yaml");
        if std::env::var_os("SALLYPORT_BLESS").is_some() {
            std::fs::write(&out, &text).unwrap();
        }
        if std::fs::read_to_string(&out).ok().as_deref() != Some(text.as_str()) {
            bad.push(name);
        }
    }
    assert!(bad.is_empty(), "{bad:?} differ; bless with SALLYPORT_BLESS=1 and read the diff");
}

#[test]
fn every_reason_has_a_case() {
    let seen: BTreeSet<&str> = cases().iter().filter_map(|(_, _, case)| outcome(case).1).collect();
    let skips = ["NotOptedIn", "OptedOut", "NamespaceNotLabelled", "NamespaceDisabled", "StaticPod"];
    let missing: Vec<_> = Refusal::REASONS.iter().chain(&skips).filter(|r| !seen.contains(**r)).collect();
    assert!(missing.is_empty(), "no case for {missing:?}");
}

#[test]
fn injecting_twice_is_injecting_once() {
    for (name, _, case) in cases() {
        let Outcome::Guarded(once) = inject(&case.pod, &facts(&case), &settings()) else { continue };
        let Outcome::Guarded(twice) = inject(&once.pod, &facts(&case), &settings()) else {
            panic!("{name}: not injected again")
        };
        assert_eq!(once.pod, twice.pod, "{name}");
    }
}

#[test]
fn the_digest_follows_what_a_restart_would_change_and_nothing_else() {
    let plain = AgentPolicySpec::default();
    let digest = |spec: &AgentPolicySpec| pod_fields_digest(spec, &settings());
    let mut hot = plain.clone();
    hot.cedar.inline = "// nothing".into();
    hot.selector.match_labels.insert("app".into(), "bot".into());
    assert_eq!(digest(&plain), digest(&hot));
    let explicit = Capture { mode: CaptureMode::Explicit, ..Capture::default() };
    let root = Isolation { allow_root: true, ..Isolation::default() };
    let with_capture = AgentPolicySpec { capture: explicit, ..plain.clone() };
    let with_isolation = AgentPolicySpec { isolation: root, ..plain.clone() };
    let mut newer = settings();
    newer.images.envoy = "registry.test/sallyport-envoy:2".into();
    let all =
        [digest(&plain), digest(&with_capture), digest(&with_isolation), pod_fields_digest(&plain, &newer)];
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
}
