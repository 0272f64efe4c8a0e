//! The bodies of what Envoy answers itself.
//!
//! A refused client reads one shape of error, whoever refused it. The filter's own refusals already have
//! it, and pass through the same mappers; what tells them apart is their `details`, which always begin
//! with `sallyport_`. So no mapper goes by status alone. The first that matches is used.

use serde_json::{Value, json};

use crate::extension;

/// Error codes of Envoy's own answers. Public API, like the engine's.
pub mod codes {
    /// The filter's process could not be asked, or did not answer in time.
    pub const FILTER_UNAVAILABLE: &str = "filter_unavailable";
    /// A body larger than Envoy may hold for inspection.
    pub const BODY_TOO_LARGE: &str = "body_too_large";
    /// The upstream could not be reached, or ended before an answer.
    pub const UPSTREAM_UNAVAILABLE: &str = "upstream_unavailable";
    /// The upstream's certificate is not one of its name, or of no authority that is trusted.
    pub const UPSTREAM_UNTRUSTED: &str = "upstream_untrusted";
    /// A tunnel or an upgrade, whose bytes could not be inspected.
    pub const TUNNEL_DENIED: &str = "tunnel_denied";
    /// A destination that leads back to the sidecar itself, or to an address that no call may go to.
    pub const EGRESS_DENIED: &str = "egress_denied";
    /// A message that Envoy could not read, or that did not end in time.
    pub const PROTOCOL_ERROR: &str = "protocol_error";
}

/// The `local_reply_config` of every connection manager.
pub(crate) fn local_reply() -> Value {
    json!({"mappers": [
        mapper(
            &details("response.code_details.startsWith('ext_proc_error')"),
            codes::FILTER_UNAVAILABLE,
            "the filter did not answer, so the call was refused (failurePolicy: Closed)",
        ),
        mapper(
            &details(
                "response.code_details == 'request_payload_too_large' || \
                 response.code_details == 'response_payload_too_large'",
            ),
            codes::BODY_TOO_LARGE,
            "the body is larger than spec.limits.maxBodyBytes of the AgentPolicy",
        ),
        mapper(
            &details("response.code_details == 'upgrade_failed' || response.code_details == 'direct_response'"),
            codes::TUNNEL_DENIED,
            "a tunnel or an upgrade can't be inspected, so none is opened; send plain http requests",
        ),
        mapper(
            &details("response.code_details.startsWith('rbac_access_denied')"),
            codes::EGRESS_DENIED,
            // Both policies of the address guard: Envoy names in the details the one that matched, as `reason`.
            "the destination is the sidecar itself, or an address that no call may go to, such as a link-local one",
        ),
        mapper(
            &details("response.code_details.contains('CERTIFICATE_VERIFY_FAILED')"),
            codes::UPSTREAM_UNTRUSTED,
            "the upstream's certificate is for another name, has expired, or comes from no trusted authority",
        ),
        mapper(
            &json!({"response_flag_filter": {"flags": [
                "UF", "UH", "UO", "UC", "UT", "UR", "LR", "URX", "UPE", "NR", "NC", "DF", "DO",
            ]}}),
            codes::UPSTREAM_UNAVAILABLE,
            "the upstream could not be reached, or ended the connection before it answered",
        ),
        mapper(
            &json!({"response_flag_filter": {"flags": ["DPE", "SI", "DT", "DC"]}}),
            codes::PROTOCOL_ERROR,
            "the request can't be read, or did not end in time",
        ),
        // What else Envoy says when it can't use an answer of the filter (out of order, a wrong length, a
        // forbidden header) has a text of its own for every case.
        mapper(
            &details("response.code >= 500 && !response.code_details.startsWith('sallyport_')"),
            codes::FILTER_UNAVAILABLE,
            "the filter's answer could not be used, so the call was refused",
        ),
    ]})
}

fn details(expression: &str) -> Value {
    json!({"extension_filter": extension(
        "envoy.access_loggers.extension_filters.cel",
        "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter",
        json!({"expression": expression}),
    )})
}

fn mapper(filter: &Value, code: &str, message: &str) -> Value {
    json!({
        "filter": filter,
        "body_format_override": {"json_format": {"error": {
            "code": code,
            "decision": "block",
            "rules": [],
            "policies": [],
            "reason": "%RESPONSE_CODE_DETAILS%",
            "request_id": "%REQ(X-REQUEST-ID)%",
            "message": message,
        }}},
    })
}
