//! What the pod's own containers are told to trust: the certificates that Envoy shows them.

use k8s_openapi::api::core::v1::{Container, EnvVar, PodSpec};
use sallyport_api::names::{AGENT_AUTHORITY, AGENT_BUNDLE, AGENT_TRUST_DIR, AGENT_TRUST_VOLUME};

use super::containers::mount;
use crate::trust::{BUNDLE_VARIABLES, EXTRA_VARIABLES};

/// Mounts the files, read-only, and sets the variables that programs find them by. Ours must not be in it yet.
pub(super) fn add(spec: &mut PodSpec, warnings: &mut Vec<String>) {
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        let mounted = mount(AGENT_TRUST_VOLUME, AGENT_TRUST_DIR, true);
        container.volume_mounts.get_or_insert_default().push(mounted);
        variables(container, warnings);
    }
}

/// Takes the mounts out again; one that is not as ours is refused with every other mount of the sidecar's volumes.
/// Variables are ours where they say what we would say.
pub(super) fn strip(spec: &mut PodSpec) {
    let ours = mount(AGENT_TRUST_VOLUME, AGENT_TRUST_DIR, true);
    for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
        if let Some(mounts) = container.volume_mounts.as_mut() {
            mounts.retain(|m| *m != ours);
        }
    }
}

fn variables(container: &mut Container, warnings: &mut Vec<String>) {
    let env = container.env.get_or_insert_default();
    let files = [(&BUNDLE_VARIABLES[..], AGENT_BUNDLE), (&EXTRA_VARIABLES[..], AGENT_AUTHORITY)];
    for (name, file) in files.iter().flat_map(|(names, file)| names.iter().map(move |name| (*name, *file))) {
        let value = format!("{AGENT_TRUST_DIR}/{file}");
        match env.iter().find(|e| e.name == name) {
            None => env.push(EnvVar { name: name.into(), value: Some(value), value_from: None }),
            Some(given) if given.value.as_deref() == Some(&value) => {}
            Some(_) => warnings.push(format!(
                "container `{}` keeps its own {name}; what reads it trusts no certificate that Envoy shows, unless \
                 {value} is among it",
                container.name
            )),
        }
    }
}
