//! What goes into an exchange and what comes out of it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use jiff::Timestamp;
use sallyport_engine::{Code, Destination, StreamStep, TransportFailure};
use sallyport_proto::ext_proc::{HttpTrailers, ProcessingResponse};

use crate::budget::{Budget, Held};
use crate::dns::Names;
use crate::head::Upstream;
use crate::judge::{Job, Judge, Judged, Scan, guarded};
use crate::observer::{Direction, Observer};
use crate::stop::Stop;
use crate::tally::{Subject, Tally};
use crate::tls::Inside;

/// What an exchange needs from the process it runs in, and from the listener it came through.
#[derive(Clone)]
pub struct Context {
    /// Who decides; the same from the first message of an exchange to its last.
    pub judge: Arc<dyn Judge>,
    /// Who is told.
    pub observer: Arc<dyn Observer>,
    /// What may be held.
    pub budget: Arc<Budget>,
    /// The destination, where the listener and not the client names it.
    pub upstream: Option<Upstream>,
    /// What the listener's requests come through.
    pub inside: Inside,
    /// The connection is captured: it must lead to the host that its requests name.
    pub captured: bool,
    /// What knows which addresses belong to which names.
    pub names: Option<Arc<Names>>,
    /// What blocks every message, whatever the judge would say.
    pub stop: Arc<Stop>,
}

/// What is to be done after a message.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// Answer.
    Answer(Box<ProcessingResponse>),
    /// Answer twice: the end of a body, then its trailers.
    AnswerTwice(Box<[ProcessingResponse; 2]>),
    /// Nothing to answer yet.
    Wait,
    /// Run this, hand the outcome to [`super::Exchange::resolved`].
    Resolve(Box<Lookup>),
    /// Run this, hand the outcome to [`super::Exchange::judged`].
    Judge(Box<Work>),
    /// Answer first, then run this aside: nobody waits for its outcome.
    AnswerThenNote(Box<ProcessingResponse>, Box<Note>),
    /// End the stream with an error, so that Envoy ends the exchange.
    Fail(Code),
}

/// Scans of more than this leave the thread that answers Envoy: at some 200 MB/s they would keep every
/// other exchange waiting for more than a millisecond.
pub(crate) const INLINE_SCAN_BYTES: usize = 256 << 10;

/// A host to be resolved, because nothing is known of the address to which its connection was made.
#[derive(Debug)]
pub struct Lookup {
    pub(super) names: Arc<Names>,
    pub(super) host: String,
    pub(super) address: IpAddr,
}

impl Lookup {
    /// Does the work, on the resolver's thread, for so long at most.
    pub async fn run(self, timeout: Duration) -> Destination {
        let Self { names, host, address } = self;
        let late = format!("{host} could not be resolved in time; try again");
        tokio::time::timeout(timeout, names.find(host, address))
            .await
            .unwrap_or(Destination::Unresolved(late))
    }
}

/// A body to be judged, or a chunk of one.
#[derive(Debug)]
pub struct Work(pub(super) Task);

#[derive(Debug)]
pub(super) enum Task {
    Body(Job),
    Chunk(Push),
}

impl Work {
    /// Bytes that will be looked at, at most.
    pub fn weight(&self) -> usize {
        match &self.0 {
            Task::Body(job) => job.weight(),
            Task::Chunk(push) => push.chunk.len(),
        }
    }

    /// Does the work, on whatever thread.
    pub fn run(self) -> Outcome {
        Outcome(match self.0 {
            Task::Body(job) => job.run().map(Done::Body),
            Task::Chunk(push) => push.run().map(Done::Chunk),
        })
    }
}

/// What came of [`Work`].
pub struct Outcome(pub(super) Result<Done, TransportFailure>);

pub(super) enum Done {
    Body(Judged),
    Chunk(Pushed),
}

impl From<TransportFailure> for Outcome {
    fn from(failure: TransportFailure) -> Self {
        Self(Err(failure))
    }
}

/// A chunk to be scanned. Owns the scanner: where nobody waits for it any more, both are gone.
pub(super) struct Push {
    pub(super) scanner: Box<dyn Scan>,
    pub(super) held: Held,
    pub(super) chunk: Bytes,
    pub(super) end: bool,
}

/// A chunk that was scanned.
pub(super) struct Pushed {
    pub(super) step: StreamStep,
    pub(super) scanner: Box<dyn Scan>,
    pub(super) held: Held,
}

impl Push {
    pub(super) fn run(self) -> Result<Pushed, TransportFailure> {
        let Self { mut scanner, mut held, chunk, end } = self;
        let (step, now_held) = guarded(|| {
            let step = scanner.push(&chunk, end, Timestamp::now());
            (step, scanner.held())
        })?;
        if held.resize(now_held) {
            Ok(Pushed { step, scanner, held })
        } else {
            Err(TransportFailure::Overloaded)
        }
    }
}

impl std::fmt::Debug for Push {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Push").field("bytes", &self.chunk.len()).finish_non_exhaustive()
    }
}

/// A body that already passed, to be judged for the record.
pub struct Note {
    pub(super) job: Result<Job, TransportFailure>,
    pub(super) tally: Tally,
    pub(super) subject: Subject,
    pub(super) direction: Direction,
}

impl Note {
    /// Judges and writes the record.
    pub fn run(mut self) {
        let started = Instant::now();
        let judged = self.job.and_then(Job::run);
        self.tally.body(judged.map(|j| j.verdict));
        self.tally.busy += started.elapsed();
        if !self.tally.record(&self.subject, self.direction, false, true) {
            tracing::error!("the observer failed on a message that had passed");
        }
    }
}

impl std::fmt::Debug for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Note").field("direction", &self.direction).finish_non_exhaustive()
    }
}

/// Proof that nothing is left unanswered. Only [`super::Exchange::settle`] makes one, and only with one can the
/// stream end as OK: Envoy reads such an end as "not interested" and lets everything pass.
#[derive(Debug)]
pub struct Settled(pub(super) ());

/// Where one direction stands.
pub(super) enum Side {
    /// Its headers have not come.
    Headers,
    /// Its headers wait for what is found out of their destination.
    Resolving,
    /// Its body will come in one message.
    Whole { held: Held },
    /// Its chunks are scanned as they come and forwarded as they pass.
    Scan { scanner: Box<dyn Scan>, held: Held },
    /// A chunk is being scanned aside; `trailers` come after the last one.
    Scanning { end: bool, trailers: Option<HttpTrailers> },
    /// Its chunks are held to the end, because they must be decoded as a whole.
    Hold { body: Vec<u8>, held: Held },
    /// Observe: its chunks pass, and a copy is kept until the end.
    Copy { body: Vec<u8>, held: Held, lost: Option<TransportFailure> },
    /// Its body is with the judge; the trailers, if any, wait for that.
    /// `last`: nothing comes after it.
    Judging { whole: bool, last: bool, trailers: Option<HttpTrailers> },
    /// Its body is answered; trailers may come.
    Answered,
    /// Observe: its record is written, and what still comes passes.
    Passing,
}
