//! What happened that somebody should be told.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use sallyport_api::{API_VERSION, KIND};

/// The object that something happened to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Its kind: `Namespace` or `AgentPolicy`.
    pub kind: &'static str,
    /// Its namespace; none for a namespace.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

impl Subject {
    pub(crate) fn namespace(meta: &ObjectMeta) -> Self {
        Self { kind: "Namespace", namespace: None, ..Self::policy(meta) }
    }

    pub(crate) fn policy(meta: &ObjectMeta) -> Self {
        Self {
            kind: KIND,
            namespace: meta.namespace.clone(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
        }
    }

    /// As Events refer to it.
    pub fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some(if self.kind == KIND { API_VERSION } else { "v1" }.into()),
            kind: Some(self.kind.into()),
            namespace: self.namespace.clone(),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The kill switch was turned.
    Kill {
        /// What was annotated.
        subject: Subject,
        /// Whether everything is blocked now.
        on: bool,
        /// Who did it, as far as the object tells.
        who: Option<String>,
    },
    /// A policy is gone.
    PolicyDeleted {
        /// The policy.
        subject: Subject,
        /// Pods that no policy selects now and that keep its last good bundle.
        pods: usize,
    },
}
