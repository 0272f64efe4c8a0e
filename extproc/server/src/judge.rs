//! The questions the request path asks, and the work of answering one for a whole body.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use sallyport_api::{AgentPolicySpec, Listed};
use sallyport_engine::{
    BodyVerdict, Engine, NameQuestion, Protocol, RequestHead, ResponseHead, StreamScanner, StreamStep,
    TransportFailure, Verdict,
};

use crate::budget::Held;
use crate::coding::Coding;

/// Who decides. [`Engine`] does; tests put in its place one that panics, stalls or answers by a script.
pub trait Judge: Send + Sync + 'static {
    /// The policy behind the decisions.
    fn spec(&self) -> &AgentPolicySpec;
    /// See [`Engine::request_head`].
    fn request_head(&self, head: &RequestHead, now: Timestamp) -> Verdict;
    /// See [`Engine::request_body`].
    fn request_body(&self, head: &RequestHead, body: &[u8], now: Timestamp) -> BodyVerdict;
    /// See [`Engine::response_head`].
    fn response_head(&self, request: &RequestHead, response: &ResponseHead, now: Timestamp) -> Verdict;
    /// See [`Engine::response_body`].
    fn response_body(
        &self,
        request: &RequestHead,
        response: &ResponseHead,
        body: &[u8],
        now: Timestamp,
    ) -> BodyVerdict;
    /// See [`Engine::request_tunnel`]. A judge that knows nothing of inspected tunnels takes it for any other.
    fn request_tunnel(&self, head: &RequestHead, now: Timestamp) -> Verdict {
        self.request_head(head, now)
    }
    /// See [`Engine::server_name`]. A judge that knows nothing of them knows no name that is allowed.
    fn server_name(&self, name: &str, now: Timestamp) -> Verdict {
        let _ = (name, now);
        TransportFailure::TunnelDenied.verdict()
    }
    /// See [`Engine::warm`].
    fn warm(&self) {}
    /// See [`Engine::names`].
    fn names(&self, name: &str) -> Listed {
        self.spec().names(name)
    }
    /// See [`Engine::name`]. Who can't say refuses.
    fn name(&self, question: &NameQuestion<'_>, now: Timestamp) -> Verdict {
        let _ = (question, now);
        Verdict::no_bundle()
    }
    /// See [`Engine::response_stream`].
    fn response_stream(
        self: Arc<Self>,
        request: &RequestHead,
        response: &ResponseHead,
        answers: &Protocol,
    ) -> Box<dyn Scan>;
}

/// Incremental scanning of one response; see [`StreamScanner`].
pub trait Scan: Send {
    /// See [`StreamScanner::push`].
    fn push(&mut self, chunk: &[u8], end: bool, now: Timestamp) -> StreamStep;
    /// See [`StreamScanner::held`].
    fn held(&self) -> usize;
}

impl Judge for Engine {
    fn spec(&self) -> &AgentPolicySpec {
        Engine::spec(self)
    }

    fn warm(&self) {
        Engine::warm(self);
    }

    fn name(&self, question: &NameQuestion<'_>, now: Timestamp) -> Verdict {
        Engine::name(self, question, now)
    }

    fn request_head(&self, head: &RequestHead, now: Timestamp) -> Verdict {
        Engine::request_head(self, head, now)
    }

    fn request_tunnel(&self, head: &RequestHead, now: Timestamp) -> Verdict {
        Engine::request_tunnel(self, head, now)
    }

    fn server_name(&self, name: &str, now: Timestamp) -> Verdict {
        Engine::server_name(self, name, now)
    }

    fn request_body(&self, head: &RequestHead, body: &[u8], now: Timestamp) -> BodyVerdict {
        Engine::request_body(self, head, body, now)
    }

    fn response_head(&self, request: &RequestHead, response: &ResponseHead, now: Timestamp) -> Verdict {
        Engine::response_head(self, request, response, now)
    }

    fn response_body(
        &self,
        request: &RequestHead,
        response: &ResponseHead,
        body: &[u8],
        now: Timestamp,
    ) -> BodyVerdict {
        Engine::response_body(self, request, response, body, now)
    }

    fn response_stream(
        self: Arc<Self>,
        request: &RequestHead,
        response: &ResponseHead,
        answers: &Protocol,
    ) -> Box<dyn Scan> {
        Box::new(Engine::response_stream(&self, request, response, answers))
    }
}

impl Scan for StreamScanner {
    fn push(&mut self, chunk: &[u8], end: bool, now: Timestamp) -> StreamStep {
        StreamScanner::push(self, chunk, end, now)
    }

    fn held(&self) -> usize {
        StreamScanner::held(self)
    }
}

/// Runs code that must not take the exchange down with it. A panic is a fault of our own and gets the
/// verdict of one.
pub(crate) fn guarded<T>(f: impl FnOnce() -> T) -> Result<T, TransportFailure> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|_| TransportFailure::Internal)
}

/// A whole body waiting to be judged. It owns all it needs, so that it can run on any thread and outlive
/// the exchange that no longer waits for it.
pub(crate) struct Job {
    pub(crate) judge: Arc<dyn Judge>,
    pub(crate) request: Arc<RequestHead>,
    /// Set where the body is a response's.
    pub(crate) response: Option<Arc<ResponseHead>>,
    pub(crate) body: Bytes,
    pub(crate) coding: Coding,
    pub(crate) cap: usize,
    /// Given back when the job is done, also when nobody waits for it any more: its bytes are still held.
    pub(crate) held: Held,
}

/// A body that was judged.
pub(crate) struct Judged {
    pub(crate) verdict: BodyVerdict,
    /// What came out of the body's encoding, if it had one.
    pub(crate) decoded: Option<Vec<u8>>,
}

impl Job {
    /// Bytes that will be looked at, at most.
    pub(crate) fn weight(&self) -> usize {
        self.coding.most(self.body.len(), self.cap)
    }

    /// Decodes and judges.
    pub(crate) fn run(self) -> Result<Judged, TransportFailure> {
        let Self { judge, request, response, body, coding, cap, held } = self;
        let judged = guarded(|| {
            let decoded = coding.decode(&body, cap)?;
            let now = Timestamp::now();
            let verdict = match &response {
                None => judge.request_body(&request, &decoded, now),
                Some(response) => judge.response_body(&request, response, &decoded, now),
            };
            let decoded = match decoded {
                Cow::Borrowed(_) => None,
                Cow::Owned(bytes) => Some(bytes),
            };
            Ok(Judged { verdict, decoded })
        });
        drop(held);
        judged?
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("bytes", &self.body.len())
            .field("coding", &self.coding)
            .finish_non_exhaustive()
    }
}
