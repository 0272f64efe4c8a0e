//! Protobuf code for the protocol that Envoy speaks with the filter, vendored.
//!
//! Generated, checked in, and trimmed to what ext_proc needs, because a crate of all of Envoy's messages
//! takes longer to compile than the rest of the product. `regen.sh` makes it anew; `regen.sh --check` tells
//! whether what is checked in is stale. Bodies and header values are [`bytes::Bytes`]: they pass from the
//! frame they came in to the frame they leave in without a copy.

#[rustfmt::skip]
#[allow(clippy::all, clippy::pedantic, dead_code, missing_docs, rust_2018_idioms, unreachable_pub)]
#[path = "generated/mod.rs"]
mod generated;

/// The ext_proc service and its messages.
pub mod ext_proc {
    pub use crate::generated::envoy::config::core::v3::header_value_option::HeaderAppendAction;
    pub use crate::generated::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption};
    pub use crate::generated::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
    pub use crate::generated::envoy::extensions::filters::http::ext_proc::v3::processing_mode::{
        BodySendMode, HeaderSendMode,
    };
    pub use crate::generated::envoy::service::ext_proc::v3::body_mutation::Mutation;
    pub use crate::generated::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
    pub use crate::generated::envoy::service::ext_proc::v3::external_processor_server::{
        ExternalProcessor, ExternalProcessorServer,
    };
    pub use crate::generated::envoy::service::ext_proc::v3::processing_request::Request as Message;
    pub use crate::generated::envoy::service::ext_proc::v3::processing_response::Response as Reply;
    pub use crate::generated::envoy::service::ext_proc::v3::{
        BodyMutation, BodyResponse, CommonResponse, GrpcStatus, HeaderMutation, HeadersResponse, HttpBody,
        HttpHeaders, HttpTrailers, ImmediateResponse, ProcessingRequest, ProcessingResponse,
        ProtocolConfiguration, StreamedBodyResponse, TrailersResponse,
    };
    pub use crate::generated::envoy::r#type::v3::HttpStatus;
}
