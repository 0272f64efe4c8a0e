//! The judge before there is a policy.

use std::sync::Arc;

use jiff::Timestamp;
use sallyport_api::AgentPolicySpec;
use sallyport_engine::{
    BodyVerdict, Code, Cut, Decision, Protocol, RequestHead, ResponseHead, StreamStep, Verdict,
};

use crate::judge::{Judge, Scan};

/// Refuses everything. The stop switch does so before anybody asks; this is what stands behind it.
#[derive(Debug, Default)]
pub(crate) struct Refusing(AgentPolicySpec);

fn no() -> Verdict {
    Verdict {
        decision: Decision::Block,
        code: Some(Code::NoBundle),
        message: "the sidecar has not been told yet what to enforce; try again".to_owned(),
        ..Verdict::default()
    }
}

impl Judge for Refusing {
    fn spec(&self) -> &AgentPolicySpec {
        &self.0
    }

    fn request_head(&self, _: &RequestHead, _: Timestamp) -> Verdict {
        no()
    }

    fn request_body(&self, _: &RequestHead, _: &[u8], _: Timestamp) -> BodyVerdict {
        BodyVerdict { verdict: no(), ..BodyVerdict::default() }
    }

    fn response_head(&self, _: &RequestHead, _: &ResponseHead, _: Timestamp) -> Verdict {
        no()
    }

    fn response_body(&self, _: &RequestHead, _: &ResponseHead, _: &[u8], _: Timestamp) -> BodyVerdict {
        BodyVerdict { verdict: no(), ..BodyVerdict::default() }
    }

    fn response_stream(self: Arc<Self>, _: &RequestHead, _: &ResponseHead, _: &Protocol) -> Box<dyn Scan> {
        Box::new(Self::default())
    }
}

impl Scan for Refusing {
    fn push(&mut self, _: &[u8], _: bool, _: Timestamp) -> StreamStep {
        StreamStep { verdict: Some(no()), cut: Some(Cut::Reset), ..StreamStep::default() }
    }

    fn held(&self) -> usize {
        0
    }
}
