//! The sidecar's process: answers Envoy's external processing filter on a unix socket.
//!
//! Envoy asks about every HTTP exchange on a gRPC stream of its own; an [`exchange::Exchange`] reads what
//! comes, asks the engine, and says what Envoy is to do. What Envoy must be configured to:
//!
//! * `processing_mode`: headers `SEND`, bodies `NONE`, trailers `SKIP`; `allow_mode_override: true`,
//!   `failure_mode_allow: false`, no `observability_mode`, no `send_body_without_waiting_for_header_response`.
//!   The server asks for bodies and trailers itself, message by message.
//! * Where the policy enforces, `envoy.filters.http.body_size_limit` before this filter, with
//!   `max_request_bytes` at `limits.maxBodyBytes`, and buffer limits of listener and clusters not below that:
//!   a longer body without a length, read while its headers wait for our answer, otherwise fills Envoy's
//!   buffer before the body is asked for, and the request hangs there until `stream_idle_timeout`.
//! * `metadata_options.receiving_namespaces.untyped: [sallyport]`, for the access log.
//! * Where TLS is opened, delta ADS for secrets on the same socket, and gRPC initial metadata
//!   [`TLS_METADATA`] with the attributes that [`tls::OpenedTo`] reads.
//! * Where connections are captured, gRPC initial metadata [`CAPTURED_METADATA`], the request attribute
//!   `destination.address`, and a cluster that dials what our metadata names (`sallyport`, `destination`).
//! * Where the listener stands for one upstream, gRPC initial metadata [`UPSTREAM_METADATA`].
//!
//! In a pod ([`sidecar`]) the policy comes from the operator ([`discovery`]); beside `sallyport up` it is a file.
//!
//! What is not guaranteed: a peer that can write to the socket can do as Envoy can. It is made with mode 0600.

pub mod cli;
pub mod discovery;
pub mod dns;
pub mod exchange;
pub mod metrics;
pub mod noop;
pub mod observer;
pub mod sidecar;
pub mod tls;
pub mod watchdog;

mod budget;
mod coding;
mod head;
mod judge;
mod reply;
mod server;
mod socket;
mod stop;
mod stream;
mod tally;

pub use budget::Budget;
pub use head::Upstream;
pub use judge::{Judge, Scan};
pub use observer::{Direction, LogObserver, MessageKind, NameRecord, NameSource, Observer, Record};
pub use reply::{DECISION_HEADER, DESTINATION, METADATA_NAMESPACE};
pub use server::{CAPTURED_METADATA, Config, Policy, Server, TLS_METADATA, UPSTREAM_METADATA};
pub use stop::{Stop, Why};
