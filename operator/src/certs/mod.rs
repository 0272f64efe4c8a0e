//! The operator's certificates: who signs, what is served, what clients trust.
//!
//! Two sources, one shape. By default the operator keeps authorities of its own in a Secret ([`own`]);
//! with `--tls-dir` it serves what cert-manager or an administrator puts there ([`files`]). Either way
//! [`Certificates`] holds what TLS serves now and the bundle that clients shall trust, and both change
//! without a restart. [`bundles`] carries the bundle into the webhook configurations.

pub mod authority;
pub mod bundles;
pub mod files;
pub mod mint;
pub mod own;
mod serving;

pub use serving::{Certificates, server_config};

/// How often a source looks at the clock and at its files. Whatever a timer slept through, a suspended
/// machine or a clock that was set, is found at the next look.
pub(crate) const LOOK: std::time::Duration = std::time::Duration::from_secs(10);
