//! TLS that is opened for inspection: what the agent's connections meet, and how upstreams are met.
//!
//! A connection's first message names the server (SNI). Envoy asks the filter's process for a certificate of
//! that name, over delta ADS on the socket it uses for ext_proc, and ends the handshake where it gets none.
//! What comes out of the connection is HTTP, and goes through the same filter as clear HTTP does. Towards
//! the upstream the host that was judged is also the name that its certificate must carry.
//!
//! Not guaranteed here: that the server's name and the request's host are the same. The filter's process
//! compares them, from the attributes below.

use sallyport_api::AgentPolicySpec;
use serde_json::{Value, json};

use crate::cluster::{EXTPROC, by_name, endpoints, set_protocols};
use crate::http::upstream_http;
use crate::settings::{Scheme, Settings};
use crate::{extension, path};

/// Name of the listener inside Envoy, and of the cluster in front of it, to which the bytes of CONNECT go.
pub(crate) const TUNNEL: &str = "tunnel";
/// Name of the cluster that takes its address from the request and speaks TLS to it.
pub(crate) const BY_NAME_TLS: &str = "by_name_tls";
/// The name that is asked for where the client named no server: no host is called so, and none is minted.
pub const NO_SERVER_NAME: &str = "-";
/// Under this name a tunnel's destination goes with its connection into the inner listener.
const CONNECT_STATE: &str = "sallyport.connect";

/// What a connection manager's requests come through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inside {
    /// Clear HTTP; CONNECT is refused.
    Clear,
    /// Clear HTTP, and CONNECT leads into [`Inside::Tunnel`].
    Proxy,
    /// TLS inside a tunnel that a client opened by CONNECT.
    Tunnel,
}

impl Inside {
    /// The value of the stream's metadata `sallyport-tls`; a client can't write it.
    pub(crate) const fn metadata(self) -> Option<&'static str> {
        match self {
            Self::Clear => None,
            Self::Proxy => Some("connect"),
            Self::Tunnel => Some("tunnel"),
        }
    }

    /// Whether what comes through was TLS.
    pub(crate) const fn is_tls(self) -> bool {
        matches!(self, Self::Tunnel)
    }

    /// What the filter's process must know beside the request, to see that both name the same server.
    pub(crate) fn attributes(self) -> Vec<String> {
        match self {
            Self::Clear | Self::Proxy => vec![],
            Self::Tunnel => {
                vec!["connection.requested_server_name".into(), format!("filter_state['{CONNECT_STATE}']")]
            }
        }
    }
}

/// The route by which CONNECT gets into [`TUNNEL`].
pub(crate) fn connect_route() -> Value {
    json!({
        "match": {"connect_matcher": {}},
        "route": {
            "cluster": TUNNEL,
            "timeout": "0s",
            "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}],
        },
        "typed_per_filter_config": {
            // The tunnel's bytes are judged when they come out of it.
            "envoy.filters.http.ext_proc": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
                "overrides": {"processing_mode": {
                    "request_header_mode": "SEND",
                    "response_header_mode": "SKIP",
                    "request_body_mode": "NONE",
                    "response_body_mode": "NONE",
                    "request_trailer_mode": "SKIP",
                    "response_trailer_mode": "SKIP",
                }},
            },
            // A tunnel may carry any number of requests; each is bounded inside.
            "envoy.filters.http.body_size_limit": {
                "@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig",
                "disabled": true,
                "config": {},
            },
            "envoy.filters.http.set_filter_state": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_filter_state.v3.Config",
                "on_request_headers": [{
                    "object_key": CONNECT_STATE,
                    // Hashable, so that a connection made for one destination never serves another.
                    "factory_key": "envoy.hashable_string",
                    "format_string": {"text_format_source": {"inline_string": "%REQ(:AUTHORITY)%"}},
                    "shared_with_upstream": "ONCE",
                }],
            },
        },
    })
}

/// The filter that [`connect_route`] configures; it does nothing on other routes.
pub(crate) fn connect_state() -> Value {
    extension(
        "envoy.filters.http.set_filter_state",
        "envoy.extensions.filters.http.set_filter_state.v3.Config",
        json!({}),
    )
}

/// The cluster in front of the inner listener.
pub(crate) fn tunnel_cluster(settings: &Settings) -> Value {
    let address = json!({"envoy_internal_address": {"server_listener_name": TUNNEL, "endpoint_id": TUNNEL}});
    json!({
        "name": TUNNEL,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": endpoints(TUNNEL, &address),
        "transport_socket": extension(
            "envoy.transport_sockets.internal_upstream",
            "envoy.extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport",
            json!({"transport_socket": extension(
                "envoy.transport_sockets.raw_buffer",
                "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer",
                json!({}),
            )}),
        ),
        "circuit_breakers": crate::cluster::breakers(settings),
    })
}

/// The listener inside Envoy. It has one chain, for TLS: what is none is closed.
pub(crate) fn tunnel_listener(manager: &Value, buffer: u32) -> Value {
    json!({
        "name": TUNNEL,
        "internal_listener": {},
        "per_connection_buffer_limit_bytes": buffer,
        "listener_filters": [inspector()],
        "listener_filters_timeout": "15s",
        "continue_on_listener_filters_timeout": false,
        "filter_chains": [chain(TUNNEL, manager)],
    })
}

/// What finds out whether a connection speaks TLS, and to whom.
pub(crate) fn inspector() -> Value {
    extension(
        "envoy.filters.listener.tls_inspector",
        "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector",
        json!({}),
    )
}

/// A filter chain for connections that speak TLS.
pub(crate) fn chain(name: &str, manager: &Value) -> Value {
    json!({
        "name": name,
        "filter_chain_match": {"transport_protocol": "tls"},
        "transport_socket": downstream(),
        // Past any handshake, the time for the certificate included.
        "transport_socket_connect_timeout": "10s",
        "filters": [manager],
    })
}

/// TLS with a certificate for whatever server the client names, if the filter's process mints one.
fn downstream() -> Value {
    let selector = extension(
        "envoy.tls.certificate_selectors.on_demand_secret",
        "envoy.extensions.transport_sockets.tls.cert_selectors.on_demand_secret.v3.Config",
        json!({
            "config_source": {"ads": {}, "resource_api_version": "V3"},
            "certificate_mapper": extension(
                "sni",
                "envoy.extensions.transport_sockets.tls.cert_mappers.sni.v3.SNI",
                json!({"default_value": NO_SERVER_NAME}),
            ),
        }),
    );
    extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        json!({
            // A resumed session would pass by the choice of a certificate; Envoy refuses the selector
            // together with either kind.
            "disable_stateless_session_resumption": true,
            "disable_stateful_session_resumption": true,
            "common_tls_context": {
                "alpn_protocols": ["h2", "http/1.1"],
                "custom_tls_certificate_selector": selector,
            },
        }),
    )
}

/// Upstreams that the requests inside TLS name: as in the clear, and over TLS.
pub(crate) fn by_name_tls(spec: &AgentPolicySpec, settings: &Settings, buffer: u32) -> Value {
    let mut cluster = by_name(spec, settings, buffer);
    cluster["name"] = json!(BY_NAME_TLS);
    set_protocols(&mut cluster, &upstream_http(Some(Scheme::Https), buffer));
    cluster["transport_socket"] = extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        // The name to ask for and to verify is the request's host: `auto_sni`, `auto_san_validation`.
        json!({"common_tls_context": {
            "validation_context": {"trusted_ca": {"filename": path(&settings.ca_bundle)}},
        }}),
    );
    cluster
}

/// What a bootstrap needs for all this: the stream that certificates come by, and inner listeners.
pub(crate) fn add_to_bootstrap(bootstrap: &mut Value) {
    bootstrap["bootstrap_extensions"] = json!([extension(
        "envoy.bootstrap.internal_listener",
        "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
        json!({}),
    )]);
    bootstrap["dynamic_resources"]["ads_config"] = json!({
        "api_type": "DELTA_GRPC",
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {
            "cluster_name": EXTPROC,
            // With Envoy's own patience a server that it has no certificate for could not be reached for
            // some ten seconds after the filter's process is back.
            "retry_policy": {"retry_back_off": {"base_interval": "0.1s", "max_interval": "0.5s"}},
        }}],
    });
}
