//! Tests against the real Envoy, and the demo.
//!
//! Everything here runs on the loopback and is what it says: a real Envoy with the bootstrap that
//! `sallyport-plan` renders, the real filter or a deliberately faulty one, a small honest upstream, and a
//! client that speaks HTTP/1.1 byte by byte so that it can tell a clean end from a cut.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "test equipment: the honest reaction to anything unexpected is to stop with its place"
)]

pub mod agent;
pub mod client;
pub mod cluster;
pub mod demo;
pub mod fault_extproc;
pub mod messages;
pub mod rig;
pub mod scripted;
pub mod subscribers;
pub mod tls;
pub mod upstream;
