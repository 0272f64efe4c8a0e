//! The access log: one JSON object per call.

use serde_json::{Value, json};

use crate::settings::{AccessLog, Settings};
use crate::{extension, path};

/// The `access_log` of a connection manager.
pub(crate) fn access_log(settings: &Settings) -> Value {
    let format = json!({"json_format": {
        "time": "%START_TIME%",
        "listener": "%FILTER_CHAIN_NAME%",
        "request_id": "%REQ(X-REQUEST-ID)%",
        "method": "%REQ(:METHOD)%",
        "authority": "%REQ(:AUTHORITY)%",
        // Without the query: it is where keys and addresses of people end up.
        "path": "%PATH(NQ:PATH):512%",
        "protocol": "%PROTOCOL%",
        "status": "%RESPONSE_CODE%",
        // `details` and `flags` together say who answered: the upstream, the filter or Envoy itself.
        "details": "%RESPONSE_CODE_DETAILS%",
        "flags": "%RESPONSE_FLAGS%",
        "upstream": "%UPSTREAM_HOST%",
        "bytes_in": "%BYTES_RECEIVED%",
        "bytes_out": "%BYTES_SENT%",
        "millis": "%DURATION%",
        // The filter's verdict: decision, rules, score.
        "sallyport": "%DYNAMIC_METADATA(sallyport)%",
        // Per message: microseconds and gRPC status. Status 10 marks a message that was never answered,
        // the sign of a stream that ended without a verdict.
        "extproc": "%FILTER_STATE(envoy.filters.http.ext_proc:PLAIN)%",
    }});
    match &settings.access_log {
        AccessLog::Off => json!([]),
        AccessLog::Stdout => json!([extension(
            "envoy.access_loggers.stdout",
            "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            json!({"log_format": format}),
        )]),
        AccessLog::File(file) => json!([extension(
            "envoy.access_loggers.file",
            "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            json!({"path": path(file), "log_format": format}),
        )]),
    }
}
