//! One sidecar's stream, from its Hello to its end.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::HeaderMap;
use bytes::Bytes;
use futures_util::stream::{self, Stream, StreamExt as _};
use http_body::Frame;
use jiff::Timestamp;
use sallyport_proto::discovery::{Hello, Request, SubscribeRequest};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Status, Streaming};

use super::subscribers::{Offer, Subscriber, trimmed};
use super::{Bundles, Limits, PodIdentity, Refused};
use crate::index::Index;

/// Parts that are remembered as held. A bundle has two; the rest are older ones that may come back.
const MOST_HELD: usize = 16;
/// Characters of a SHA-256 in hexadecimal.
const LONGEST_DIGEST: usize = 64;
/// Messages that a sidecar may send in a stream's life. It sends one per bundle; half an hour of changes
/// every two seconds is 900.
const MOST_MESSAGES: usize = 4_000;

/// The state of one stream. Dropping it ends the subscription, however the stream ended.
pub(super) struct Session {
    id: u64,
    pod: PodIdentity,
    bundles: Bundles,
    inbound: Streaming<SubscribeRequest>,
    index: Index,
    stopping: watch::Receiver<bool>,
    hello_by: Duration,
    ends_at: Instant,
    /// Bundle schemas that the sidecar reads; none until it said Hello.
    schemas: Option<std::ops::RangeInclusive<u32>>,
    /// Digests of parts that the sidecar has.
    held: Vec<String>,
    /// Digest of the bundle that the sidecar has or is about to have.
    offered: String,
    messages: usize,
    /// Whether the newest bundle still has to be looked at.
    due: bool,
    done: bool,
}

impl Session {
    pub(super) fn new(
        id: u64,
        pod: PodIdentity,
        bundles: Bundles,
        inbound: Streaming<SubscribeRequest>,
        index: Index,
        limits: &Limits,
    ) -> Self {
        // Streams that began in one storm must not end in one.
        let life = limits.life.mul_f64(1.0 + fastrand::f64() * 0.1);
        Self {
            id,
            pod,
            bundles,
            inbound,
            stopping: index.stopping(),
            index,
            hello_by: limits.hello,
            ends_at: Instant::now() + life,
            schemas: None,
            held: Vec::new(),
            offered: String::new(),
            messages: 0,
            due: false,
            done: false,
        }
    }

    /// The body of the answer: messages, then a status. It moves only as fast as the connection takes them.
    pub(super) fn run(self) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
        stream::unfold(self, async |mut session| {
            if session.done {
                return None;
            }
            let frame = match session.next().await {
                Ok(Some(message)) => Frame::data(message),
                ended => {
                    session.done = true;
                    let status = match ended {
                        Err(refused) => {
                            session.index.metrics().refused(refused.reason());
                            refused.status()
                        }
                        Ok(_) => Status::ok(""),
                    };
                    Frame::trailers(trailers(&status))
                }
            };
            Some((Ok(frame), session))
        })
    }

    /// The next message for the sidecar; none where the sidecar has ended the stream.
    async fn next(&mut self) -> Result<Option<Bytes>, Refused> {
        if self.schemas.is_none() {
            let first = tokio::time::timeout(self.hello_by, self.inbound.next());
            let Some(first) = first.await.map_err(|_| Refused::NoHello)? else { return Ok(None) };
            let Ok(first) = first else { return Ok(None) };
            let Some(Request::Hello(hello)) = first.kind else {
                return Err(Refused::Protocol("the first message is a Hello"));
            };
            self.greet(hello)?;
        }
        loop {
            if std::mem::take(&mut self.due)
                && let Some(message) = self.newest()
            {
                return Ok(Some(message));
            }
            tokio::select! {
                () = stop_of(&mut self.stopping) => return Err(Refused::Stopping),
                () = tokio::time::sleep_until(self.ends_at) => return Err(Refused::Expired),
                changed = self.bundles.changed() => match changed {
                    Ok(()) => self.due = true,
                    Err(_) => return Err(Refused::PodGone),
                },
                message = self.inbound.next() => match message {
                    Some(Ok(message)) => self.take(message)?,
                    // The client is gone, or sends what is no message: either way there is nobody to tell.
                    Some(Err(_)) | None => return Ok(None),
                },
            }
        }
    }

    fn greet(&mut self, hello: Hello) -> Result<(), Refused> {
        is_digest(&hello.in_force)?;
        self.schemas = Some(hello.schema_least..=hello.schema_most);
        self.held = hello.held;
        self.held.retain(|digest| is_digest(digest).is_ok());
        self.held.truncate(MOST_HELD);
        self.held.shrink_to_fit();
        self.offered.clone_from(&hello.in_force);
        let subscriber = Subscriber {
            stream: self.id,
            namespace: self.pod.namespace.clone(),
            pod: self.pod.name.clone(),
            version: trimmed(&hello.version),
            since: Timestamp::now(),
            policy: None,
            newest: String::new(),
            sent_at: None,
            in_force: hello.in_force,
            nack: None,
            too_old: false,
            away: None,
        };
        self.index.subscribers().begin(&self.pod.uid, subscriber);
        self.index.metrics().connected();
        self.index.touch();
        self.due = true;
        Ok(())
    }

    /// The newest bundle as it goes on the wire; none where the sidecar has it, can't read it, or there is
    /// none.
    fn newest(&mut self) -> Option<Bytes> {
        let bundle = self.bundles.borrow_and_update().clone()?;
        let readable = self.schemas.as_ref().is_some_and(|s| s.contains(&bundle.schema));
        let sent = readable && self.offered != bundle.digest;
        let offer = Offer {
            policy: bundle.policy.as_ref().map(|p| p.name.clone()).unwrap_or_default(),
            digest: bundle.digest.clone(),
            too_old: !readable,
            sent,
        };
        self.index.subscribers().offered(&self.pod.uid, self.id, offer);
        self.index.touch();
        if !sent {
            return None;
        }
        let message = bundle.message(|digest| self.held.iter().any(|held| held == digest));
        for part in &bundle.parts {
            if !self.held.contains(&part.digest) {
                if self.held.len() == MOST_HELD {
                    self.held.remove(0);
                }
                self.held.push(part.digest.clone());
            }
        }
        self.offered.clone_from(&bundle.digest);
        self.index.metrics().sent();
        Some(message)
    }

    fn take(&mut self, message: SubscribeRequest) -> Result<(), Refused> {
        self.messages += 1;
        if self.messages > MOST_MESSAGES {
            return Err(Refused::Protocol("too many messages"));
        }
        let subscribers = self.index.subscribers();
        match message.kind {
            Some(Request::Ack(ack)) => {
                is_digest(&ack.digest)?;
                let after = subscribers.acked(&self.pod.uid, self.id, ack.digest);
                self.index.metrics().acked(after);
            }
            Some(Request::Nack(nack)) => {
                is_digest(&nack.digest)?;
                self.index.metrics().nacked();
                tracing::warn!(
                    namespace = self.pod.namespace,
                    pod = self.pod.name,
                    digest = nack.digest,
                    error = trimmed(&nack.error),
                    "a sidecar refused a bundle"
                );
                subscribers.nacked(&self.pod.uid, self.id, nack.digest, &nack.error);
                // Should it have refused because a part was missing, the next bundle is whole.
                self.held.clear();
            }
            Some(Request::Hello(_)) => return Err(Refused::Protocol("a second Hello")),
            // A kind of a later version.
            None => return Ok(()),
        }
        self.index.touch();
        Ok(())
    }
}

/// Digests are kept per subscriber, so a sidecar must not choose how long they are.
fn is_digest(text: &str) -> Result<(), Refused> {
    let good = text.len() <= LONGEST_DIGEST && text.bytes().all(|b| b.is_ascii_alphanumeric());
    if good { Ok(()) } else { Err(Refused::Protocol("what is no digest")) }
}

/// A status as the end of a stream.
fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // Nothing that we say is no header. Without a status the sidecar takes the stream for broken, and
        // comes again.
        trailers.clear();
    }
    trailers
}

/// Returns once this replica stops; never, if nothing can stop it.
async fn stop_of(stopping: &mut watch::Receiver<bool>) {
    if stopping.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.schemas.is_some() {
            self.index.subscribers().end(&self.pod.uid, self.id);
            self.index.metrics().disconnected();
            self.index.touch();
        }
    }
}
