//! What may change of a guarded pod after it was made, and what must not have happened since injection.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodSecurityContext, SecurityContext};
use sallyport_api::names::{GUARDED, INJECT, POLICY, STATUS};
use sallyport_api::{AgentPolicyObject, Isolation};

use super::containers::{CONTAINERS, VOLUMES};
use super::{Facts, InjectSettings, Outcome, Refusal, choose, harden, inject};

/// Whether a guarded pod may be changed so; both as the API server shows them. Holds for the subresource
/// `ephemeralcontainers` too.
pub fn check_update(old: &Pod, new: &Pod, facts: &Facts<'_>) -> Result<(), Refusal> {
    let guarded = |pod: &Pod| label(pod, GUARDED) == Some("true");
    if guarded(old) != guarded(new) {
        return Err(Refusal::GuardedLabelChanged {});
    }
    if !guarded(new) {
        return Ok(());
    }
    for key in [INJECT, POLICY, STATUS] {
        if annotation(old, key) != annotation(new, key) {
            return Err(Refusal::ProtectedMetadata { field: format!("metadata.annotations[{key}]") });
        }
    }
    if label(old, INJECT) != label(new, INJECT) {
        return Err(Refusal::ProtectedMetadata { field: format!("metadata.labels[{INJECT}]") });
    }
    let (was, would) = (chosen(old, facts), chosen(new, facts));
    if name(was) != name(would) {
        let shown = |p: Option<&AgentPolicyObject>| {
            name(p).map_or("none (no AgentPolicy would select it)".to_owned(), |n| format!("`{n}`"))
        };
        return Err(Refusal::PolicyWouldChange {
            from: name(was).unwrap_or_default().into(),
            to: shown(would),
        });
    }
    sidecar_unchanged(old, new)?;
    // A policy that is gone allows nothing more than the default.
    let isolation = was.map_or_else(Isolation::default, |p| p.spec.isolation.clone());
    let before: Vec<&EphemeralContainer> = ephemeral(old).collect();
    for container in ephemeral(new).filter(|c| !before.contains(c)) {
        debug_container(container, new, &isolation, name(was).unwrap_or_default())?;
    }
    Ok(())
}

/// Whether a pod that is about to be made is what injection makes of it; for a validating webhook, which
/// runs after every other webhook had its turn.
pub fn check_created(pod: &Pod, facts: &Facts<'_>, settings: &InjectSettings) -> Result<(), Refusal> {
    let fresh = match inject(pod, facts, settings) {
        Outcome::Skipped(_) => return Ok(()),
        Outcome::Refused(refusal) => return Err(refusal),
        Outcome::Guarded(injection) => injection.pod,
    };
    if label(pod, GUARDED) != Some("true") {
        return Err(Refusal::GuardedLabelChanged {});
    }
    if annotation(pod, STATUS) != annotation(&fresh, STATUS) {
        return Err(Refusal::ProtectedMetadata { field: format!("metadata.annotations[{STATUS}]") });
    }
    let (Some(found), Some(fresh)) = (&pod.spec, &fresh.spec) else { return Ok(()) };
    let mut running = found.init_containers.iter().flatten();
    for ours in fresh.init_containers.iter().flatten().filter(|c| is_ours(c)) {
        match running.next() {
            Some(c) if c.name != ours.name && !is_ours(c) => {
                return Err(Refusal::InitContainerBeforeSidecar { container: c.name.clone() });
            }
            Some(c) if same(c, ours) => {}
            _ => return Err(Refusal::SidecarAltered { container: ours.name.clone() }),
        }
    }
    for volume in fresh.volumes.iter().flatten().filter(|v| VOLUMES.contains(&v.name.as_str())) {
        let there = found.volumes.iter().flatten().find(|v| v.name == volume.name);
        let same = there.is_some_and(|v| {
            v.empty_dir.is_some() == volume.empty_dir.is_some() && v.projected == volume.projected
        });
        if !same {
            return Err(Refusal::ReservedName { kind: "volume", name: volume.name.clone() });
        }
    }
    let theirs =
        |spec: &'_ k8s_openapi::api::core::v1::PodSpec| -> BTreeMap<String, Option<SecurityContext>> {
            let all = spec.init_containers.iter().flatten().chain(&spec.containers);
            all.filter(|c| !is_ours(c)).map(|c| (c.name.clone(), c.security_context.clone())).collect()
        };
    let wanted = theirs(fresh);
    for (name, context) in theirs(found) {
        if wanted.get(&name) != Some(&context) {
            return Err(Refusal::NotHardened { container: name });
        }
    }
    Ok(())
}

fn is_ours(container: &Container) -> bool {
    CONTAINERS.contains(&container.name.as_str())
}

/// The API server fills in defaults and mounts, so only what decides over the guarding is compared.
fn same(found: &Container, ours: &Container) -> bool {
    let context = |c: &Container| {
        let s = c.security_context.clone().unwrap_or_default();
        (s.run_as_user, s.run_as_group, s.run_as_non_root, s.capabilities, s.privileged)
    };
    let mounts = |c: &Container| c.volume_mounts.clone().unwrap_or_default();
    found.name == ours.name
        && found.image == ours.image
        && found.command == ours.command
        && found.args == ours.args
        && found.env.iter().flatten().eq(ours.env.iter().flatten())
        && found.env_from.iter().flatten().eq(ours.env_from.iter().flatten())
        && found.restart_policy == ours.restart_policy
        && found.lifecycle == ours.lifecycle
        && found.startup_probe.is_some() == ours.startup_probe.is_some()
        && context(found) == context(ours)
        && mounts(ours)
            .iter()
            .all(|m| mounts(found).iter().any(|f| f.name == m.name && f.mount_path == m.mount_path))
}

/// Images and, in place, resources of a running pod's containers can change.
fn sidecar_unchanged(old: &Pod, new: &Pod) -> Result<(), Refusal> {
    for name in CONTAINERS {
        let Some(was) = init_container(old, name) else { continue };
        let changed = |field| Refusal::SidecarChanged { container: name.into(), field };
        let Some(is) = init_container(new, name) else { return Err(changed("the presence")) };
        if was.image != is.image {
            return Err(changed("image"));
        }
        if was.resources != is.resources {
            return Err(changed("resources"));
        }
    }
    Ok(())
}

/// A container that is added to a running pod can't be confined by us, so it must come confined.
fn debug_container(
    container: &EphemeralContainer,
    pod: &Pod,
    isolation: &Isolation,
    policy: &str,
) -> Result<(), Refusal> {
    let target = container.target_container_name.as_deref().unwrap_or_default();
    if CONTAINERS.contains(&target) {
        return Err(Refusal::DebugsSidecar { container: container.name.clone(), target: target.into() });
    }
    if CONTAINERS.contains(&container.name.as_str()) {
        return Err(Refusal::ReservedName { kind: "container", name: container.name.clone() });
    }
    harden::mounts(&container.name, container.volume_mounts.iter().flatten().map(|m| m.name.as_str()))?;
    let empty = SecurityContext::default();
    let context = container.security_context.as_ref().unwrap_or(&empty);
    let none = PodSecurityContext::default();
    let around = pod.spec.as_ref().and_then(|s| s.security_context.as_ref()).unwrap_or(&none);
    harden::check_context(&container.name, context, around, isolation, policy)?;
    let lacks = |field| Err(Refusal::DebugNotConfined { container: container.name.clone(), field });
    if context.allow_privilege_escalation != Some(false) {
        return lacks("securityContext.allowPrivilegeEscalation: false");
    }
    let mut dropped = context.capabilities.iter().flat_map(|c| c.drop.iter().flatten());
    if !dropped.any(|c| c == "ALL") {
        return lacks("securityContext.capabilities.drop: [ALL]");
    }
    // Here, unlike at creation, it can't be set, and the image may say root.
    let non_root = context.run_as_non_root.or(around.run_as_non_root) == Some(true)
        || context.run_as_user.or(around.run_as_user).is_some_and(|u| u != 0);
    if !isolation.allow_root && !non_root {
        return lacks("securityContext.runAsNonRoot: true");
    }
    Ok(())
}

fn chosen<'a>(pod: &Pod, facts: &Facts<'a>) -> Option<&'a AgentPolicyObject> {
    let empty = BTreeMap::new();
    let labels = pod.metadata.labels.as_ref().unwrap_or(&empty);
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&empty);
    choose(labels, annotations, facts.policies)
}

fn name(policy: Option<&AgentPolicyObject>) -> Option<&str> {
    policy.and_then(|p| p.metadata.name.as_deref())
}

fn label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn init_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    pod.spec.as_ref()?.init_containers.iter().flatten().find(|c| c.name == name)
}

fn ephemeral(pod: &Pod) -> impl Iterator<Item = &EphemeralContainer> {
    pod.spec.iter().flat_map(|s| s.ephemeral_containers.iter().flatten())
}
