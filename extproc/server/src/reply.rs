//! Answers to Envoy.

use std::net::SocketAddr;

use bytes::Bytes;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use sallyport_engine::{Code, Decision, Protocol, RequestHead, Verdict, error_body};
use sallyport_proto::ext_proc::{
    BodyMutation, BodyResponse, BodySendMode, CommonResponse, GrpcStatus, HeaderAppendAction, HeaderMutation,
    HeaderSendMode, HeaderValue, HeaderValueOption, HeadersResponse, HttpStatus, ImmediateResponse, Mutation,
    ProcessingMode, ProcessingResponse, Reply, StreamedBodyResponse, TrailersResponse,
};

use crate::observer::{self, Direction};

/// The namespace of our dynamic metadata, for the access log: `%DYNAMIC_METADATA(sallyport:code)%`.
pub const METADATA_NAMESPACE: &str = "sallyport";
/// The address that a captured call goes to, in our metadata: Envoy's cluster reads it there.
pub const DESTINATION: &str = "destination";
/// The header on every refusal.
pub const DECISION_HEADER: &str = "x-sallyport-decision";

/// gRPC's PERMISSION_DENIED.
const PERMISSION_DENIED: u32 = 7;

/// Headers that describe a body's bytes, and are wrong once the bytes are others.
const BODY_DESCRIPTIONS: [&str; 6] =
    ["content-encoding", "content-digest", "repr-digest", "digest", "content-md5", "etag"];

/// Sets a header, replacing what stands there.
pub(crate) fn set(key: &str, value: impl Into<Bytes>) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue { key: key.to_owned(), raw_value: value.into(), ..HeaderValue::default() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

/// How Envoy is to send the rest of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Send {
    /// The whole body in one message, then the trailers.
    Whole(Direction),
    /// The body in chunks that wait for their answers one by one; for looking on.
    Chunks(Direction),
    /// The response's body in chunks that we forward when we see fit.
    Stream,
}

impl From<Send> for ProcessingMode {
    fn from(send: Send) -> Self {
        let trailers = HeaderSendMode::Send.into();
        // A field left at its default would mean NONE or SKIP for what is still to come.
        let mut mode = Self { response_header_mode: HeaderSendMode::Send.into(), ..Self::default() };
        match send {
            Send::Whole(Direction::Request) => {
                mode.request_body_mode = BodySendMode::Buffered.into();
                mode.request_trailer_mode = trailers;
            }
            Send::Chunks(Direction::Request) => {
                mode.request_body_mode = BodySendMode::Streamed.into();
                mode.request_trailer_mode = trailers;
            }
            Send::Whole(Direction::Response) => {
                mode.response_body_mode = BodySendMode::Buffered.into();
                mode.response_trailer_mode = trailers;
            }
            Send::Chunks(Direction::Response) => {
                mode.response_body_mode = BodySendMode::Streamed.into();
                mode.response_trailer_mode = trailers;
            }
            Send::Stream => {
                mode.response_body_mode = BodySendMode::FullDuplexStreamed.into();
                mode.response_trailer_mode = trailers;
            }
        }
        mode
    }
}

/// Answers a header message.
pub(crate) fn headers(
    direction: Direction,
    set_headers: Vec<HeaderValueOption>,
    remove: &[&str],
    send: Option<Send>,
) -> ProcessingResponse {
    let response = HeadersResponse {
        response: (!set_headers.is_empty() || !remove.is_empty()).then(|| CommonResponse {
            header_mutation: Some(HeaderMutation {
                set_headers,
                remove_headers: remove.iter().map(|&h| h.to_owned()).collect(),
            }),
            ..CommonResponse::default()
        }),
    };
    ProcessingResponse {
        response: Some(match direction {
            Direction::Request => Reply::RequestHeaders(response),
            Direction::Response => Reply::ResponseHeaders(response),
        }),
        mode_override: send.map(ProcessingMode::from),
        ..ProcessingResponse::default()
    }
}

fn body(direction: Direction, response: Option<CommonResponse>) -> ProcessingResponse {
    let response = BodyResponse { response };
    ProcessingResponse {
        response: Some(match direction {
            Direction::Request => Reply::RequestBody(response),
            Direction::Response => Reply::ResponseBody(response),
        }),
        ..ProcessingResponse::default()
    }
}

/// Lets a body message pass as it came.
pub(crate) fn body_unchanged(direction: Direction) -> ProcessingResponse {
    body(direction, None)
}

/// Forwards other bytes instead of a whole body, and makes the headers true again. Envoy compares
/// `content-length` with the new body and answers 500 where they differ; a message that had none (chunked)
/// must not get one, or it would carry two framings.
pub(crate) fn body_replaced(direction: Direction, bytes: Vec<u8>, had_length: bool) -> ProcessingResponse {
    let length = had_length.then(|| set("content-length", bytes.len().to_string()));
    body(
        direction,
        Some(CommonResponse {
            header_mutation: Some(HeaderMutation {
                set_headers: length.into_iter().collect(),
                remove_headers: BODY_DESCRIPTIONS.iter().map(|&h| h.to_owned()).collect(),
            }),
            body_mutation: Some(BodyMutation { mutation: Some(Mutation::Body(bytes.into())) }),
            ..CommonResponse::default()
        }),
    )
}

/// Forwards bytes of a response whose chunks we forward when we see fit.
pub(crate) fn streamed(bytes: Bytes, end_of_stream: bool) -> ProcessingResponse {
    let mutation = Mutation::StreamedResponse(StreamedBodyResponse {
        body: bytes,
        end_of_stream,
        ..StreamedBodyResponse::default()
    });
    body(
        Direction::Response,
        Some(CommonResponse {
            body_mutation: Some(BodyMutation { mutation: Some(mutation) }),
            ..CommonResponse::default()
        }),
    )
}

/// Lets trailers pass as they came.
pub(crate) fn trailers(direction: Direction) -> ProcessingResponse {
    let response = TrailersResponse::default();
    ProcessingResponse {
        response: Some(match direction {
            Direction::Request => Reply::RequestTrailers(response),
            Direction::Response => Reply::ResponseTrailers(response),
        }),
        ..ProcessingResponse::default()
    }
}

/// Refuses a message with an answer of our own. `call` is what the request's body turned out to be: an MCP
/// client waits for a JSON-RPC answer to its id, and reads an HTTP error as a broken transport.
pub(crate) fn refuse(
    verdict: &Verdict,
    request: &RequestHead,
    request_id: &str,
    call: &Protocol,
) -> ProcessingResponse {
    let code = observer::code(verdict).unwrap_or(Code::Internal);
    let status = match call {
        Protocol::Mcp { id: Some(_) } => 200,
        _ => code.http_status(),
    };
    let grpc = request.header("content-type").is_some_and(|t| t.starts_with("application/grpc"));
    let response = ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(status) }),
        headers: Some(HeaderMutation {
            set_headers: vec![
                set("content-type", &b"application/json"[..]),
                set(DECISION_HEADER, verdict.decision.as_str().as_bytes()),
            ],
            ..HeaderMutation::default()
        }),
        body: error_body(verdict, request_id, call).into(),
        grpc_status: grpc.then_some(GrpcStatus { status: PERMISSION_DENIED }),
        details: format!("sallyport_{}", code.as_str()),
    };
    ProcessingResponse {
        response: Some(Reply::ImmediateResponse(response)),
        dynamic_metadata: metadata(verdict, true),
        ..ProcessingResponse::default()
    }
}

/// Tells Envoy which address to dial, whatever the request or the connection says.
pub(crate) fn dial(response: &mut ProcessingResponse, address: SocketAddr) {
    let ours = response.dynamic_metadata.get_or_insert_default();
    let ours = ours.fields.entry(METADATA_NAMESPACE.to_owned()).or_default();
    let address = Value { kind: Some(Kind::StringValue(address.to_string())) };
    match &mut ours.kind {
        Some(Kind::StructValue(fields)) => drop(fields.fields.insert(DESTINATION.to_owned(), address)),
        kind => {
            let fields = [(DESTINATION.to_owned(), address)].into();
            *kind = Some(Kind::StructValue(Struct { fields }));
        }
    }
}

/// What the access log is told; nothing where there is nothing to tell, which is nearly always.
pub(crate) fn metadata(verdict: &Verdict, enforced: bool) -> Option<Struct> {
    if verdict.decision == Decision::Allow {
        return None;
    }
    let string = |s: &str| Value { kind: Some(Kind::StringValue(s.to_owned())) };
    let fields = [
        ("decision", string(verdict.decision.as_str())),
        ("code", string(observer::code(verdict).map_or("", Code::as_str))),
        ("rules", string(&observer::rules(verdict).join(","))),
        ("enforced", Value { kind: Some(Kind::BoolValue(enforced)) }),
        ("score", Value { kind: Some(Kind::NumberValue(f64::from(verdict.score))) }),
    ];
    let fields = fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
    let ours = Value { kind: Some(Kind::StructValue(Struct { fields })) };
    Some(Struct { fields: [(METADATA_NAMESPACE.to_owned(), ours)].into() })
}
