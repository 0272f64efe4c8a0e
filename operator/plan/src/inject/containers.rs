//! The sidecar's containers and volumes.

use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapProjection, Container, ContainerPort, EmptyDirVolumeSource, ExecAction,
    HTTPGetAction, KeyToPath, Probe, ProjectedVolumeSource, SeccompProfile, SecurityContext,
    ServiceAccountTokenProjection, Volume, VolumeMount, VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use sallyport_api::names::{
    AUDIENCE, CAPTURE_CONTAINER, DNS_PORT, ENVOY_CONTAINER, EXTPROC_CONTAINER, IDENTITY_DIR, IDENTITY_VOLUME,
    METRICS_PORT, RUN_DIR, RUN_VOLUME, SIDECAR_UID, STATE_DIR, STATE_VOLUME, TRUST_CONFIG_MAP, TRUST_KEY,
};
use sallyport_api::{AgentPolicySpec, CaptureMode};

use super::InjectSettings;
use super::resources::Demand;
use crate::capture::{SCRIPT, nft_rules};
use crate::size::Sizing;

/// Names of the injected containers, in their order.
pub(super) const CONTAINERS: [&str; 3] = [CAPTURE_CONTAINER, EXTPROC_CONTAINER, ENVOY_CONTAINER];
/// Names of the injected volumes.
pub(super) const VOLUMES: [&str; 3] = [RUN_VOLUME, STATE_VOLUME, IDENTITY_VOLUME];

/// An hour of probes: a pod that starts while every operator is down waits for its bundle, and is not
/// restarted for it.
const STARTUP_FAILURES: i32 = 3600;
/// The token is renewed by the kubelet at four fifths of this.
const TOKEN_SECONDS: i64 = 3600;

/// The init containers, in their order.
pub(super) fn init_containers(
    spec: &AgentPolicySpec,
    sizing: &Sizing,
    demands: &[Demand],
    settings: &InjectSettings,
) -> Vec<Container> {
    let mut all = Vec::new();
    if spec.capture.mode == CaptureMode::Init {
        all.push(capture(spec, settings));
    }
    all.push(extproc(spec, sizing, settings));
    all.push(envoy(sizing, settings));
    for container in &mut all {
        container.resources = demands.iter().find(|d| d.container == container.name).map(Demand::resources);
        container.image_pull_policy.clone_from(&settings.image_pull_policy);
    }
    all
}

fn capture(spec: &AgentPolicySpec, settings: &InjectSettings) -> Container {
    Container {
        name: CAPTURE_CONTAINER.into(),
        image: Some(settings.images.capture.clone()),
        command: Some(vec!["/bin/sh".into(), "-c".into(), SCRIPT.into()]),
        args: Some(vec![CAPTURE_CONTAINER.into(), nft_rules(&spec.capture)]),
        security_context: Some(SecurityContext {
            run_as_user: Some(0),
            run_as_group: Some(0),
            // The pod as a whole may say that nobody is root.
            run_as_non_root: Some(false),
            ..confined(Some(vec!["NET_ADMIN".into()]))
        }),
        ..Container::default()
    }
}

fn extproc(spec: &AgentPolicySpec, sizing: &Sizing, settings: &InjectSettings) -> Container {
    let mut args = vec![
        ("--discovery", settings.discovery.clone()),
        ("--run-dir", RUN_DIR.into()),
        ("--state-dir", STATE_DIR.into()),
        ("--identity-dir", IDENTITY_DIR.into()),
        ("--metrics-addr", format!("[::]:{METRICS_PORT}")),
        ("--budget-bytes", sizing.budget_bytes.to_string()),
        ("--scan-timeout-ms", sizing.scan_timeout.as_millis().to_string()),
    ];
    // Captured questions for names come to it, and captured calls are held against the answers.
    if spec.capture.mode.forces() {
        args.push(("--dns-port", DNS_PORT.to_string()));
    }
    let mut args: Vec<String> = args.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
    if spec.capture.mode.forces() {
        args.push("--captured".into());
    }
    Container {
        name: EXTPROC_CONTAINER.into(),
        image: Some(settings.images.extproc.clone()),
        command: Some(vec!["/sallyport-extproc".into()]),
        args: Some(std::iter::once("sidecar".to_owned()).chain(args).collect()),
        restart_policy: Some("Always".into()),
        ports: Some(vec![ContainerPort {
            name: Some("slp-metrics".into()),
            container_port: METRICS_PORT.into(),
            protocol: Some("TCP".into()),
            ..ContainerPort::default()
        }]),
        startup_probe: Some(Probe {
            exec: Some(ExecAction {
                command: Some(
                    ["/sallyport-extproc", "ready", "--run-dir", RUN_DIR].map(str::to_owned).to_vec(),
                ),
            }),
            ..startup()
        }),
        security_context: Some(sidecar()),
        volume_mounts: Some(vec![
            mount(RUN_VOLUME, RUN_DIR, false),
            mount(STATE_VOLUME, STATE_DIR, false),
            mount(IDENTITY_VOLUME, IDENTITY_DIR, true),
        ]),
        ..Container::default()
    }
}

fn envoy(sizing: &Sizing, settings: &InjectSettings) -> Container {
    let concurrency = sizing.concurrency.to_string();
    let config = format!("{RUN_DIR}/envoy.json");
    let args = [
        "-c",
        &config,
        "--concurrency",
        &concurrency,
        "--log-level",
        "warn",
        "--disable-hot-restart",
        // A typo in a safety field must not be read as "not set".
        "--reject-unknown-dynamic-fields",
    ];
    Container {
        name: ENVOY_CONTAINER.into(),
        image: Some(settings.images.envoy.clone()),
        command: Some(vec!["/usr/local/bin/envoy".into()]),
        args: Some(args.map(str::to_owned).to_vec()),
        restart_policy: Some("Always".into()),
        startup_probe: Some(Probe {
            http_get: Some(HTTPGetAction {
                path: Some("/ready/envoy".into()),
                port: IntOrString::Int(METRICS_PORT.into()),
                ..HTTPGetAction::default()
            }),
            ..startup()
        }),
        security_context: Some(sidecar()),
        volume_mounts: Some(vec![mount(RUN_VOLUME, RUN_DIR, false)]),
        ..Container::default()
    }
}

fn startup() -> Probe {
    Probe { period_seconds: Some(1), failure_threshold: Some(STARTUP_FAILURES), ..Probe::default() }
}

fn sidecar() -> SecurityContext {
    SecurityContext {
        run_as_user: Some(SIDECAR_UID),
        run_as_group: Some(SIDECAR_UID),
        run_as_non_root: Some(true),
        ..confined(None)
    }
}

fn confined(add: Option<Vec<String>>) -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { add, drop: Some(vec!["ALL".into()]) }),
        privileged: Some(false),
        read_only_root_filesystem: Some(true),
        seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".into(), localhost_profile: None }),
        ..SecurityContext::default()
    }
}

fn mount(volume: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: volume.into(),
        mount_path: path.into(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// The volumes, in their order.
pub(super) fn volumes() -> Vec<Volume> {
    let memory = |name: &str, limit: &str| Volume {
        name: name.into(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: Some("Memory".into()),
            // Counted against extproc's memory, so a bound here keeps a fault from becoming an OOM kill.
            size_limit: Some(Quantity(limit.into())),
        }),
        ..Volume::default()
    };
    let token = VolumeProjection {
        service_account_token: Some(ServiceAccountTokenProjection {
            audience: Some(AUDIENCE.into()),
            expiration_seconds: Some(TOKEN_SECONDS),
            path: "token".into(),
        }),
        ..VolumeProjection::default()
    };
    let trust = VolumeProjection {
        config_map: Some(ConfigMapProjection {
            name: TRUST_CONFIG_MAP.into(),
            items: Some(vec![KeyToPath { key: TRUST_KEY.into(), path: "ca.crt".into(), mode: None }]),
            optional: Some(false),
        }),
        ..VolumeProjection::default()
    };
    vec![
        memory(RUN_VOLUME, "8Mi"),
        memory(STATE_VOLUME, "32Mi"),
        Volume {
            name: IDENTITY_VOLUME.into(),
            projected: Some(ProjectedVolumeSource {
                default_mode: Some(0o444),
                sources: Some(vec![token, trust]),
            }),
            ..Volume::default()
        },
    ]
}
