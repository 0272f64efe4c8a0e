//! The judge before there is a policy.

use std::sync::Arc;

use jiff::Timestamp;
use sallyport_api::AgentPolicySpec;
use sallyport_engine::{BodyVerdict, Cut, Protocol, RequestHead, ResponseHead, StreamStep, Verdict};

use crate::judge::{Judge, Scan};

/// Refuses everything. The stop switch does so before anybody asks; this is what stands behind it.
#[derive(Debug, Default)]
pub(crate) struct Refusing(AgentPolicySpec);

impl Judge for Refusing {
    fn spec(&self) -> &AgentPolicySpec {
        &self.0
    }

    fn request_head(&self, _: &RequestHead, _: Timestamp) -> Verdict {
        Verdict::no_bundle()
    }

    fn request_body(&self, _: &RequestHead, _: &[u8], _: Timestamp) -> BodyVerdict {
        BodyVerdict { verdict: Verdict::no_bundle(), ..BodyVerdict::default() }
    }

    fn response_head(&self, _: &RequestHead, _: &ResponseHead, _: Timestamp) -> Verdict {
        Verdict::no_bundle()
    }

    fn response_body(&self, _: &RequestHead, _: &ResponseHead, _: &[u8], _: Timestamp) -> BodyVerdict {
        BodyVerdict { verdict: Verdict::no_bundle(), ..BodyVerdict::default() }
    }

    fn response_stream(self: Arc<Self>, _: &RequestHead, _: &ResponseHead, _: &Protocol) -> Box<dyn Scan> {
        Box::new(Self::default())
    }
}

impl Scan for Refusing {
    fn push(&mut self, _: &[u8], _: bool, _: Timestamp) -> StreamStep {
        StreamStep { verdict: Some(Verdict::no_bundle()), cut: Some(Cut::Reset), ..StreamStep::default() }
    }

    fn held(&self) -> usize {
        0
    }
}
