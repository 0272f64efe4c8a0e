//! The engine itself: a compiled policy, and the questions it answers.

use std::sync::Arc;

use jiff::Timestamp;
use sallyport_api::AgentPolicySpec;

use crate::finding::Surface;
use crate::message::{RequestHead, ResponseHead};
use crate::verdict::{BodyVerdict, StreamStep, Verdict};

/// Why a policy could not be compiled.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LoadError(pub String);

/// A compiled policy. Immutable; share it by `Arc`.
#[derive(Debug)]
pub struct Engine {
    spec: AgentPolicySpec,
}

impl Engine {
    /// Compiles a policy.
    pub fn new(spec: &AgentPolicySpec) -> Result<Self, LoadError> {
        Ok(Self { spec: spec.clone() })
    }

    /// The policy this engine was compiled from.
    pub fn spec(&self) -> &AgentPolicySpec {
        &self.spec
    }

    /// Decides on a request's head: URL, headers, destination.
    pub fn request_head(&self, _head: &RequestHead, _now: Timestamp) -> Verdict {
        Verdict::default()
    }

    /// Decides on a whole request body (decoded).
    pub fn request_body(&self, _head: &RequestHead, _body: &[u8], _now: Timestamp) -> BodyVerdict {
        BodyVerdict::default()
    }

    /// Decides on a response's head.
    pub fn response_head(
        &self,
        _request: &RequestHead,
        _response: &ResponseHead,
        _now: Timestamp,
    ) -> Verdict {
        Verdict::default()
    }

    /// Decides on a whole response body (decoded).
    pub fn response_body(
        &self,
        _request: &RequestHead,
        _response: &ResponseHead,
        _body: &[u8],
        _now: Timestamp,
    ) -> BodyVerdict {
        BodyVerdict::default()
    }

    /// Opens a scanner for a response that is forwarded while it arrives.
    pub fn response_stream(
        self: &Arc<Self>,
        _request: &RequestHead,
        _response: &ResponseHead,
    ) -> StreamScanner {
        StreamScanner { engine: Arc::clone(self) }
    }

    /// Looks at one text, as `sallyport scan` does.
    pub fn scan_text(&self, _surface: Surface, _text: &str, _now: Timestamp) -> Verdict {
        Verdict::default()
    }

    /// Looks at one JSON document, as `sallyport scan` does.
    pub fn scan_json(&self, _surface: Surface, _json: &[u8], _now: Timestamp) -> Verdict {
        Verdict::default()
    }
}

/// Incremental scanning of one response with bounded hold-back.
#[derive(Debug)]
pub struct StreamScanner {
    engine: Arc<Engine>,
}

impl StreamScanner {
    /// Takes a chunk; `end` says that it is the last. Returns what may be forwarded now.
    pub fn push(&mut self, chunk: &[u8], _end: bool, _now: Timestamp) -> StreamStep {
        let _ = &self.engine;
        StreamStep { emit: chunk.to_vec(), ..StreamStep::default() }
    }

    /// Bytes held back right now.
    pub fn held(&self) -> usize {
        0
    }
}
