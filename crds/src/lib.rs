//! The AgentPolicy API (`sallyport.dev/v1alpha1`).
//!
//! One document, one meaning: the same file drives `sallyport up` on a laptop and a guarded pod in a
//! cluster. A field stands here only once something enforces it; unknown fields are errors, because a
//! typo in a safety field must never be read as "not set".
//!
//! This crate knows types and loading. What a policy *means* is the engine's business.

pub mod bounds;
#[cfg(feature = "kube")]
mod cel;
mod check;
mod class;
#[cfg(feature = "kube")]
mod crd;
mod egress;
mod load;
pub mod names;
mod policy;
pub mod quantity;
#[cfg(feature = "kube")]
mod status;

pub use check::check_spec;
pub use class::{CLASSES, Class, class};
#[cfg(feature = "kube")]
pub use crd::{CrdError, crd, crd_yaml};
pub use egress::{
    DefaultAction, Dns, Egress, EgressAction, EgressRule, Listed, Platform, ends_label, host_matches,
    network_holds,
};
pub use load::{LoadError, load_policy};
#[cfg(feature = "kube")]
pub use policy::AgentPolicyObject;
pub use policy::{
    AgentPolicy, AgentPolicySpec, Capacity, Capture, CaptureMode, Cedar, Detection, Exception, FailurePolicy,
    Isolation, LabelOperator, LabelRequirement, Limits, Metadata, Mode, OverrideAction, RuleOverride,
    Selector,
};
#[cfg(feature = "kube")]
pub use status::{AgentPolicyStatus, CapacityStatus};

/// The API group and version of every kind in this crate.
pub const API_VERSION: &str = "sallyport.dev/v1alpha1";
/// The kind of [`AgentPolicy`].
pub const KIND: &str = "AgentPolicy";
