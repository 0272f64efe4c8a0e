//! What the pod's own containers may be. Everything here only ever takes away.

use k8s_openapi::api::core::v1::{
    Capabilities, Container, EnvVar, Pod, PodSecurityContext, PodSpec, SeccompProfile, SecurityContext,
};
use sallyport_api::names::{
    AUDIENCE, CHECK_PORT, DNS_PORT, METRICS_PORT, PROXY_PORT, SIDECAR_UID, TRANSPARENT_PORT,
};
use sallyport_api::{AgentPolicySpec, CaptureMode, Isolation};

use super::Refusal;
use super::containers::{CONTAINERS, VOLUMES};

/// Capabilities with which the sidecar can be got round; no policy can allow them. Configuring or bypassing
/// the network stack, becoming the sidecar's user, looking into its process, reaching the node.
const FORBIDDEN: [&str; 15] = [
    "ALL",
    "NET_ADMIN",
    "NET_RAW",
    "SETUID",
    "SETGID",
    "SETPCAP",
    "SETFCAP",
    "SYS_ADMIN",
    "SYS_PTRACE",
    "SYS_MODULE",
    "SYS_RAWIO",
    "BPF",
    "PERFMON",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
];

/// Containers by which other meshes capture the same connections.
const MESHES: [&str; 9] = [
    "istio-proxy",
    "istio-init",
    "linkerd-proxy",
    "linkerd-init",
    "kuma-sidecar",
    "kuma-init",
    "consul-dataplane",
    "consul-connect-inject-init",
    "aws-appmesh-proxyinit",
];

/// Settings of the pod's own kernel namespaces that Kubernetes calls safe.
const SAFE_SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];

/// The deprecated annotation that still chooses an AppArmor profile.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// The policy, as far as it says what containers may be.
pub(super) struct Rules<'a> {
    /// The policy's name, for messages.
    pub policy: &'a str,
    /// What it says.
    pub spec: &'a AgentPolicySpec,
}

/// Checks and confines everything in the pod that is not ours. Ours must not be in it yet.
pub(super) fn harden(pod: &mut Pod, rules: &Rules<'_>, warnings: &mut Vec<String>) -> Result<(), Refusal> {
    let apparmor = pod.metadata.annotations.iter().flatten();
    for (key, value) in apparmor {
        if key.starts_with(APPARMOR_ANNOTATION) && value.eq_ignore_ascii_case("unconfined") {
            return Err(Refusal::Unconfined { field: format!("metadata.annotations[{key}]") });
        }
    }
    let Some(spec) = pod.spec.as_mut() else { return Ok(()) };
    whole_pod(spec)?;
    runtime_class(spec, rules)?;
    volumes(spec)?;
    let around = spec.security_context.clone().unwrap_or_default();
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        check_container(container)?;
        let mut context = container.security_context.take().unwrap_or_default();
        confine(&container.name, &mut context, &around, rules, warnings)?;
        container.security_context = Some(context);
        if rules.spec.capture.mode == CaptureMode::Explicit {
            proxy_variables(container, warnings);
        }
    }
    Ok(())
}

fn whole_pod(spec: &PodSpec) -> Result<(), Refusal> {
    if spec.os.as_ref().is_some_and(|os| os.name == "windows") {
        return Err(Refusal::WindowsPod {});
    }
    for (set, field) in [
        (spec.host_network, "spec.hostNetwork"),
        (spec.host_pid, "spec.hostPID"),
        (spec.host_ipc, "spec.hostIPC"),
    ] {
        if set == Some(true) {
            return Err(Refusal::HostNamespace { field });
        }
    }
    if spec.share_process_namespace == Some(true) {
        return Err(Refusal::SharedProcesses {});
    }
    if let Some(dns) = &spec.dns_config {
        if dns.nameservers.as_ref().is_some_and(|n| !n.is_empty()) {
            return Err(Refusal::OwnDns { field: "spec.dnsConfig.nameservers" });
        }
        if dns.searches.as_ref().is_some_and(|s| !s.is_empty()) {
            return Err(Refusal::OwnDns { field: "spec.dnsConfig.searches" });
        }
    }
    // The kubelet writes them into the file that the sidecar resolves names by, too.
    if spec.host_aliases.as_ref().is_some_and(|a| !a.is_empty()) {
        return Err(Refusal::HostAliases {});
    }
    let Some(context) = &spec.security_context else { return Ok(()) };
    identity(
        &[
            ("spec.securityContext.runAsUser", context.run_as_user),
            ("spec.securityContext.runAsGroup", context.run_as_group),
            ("spec.securityContext.fsGroup", context.fs_group),
        ],
        "",
    )?;
    for group in context.supplemental_groups.iter().flatten() {
        identity(&[("spec.securityContext.supplementalGroups", Some(*group))], "")?;
    }
    for sysctl in context.sysctls.iter().flatten() {
        // Both spellings mean the same setting.
        if !SAFE_SYSCTLS.contains(&sysctl.name.replace('/', ".").as_str()) {
            return Err(Refusal::UnsafeSysctl { name: sysctl.name.clone() });
        }
    }
    Ok(())
}

fn runtime_class(spec: &mut PodSpec, rules: &Rules<'_>) -> Result<(), Refusal> {
    let wanted = &rules.spec.isolation.runtime_class;
    if !wanted.is_empty() {
        let found = spec.runtime_class_name.get_or_insert_with(|| wanted.clone());
        if found != wanted {
            return Err(Refusal::RuntimeClassMismatch {
                found: found.clone(),
                wanted: wanted.clone(),
                policy: rules.policy.into(),
            });
        }
    }
    let found = spec.runtime_class_name.as_deref().unwrap_or_default();
    let lower = found.to_ascii_lowercase();
    let gvisor = lower.contains("gvisor") || lower.contains("runsc");
    // A virtual machine's packets pass the pod's namespace on the node as frames, which its rules never see.
    // With Init the rules are written inside of the machine.
    let outside = lower.contains("kata") && rules.spec.capture.mode == CaptureMode::Cni;
    if (gvisor && rules.spec.capture.mode.forces()) || outside {
        return Err(Refusal::UnsupportedRuntime { found: found.into(), mode: rules.spec.capture.mode });
    }
    Ok(())
}

fn volumes(spec: &PodSpec) -> Result<(), Refusal> {
    for volume in spec.volumes.iter().flatten() {
        let name = || volume.name.clone();
        if VOLUMES.contains(&volume.name.as_str()) {
            return Err(Refusal::ReservedName { kind: "volume", name: name() });
        }
        if volume.host_path.is_some() {
            return Err(Refusal::HostPathVolume { volume: name() });
        }
        let sources = volume.projected.iter().flat_map(|p| p.sources.iter().flatten());
        let mut tokens = sources.filter_map(|s| s.service_account_token.as_ref());
        if tokens.any(|t| t.audience.as_deref() == Some(AUDIENCE)) {
            return Err(Refusal::SidecarToken { volume: name() });
        }
    }
    Ok(())
}

fn check_container(container: &Container) -> Result<(), Refusal> {
    let name = || container.name.clone();
    if CONTAINERS.contains(&container.name.as_str()) {
        return Err(Refusal::ReservedName { kind: "container", name: name() });
    }
    if MESHES.contains(&container.name.as_str()) {
        return Err(Refusal::OtherMesh { container: name() });
    }
    mounts(&container.name, container.volume_mounts.iter().flatten().map(|m| m.name.as_str()))?;
    for port in container.ports.iter().flatten() {
        if [TRANSPARENT_PORT, PROXY_PORT, METRICS_PORT, CHECK_PORT, DNS_PORT]
            .iter()
            .any(|p| i32::from(*p) == port.container_port)
        {
            return Err(Refusal::PortCollision { container: name(), port: port.container_port });
        }
    }
    Ok(())
}

/// Refuses mounts of the sidecar's volumes.
pub(super) fn mounts<'a>(container: &str, mut mounted: impl Iterator<Item = &'a str>) -> Result<(), Refusal> {
    match mounted.find(|m| VOLUMES.contains(m)) {
        None => Ok(()),
        Some(volume) => {
            Err(Refusal::MountsSidecarVolume { container: container.into(), volume: volume.into() })
        }
    }
}

fn identity(fields: &[(&str, Option<i64>)], prefix: &str) -> Result<(), Refusal> {
    for (field, id) in fields {
        if *id == Some(SIDECAR_UID) {
            return Err(Refusal::SidecarIdentity { field: format!("{prefix}{field}"), uid: SIDECAR_UID });
        }
    }
    Ok(())
}

/// Refuses what no setting of ours can make safe.
pub(super) fn check_context(
    container: &str,
    context: &SecurityContext,
    around: &PodSecurityContext,
    isolation: &Isolation,
    policy: &str,
) -> Result<(), Refusal> {
    let name = || container.to_owned();
    let prefix = format!("container `{container}` securityContext.");
    identity(&[("runAsUser", context.run_as_user), ("runAsGroup", context.run_as_group)], &prefix)?;
    if context.privileged == Some(true) {
        return Err(Refusal::Privileged { container: name() });
    }
    if context.proc_mount.as_deref().is_some_and(|p| p != "Default") {
        return Err(Refusal::UnmaskedProc { container: name() });
    }
    let seccomp = context.seccomp_profile.as_ref().or(around.seccomp_profile.as_ref());
    if seccomp.is_some_and(|s| s.type_ == "Unconfined") {
        return Err(Refusal::Unconfined { field: format!("{prefix}seccompProfile") });
    }
    let apparmor = context.app_armor_profile.as_ref().or(around.app_armor_profile.as_ref());
    if apparmor.is_some_and(|a| a.type_ == "Unconfined") {
        return Err(Refusal::Unconfined { field: format!("{prefix}appArmorProfile") });
    }
    if !isolation.allow_root && context.run_as_user.or(around.run_as_user) == Some(0) {
        return Err(Refusal::RootUser { container: name(), policy: policy.into() });
    }
    let allowed: Vec<String> = isolation.allow_capabilities.iter().map(|c| plain(c)).collect();
    for added in context.capabilities.iter().flat_map(|c| c.add.iter().flatten()) {
        let capability = plain(added);
        if FORBIDDEN.contains(&capability.as_str()) {
            return Err(Refusal::ForbiddenCapability { container: name(), capability });
        }
        if !allowed.contains(&capability) {
            return Err(Refusal::CapabilityNotAllowed {
                container: name(),
                capability,
                policy: policy.into(),
            });
        }
    }
    Ok(())
}

/// Runtimes take `net_admin` and `CAP_NET_ADMIN` for `NET_ADMIN`.
fn plain(capability: &str) -> String {
    let upper = capability.trim().to_ascii_uppercase();
    upper.strip_prefix("CAP_").map_or(upper.clone(), str::to_owned)
}

fn confine(
    container: &str,
    context: &mut SecurityContext,
    around: &PodSecurityContext,
    rules: &Rules<'_>,
    warnings: &mut Vec<String>,
) -> Result<(), Refusal> {
    let isolation = &rules.spec.isolation;
    check_context(container, context, around, isolation, rules.policy)?;
    let mut overrule = |field: &mut Option<bool>, value: bool, name: &str| {
        if *field == Some(!value) {
            warnings.push(format!("container `{container}`: securityContext.{name} is now {value}"));
        }
        *field = Some(value);
    };
    overrule(&mut context.allow_privilege_escalation, false, "allowPrivilegeEscalation");
    if !isolation.allow_root {
        // The image decides the user where the pod does not; the kubelet then refuses root.
        overrule(&mut context.run_as_non_root, true, "runAsNonRoot");
    }
    if isolation.read_only_root {
        overrule(&mut context.read_only_root_filesystem, true, "readOnlyRootFilesystem");
    }
    let capabilities = context.capabilities.get_or_insert_with(Capabilities::default);
    if !capabilities.drop.iter().flatten().any(|c| plain(c) == "ALL") {
        capabilities.drop = Some(vec!["ALL".into()]);
    }
    // Among other things it keeps AF_VSOCK sockets away, which no netfilter rule sees.
    if context.seccomp_profile.is_none() && around.seccomp_profile.is_none() {
        context.seccomp_profile =
            Some(SeccompProfile { type_: "RuntimeDefault".into(), localhost_profile: None });
    }
    Ok(())
}

/// Tells a container where the proxy is; what the user says himself stays.
fn proxy_variables(container: &mut Container, warnings: &mut Vec<String>) {
    let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
    let none = "127.0.0.1,localhost,::1".to_owned();
    let env = container.env.get_or_insert_with(Vec::new);
    for (name, value) in
        [("HTTP_PROXY", &proxy), ("http_proxy", &proxy), ("NO_PROXY", &none), ("no_proxy", &none)]
    {
        match env.iter().find(|e| e.name == name) {
            None => env.push(EnvVar { name: name.into(), value: Some(value.clone()), value_from: None }),
            Some(given) if given.value.as_ref() == Some(value) => {}
            Some(_) => warnings.push(format!(
                "container `{}` keeps its own {name}; calls that it sends elsewhere are not inspected",
                container.name
            )),
        }
    }
}
