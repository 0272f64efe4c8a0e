//! The kill switch: an annotation on a namespace or a policy.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use sallyport_api::names;

/// Which annotation blocks a pod's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KilledBy {
    /// The policy's.
    Policy,
    /// The namespace's.
    Namespace,
}

impl KilledBy {
    /// As in the bundle and in status.
    pub(crate) fn text(self, namespace: &str, policy: &str) -> String {
        match self {
            Self::Policy => format!("agentpolicy {namespace}/{policy}"),
            Self::Namespace => format!("namespace {namespace}"),
        }
    }
}

/// Whether the annotation is set. Left out, empty and `false` mean no. Every other value means yes: who
/// writes `yes` or `True` in a hurry wants the calls stopped.
pub(crate) fn is_killed(annotations: Option<&BTreeMap<String, String>>) -> bool {
    annotations
        .and_then(|a| a.get(names::KILL))
        .map(|v| v.trim())
        .is_some_and(|v| !v.is_empty() && !v.eq_ignore_ascii_case("false"))
}

/// Who wrote the annotation, as far as the object tells: the field manager that owns it. Nobody, once it is
/// removed: an object does not say who removed what, and the last writer may be somebody else. Kubernetes' own
/// audit log knows the user.
pub(crate) fn who(meta: &ObjectMeta) -> Option<String> {
    let fields = meta.managed_fields.as_ref()?;
    let owned = format!("f:{}", names::KILL);
    let owner = fields.iter().filter(|f| {
        f.fields_v1.as_ref().is_some_and(|v| {
            v.0.get("f:metadata").and_then(|m| m.get("f:annotations")).and_then(|a| a.get(&owned)).is_some()
        })
    });
    let writer = owner.max_by_key(|f| f.time.as_ref().map(|t| t.0))?;
    let manager = writer.manager.as_deref().unwrap_or("unknown");
    Some(match &writer.time {
        Some(time) => format!("{manager} at {}", time.0),
        None => manager.to_owned(),
    })
}
