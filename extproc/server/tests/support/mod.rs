//! A judge that decides by the words it sees, an observer that remembers, and a client that speaks as
//! Envoy does.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use sallyport_api::{AgentPolicySpec, Mode};
use sallyport_engine::{
    BodyVerdict, Code, Cut, Decision, Protocol, Reason, RequestHead, ResponseHead, StreamStep, Verdict,
};
use sallyport_extproc::{Config, Judge, Observer, Policy, Record, Scan, Server};
use sallyport_proto::ext_proc::{
    ExternalProcessorClient, HeaderMap, HeaderValue, HttpBody, HttpHeaders, HttpTrailers, ImmediateResponse,
    Message, Mutation, ProcessingMode, ProcessingRequest, ProcessingResponse, ProtocolConfiguration, Reply,
    StreamedBodyResponse,
};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Every await of a test ends by then.
pub const DEADLINE: Duration = Duration::from_secs(20);

// === the judge ===

/// Decides by words: `BLOCK`, `HOLD`, `FLAG`, `REDACT` (replaces `SECRET`), `PANIC`, `STALL`; `MCP` makes the
/// body a call with id 7, `LIAR` says redact and brings nothing.
#[derive(Default)]
pub struct Words {
    pub spec: AgentPolicySpec,
}

impl Words {
    pub fn with(mode: Mode, max_body_bytes: u32) -> Arc<Self> {
        let mut spec = AgentPolicySpec { mode, ..AgentPolicySpec::default() };
        spec.limits.max_body_bytes = max_body_bytes;
        Arc::new(Self { spec })
    }
}

fn has(text: &[u8], word: &str) -> bool {
    text.windows(word.len()).any(|w| w == word.as_bytes())
}

/// How long a scan of `STALL` takes: whatever ends sooner did not wait for it, on a busy machine too.
pub const STALL: Duration = Duration::from_secs(6);

fn verdict(text: &[u8]) -> Verdict {
    assert!(!has(text, "PANIC"), "asked to");
    if has(text, "STALL") {
        std::thread::sleep(STALL);
    }
    let (decision, code) = match () {
        () if has(text, "BLOCK") => (Decision::Block, Some(Code::PolicyDenied)),
        () if has(text, "HOLD") => (Decision::Hold, Some(Code::Held)),
        () if has(text, "REDACT") || has(text, "LIAR") => (Decision::Redact, None),
        () if has(text, "FLAG") => (Decision::Flag, None),
        () => return Verdict::default(),
    };
    let reasons = vec![Reason { policy: "test-words".to_owned(), decision }];
    Verdict {
        decision,
        code,
        message: "a word was seen".to_owned(),
        reasons,
        score: 50,
        ..Verdict::default()
    }
}

fn body(text: &[u8]) -> BodyVerdict {
    let verdict = verdict(text);
    let rewritten = (verdict.decision == Decision::Redact && !has(text, "LIAR"))
        .then(|| String::from_utf8_lossy(text).replace("SECRET", "[REDACTED]").into_bytes());
    let protocol = match () {
        () if has(text, "MCP-NOTE") => Protocol::Mcp { id: None },
        () if has(text, "MCP") => Protocol::Mcp { id: Some("7".to_owned()) },
        () => Protocol::Unknown,
    };
    BodyVerdict { verdict, rewritten, protocol }
}

fn head(path: &str, headers: &[(String, String)]) -> Verdict {
    let mut text = path.to_owned();
    for (_, value) in headers {
        text.push('\n');
        text.push_str(value);
    }
    verdict(text.as_bytes())
}

impl Judge for Words {
    fn spec(&self) -> &AgentPolicySpec {
        &self.spec
    }

    fn request_head(&self, request: &RequestHead, _now: Timestamp) -> Verdict {
        head(&request.path, &request.headers)
    }

    fn server_name(&self, name: &str, _now: Timestamp) -> Verdict {
        verdict(name.to_uppercase().as_bytes())
    }

    fn request_body(&self, _head: &RequestHead, bytes: &[u8], _now: Timestamp) -> BodyVerdict {
        body(bytes)
    }

    fn response_head(&self, _request: &RequestHead, response: &ResponseHead, _now: Timestamp) -> Verdict {
        head("", &response.headers)
    }

    fn response_body(&self, _: &RequestHead, _: &ResponseHead, bytes: &[u8], _now: Timestamp) -> BodyVerdict {
        body(bytes)
    }

    fn response_stream(
        self: Arc<Self>,
        _request: &RequestHead,
        response: &ResponseHead,
        _answers: &Protocol,
    ) -> Box<dyn Scan> {
        assert_ne!(response.header("x-scanner"), Some("panic"), "asked to");
        Box::new(Lines {
            sse: response.header("content-type") == Some("text/event-stream"),
            held: Vec::new(),
        })
    }
}

/// Holds what follows the last line feed.
struct Lines {
    sse: bool,
    held: Vec<u8>,
}

impl Scan for Lines {
    fn push(&mut self, chunk: &[u8], end: bool, _now: Timestamp) -> StreamStep {
        self.held.extend_from_slice(chunk);
        let ready = match self.held.iter().rposition(|b| *b == b'\n') {
            _ if end => self.held.len(),
            Some(last) => last + 1,
            None => 0,
        };
        let rest = self.held.split_off(ready);
        let ready = std::mem::replace(&mut self.held, rest);
        let judged = body(&ready);
        let refused = judged.verdict.decision.refuses();
        let terminal = Cut::Terminal(b"event: error\ndata: cut\n\n".to_vec());
        StreamStep {
            emit: if refused { Vec::new() } else { judged.rewritten.unwrap_or(ready) },
            verdict: (judged.verdict.decision != Decision::Allow).then_some(judged.verdict),
            cut: refused.then_some(if self.sse { terminal } else { Cut::Reset }),
        }
    }

    fn held(&self) -> usize {
        self.held.len()
    }
}

// === the observer ===

/// What a record said, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub direction: &'static str,
    pub decision: Decision,
    pub code: Option<Code>,
    pub enforced: bool,
    pub complete: bool,
    pub bytes: u64,
    pub path: String,
    pub id: String,
}

#[derive(Default)]
pub struct Memory {
    pub seen: Mutex<Vec<Seen>>,
    /// Panics instead of remembering.
    pub broken: bool,
}

impl Memory {
    pub fn all(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// The records so far, as `direction decision code complete`.
    pub fn lines(&self) -> Vec<String> {
        let line = |s: &Seen| {
            let code = s.code.map_or("-", Code::as_str);
            let complete = if s.complete { "" } else { " incomplete" };
            format!("{} {} {code}{complete}", s.direction, s.decision.as_str())
        };
        self.all().iter().map(line).collect()
    }

    /// Waits until there are `n`: what is noted aside comes a little later.
    pub async fn wait(&self, n: usize) -> Vec<String> {
        let enough = async {
            while self.all().len() < n {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = tokio::time::timeout(DEADLINE, enough).await;
        self.lines()
    }
}

impl Observer for Memory {
    fn record(&self, record: &Record<'_>) {
        assert!(!self.broken, "asked to");
        self.seen.lock().unwrap().push(Seen {
            direction: record.direction.as_str(),
            decision: record.verdict.decision,
            code: record.code(),
            enforced: record.enforced,
            complete: record.complete,
            bytes: record.bytes,
            path: record.path.to_owned(),
            id: record.request_id.to_owned(),
        });
    }
}

// === messages ===

pub fn header_map(headers: &[(&str, &str)]) -> HeaderMap {
    let header = |(k, v): &(&str, &str)| HeaderValue {
        key: (*k).to_owned(),
        raw_value: Bytes::copy_from_slice(v.as_bytes()),
        ..HeaderValue::default()
    };
    HeaderMap { headers: headers.iter().map(header).collect() }
}

fn message(request: Message) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

/// Request headers: POST http://api.test/v1?key=1 with these on top.
pub fn request_headers(headers: &[(&str, &str)], end: bool) -> ProcessingRequest {
    let mut all = vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "api.test"),
        (":path", "/v1?key=1"),
        ("x-request-id", "id-1"),
    ];
    all.retain(|(k, _)| !headers.iter().any(|(h, _)| h == k));
    all.extend_from_slice(headers);
    let headers = Some(header_map(&all));
    let mut first = message(Message::RequestHeaders(HttpHeaders {
        headers,
        end_of_stream: end,
        ..HttpHeaders::default()
    }));
    first.protocol_config = Some(ProtocolConfiguration::default());
    first
}

pub fn request_body(bytes: impl Into<Bytes>, end: bool) -> ProcessingRequest {
    message(Message::RequestBody(HttpBody { body: bytes.into(), end_of_stream: end, ..HttpBody::default() }))
}

pub fn request_trailers(headers: &[(&str, &str)]) -> ProcessingRequest {
    message(Message::RequestTrailers(HttpTrailers { trailers: Some(header_map(headers)) }))
}

pub fn response_headers(headers: &[(&str, &str)], end: bool) -> ProcessingRequest {
    let mut all = vec![(":status", "200")];
    all.retain(|(k, _)| !headers.iter().any(|(h, _)| h == k));
    all.extend_from_slice(headers);
    let headers = Some(header_map(&all));
    message(Message::ResponseHeaders(HttpHeaders { headers, end_of_stream: end, ..HttpHeaders::default() }))
}

pub fn response_body(bytes: impl Into<Bytes>, end: bool) -> ProcessingRequest {
    message(Message::ResponseBody(HttpBody { body: bytes.into(), end_of_stream: end, ..HttpBody::default() }))
}

pub fn response_trailers(headers: &[(&str, &str)]) -> ProcessingRequest {
    message(Message::ResponseTrailers(HttpTrailers { trailers: Some(header_map(headers)) }))
}

// === answers ===

/// An answer in a line: what kind it is, what it changes.
pub fn line(answer: &ProcessingResponse) -> String {
    let (kind, common) = match answer.response.as_ref().unwrap() {
        Reply::RequestHeaders(r) => ("request headers", r.response.as_ref()),
        Reply::ResponseHeaders(r) => ("response headers", r.response.as_ref()),
        Reply::RequestBody(r) => ("request body", r.response.as_ref()),
        Reply::ResponseBody(r) => ("response body", r.response.as_ref()),
        Reply::RequestTrailers(_) => ("request trailers", None),
        Reply::ResponseTrailers(_) => ("response trailers", None),
        Reply::ImmediateResponse(r) => return format!("refused {}", r.status.unwrap().code),
        Reply::StreamedImmediateResponse(_) => panic!("never sent"),
    };
    let mut line = kind.to_owned();
    if let Some(common) = common {
        if let Some(headers) = &common.header_mutation {
            for set in &headers.set_headers {
                let header = set.header.as_ref().unwrap();
                write!(line, " +{}={}", header.key, String::from_utf8_lossy(&header.raw_value)).unwrap();
            }
            for remove in &headers.remove_headers {
                write!(line, " -{remove}").unwrap();
            }
        }
        match common.body_mutation.as_ref().and_then(|m| m.mutation.as_ref()) {
            None => {}
            Some(Mutation::Body(bytes)) => write!(line, " body={}", String::from_utf8_lossy(bytes)).unwrap(),
            Some(Mutation::StreamedResponse(StreamedBodyResponse { body, end_of_stream, .. })) => {
                let end = if *end_of_stream { " end" } else { "" };
                write!(line, " emit={}{end}", String::from_utf8_lossy(body)).unwrap();
            }
            Some(Mutation::ClearBody(_)) => line += " clear",
        }
    }
    if let Some(ProcessingMode { request_body_mode, response_body_mode, .. }) = answer.mode_override {
        let name = |m| ["none", "streamed", "buffered", "partial", "duplex"][usize::try_from(m).unwrap()];
        write!(line, " mode={}/{}", name(request_body_mode), name(response_body_mode)).unwrap();
    }
    line
}

pub fn refusal(answer: &ProcessingResponse) -> &ImmediateResponse {
    match answer.response.as_ref().unwrap() {
        Reply::ImmediateResponse(r) => r,
        _ => panic!("not a refusal: {}", line(answer)),
    }
}

pub fn refusal_json(answer: &ProcessingResponse) -> serde_json::Value {
    serde_json::from_slice(&refusal(answer).body).unwrap()
}

/// The error that a client gets instead of a response, and its status: of our own, or, where the response's
/// head was on its way already, `None` and an error that ends the body.
pub fn error(answer: &ProcessingResponse) -> (Option<i32>, serde_json::Value) {
    let body = match answer.response.as_ref().unwrap() {
        Reply::ResponseBody(r) => r.response.as_ref().and_then(|c| c.body_mutation.as_ref()),
        _ => return (Some(refusal(answer).status.unwrap().code), refusal_json(answer)),
    };
    match body.and_then(|b| b.mutation.as_ref()) {
        Some(Mutation::StreamedResponse(StreamedBodyResponse { body, end_of_stream: true, .. })) => {
            (None, serde_json::from_slice(body).unwrap())
        }
        _ => panic!("not a refusal: {}", line(answer)),
    }
}

// === the rig ===

/// A server on a socket of its own, in a runtime of the test's.
pub struct Rig {
    pub dir: tempfile::TempDir,
    pub memory: Arc<Memory>,
    pub policy: Policy,
    stop: Option<oneshot::Sender<()>>,
    pub served: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Rig {
    pub fn start(judge: Arc<dyn Judge>) -> Self {
        Self::with(judge, Arc::default(), |_| {})
    }

    pub fn with(judge: Arc<dyn Judge>, memory: Arc<Memory>, change: impl FnOnce(&mut Config)) -> Self {
        Self::serving(judge, memory, change, |server| server)
    }

    pub fn serving(
        judge: Arc<dyn Judge>,
        memory: Arc<Memory>,
        change: impl FnOnce(&mut Config),
        more: impl FnOnce(Server) -> Server,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::new(dir.path().join("s"));
        config.drain = Duration::from_millis(200);
        config.scan_timeout = Duration::from_millis(300);
        change(&mut config);
        let server = Server::bind(config, judge, Arc::clone(&memory) as Arc<dyn Observer>).unwrap();
        let server = more(server);
        let policy = server.policy();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(server.serve(async {
            let _ = stopped.await;
        }));
        Self { dir, memory, policy, stop: Some(stop), served }
    }

    pub fn shut_down(&mut self) {
        drop(self.stop.take());
    }

    pub async fn call(&self) -> Call {
        Call::open(&self.dir.path().join("s"), &[]).await
    }
}

/// A connection to the server's socket.
pub async fn channel(socket: &Path) -> tonic::transport::Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move {
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(
                tokio::net::UnixStream::connect(socket).await?,
            ))
        }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://extproc");
    endpoint.connect_with_connector(connector).await.unwrap()
}

/// One exchange, as Envoy holds it.
pub struct Call {
    pub send: Option<mpsc::Sender<ProcessingRequest>>,
    pub answers: Streaming<ProcessingResponse>,
}

impl Call {
    pub async fn try_open(socket: &Path, metadata: &[(&'static str, &str)]) -> Result<Self, Status> {
        let mut client =
            ExternalProcessorClient::new(channel(socket).await).max_decoding_message_size(usize::MAX);
        let (send, messages) = mpsc::channel(16);
        let mut request = tonic::Request::new(ReceiverStream::new(messages));
        for (key, value) in metadata {
            request.metadata_mut().insert(*key, value.parse().unwrap());
        }
        let answers = tokio::time::timeout(DEADLINE, client.process(request)).await.unwrap()?.into_inner();
        Ok(Self { send: Some(send), answers })
    }

    pub async fn open(socket: &Path, metadata: &[(&'static str, &str)]) -> Self {
        Self::try_open(socket, metadata).await.unwrap()
    }

    pub async fn send(&self, message: ProcessingRequest) {
        self.send.as_ref().unwrap().send(message).await.unwrap();
    }

    /// What comes next: an answer, an error, or `None` for an OK end.
    pub async fn next(&mut self) -> Option<Result<ProcessingResponse, Status>> {
        tokio::time::timeout(DEADLINE, self.answers.message()).await.expect("an answer in time").transpose()
    }

    /// Sends and takes the answer.
    pub async fn ask(&mut self, message: ProcessingRequest) -> ProcessingResponse {
        self.send(message).await;
        self.next().await.expect("an answer, not the end").expect("an answer, not an error")
    }

    /// Sends and takes the answer, in a line.
    pub async fn ask_line(&mut self, message: ProcessingRequest) -> String {
        line(&self.ask(message).await)
    }

    /// Ends our side, as Envoy does once it is done.
    pub fn half_close(&mut self) {
        self.send = None;
    }
}
