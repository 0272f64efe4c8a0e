//! What the operator says of a policy.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the operator says of a policy.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentPolicyStatus {
    /// The generation that this status is about.
    #[serde(skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Accepted, ResolvedRefs, Programmed, Enforced, RolloutRequired.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map"),
        extend("x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// Pods that acknowledged the newest bundle, of guarded pods that run: `7/9`.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub enforced: String,
    /// The newest bundle's digest.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub digest: String,
    /// Rules in force.
    #[serde(skip_serializing_if = "is_zero")]
    #[schemars(with = "i32", range(min = 0))]
    pub rules: u32,
    /// What each sidecar gets, and why.
    #[serde(skip_serializing_if = "CapacityStatus::is_empty")]
    pub capacity: CapacityStatus,
}

/// What each sidecar gets, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CapacityStatus {
    /// CPU request of both sidecar containers together: `250m`.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub cpu: String,
    /// For people: `250m / 96Mi, 61 % at 50 rps`.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub summary: String,
    /// The bench record it was computed from.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub record: String,
}

impl CapacityStatus {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Unset fields are left out, so that the schema shows no defaults for what only the operator writes.
fn is_zero<N: Default + PartialEq>(n: &N) -> bool {
    *n == N::default()
}
