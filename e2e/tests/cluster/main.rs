//! The product in a cluster: a real API server, a real kubelet, the charts, and an agent that calls out.
//!
//! `make test` brings the cluster up. By hand: `make cluster`, then
//! `cargo test -p sallyport-e2e --features cluster --test cluster`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod admission;
mod api;
mod bypass;
mod failures;
mod injection;
mod journey;
mod metrics;
mod names;
mod policy;
mod traffic;
