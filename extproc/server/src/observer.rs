//! What is told about every message that was decided: the seam for receipts, metrics and logs.

use std::time::Duration;

use sallyport_engine::{Code, Decision, Protocol, Verdict};
use sallyport_proto::ext_proc::Message;

/// Which way a message went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the agent.
    Request,
    /// To the agent.
    Response,
}

impl Direction {
    /// The direction's name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Response => "response",
        }
    }
}

/// One message and what became of it. Holds no payload, no header and no query.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Envoy's id of the request; empty where it gave none.
    pub request_id: &'a str,
    /// Which message of the exchange.
    pub direction: Direction,
    /// The request's method.
    pub method: &'a str,
    /// The request's host.
    pub host: &'a str,
    /// The request's path, without its query.
    pub path: &'a str,
    /// The decision with everything behind it, of head, body and trailers together.
    pub verdict: &'a Verdict,
    /// Whether the decision was carried out (`Enforce`) or only noted (`Observe`).
    pub enforced: bool,
    /// Whether the message was seen to its end. One that was not, because a peer went away or the process
    /// is going to, was not forwarded beyond what had been decided.
    pub complete: bool,
    /// What the body turned out to be.
    pub protocol: &'a Protocol,
    /// Bytes of body that arrived.
    pub bytes: u64,
    /// The most bytes of this message that were held at once.
    pub held: usize,
    /// Microseconds the message spent in the filter.
    pub micros: u64,
}

impl<'a> Record<'a> {
    /// The error code of a refused message.
    pub fn code(&self) -> Option<Code> {
        code(self.verdict)
    }

    /// The ids of the rules that found something, each once.
    pub fn rules(&self) -> Vec<&'a str> {
        rules(self.verdict)
    }

    /// The ids of the policies behind the decision.
    pub fn policies(&self) -> Vec<&'a str> {
        policies(self.verdict)
    }

    /// The protocol's name in logs and metrics.
    pub fn protocol_name(&self) -> &'static str {
        match self.protocol {
            Protocol::Unknown => "unknown",
            Protocol::Chat => "chat",
            Protocol::Mcp { .. } => "mcp",
        }
    }
}

/// The code of a verdict that refuses.
pub(crate) fn code(verdict: &Verdict) -> Option<Code> {
    verdict.code.filter(|_| verdict.decision.refuses())
}

pub(crate) fn rules(verdict: &Verdict) -> Vec<&str> {
    let mut rules: Vec<&str> = verdict.findings.iter().map(|f| f.rule.as_str()).collect();
    rules.sort_unstable();
    rules.dedup();
    rules
}

pub(crate) fn policies(verdict: &Verdict) -> Vec<&str> {
    let mut policies: Vec<&str> = verdict.reasons.iter().map(|r| r.policy.as_str()).collect();
    policies.sort_unstable();
    policies.dedup();
    policies
}

/// Where the answer to a question for a name came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameSource {
    /// Nobody was asked: the question was refused.
    None,
    /// An answer of before.
    Cache,
    /// A nameserver of the pod.
    Nameserver,
    /// The nameservers were asked, and gave no answer.
    Failed,
}

impl NameSource {
    /// Every source, in the order of their declaration.
    pub const ALL: [Self; 4] = [Self::None, Self::Cache, Self::Nameserver, Self::Failed];

    /// The source's name in logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cache => "cache",
            Self::Nameserver => "nameserver",
            Self::Failed => "failed",
        }
    }
}

/// A name that was asked of the resolver, and what became of it.
#[derive(Clone, Copy, Debug)]
pub struct NameRecord<'a> {
    /// The name, in lower case.
    pub name: &'a str,
    /// The record type.
    pub kind: &'a str,
    /// The decision with everything behind it, of the question and the addresses in its answer together.
    pub verdict: &'a Verdict,
    /// Whether the decision was carried out (`Enforce`) or only noted (`Observe`).
    pub enforced: bool,
    /// Where the answer came from.
    pub source: NameSource,
}

/// Told of every message that was decided.
///
/// Called before the answer leaves, on the thread that answers Envoy: return at once. (In Observe also
/// afterwards, on others.) One that panics makes an enforced exchange fail: a decision that leaves no trace
/// is not carried out.
pub trait Observer: Send + Sync + 'static {
    /// Takes note of one message.
    fn record(&self, record: &Record<'_>);

    /// Takes note of a name that was asked of the resolver.
    fn resolved(&self, record: &NameRecord<'_>) {
        let _ = record;
    }

    /// A message of Envoy's was answered.
    fn answered(&self, kind: MessageKind, took: Duration) {
        let _ = (kind, took);
    }

    /// An exchange began.
    fn opened(&self) {}

    /// An exchange ended.
    fn closed(&self) {}
}

/// The kinds of messages that Envoy sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are called as in ext_proc")]
pub enum MessageKind {
    RequestHeaders,
    RequestBody,
    RequestTrailers,
    ResponseHeaders,
    ResponseBody,
    ResponseTrailers,
}

impl MessageKind {
    /// Every kind, in the order of their declaration.
    pub const ALL: [Self; 6] = [
        Self::RequestHeaders,
        Self::RequestBody,
        Self::RequestTrailers,
        Self::ResponseHeaders,
        Self::ResponseBody,
        Self::ResponseTrailers,
    ];

    /// The kind's name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RequestHeaders => "request_headers",
            Self::RequestBody => "request_body",
            Self::RequestTrailers => "request_trailers",
            Self::ResponseHeaders => "response_headers",
            Self::ResponseBody => "response_body",
            Self::ResponseTrailers => "response_trailers",
        }
    }
}

impl From<&Message> for MessageKind {
    fn from(message: &Message) -> Self {
        match message {
            Message::RequestHeaders(_) => Self::RequestHeaders,
            Message::RequestBody(_) => Self::RequestBody,
            Message::RequestTrailers(_) => Self::RequestTrailers,
            Message::ResponseHeaders(_) => Self::ResponseHeaders,
            Message::ResponseBody(_) => Self::ResponseBody,
            Message::ResponseTrailers(_) => Self::ResponseTrailers,
        }
    }
}

/// Writes one log line per message: refusals as warnings, what was marked or redacted as information, and
/// what simply passed for debugging only (Envoy's access log has a line for every call already).
#[derive(Clone, Copy, Debug, Default)]
pub struct LogObserver;

impl Observer for LogObserver {
    fn record(&self, record: &Record<'_>) {
        let code = record.code().map_or("", Code::as_str);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: "sallyport::verdict",
                    request_id = record.request_id,
                    direction = record.direction.as_str(),
                    method = record.method,
                    host = record.host,
                    path = record.path,
                    decision = record.verdict.decision.as_str(),
                    enforced = record.enforced,
                    complete = record.complete,
                    code,
                    rules = record.rules().join(","),
                    policies = record.policies().join(","),
                    score = record.verdict.score,
                    protocol = record.protocol_name(),
                    bytes = record.bytes,
                    held = record.held,
                    micros = record.micros,
                )
            };
        }
        match record.verdict.decision {
            Decision::Hold | Decision::Block => line!(warn),
            Decision::Flag | Decision::Redact => line!(info),
            Decision::Allow if record.complete => line!(debug),
            // An exchange that ended before its verdict.
            Decision::Allow => line!(info),
        }
    }

    fn resolved(&self, record: &NameRecord<'_>) {
        let code = code(record.verdict).map_or("", Code::as_str);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: "sallyport::name",
                    name = record.name,
                    kind = record.kind,
                    decision = record.verdict.decision.as_str(),
                    enforced = record.enforced,
                    code,
                    rules = rules(record.verdict).join(","),
                    policies = policies(record.verdict).join(","),
                    source = record.source.as_str(),
                )
            };
        }
        match record.verdict.decision {
            Decision::Hold | Decision::Block => line!(warn),
            Decision::Flag | Decision::Redact => line!(info),
            Decision::Allow => line!(debug),
        }
    }
}
