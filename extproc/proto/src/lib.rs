//! Protobuf code for the protocols that Envoy speaks with the filter and the filter with the operator,
//! vendored.
//!
//! Generated, checked in, and trimmed to what ext_proc and secrets need, because a crate of all of Envoy's messages
//! takes longer to compile than the rest of the product. `regen.sh` makes it anew; `regen.sh --check` tells
//! whether what is checked in is stale. Bodies and header values are [`bytes::Bytes`]: they pass from the
//! frame they came in to the frame they leave in without a copy.

mod codec;

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

/// Secrets: how Envoy gets certificates, over delta ADS.
pub mod secrets {
    pub use crate::generated::envoy::config::core::v3::DataSource;
    pub use crate::generated::envoy::config::core::v3::data_source::Specifier;
    pub use crate::generated::envoy::extensions::transport_sockets::tls::v3::secret::Type;
    pub use crate::generated::envoy::extensions::transport_sockets::tls::v3::{Secret, TlsCertificate};
    pub use crate::generated::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
    pub use crate::generated::envoy::service::discovery::v3::aggregated_discovery_service_server::{
        AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
    };
    pub use crate::generated::envoy::service::discovery::v3::{
        DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
    };

    /// The type of the only resources that are served.
    pub const SECRET_TYPE: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";
}

/// Discovery: how a sidecar gets its bundle from the operator.
pub mod discovery {
    use std::fmt::Write as _;

    use bytes::{BufMut as _, Bytes, BytesMut};
    use prost::Message as _;
    use sha2::{Digest as _, Sha256};
    use tonic::Streaming;
    use tonic::codec::Codec as _;
    use tonic::codegen::{Body, StdError};

    use crate::codec::Resting;

    pub use crate::generated::sallyport::discovery::v1alpha1::discovery_client::DiscoveryClient;
    pub use crate::generated::sallyport::discovery::v1alpha1::discovery_server::{
        Discovery, DiscoveryServer,
    };
    pub use crate::generated::sallyport::discovery::v1alpha1::subscribe_request::Kind as Request;
    pub use crate::generated::sallyport::discovery::v1alpha1::subscribe_response::Kind as Response;
    pub use crate::generated::sallyport::discovery::v1alpha1::{
        Ack, Bundle, Hello, Kill, Nack, Part, PolicyRef, SubscribeRequest, SubscribeResponse,
    };

    /// The bundle schema that this build writes, and the newest it reads.
    pub const SCHEMA: u32 = 1;
    /// Name of the part that holds the policy's spec as JSON.
    pub const POLICY_PART: &str = "policy";
    /// Name of the part that holds Envoy's configuration: an object with `bootstrap` and `listeners`.
    pub const ENVOY_PART: &str = "envoy";

    /// Where sidecars subscribe, for a server that answers with [`framed`] messages of its own.
    pub const SUBSCRIBE_PATH: &str = "/sallyport.discovery.v1alpha1.Discovery/Subscribe";

    /// What a sidecar says in its request's body. A message above `longest` bytes is an error.
    pub fn requests<B>(body: B, longest: usize) -> Streaming<SubscribeRequest>
    where
        B: Body + Send + 'static,
        B::Error: Into<StdError>,
    {
        let decoder = Resting::<SubscribeResponse, SubscribeRequest>::default().decoder();
        Streaming::new_request(decoder, body, None, Some(longest))
    }

    /// An answer as it goes on the wire: not compressed, its length, itself. Clones share the memory, so one
    /// does for every stream that is sent the same.
    pub fn framed(response: &SubscribeResponse) -> Bytes {
        let length = response.encoded_len();
        let mut frame = BytesMut::with_capacity(5 + length);
        frame.put_u8(0);
        // A bundle is some 25 KiB; what a policy may hold keeps it far below 4 GiB.
        frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
        // Fails only where there is no room, and there is: a BytesMut grows.
        let _ = response.encode(&mut frame);
        frame.freeze()
    }

    /// A part's digest.
    pub fn part_digest(content: &[u8]) -> String {
        hex(&Sha256::digest(content))
    }

    /// A bundle's digest: of its schema, its parts' names and digests, and the kill switch. Not of the
    /// policy's name and generation, which change nothing about what is enforced.
    pub fn bundle_digest(bundle: &Bundle) -> String {
        let mut parts: Vec<_> = bundle.parts.iter().map(|p| (&p.name, &p.digest)).collect();
        parts.sort();
        let mut hash = Sha256::new();
        hash.update(bundle.schema.to_be_bytes());
        for (name, digest) in parts {
            for text in [name, digest] {
                hash.update((text.len() as u64).to_be_bytes());
                hash.update(text);
            }
        }
        hash.update([u8::from(bundle.kill.is_some())]);
        hex(&hash.finalize())
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, b| {
            let _ = write!(text, "{b:02x}");
            text
        })
    }
}
