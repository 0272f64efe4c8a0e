//! The operator: what it knows of the cluster, how policies reach pods, and who may say so.
//!
//! [`run`] wires the parts: every replica indexes the cluster, serves admission and streams of policy;
//! the one that holds the [`lease`] writes.

pub mod args;
pub mod certs;
pub mod discovery;
pub mod events;
pub mod health;
pub mod index;
pub mod lease;
pub mod metrics;
pub mod probe;
pub mod run;
pub mod serve;
pub mod status;
mod tasks;
pub mod trust;
pub mod webhook;

use std::collections::BTreeMap;

pub use run::main;

/// The label on what the operator makes.
pub(crate) fn managed_by() -> BTreeMap<String, String> {
    let manager = sallyport_api::names::FIELD_MANAGER;
    BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), manager.to_owned())])
}
