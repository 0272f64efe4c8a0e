//! What the operator says of a policy.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the operator says of a policy.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentPolicyStatus {
    /// The generation that this status is about.
    pub observed_generation: i64,
    /// Conditions; their types and reasons are in [`crate::names`].
    pub conditions: Vec<Condition>,
    /// Pods that acknowledged the newest bundle, of guarded pods that run: `7/9`.
    pub enforced: String,
    /// The newest bundle's digest.
    pub digest: String,
    /// Rules in force.
    pub rules: u32,
    /// What each sidecar gets, and why.
    pub capacity: CapacityStatus,
}

/// What each sidecar gets, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CapacityStatus {
    /// For people: `250m / 96Mi, 61 % at 50 rps`.
    pub summary: String,
    /// The bench record it was computed from.
    pub record: String,
}
