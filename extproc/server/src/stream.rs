//! Carries the steps of an [`Exchange`] out on a gRPC stream.
//!
//! The one thing this file is for: the stream never ends as OK before its verdict. [`Turn::Over`] is the
//! only way to end it so, and it takes a [`Settled`], which only a settled exchange gives.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{FutureExt, Stream, StreamExt, stream};
use sallyport_engine::{Code, TransportFailure};
use sallyport_proto::ext_proc::{ProcessingRequest, ProcessingResponse};
use tokio::sync::watch;
use tonic::Status;

use crate::exchange::{Exchange, INLINE_SCAN_BYTES, Note, Outcome, Settled, Step, Work};
use crate::observer::MessageKind;
use crate::stop::Why;

/// How far the process is from its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Running,
    /// New exchanges are turned away, open ones go on.
    Draining,
    /// Open exchanges are ended by errors.
    Halting,
}

/// What comes next on the stream to Envoy.
enum Turn {
    Answer(Box<ProcessingResponse>),
    /// Never OK; see [`status`].
    Fail(Status),
    Over(Settled),
}

struct Driver<In> {
    inbound: In,
    exchange: Exchange,
    phase: watch::Receiver<Phase>,
    stop: watch::Receiver<Option<Why>>,
    /// The message that waits for its answer, and since when.
    asked: Option<(MessageKind, Instant)>,
    scan_timeout: Duration,
    /// The second half of a step that answers twice.
    queued: Option<Box<ProcessingResponse>>,
    /// To be judged once the answer before it has left.
    note: Option<Box<Note>>,
}

/// The answers to one stream of messages.
pub(crate) fn answers<In>(
    inbound: In,
    exchange: Exchange,
    phase: watch::Receiver<Phase>,
    scan_timeout: Duration,
) -> impl Stream<Item = Result<ProcessingResponse, Status>> + Send
where
    In: Stream<Item = Result<ProcessingRequest, Status>> + Send + Unpin,
{
    let stop = exchange.stop().subscribe();
    exchange.observer().opened();
    let driver =
        Driver { inbound, exchange, phase, stop, asked: None, scan_timeout, queued: None, note: None };
    // Boxed, because a stream's state is moved in and out of every turn.
    stream::unfold(Some(Box::new(driver)), |driver| async {
        // After an error the stream says so again, should anybody ask: `None` would mean OK.
        let Some(mut driver) = driver else {
            return Some((Err(Status::aborted("the exchange has failed")), None));
        };
        // The judge's and the observer's panics are caught where they are called. This net is for ours.
        let turn = AssertUnwindSafe(driver.turn()).catch_unwind().await.unwrap_or_else(|_| {
            driver.exchange.abandon(Some(TransportFailure::Internal));
            Turn::Fail(status(Code::Internal))
        });
        match turn {
            Turn::Answer(answer) => {
                if let Some((kind, since)) = driver.asked.take() {
                    driver.exchange.observer().answered(kind, since.elapsed());
                }
                Some((Ok(*answer), Some(driver)))
            }
            Turn::Fail(status) => Some((Err(status), None)),
            Turn::Over(Settled { .. }) => None,
        }
    })
}

// === impl Driver ===

impl<In> Driver<In>
where
    In: Stream<Item = Result<ProcessingRequest, Status>> + Send + Unpin,
{
    async fn turn(&mut self) -> Turn {
        if let Some(answer) = self.queued.take() {
            return Turn::Answer(answer);
        }
        if let Some(note) = self.note.take() {
            tokio::task::spawn_blocking(|| note.run());
        }
        loop {
            let message = tokio::select! {
                biased;
                () = halting(&mut self.phase) => return self.halt(),
                () = thrown(&mut self.stop), if self.exchange.stoppable() => match self.exchange.stopped() {
                    Some(step) => match self.carry_out(step).await {
                        Some(turn) => return turn,
                        None => continue,
                    },
                    None => continue,
                },
                message = self.inbound.next() => message,
            };
            let step = match message {
                Some(Ok(message)) => {
                    self.asked = message.request.as_ref().map(|m| (m.into(), Instant::now()));
                    self.exchange.take(message)
                }
                Some(Err(error)) => {
                    tracing::debug!(code = ?error.code(), "no further message: {}", error.message());
                    self.exchange.abandon(match error.code() {
                        // Longer than we ever decode.
                        tonic::Code::OutOfRange => Some(TransportFailure::BodyTooLarge),
                        // What came is no message, or the connection broke.
                        tonic::Code::Internal => Some(TransportFailure::ProtocolError),
                        _ => None,
                    });
                    return Turn::Fail(Status::aborted("the exchange was given up"));
                }
                None => {
                    if let Some(settled) = self.exchange.settle() {
                        return Turn::Over(settled);
                    }
                    self.exchange.abandon(None);
                    return Turn::Fail(Status::aborted("the exchange ended before its verdict"));
                }
            };
            if let Some(turn) = self.carry_out(step).await {
                return turn;
            }
        }
    }

    /// Carries a step out; `None` where there is nothing to say to Envoy yet.
    async fn carry_out(&mut self, mut step: Step) -> Option<Turn> {
        loop {
            match step {
                Step::Answer(answer) => return Some(Turn::Answer(answer)),
                Step::AnswerTwice(answers) => {
                    let [first, second] = *answers;
                    self.queued = Some(Box::new(second));
                    return Some(Turn::Answer(Box::new(first)));
                }
                Step::AnswerThenNote(answer, note) => {
                    self.note = Some(note);
                    return Some(Turn::Answer(answer));
                }
                Step::Wait => return None,
                Step::Resolve(lookup) => {
                    let found = tokio::select! {
                        biased;
                        () = halting(&mut self.phase) => return Some(self.halt()),
                        () = thrown(&mut self.stop) => None,
                        found = lookup.run(self.scan_timeout) => Some(found),
                    };
                    step = match found {
                        Some(found) => self.exchange.resolved(found),
                        None => self.exchange.stopped().unwrap_or(Step::Fail(Code::Killed)),
                    };
                }
                Step::Fail(code) => return Some(Turn::Fail(status(code))),
                Step::Judge(work) => {
                    let outcome = tokio::select! {
                        biased;
                        () = halting(&mut self.phase) => return Some(self.halt()),
                        () = thrown(&mut self.stop) => None,
                        outcome = judge(*work, self.scan_timeout) => Some(outcome),
                    };
                    step = match outcome {
                        Some(outcome) => self.exchange.judged(outcome),
                        // Reversed in this very moment: what was cut off can't be taken up again.
                        None => self.exchange.stopped().unwrap_or(Step::Fail(Code::Killed)),
                    };
                }
            }
        }
    }

    fn halt(&mut self) -> Turn {
        self.exchange.abandon(Some(TransportFailure::ShuttingDown));
        Turn::Fail(status(Code::ShuttingDown))
    }
}

impl<In> Drop for Driver<In> {
    /// What passed is judged also where nobody came back for the next answer.
    fn drop(&mut self) {
        self.exchange.observer().closed();
        let Some(note) = self.note.take() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(|| note.run())),
            Err(_) => note.run(),
        }
    }
}

/// Comes back when open exchanges are to end, also when whoever would say so is gone.
async fn halting(phase: &mut watch::Receiver<Phase>) {
    let _ = phase.wait_for(|p| *p == Phase::Halting).await;
}

/// Comes back when open exchanges are to be blocked.
async fn thrown(stop: &mut watch::Receiver<Option<Why>>) {
    // Whoever could throw it is gone: it stays as it was.
    if stop.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Small bodies are judged where we are: handing them over would cost more than the scan.
async fn judge(work: Work, timeout: Duration) -> Outcome {
    if work.weight() <= INLINE_SCAN_BYTES {
        return work.run();
    }
    let scan = tokio::task::spawn_blocking(|| work.run());
    match tokio::time::timeout(timeout, scan).await {
        Ok(Ok(outcome)) => outcome,
        // Cancelled: the runtime is going down.
        Ok(Err(_)) => TransportFailure::Internal.into(),
        Err(_) => TransportFailure::ScanTimeout.into(),
    }
}

/// The error that Envoy sees; it answers its client itself, by its `status_on_error`. Never OK.
pub(crate) fn status(code: Code) -> Status {
    match code {
        Code::Overloaded | Code::ShuttingDown | Code::NoBundle => Status::unavailable(code.as_str()),
        Code::Internal | Code::PolicyError => Status::internal(code.as_str()),
        Code::ScanTimeout => Status::deadline_exceeded(code.as_str()),
        Code::BadUrl
        | Code::BadEncoding
        | Code::BodyTooLarge
        | Code::DestinationDenied
        | Code::DestinationNotBound
        | Code::DestinationUnresolved
        | Code::EgressDenied
        | Code::Held
        | Code::Killed
        | Code::PolicyDenied
        | Code::ProtocolError
        | Code::Misdirected
        | Code::TunnelDenied => Status::aborted(code.as_str()),
    }
}

/// Turns an exchange away before it begins.
pub(crate) fn turned_away(phase: &watch::Receiver<Phase>) -> Option<Status> {
    (*phase.borrow() != Phase::Running).then(|| status(Code::ShuttingDown))
}

/// Kept apart for the type that tonic asks to be named.
pub(crate) type Answers = std::pin::Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

/// Who decides for exchanges that begin from now on; see [`crate::Policy`].
pub(crate) type JudgeSlot = watch::Sender<Arc<dyn crate::judge::Judge>>;

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use sallyport_api::AgentPolicySpec;
    use sallyport_engine::{BodyVerdict, Protocol, RequestHead, ResponseHead, StreamStep, Verdict};
    use sallyport_proto::ext_proc::{HeaderMap, HeaderValue, HttpBody, HttpHeaders, Message};

    use super::*;
    use crate::judge::{Judge, Scan};
    use crate::{Budget, LogObserver};

    /// Lets everything pass, and holds every stream back to its end.
    #[derive(Default)]
    struct Lenient(AgentPolicySpec);

    impl Judge for Lenient {
        fn spec(&self) -> &AgentPolicySpec {
            &self.0
        }
        fn request_head(&self, _: &RequestHead, _: Timestamp) -> Verdict {
            Verdict::default()
        }
        fn request_body(&self, _: &RequestHead, _: &[u8], _: Timestamp) -> BodyVerdict {
            BodyVerdict::default()
        }
        fn response_head(&self, _: &RequestHead, _: &ResponseHead, _: Timestamp) -> Verdict {
            Verdict::default()
        }
        fn response_body(&self, _: &RequestHead, _: &ResponseHead, _: &[u8], _: Timestamp) -> BodyVerdict {
            BodyVerdict::default()
        }
        fn response_stream(
            self: Arc<Self>,
            _: &RequestHead,
            _: &ResponseHead,
            _: &Protocol,
        ) -> Box<dyn Scan> {
            Box::new(Sponge)
        }
    }

    struct Sponge;

    impl Scan for Sponge {
        fn push(&mut self, _: &[u8], _: bool, _: Timestamp) -> StreamStep {
            StreamStep::default()
        }
        fn held(&self) -> usize {
            1
        }
    }

    fn headers(pairs: &[(&str, &'static str)]) -> HttpHeaders {
        let header = |(k, v): &(&str, &'static str)| HeaderValue {
            key: (*k).to_owned(),
            raw_value: (*v).into(),
            ..HeaderValue::default()
        };
        let headers = Some(HeaderMap { headers: pairs.iter().map(header).collect() });
        HttpHeaders { headers, ..HttpHeaders::default() }
    }

    fn body(end_of_stream: bool) -> HttpBody {
        HttpBody { body: "x".into(), end_of_stream, ..HttpBody::default() }
    }

    /// An exchange in its order; the last message is in the middle of a streamed response.
    fn script() -> Vec<Message> {
        let request = [(":method", "POST"), (":scheme", "http"), (":authority", "a.b"), (":path", "/")];
        vec![
            Message::RequestHeaders(headers(&request)),
            Message::RequestBody(body(true)),
            Message::ResponseHeaders(headers(&[(":status", "200")])),
            Message::ResponseBody(body(false)),
        ]
    }

    /// What ends the inbound side after some messages.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum End {
        Panic,
        Error,
        HalfClose,
        Halt,
    }

    /// Plays so many messages and the end; comes back with what the outbound side ended with.
    async fn play(messages: usize, end: End) -> Option<Result<ProcessingResponse, Status>> {
        let (phase, phases) = watch::channel(Phase::Running);
        let script = script()
            .into_iter()
            .take(messages)
            .map(|m| Ok(ProcessingRequest { request: Some(m), ..ProcessingRequest::default() }));
        let last = stream::poll_fn(move |_| match end {
            End::Panic => panic!("asked to"),
            End::Error => std::task::Poll::Ready(Some(Err(Status::cancelled("asked to")))),
            End::HalfClose => std::task::Poll::Ready(None),
            End::Halt => {
                phase.send_replace(Phase::Halting);
                std::task::Poll::Pending
            }
        });
        let context = crate::exchange::Context {
            inside: crate::tls::Inside::Clear,
            judge: Arc::new(Lenient::default()),
            observer: Arc::new(LogObserver),
            budget: Budget::new(1 << 20),
            upstream: None,
            captured: false,
            names: None,
            stop: Arc::default(),
        };
        let inbound = stream::iter(script).chain(last);
        let mut outbound =
            std::pin::pin!(answers(inbound, Exchange::new(context), phases, Duration::from_secs(1)));
        loop {
            match outbound.next().await {
                Some(Ok(_)) => {}
                Some(Err(status)) => {
                    assert_ne!(status.code(), tonic::Code::Ok);
                    let again = outbound.next().await;
                    assert!(matches!(again, Some(Err(_))), "an error is the end, and not an OK one");
                    return Some(Err(status));
                }
                None => return None,
            }
        }
    }

    #[tokio::test]
    async fn whatever_ends_an_exchange_before_its_verdict_ends_it_by_an_error() {
        // Settled: nothing asked, or everything answered (after the request's body).
        let settled = [0, 2];
        for messages in 0..=script().len() {
            for end in [End::Panic, End::Error, End::HalfClose, End::Halt] {
                let play = tokio::time::timeout(Duration::from_secs(10), play(messages, end));
                let ended = play.await.expect("an end in time");
                let fine = end == End::HalfClose && settled.contains(&messages);
                assert_eq!(ended.is_none(), fine, "{end:?} after {messages} messages: {ended:?}");
            }
        }
    }

    #[test]
    fn no_code_becomes_an_ok_status() {
        for code in Code::ALL {
            assert_ne!(status(code).code(), tonic::Code::Ok);
        }
    }
}
