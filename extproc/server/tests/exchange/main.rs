//! The state machine on sequences of messages: what is answered, what is recorded, by what name it fails.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

mod any_order;
mod observes;
mod passes;
mod refuses;
mod tunnels;

use std::io::Write;
use std::sync::Arc;

use sallyport_api::Mode;
use sallyport_engine::TransportFailure;
use sallyport_extproc::exchange::{Context, Exchange, Outcome, Step};
use sallyport_extproc::{Budget, Judge, Observer, Upstream};
use sallyport_proto::ext_proc::{ProcessingRequest, ProcessingResponse, ProtocolConfiguration};
use support::*;

const CAP: u32 = 100_000;

struct Bench {
    exchange: Exchange,
    memory: Arc<Memory>,
    budget: Arc<Budget>,
}

impl Bench {
    fn enforce() -> Self {
        Self::new(Mode::Enforce, |_| {})
    }

    fn observe() -> Self {
        Self::new(Mode::Observe, |_| {})
    }

    fn new(mode: Mode, change: impl FnOnce(&mut Context)) -> Self {
        Self::told(mode, Arc::default(), change)
    }

    fn told(mode: Mode, memory: Arc<Memory>, change: impl FnOnce(&mut Context)) -> Self {
        let budget = Budget::new(1 << 20);
        let mut cx = Context {
            inside: sallyport_extproc::tls::Inside::Clear,
            judge: Words::with(mode, CAP) as Arc<dyn Judge>,
            observer: Arc::clone(&memory) as Arc<dyn Observer>,
            budget: Arc::clone(&budget),
            upstream: None,
            captured: false,
            names: None,
            stop: Arc::default(),
        };
        change(&mut cx);
        let budget = Arc::clone(&cx.budget);
        Self { exchange: Exchange::new(cx), memory, budget }
    }

    /// Takes a message, does the work that comes of it, and says in lines what was answered.
    fn take(&mut self, message: ProcessingRequest) -> Vec<String> {
        self.answers(message).iter().map(line).collect()
    }

    fn answers(&mut self, message: ProcessingRequest) -> Vec<ProcessingResponse> {
        let mut step = self.exchange.take(message);
        loop {
            step = match step {
                Step::Answer(answer) => return vec![*answer],
                Step::AnswerTwice(answers) => return (*answers).into(),
                Step::Wait => return vec![],
                Step::AnswerThenNote(answer, note) => {
                    note.run();
                    return vec![*answer];
                }
                Step::Resolve(lookup) => panic!("nothing is captured here: {lookup:?}"),
                Step::Judge(work) => self.exchange.judged(work.run()),
                Step::Fail(code) => panic!("failed: {}", code.as_str()),
            }
        }
    }

    fn fails(&mut self, message: ProcessingRequest) -> &'static str {
        match self.exchange.take(message) {
            Step::Fail(code) => code.as_str(),
            step => panic!("did not fail: {step:?}"),
        }
    }

    fn settled(&self) -> bool {
        self.exchange.settle().is_some()
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// The answer to a chunk that is held back whole: without one, its trailers would never come.
const HELD: &str = "response body emit=";
const REQUEST: &str = "request headers +accept-encoding=identity";
