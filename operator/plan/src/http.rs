//! HTTP on both sides: the connection manager and the upstream protocol options.

use sallyport_api::{AgentPolicySpec, Mode};
use serde_json::{Value, json};

use crate::access_log::access_log;
use crate::extension;
use crate::filter::ext_proc;
use crate::local_reply::local_reply;
use crate::settings::{Scheme, Settings, Upstream};
use crate::tls::{Inside, connect_state};

/// What differs between the connection managers of two listeners.
pub(crate) struct Manager<'a> {
    /// The listener's name, also of its statistics.
    pub name: &'a str,
    /// The upstream that the listener stands for, if it stands for one.
    pub upstream: Option<&'a Upstream>,
    /// Routes, in order.
    pub routes: Value,
    /// The filter that resolves the host that a request names, where nobody else does.
    pub resolving: Option<Value>,
    /// What its requests come through.
    pub inside: Inside,
    /// The connections are captured: they carry the address that the agent connected to.
    pub captured: bool,
    /// Filters towards the upstream, where its cluster has none of its own.
    pub upstream_filters: Vec<Value>,
    /// Upgrades that are let as far as the filter and the routes.
    pub upgrades: Value,
}

/// A connection manager with the filter in it.
pub(crate) fn manager(spec: &AgentPolicySpec, settings: &Settings, buffer: u32, m: Manager<'_>) -> Value {
    let mut filters = Vec::new();
    // A body that outgrows the buffer while the filter still judges the headers stops Envoy's reading, and
    // a filter that then asks for the whole body waits for what is never read. So the size is bounded
    // before it gets there. Observe holds no bodies, and must not refuse any.
    if spec.mode == Mode::Enforce {
        filters.push(extension(
            "envoy.filters.http.body_size_limit",
            "envoy.extensions.filters.http.body_size_limit.v3.BodySizeLimit",
            json!({"max_request_bytes": buffer}),
        ));
    }
    if m.inside == Inside::Proxy {
        filters.push(connect_state());
    }
    filters.push(ext_proc(spec, settings, &m));
    // A host is resolved once it was let pass: the question alone may carry what must not leave. But a filter
    // that stops everything behind ours loses the part of a streamed body that we still have when it goes on:
    // Envoy 1.40 takes the client's end for the end. Observe streams bodies, and refuses no name anyway.
    match (m.resolving, spec.mode) {
        (Some(filter), Mode::Observe) => filters.insert(0, filter),
        (filter, _) => filters.extend(filter),
    }
    // No x-envoy-* header towards the upstream or the agent.
    let mut router = json!({"suppress_envoy_headers": true});
    if !m.upstream_filters.is_empty() {
        router["upstream_http_filters"] = m.upstream_filters.into();
    }
    filters.push(extension(
        "envoy.filters.http.router",
        "envoy.extensions.filters.http.router.v3.Router",
        router,
    ));
    let mut manager = json!({
            "stat_prefix": m.name,
            "codec_type": "AUTO",
            "access_log": access_log(settings),
            "http_filters": filters,
            "route_config": {
                "name": m.name,
                "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": m.routes}],
                // What Envoy notes for its own use; the upstream learns nothing of the pod from us.
                "request_headers_to_remove": [
                    "x-forwarded-proto", "x-envoy-external-address", "x-envoy-internal",
                ],
            },
            "local_reply_config": local_reply(),
            "http_protocol_options": {"enable_trailers": true},
            "http2_protocol_options": {
                // A stream's window is also the limit of its held body, so it must admit the cap.
                "initial_stream_window_size": buffer.max(H2_LEAST_WINDOW),
                "initial_connection_window_size": buffer.max(H2_LEAST_WINDOW),
                "max_concurrent_streams": 100,
            },
            "upgrade_configs": m.upgrades,
            // The filter must see the path that is forwarded, and the policy's patterns must not be
            // dodged by `/a/../b`. Normalising happens before the filter, so both see the same. Slashes
            // are neither merged nor unescaped: to an upstream `//` and `%2F` may be another resource.
            "normalize_path": true,
            "merge_slashes": false,
            "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
            // The id ties receipt, access log and error body together, so the agent may not choose it.
            // Envoy replaces a given id only for clients it holds for external; with no range declared
            // internal, all are.
            "generate_request_id": true,
            "preserve_external_request_id": false,
            "use_remote_address": true,
            "internal_address_config": {"unix_sockets": false, "cidr_ranges": [
                {"address_prefix": "192.0.2.255", "prefix_len": 32},
            ]},
            "skip_xff_append": true,
            "server_header_transformation": "PASS_THROUGH",
            // Nothing else ends a stream whose filter hangs in full duplex, where no message timeout
            // holds. Longer than any pause of a model that thinks.
            "stream_idle_timeout": "300s",
            // A client that trickles its headers holds a connection for no call at all.
            "request_headers_timeout": "10s",
            // After a reply that ends the connection, don't wait a second for the client: a cut stream
            // would be seen as cut a second late.
            "delayed_close_timeout": "0s",
    });
    if m.inside == Inside::Proxy {
        // Python before 3.12 asks for a tunnel by HTTP/1.0, and with it `requests` and pip.
        manager["http_protocol_options"]["accept_http_10"] = json!(true);
    }
    if m.inside.is_tls() {
        // A client writes what it likes here (`:scheme` over HTTP/2, a URL in absolute form), and what goes out
        // as TLS to port 443 would be judged as clear HTTP to port 80.
        manager["scheme_header_transformation"] = json!({"scheme_to_overwrite": "https"});
    }
    extension(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        manager,
    )
}

/// The least window HTTP/2 allows Envoy to announce.
const H2_LEAST_WINDOW: u32 = 65_535;

/// Protocol towards an upstream. In clear, what the client speaks is spoken on, so that gRPC works; over
/// TLS, ALPN decides.
pub(crate) fn upstream_http(scheme: Option<Scheme>, buffer: u32) -> Value {
    let http1 = json!({"enable_trailers": true});
    let http2 = json!({
        "initial_stream_window_size": buffer.max(H2_LEAST_WINDOW),
        "initial_connection_window_size": buffer.max(H2_LEAST_WINDOW),
    });
    let protocols = json!({"http_protocol_options": http1, "http2_protocol_options": http2});
    match scheme {
        Some(Scheme::Https) => json!({"auto_config": protocols}),
        Some(Scheme::Http) | None => json!({"use_downstream_protocol_config": protocols}),
    }
}
