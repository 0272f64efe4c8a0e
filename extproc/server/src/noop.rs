//! An ext_proc server that decides nothing: the baseline of benchmarks, never of a deployment.
//!
//! It asks Envoy for the same messages as the real one and answers each of them, so that what is left
//! between the two is the inspection.

use std::future::Future;
use std::io;
use std::path::Path;

use futures_util::StreamExt;
use sallyport_proto::ext_proc::{
    ExternalProcessor, ExternalProcessorServer, HttpBody, Message, ProcessingRequest, ProcessingResponse,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, Streaming};

use crate::head;
use crate::observer::Direction;
use crate::reply::{self, Send};
use crate::stream::Answers;

/// Serves on `socket` until `shutdown` comes back.
pub async fn serve_noop(socket: &Path, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let (listener, _file) = crate::socket::bind(socket)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    tonic::transport::Server::builder()
        .add_service(ExternalProcessorServer::new(Noop).max_decoding_message_size(usize::MAX))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown)
        .await
        .map_err(io::Error::other)
}

struct Noop;

#[tonic::async_trait]
impl ExternalProcessor for Noop {
    type ProcessStream = Answers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let mut streamed = false;
        let answers = request.into_inner().map(move |message| answer(message?, &mut streamed));
        Ok(Response::new(Box::pin(answers)))
    }
}

fn answer(message: ProcessingRequest, streamed: &mut bool) -> Result<ProcessingResponse, Status> {
    let (request, response) = (Direction::Request, Direction::Response);
    Ok(match message.request {
        Some(Message::RequestHeaders(m)) => {
            let identity = vec![reply::set("accept-encoding", &b"identity"[..])];
            reply::headers(request, identity, &[], (!m.end_of_stream).then_some(Send::Whole(request)))
        }
        Some(Message::ResponseHeaders(m)) if m.end_of_stream => reply::headers(response, vec![], &[], None),
        Some(Message::ResponseHeaders(m)) => {
            *streamed = head::content_length(&head::response(m.headers).headers).is_none();
            if *streamed {
                reply::headers(response, vec![], &["content-length"], Some(Send::Stream))
            } else {
                reply::headers(response, vec![], &[], Some(Send::Whole(response)))
            }
        }
        Some(Message::RequestBody(_)) => reply::body_unchanged(request),
        Some(Message::ResponseBody(HttpBody { body, end_of_stream, .. })) if *streamed => {
            reply::streamed(body, end_of_stream)
        }
        Some(Message::ResponseBody(_)) => reply::body_unchanged(response),
        Some(Message::RequestTrailers(_)) => reply::trailers(request),
        Some(Message::ResponseTrailers(_)) => reply::trailers(response),
        None => return Err(Status::invalid_argument("a message of an unknown kind")),
    })
}
