//! What is to be done, and why.

use serde::Serialize;

use crate::finding::Finding;

/// What happens to a message; the strongest wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It passes.
    #[default]
    Allow,
    /// It passes, marked.
    Flag,
    /// It passes with the findings replaced by placeholders.
    Redact,
    /// It waits for an approval; until approvals exist it is refused with code `held`.
    Hold,
    /// It is refused.
    Block,
}

impl Decision {
    /// The decision's name, as users write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Flag => "flag",
            Self::Redact => "redact",
            Self::Hold => "hold",
            Self::Block => "block",
        }
    }

    /// Whether the message must not pass.
    pub const fn refuses(self) -> bool {
        matches!(self, Self::Hold | Self::Block)
    }
}

/// The error codes a refused client sees. Public API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// A policy refused the message.
    PolicyDenied,
    /// A policy wants an approval, and approvals don't exist yet.
    Held,
    /// The destination is not allowed.
    EgressDenied,
    /// The address that the connection goes to is not one of the host that the request names.
    DestinationNotBound,
    /// The host that the request names could not be resolved, so nothing is known of the address: try again.
    DestinationUnresolved,
    /// The address is one that no call may go to: metadata, link-local, loopback, private.
    DestinationDenied,
    /// The URL is malformed or longer than any honest one.
    BadUrl,
    /// The request is for another server than its TLS connection was opened to.
    Misdirected,
    /// A tunnel (CONNECT, upgrade) whose bytes could not be inspected.
    TunnelDenied,
    /// A body larger than `limits.maxBodyBytes`.
    BodyTooLarge,
    /// A content encoding that can't be undone, or that unpacks to too much.
    BadEncoding,
    /// More bytes in flight than this sidecar may hold.
    Overloaded,
    /// The scan did not end in time.
    ScanTimeout,
    /// A Cedar policy could not be evaluated.
    PolicyError,
    /// Messages arrived in an order that can't be inspected.
    ProtocolError,
    /// The sidecar is going away.
    ShuttingDown,
    /// The kill switch blocks every call.
    Killed,
    /// The sidecar has not been told yet what to enforce.
    NoBundle,
    /// A fault of our own.
    Internal,
}

impl Code {
    /// Every code, in the order of their declaration.
    pub const ALL: [Self; 19] = [
        Self::PolicyDenied,
        Self::Held,
        Self::EgressDenied,
        Self::DestinationNotBound,
        Self::DestinationUnresolved,
        Self::DestinationDenied,
        Self::BadUrl,
        Self::Misdirected,
        Self::TunnelDenied,
        Self::BodyTooLarge,
        Self::BadEncoding,
        Self::Overloaded,
        Self::ScanTimeout,
        Self::PolicyError,
        Self::ProtocolError,
        Self::ShuttingDown,
        Self::Killed,
        Self::NoBundle,
        Self::Internal,
    ];

    /// The code as it stands in error bodies, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PolicyDenied => "policy_denied",
            Self::Held => "held",
            Self::EgressDenied => "egress_denied",
            Self::DestinationNotBound => "destination_not_bound",
            Self::DestinationUnresolved => "destination_unresolved",
            Self::DestinationDenied => "destination_denied",
            Self::BadUrl => "bad_url",
            Self::Misdirected => "misdirected",
            Self::TunnelDenied => "tunnel_denied",
            Self::BodyTooLarge => "body_too_large",
            Self::BadEncoding => "bad_encoding",
            Self::Overloaded => "overloaded",
            Self::ScanTimeout => "scan_timeout",
            Self::PolicyError => "policy_error",
            Self::ProtocolError => "protocol_error",
            Self::ShuttingDown => "shutting_down",
            Self::Killed => "killed",
            Self::NoBundle => "no_bundle",
            Self::Internal => "internal",
        }
    }

    /// The HTTP status a refused client gets.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::PolicyDenied
            | Self::Held
            | Self::EgressDenied
            | Self::DestinationNotBound
            | Self::DestinationDenied
            | Self::TunnelDenied
            | Self::Killed => 403,
            Self::BadUrl => 400,
            Self::Misdirected => 421,
            Self::BodyTooLarge => 413,
            Self::BadEncoding => 415,
            Self::DestinationUnresolved | Self::Overloaded | Self::ShuttingDown | Self::NoBundle => 503,
            Self::ScanTimeout => 504,
            Self::PolicyError | Self::ProtocolError | Self::Internal => 500,
        }
    }
}

/// A policy that took part in the decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// The policy's `@id`.
    pub policy: String,
    /// Its `@action`.
    pub decision: Decision,
}

/// The outcome of looking at one message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// What is to be done.
    pub decision: Decision,
    /// The code for the client where the message is refused.
    pub code: Option<Code>,
    /// One sentence for a human.
    pub message: String,
    /// The policies behind it.
    pub reasons: Vec<Reason>,
    /// Everything that was found, in the order of the text.
    pub findings: Vec<Finding>,
    /// The combined score, 0 to 100.
    pub score: u8,
}

impl Verdict {
    /// The verdict where Cedar wants a redaction that can't be carried out any more, because what is to
    /// be cut out stands in no body, or has begun to leave: the message is refused.
    #[must_use]
    pub fn unredactable(self) -> Self {
        Self { decision: Decision::Block, code: Some(Code::PolicyDenied), ..self }
    }
}

/// What a body turned out to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Nothing known.
    #[default]
    Unknown,
    /// An LLM API's chat call.
    Chat,
    /// A JSON-RPC message of MCP; `id` is the raw JSON of the call's id, absent for notifications.
    Mcp {
        /// The raw JSON of `id`.
        id: Option<String>,
    },
}

/// The outcome of looking at a whole body.
#[derive(Clone, Debug, Default)]
pub struct BodyVerdict {
    /// What is to be done.
    pub verdict: Verdict,
    /// The body to forward instead; set exactly when the decision is `redact`.
    pub rewritten: Option<Vec<u8>>,
    /// What the body turned out to be.
    pub protocol: Protocol,
}

/// How a stream that may not go on is ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Forward these bytes (the protocol's own terminal event), then end the stream cleanly.
    Terminal(Vec<u8>),
    /// The protocol has no such event: end it as an error, so that nobody takes a part for the whole.
    Reset,
}

/// The outcome of looking at one chunk of a stream.
#[derive(Clone, Debug, Default)]
pub struct StreamStep {
    /// Bytes that may be forwarded now, possibly redacted.
    pub emit: Vec<u8>,
    /// Set when the chunk brought something to decide on.
    pub verdict: Option<Verdict>,
    /// Set when the stream must end here, after `emit`.
    pub cut: Option<Cut>,
}

/// Failures of transport that are decided outside Cedar, because no message exists to decide on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each maps to the documented code of the same name")]
pub enum TransportFailure {
    BadUrl,
    Misdirected,
    TunnelDenied,
    BodyTooLarge,
    BadEncoding,
    Overloaded,
    ScanTimeout,
    ProtocolError,
    ShuttingDown,
    Internal,
}

impl TransportFailure {
    /// The one place where a transport failure becomes a verdict.
    pub fn verdict(self) -> Verdict {
        let (code, message) = match self {
            Self::BodyTooLarge => {
                (Code::BodyTooLarge, "the body is larger than spec.limits.maxBodyBytes of the AgentPolicy")
            }
            Self::BadUrl => (Code::BadUrl, "the request names no host that can be read"),
            Self::Misdirected => (
                Code::Misdirected,
                "the request's host is not the server that its TLS connection was opened to (SNI, CONNECT)",
            ),
            Self::TunnelDenied => {
                (Code::TunnelDenied, "the connection would become a tunnel, whose bytes can't be inspected")
            }
            Self::BadEncoding => {
                (Code::BadEncoding, "the body's content-encoding can't be undone for inspection")
            }
            Self::Overloaded => (Code::Overloaded, "the sidecar holds as many bytes as it may; try again"),
            Self::ScanTimeout => (Code::ScanTimeout, "the inspection did not end in time"),
            Self::ProtocolError => {
                (Code::ProtocolError, "the message can't be inspected in the order it arrived")
            }
            Self::ShuttingDown => (Code::ShuttingDown, "the sidecar is shutting down; try again"),
            Self::Internal => (Code::Internal, "the sidecar failed while inspecting the message"),
        };
        Verdict {
            decision: Decision::Block,
            code: Some(code),
            message: message.to_owned(),
            ..Verdict::default()
        }
    }
}

impl Verdict {
    /// What every call gets while the kill switch is on; `by` says what was annotated.
    pub fn killed(by: &str) -> Self {
        Self::stopped(Code::Killed, format!("the kill switch on {by} blocks every call"))
    }

    /// What every call gets before the first bundle.
    pub fn no_bundle() -> Self {
        Self::stopped(
            Code::NoBundle,
            "the sidecar has not been told yet what to enforce; try again".to_owned(),
        )
    }

    fn stopped(code: Code, message: String) -> Self {
        Self { decision: Decision::Block, code: Some(code), message, ..Self::default() }
    }
}

/// The body of the error that a refused client gets: a JSON object with `error`, or, where an MCP call
/// with an id is answered, a JSON-RPC error that carries the same object as its data.
pub fn error_body(verdict: &Verdict, request_id: &str, answers: &Protocol) -> String {
    #[derive(Serialize)]
    struct Error<'a> {
        code: &'static str,
        decision: &'static str,
        rules: Vec<&'a str>,
        policies: Vec<&'a str>,
        reason: &'a str,
        request_id: &'a str,
        message: String,
    }
    let code = verdict.code.unwrap_or(Code::PolicyDenied).as_str();
    let mut rules: Vec<&str> = Vec::new();
    for f in verdict.findings.iter().filter(|f| f.decision == verdict.decision) {
        if !rules.contains(&f.rule.as_str()) {
            rules.push(&f.rule);
        }
    }
    let reasons = verdict.reasons.iter().filter(|r| r.decision == verdict.decision);
    let error = Error {
        code,
        decision: verdict.decision.as_str(),
        rules,
        policies: reasons.map(|r| r.policy.as_str()).collect(),
        reason: &verdict.message,
        request_id,
        message: format!("Sallyport refused this message: {}", verdict.message),
    };
    // Serialising strings and lists of strings can't fail.
    let object = serde_json::to_string(&error).unwrap_or_else(|_| "{}".to_owned());
    match answers {
        Protocol::Mcp { id: Some(id) } => {
            let message = serde_json::to_string(&error.message).unwrap_or_else(|_| "\"\"".to_owned());
            format!(
                "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{\"code\":-32001,\"message\":{message},\"data\":{object}}}}}"
            )
        }
        _ => format!("{{\"error\":{object}}}"),
    }
}
