//! An ext_proc server that misbehaves on request, to learn what Envoy does with each kind of fault.
//!
//! The real filter never does these things; its own tests see to that. What is tested with this one is
//! the other half: that the bootstrap we render, on the Envoy we ship, turns a fault into a refusal, and
//! that the few faults no configuration can catch are known by name.
//!
//! A request says what it wants in `x-modes: REQUEST,RESPONSE` (`none`, `buffered`, `streamed`, `duplex`)
//! and in `x-fault: FAULT@MESSAGE`, where MESSAGE is `request-headers`, `request-body`,
//! `response-headers` or `response-body`. Without a fault it answers every message with "go on".

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use sallyport_proto::ext_proc::{
    BodyMutation, BodyResponse, BodySendMode, CommonResponse, ExternalProcessor, ExternalProcessorServer,
    HeaderMap, HeaderMutation, HeaderSendMode, HeaderValue, HeaderValueOption, HeadersResponse, HttpBody,
    HttpStatus, ImmediateResponse, Message, Mutation, ProcessingMode, ProcessingRequest, ProcessingResponse,
    Reply, StreamedBodyResponse, TrailersResponse,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// Serves on a unix socket until the process ends.
pub fn serve(socket: &std::path::Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // A socket left by a killed predecessor would make the bind fail.
        let _ = std::fs::remove_file(socket);
        let listener = tokio::net::UnixListener::bind(socket)?;
        tonic::transport::Server::builder()
            .add_service(ExternalProcessorServer::new(Faulty).max_decoding_message_size(128 << 20))
            .serve_with_incoming(UnixListenerStream::new(listener))
            .await?;
        Ok(())
    })
}

struct Faulty;

type Answers = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

/// What the answering task hands to the stream.
enum Step {
    Answer(Box<ProcessingResponse>),
    Error,
    Panic,
}

#[tonic::async_trait]
impl ExternalProcessor for Faulty {
    type ProcessStream = Answers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(answer(request.into_inner(), sender));
        let answers = ReceiverStream::new(receiver).map(|step| match step {
            Step::Answer(answer) => Ok(*answer),
            Step::Error => Err(Status::internal("a fault was asked for")),
            Step::Panic => panic!("a fault was asked for"),
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// What one request asked for.
#[derive(Default)]
struct Wish {
    fault: String,
    at: String,
    request_mode: String,
    response_mode: String,
}

impl Wish {
    fn read(headers: Option<&HeaderMap>) -> Self {
        let get = |name: &str| {
            headers
                .into_iter()
                .flat_map(|h| &h.headers)
                .find(|h| h.key == name)
                .map(|h| String::from_utf8_lossy(&h.raw_value).into_owned())
                .unwrap_or_default()
        };
        let split = |text: String, by: char| {
            text.split_once(by).map_or((text.clone(), String::new()), |(a, b)| (a.to_owned(), b.to_owned()))
        };
        let (fault, at) = split(get("x-fault"), '@');
        let (request_mode, response_mode) = split(get("x-modes"), ',');
        Self { fault, at, request_mode, response_mode }
    }

    /// The fault, if it is due at this message.
    fn due(&self, at: &str) -> &str {
        if self.at == at { &self.fault } else { "" }
    }
}

fn mode(name: &str) -> BodySendMode {
    match name {
        "buffered" => BodySendMode::Buffered,
        "streamed" => BodySendMode::Streamed,
        "duplex" => BodySendMode::FullDuplexStreamed,
        _ => BodySendMode::None,
    }
}

async fn answer(mut messages: Streaming<ProcessingRequest>, sender: mpsc::Sender<Step>) {
    let mut wish = Wish::default();
    let mut held = Vec::new();
    while let Ok(Some(message)) = messages.message().await {
        let Some(message) = message.request else { continue };
        if let Message::RequestHeaders(head) = &message {
            wish = Wish::read(head.headers.as_ref());
        }
        let at = match &message {
            Message::RequestHeaders(_) => "request-headers",
            Message::RequestBody(_) => "request-body",
            Message::ResponseHeaders(_) => "response-headers",
            Message::ResponseBody(_) => "response-body",
            _ => "trailers",
        };
        // Every message is slow, not one: the timer is per message.
        if let Some(millis) = wish.fault.strip_prefix("slow-").and_then(|m| m.parse().ok()) {
            tokio::time::sleep(Duration::from_millis(millis)).await;
        }
        // What a scanner with hold-back does: nothing leaves until the end is known.
        if let Some(how) = wish.fault.strip_prefix("hold-") {
            match &message {
                // Late enough that body and trailers are there before the mode is known.
                Message::ResponseHeaders(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                Message::ResponseBody(body) if !body.end_of_stream => {
                    held.extend_from_slice(&body.body);
                    if how == "empty" && sender.send(streamed(Vec::new(), false)).await.is_err() {
                        return;
                    }
                    continue;
                }
                Message::ResponseBody(body) => {
                    held.extend_from_slice(&body.body);
                    let _ = sender.send(streamed(std::mem::take(&mut held), true)).await;
                    continue;
                }
                Message::ResponseTrailers(_) => {
                    let _ = sender.send(streamed(std::mem::take(&mut held), false)).await;
                }
                _ => {}
            }
        }
        let fault = wish.due(at);
        let step = match fault {
            // Dropping the sender ends the gRPC stream with OK.
            "end-ok" => return,
            "error" => Step::Error,
            "panic" => Step::Panic,
            "hang" => std::future::pending().await,
            "spurious" => Step::Answer(Box::new(reply(Reply::ResponseTrailers(TrailersResponse::default())))),
            "block" => Step::Answer(Box::new(reply(block()))),
            _ => Step::Answer(Box::new(respond(message, &wish, fault))),
        };
        if sender.send(step).await.is_err() {
            return;
        }
    }
}

fn respond(message: Message, wish: &Wish, fault: &str) -> ProcessingResponse {
    match message {
        Message::RequestHeaders(head) => {
            let mut answer = reply(Reply::RequestHeaders(HeadersResponse::default()));
            if mode(&wish.request_mode) != BodySendMode::None && !head.end_of_stream {
                answer.mode_override = Some(ProcessingMode {
                    request_body_mode: mode(&wish.request_mode).into(),
                    response_header_mode: HeaderSendMode::Send.into(),
                    ..ProcessingMode::default()
                });
            }
            answer
        }
        Message::ResponseHeaders(_) => {
            let mutation = (fault == "strip-length").then(|| HeaderMutation {
                remove_headers: vec!["content-length".into()],
                ..Default::default()
            });
            let mut answer = reply(Reply::ResponseHeaders(HeadersResponse {
                response: Some(CommonResponse { header_mutation: mutation, ..Default::default() }),
            }));
            if mode(&wish.response_mode) != BodySendMode::None {
                let duplex = wish.response_mode == "duplex";
                answer.mode_override = Some(ProcessingMode {
                    response_body_mode: mode(&wish.response_mode).into(),
                    // Envoy refuses full duplex without trailers.
                    response_trailer_mode: if duplex { HeaderSendMode::Send } else { HeaderSendMode::Skip }
                        .into(),
                    ..ProcessingMode::default()
                });
            }
            answer
        }
        Message::RequestBody(body) => {
            reply(Reply::RequestBody(body_response(&body, &wish.request_mode, fault)))
        }
        Message::ResponseBody(body) => {
            // The faults of lengths are named at the headers but show in the body.
            let fault = if wish.at == "response-headers" { &wish.fault } else { fault };
            reply(Reply::ResponseBody(body_response(&body, &wish.response_mode, fault)))
        }
        Message::RequestTrailers(_) => reply(Reply::RequestTrailers(TrailersResponse::default())),
        Message::ResponseTrailers(_) => reply(Reply::ResponseTrailers(TrailersResponse::default())),
    }
}

/// What a rewritten body ends with.
pub const TAIL: &[u8] = b"[rewritten]";

fn body_response(body: &HttpBody, mode: &str, fault: &str) -> BodyResponse {
    let mut bytes = body.body.to_vec();
    let rewrite = matches!(fault, "no-length" | "right-length" | "keep-length" | "strip-length");
    if rewrite && body.end_of_stream {
        bytes.extend_from_slice(TAIL);
    }
    let header_mutation = (fault == "right-length").then(|| HeaderMutation {
        set_headers: vec![HeaderValueOption {
            header: Some(HeaderValue {
                key: "content-length".into(),
                raw_value: bytes.len().to_string().into(),
                ..Default::default()
            }),
            ..Default::default()
        }],
        ..Default::default()
    });
    let mutation = if mode == "duplex" {
        Some(Mutation::StreamedResponse(StreamedBodyResponse {
            body: Bytes::from(bytes),
            end_of_stream: body.end_of_stream,
            ..Default::default()
        }))
    } else {
        rewrite.then(|| Mutation::Body(Bytes::from(bytes)))
    };
    BodyResponse {
        response: Some(CommonResponse {
            header_mutation,
            body_mutation: mutation.map(|m| BodyMutation { mutation: Some(m) }),
            ..Default::default()
        }),
    }
}

fn streamed(bytes: Vec<u8>, end_of_stream: bool) -> Step {
    let body = HttpBody { body: bytes.into(), end_of_stream, ..Default::default() };
    Step::Answer(Box::new(reply(Reply::ResponseBody(body_response(&body, "duplex", "")))))
}

fn block() -> Reply {
    Reply::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: 403 }),
        body: Bytes::from_static(b"{\"error\":{\"code\":\"policy_denied\"}}"),
        details: "fault_block".into(),
        ..Default::default()
    })
}

fn reply(reply: Reply) -> ProcessingResponse {
    ProcessingResponse { response: Some(reply), ..Default::default() }
}
