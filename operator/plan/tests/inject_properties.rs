//! What holds for every pod: injection is idempotent, only ever takes rights away, changes nothing else of
//! the pod's own, and a pod that was prepared to look injected gains nothing by it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use k8s_openapi::api::core::v1::{Container, Pod, SecurityContext};
use proptest::prelude::*;
use sallyport_api::names::{CAPTURE_CONTAINER, ENVOY_CONTAINER, EXTPROC_CONTAINER, SIDECAR_UID, STATUS};
use sallyport_api::{AgentPolicyObject, AgentPolicySpec, Capture, CaptureMode, Isolation};
use sallyport_plan::inject::{
    Facts, Images, InjectSettings, Injection, Outcome, check_created, check_update, inject,
};
use serde_json::{Value, json};

fn settings() -> InjectSettings {
    InjectSettings {
        images: Images { extproc: "e".into(), envoy: "v".into(), capture: "c".into() },
        image_pull_policy: Some("IfNotPresent".into()),
        image_pull_secrets: vec!["pull".into()],
        cni: true,
        discovery: "https://operator:8443".into(),
    }
}

fn flag() -> impl Strategy<Value = Option<bool>> {
    prop_oneof![Just(None), Just(Some(true)), Just(Some(false))]
}

fn user() -> impl Strategy<Value = Option<i64>> {
    prop_oneof![Just(None), Just(Some(0)), Just(Some(1000)), Just(Some(SIDECAR_UID))]
}

fn capabilities() -> impl Strategy<Value = Vec<String>> {
    let name = prop_oneof![
        Just("NET_BIND_SERVICE"),
        Just("cap_net_bind_service"),
        Just("NET_ADMIN"),
        Just("CAP_SETUID"),
        Just("ALL"),
        Just("CHOWN"),
    ];
    prop::collection::vec(name.prop_map(str::to_owned), 0..3)
}

/// A securityContext, with null for what is left out.
fn context() -> impl Strategy<Value = Value> {
    let flags = (flag(), flag(), flag(), flag());
    (flags, user(), user(), capabilities(), capabilities()).prop_map(
        |((escalation, privileged, non_root, read_only), user, group, add, drop)| {
            json!({
                "allowPrivilegeEscalation": escalation, "privileged": privileged, "runAsNonRoot": non_root,
                "readOnlyRootFilesystem": read_only, "runAsUser": user, "runAsGroup": group,
                "capabilities": {"add": add, "drop": drop},
            })
        },
    )
}

fn name() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        8 => Just("agent"),
        4 => Just("tool"),
        1 => Just(ENVOY_CONTAINER),
        1 => Just(EXTPROC_CONTAINER),
        1 => Just(CAPTURE_CONTAINER),
    ]
}

fn container() -> impl Strategy<Value = Value> {
    (name(), prop::option::of(context()), prop::bool::ANY).prop_map(|(name, context, limits)| {
        let quantities = json!({"cpu": "1", "memory": "1Gi"});
        json!({
            "name": name, "image": "anything", "securityContext": context,
            "resources": if limits { json!({"limits": quantities}) } else { json!({}) },
        })
    })
}

fn pod() -> impl Strategy<Value = Pod> {
    let containers = || prop::collection::vec(container(), 0..3);
    let around = prop_oneof![
        3 => Just(json!({})),
        1 => Just(json!({"runAsUser": 1000})),
        1 => Just(json!({"runAsUser": 0, "runAsNonRoot": false})),
    ];
    let looks_injected = prop::option::of(prop_oneof![Just("{}"), Just("not even JSON")]);
    let volume = prop_oneof![3 => Just("work"), 1 => Just("sallyport-run")];
    (containers(), containers(), around, looks_injected, volume).prop_map(
        |(init, mut containers, around, status, volume)| {
            containers.push(json!({"name": "last", "image": "last"}));
            let mut annotations = json!({"sallyport.dev/inject": "true"});
            if let Some(status) = status {
                annotations[STATUS] = json!(status);
            }
            serde_json::from_value(json!({
                "metadata": {"name": "p", "annotations": annotations, "labels": {"app": "bot"}},
                "spec": {
                    "initContainers": init, "containers": containers, "securityContext": around,
                    "volumes": [{"name": volume, "emptyDir": {}}],
                },
            }))
            .unwrap()
        },
    )
}

fn policy() -> impl Strategy<Value = AgentPolicyObject> {
    let allowed =
        prop_oneof![Just(vec![]), Just(vec!["NET_BIND_SERVICE".to_owned(), "NET_ADMIN".to_owned()])];
    let mode = prop_oneof![Just(CaptureMode::Cni), Just(CaptureMode::Init), Just(CaptureMode::Explicit)];
    (mode, prop::bool::ANY, prop::bool::ANY, allowed).prop_map(
        |(mode, allow_root, read_only_root, allow_capabilities)| {
            let spec = AgentPolicySpec {
                capture: Capture { mode, ..Capture::default() },
                isolation: Isolation {
                    allow_root,
                    read_only_root,
                    allow_capabilities,
                    ..Isolation::default()
                },
                ..AgentPolicySpec::default()
            };
            AgentPolicyObject::new("p", spec)
        },
    )
}

fn guarded(pod: &Pod, policies: &[AgentPolicyObject]) -> Option<Injection> {
    match inject(pod, &facts(policies), &settings()) {
        Outcome::Guarded(injection) => Some(*injection),
        Outcome::Refused(_) => None,
        Outcome::Skipped(skip) => panic!("{skip}"),
    }
}

fn facts(policies: &[AgentPolicyObject]) -> Facts<'_> {
    Facts { namespace: "n", namespace_inject: Some("required"), policies, limit_ranges: &[] }
}

const OURS: [&str; 3] = [CAPTURE_CONTAINER, EXTPROC_CONTAINER, ENVOY_CONTAINER];

fn theirs(pod: &Pod) -> Vec<Container> {
    let spec = pod.spec.clone().unwrap();
    let all = spec.init_containers.into_iter().flatten().chain(spec.containers);
    all.filter(|c| !OURS.contains(&c.name.as_str())).collect()
}

/// Whether `after` has no right that `before` lacks.
fn no_stronger(before: &SecurityContext, after: &SecurityContext) {
    for (field, was, is) in [
        ("allowPrivilegeEscalation", before.allow_privilege_escalation, after.allow_privilege_escalation),
        ("privileged", before.privileged, after.privileged),
    ] {
        assert!(was != Some(false) || is == Some(false), "{field}");
    }
    assert!(before.run_as_non_root != Some(true) || after.run_as_non_root == Some(true));
    assert!(before.read_only_root_filesystem != Some(true) || after.read_only_root_filesystem == Some(true));
    assert_eq!(before.run_as_user, after.run_as_user);
    assert_eq!(before.run_as_group, after.run_as_group);
    let add = |c: &SecurityContext| c.capabilities.clone().and_then(|c| c.add).unwrap_or_default();
    assert_eq!(add(before), add(after));
    assert_eq!(after.allow_privilege_escalation, Some(false));
    assert_ne!(after.privileged, Some(true));
    assert_ne!(after.run_as_user, Some(SIDECAR_UID));
    assert_ne!(after.run_as_group, Some(SIDECAR_UID));
    let capabilities = after.capabilities.clone().unwrap();
    assert!(capabilities.drop.unwrap().iter().any(|c| c.eq_ignore_ascii_case("all")));
    for capability in capabilities.add.unwrap_or_default() {
        assert!(capability.to_ascii_lowercase().ends_with("net_bind_service"), "{capability}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2048, ..ProptestConfig::default() })]

    #[test]
    fn injecting_an_injected_pod_changes_nothing(pod in pod(), policy in policy()) {
        let policies = [policy];
        let Some(once) = guarded(&pod, &policies) else { return Ok(()) };
        let twice = guarded(&once.pod, &policies).expect("what was injected can be injected again");
        prop_assert_eq!(&once.pod, &twice.pod);
        prop_assert_eq!(check_created(&once.pod, &facts(&policies), &settings()), Ok(()));
        prop_assert_eq!(check_update(&once.pod, &once.pod, &facts(&policies)), Ok(()));
    }

    #[test]
    fn injection_only_ever_takes_rights_away(pod in pod(), policy in policy()) {
        let policies = [policy];
        let Some(injection) = guarded(&pod, &policies) else { return Ok(()) };
        let (before, after) = (theirs(&pod), theirs(&injection.pod));
        prop_assert_eq!(before.len(), after.len());
        for (before, after) in before.into_iter().zip(after) {
            let was = before.security_context.clone().unwrap_or_default();
            no_stronger(&was, after.security_context.as_ref().unwrap());
            // Nothing else is touched.
            let rest = |c: Container| Container { security_context: None, env: None, ..c };
            prop_assert_eq!(rest(before), rest(after));
        }
    }

    #[test]
    fn a_pod_made_to_look_injected_comes_out_like_any_other(pod in pod(), policy in policy()) {
        let policies = [policy];
        let mut honest = pod.clone();
        honest.metadata.annotations.as_mut().unwrap().remove(STATUS);
        let spec = honest.spec.as_mut().unwrap();
        spec.init_containers.as_mut().unwrap().retain(|c| !OURS.contains(&c.name.as_str()));
        spec.volumes.as_mut().unwrap().retain(|v| !v.name.starts_with("sallyport-"));
        let want = guarded(&honest, &policies).map(|i| i.pod);
        // Refused, or the same.
        if let Some(got) = guarded(&pod, &policies) {
            prop_assert_eq!(Some(got.pod), want);
        }
    }

    #[test]
    fn ours_come_first_and_stay_confined(pod in pod(), policy in policy()) {
        let policies = [policy];
        let Some(injection) = guarded(&pod, &policies) else { return Ok(()) };
        let init = injection.pod.spec.unwrap().init_containers.unwrap();
        let alone = policies[0].spec.capture.mode != CaptureMode::Init;
        let ours = if alone { &OURS[1..] } else { &OURS[..] };
        let names: Vec<&str> = init.iter().take(ours.len()).map(|c| c.name.as_str()).collect();
        prop_assert_eq!(names, ours);
        for container in &init[..ours.len()] {
            let context = container.security_context.as_ref().unwrap();
            prop_assert_eq!(context.allow_privilege_escalation, Some(false));
            prop_assert_eq!(context.read_only_root_filesystem, Some(true));
            let user = if container.name == CAPTURE_CONTAINER { 0 } else { SIDECAR_UID };
            prop_assert_eq!(context.run_as_user, Some(user));
        }
    }
}
