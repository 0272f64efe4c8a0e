//! Sallyport's detection engine: bytes in, decision out.
//!
//! Pure by design: no sockets, files, threads or clock of its own, and no word of Kubernetes, Envoy or
//! gRPC, so that a bench, the CLI, the ext_proc filter and one day an Envoy dynamic module use it
//! unchanged. The caller hands in the instant; everything else comes from the compiled policy.

pub mod finding;
pub mod message;
pub mod rules;
pub mod validate;
pub mod verdict;

mod body;
mod decide;
mod detect;
mod engine;
mod text;
mod url;
mod value;

pub use body::stream::StreamScanner;
pub use engine::{Engine, LoadError};
pub use finding::{Category, Finding, Severity, Surface};
pub use message::{Destination, NameQuestion, Peer, RequestHead, ResponseHead};
pub use verdict::{
    BodyVerdict, Code, Cut, Decision, Protocol, Reason, StreamStep, TransportFailure, Verdict, error_body,
};
