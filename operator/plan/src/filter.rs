//! The ext_proc filter: what it sends, how long it waits, and what happens when nobody answers.

use sallyport_api::{AgentPolicySpec, FailurePolicy, Mode};
use serde_json::{Value, json};

use crate::cluster::EXTPROC;
use crate::extension;
use crate::http::Manager;
use crate::settings::Settings;

/// The ext_proc filter of one listener.
pub(crate) fn ext_proc(spec: &AgentPolicySpec, settings: &Settings, m: &Manager<'_>) -> Value {
    // The filter's process learns by gRPC metadata on which listener a call came in. A client can't write
    // these, unlike headers.
    let mut metadata = vec![json!({"key": "sallyport-listener", "value": m.name})];
    if let Some(upstream) = m.upstream {
        metadata.push(json!({"key": "sallyport-upstream", "value": upstream.url()}));
    }
    if let Some(inside) = m.inside.metadata() {
        metadata.push(json!({"key": "sallyport-tls", "value": inside}));
    }
    // Each attribute costs a little per call: these two tie a receipt to a log line and a client.
    let mut attributes = vec!["request.id".to_owned(), "source.address".to_owned()];
    attributes.extend(m.inside.attributes());
    if m.captured {
        metadata.push(json!({"key": "sallyport-captured", "value": "true"}));
        // Where the agent connected to: the host it names must have that address.
        attributes.push("destination.address".to_owned());
    }
    let timeout = settings.message_timeout.max(Settings::LEAST_MESSAGE_TIMEOUT);
    extension(
        "envoy.filters.http.ext_proc",
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        json!({
            "grpc_service": {
                "envoy_grpc": {"cluster_name": EXTPROC},
                // No deadline for the stream: it lives as long as the call, and an LLM's answer takes
                // minutes. Each message has its own below.
                "timeout": "0s",
                "initial_metadata": metadata,
            },
            // Observe promises that not a status changes, and that includes the filter's own death.
            "failure_mode_allow": spec.failure_policy == FailurePolicy::Open || spec.mode == Mode::Observe,
            // 503 says "try again", which is what a caller should do while the filter restarts. A message
            // timeout stays 504 whatever stands here.
            "status_on_error": {"code": 503},
            "message_timeout": format!("{}.{:03}s", timeout.as_secs(), timeout.subsec_millis()),
            // Bodies NONE, and the process asks for more per message. The other way round (BUFFERED, and
            // an override to NONE) races against the buffer limit.
            "processing_mode": {
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": "NONE",
                "response_body_mode": "NONE",
                "request_trailer_mode": "SKIP",
                "response_trailer_mode": "SKIP",
            },
            "allow_mode_override": true,
            // The process sets `accept-encoding` and `content-length`, which the default rules allow. What
            // they forbid (host, method, x-envoy-*) it never touches; if it did, an ignored mutation would
            // be a redaction that did not happen, so that is an error.
            "mutation_rules": {"disallow_is_error": true},
            // The verdict, for the access log.
            "metadata_options": {"receiving_namespaces": {"untyped": ["sallyport"]}},
            "request_attributes": attributes,
        }),
    )
}
