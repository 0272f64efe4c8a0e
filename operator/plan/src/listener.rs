//! The listeners: an explicit HTTP proxy, and one listener per base URL.
//!
//! No tunnel is opened whose bytes could not be inspected. On the proxy CONNECT leads into a listener inside
//! Envoy that speaks TLS and nothing else ([`crate::tls`]). Elsewhere CONNECT, and websocket everywhere, are
//! let in as far as the filter, so that an attempt leaves a receipt; after it stands a route that never
//! forwards, for a filter that only observes or is down. Every other upgrade Envoy refuses by itself.

use sallyport_api::AgentPolicySpec;
use serde_json::{Value, json};

use crate::cluster::{BY_ADDRESS, BY_NAME, base_url_name, dns_cache, guards};
use crate::extension;
use crate::http::{Manager, manager};
use crate::settings::{BaseUrl, ProxyListener, Settings};
use crate::tls::{self, BY_NAME_TLS, Inside, TUNNEL};

/// The explicit proxy.
pub(crate) fn proxy(
    spec: &AgentPolicySpec,
    settings: &Settings,
    proxy: &ProxyListener,
    buffer: u32,
) -> Value {
    const NAME: &str = "proxy";
    let inside = if settings.intercept_tls { Inside::Proxy } else { Inside::Clear };
    let filter = dialling(spec, settings, NAME, inside, false, buffer);
    listener(NAME, &proxy.address.to_string(), proxy.port, &filter, buffer)
}

/// The inner listener, for the bytes of CONNECT.
pub(crate) fn tunnel(spec: &AgentPolicySpec, settings: &Settings, buffer: u32) -> Value {
    tls::tunnel_listener(&dialling(spec, settings, TUNNEL, Inside::Tunnel, false, buffer), buffer)
}

/// A connection manager that dials what was judged: the host that the request names, or, where connections are
/// captured, the address that the filter found to be that host's.
fn dialling(
    spec: &AgentPolicySpec,
    settings: &Settings,
    name: &str,
    inside: Inside,
    captured: bool,
    buffer: u32,
) -> Value {
    let no_connect = json!({"match": {"connect_matcher": {}}, "direct_response": {"status": 403}});
    let routes = match inside {
        Inside::Tunnel => json!([no_connect, no_upgrade(), route(&json!({"cluster": BY_NAME_TLS}))]),
        Inside::Clear | Inside::Proxy => json!([
            if inside == Inside::Proxy { tls::connect_route() } else { no_connect },
            no_upgrade(),
            // `GET https://...` without a tunnel would go on in clear to a host that expects TLS.
            {"match": {"prefix": "/", "headers": [{"name": ":scheme", "string_match": {"exact": "https"}}]},
             "direct_response": {"status": 403}},
            route(&json!({"cluster": if captured { BY_ADDRESS } else { BY_NAME }})),
        ]),
    };
    let resolving = || {
        extension(
            "envoy.filters.http.dynamic_forward_proxy",
            "envoy.extensions.filters.http.dynamic_forward_proxy.v3.FilterConfig",
            json!({"dns_cache_config": dns_cache()}),
        )
    };
    manager(
        spec,
        settings,
        buffer,
        Manager {
            name,
            upstream: None,
            routes,
            // Nothing is resolved where the filter names the address.
            resolving: (!captured).then(resolving),
            inside,
            captured,
            // The listener's, because what they let through changes with the policy.
            upstream_filters: if captured { guards(spec, settings) } else { Vec::new() },
            upgrades: json!([{"upgrade_type": "CONNECT"}, {"upgrade_type": "websocket"}]),
        },
    )
}

/// The listener to which a pod's connections are redirected, for one address family.
///
/// A connection is judged by what its requests say, and goes to the address that the agent connected to, if the
/// filter finds that it is one of the host's. So a name that is allowed can't be sent to an address that is not its
/// own, nobody resolves a second time, and a request whose Host lacks the port goes to port 80, wherever the
/// connection was going.
pub(crate) fn transparent(
    spec: &AgentPolicySpec,
    settings: &Settings,
    name: &str,
    address: &str,
    port: u16,
    buffer: u32,
) -> Value {
    let filter = dialling(spec, settings, name, Inside::Clear, true, buffer);
    // The first bytes decide between TLS and the rest; who sends none in time is closed, since protocols
    // where the server speaks first can't be inspected.
    json!({
        "name": name,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "per_connection_buffer_limit_bytes": buffer,
        "listener_filters": [
            extension(
                "envoy.filters.listener.original_dst",
                "envoy.extensions.filters.listener.original_dst.v3.OriginalDst",
                json!({}),
            ),
            tls::inspector(),
        ],
        "listener_filters_timeout": "15s",
        "continue_on_listener_filters_timeout": false,
        "filter_chains": [
            // A connection that was not redirected has this port as its destination. Another pod would use
            // the listener as its own proxy by it, and Envoy itself would come back for ever.
            {"name": "not_redirected", "filter_chain_match": {"destination_port": port}, "filters": [closed()]},
            // TLS can't be inspected yet, so it is closed rather than tunnelled.
            {"name": "tls", "filter_chain_match": {"transport_protocol": "tls"}, "filters": [closed()]},
            {"name": name, "filters": [filter]},
        ],
    })
}

/// Answers nothing and closes.
fn closed() -> Value {
    extension(
        "envoy.filters.network.direct_response",
        "envoy.extensions.filters.network.direct_response.v3.Config",
        json!({}),
    )
}

/// The listener of a base URL.
pub(crate) fn base_url(spec: &AgentPolicySpec, settings: &Settings, base: &BaseUrl, buffer: u32) -> Value {
    let name = base_url_name(base);
    let forward = json!({"cluster": name, "host_rewrite_literal": base.upstream.authority()});
    let routes = json!([no_upgrade(), route(&forward)]);
    let filter = manager(
        spec,
        settings,
        buffer,
        Manager {
            name: &name,
            upstream: Some(&base.upstream),
            routes,
            resolving: None,
            inside: Inside::Clear,
            captured: false,
            upstream_filters: Vec::new(),
            upgrades: json!([{"upgrade_type": "websocket"}]),
        },
    );
    listener(&name, "127.0.0.1", base.port, &filter, buffer)
}

/// Refuses what is left of an upgrade after the filter. A request that merely has the header and asks for
/// no upgrade has lost it by now.
fn no_upgrade() -> Value {
    json!({"match": {"prefix": "/", "headers": [{"name": "upgrade", "present_match": true}]},
           "direct_response": {"status": 403}})
}

/// Everything to one cluster, for as long as it takes: an LLM's answer has no sensible deadline here, the
/// client has its own.
fn route(action: &Value) -> Value {
    let mut action = action.clone();
    action["timeout"] = json!("0s");
    json!({"match": {"prefix": "/"}, "route": action})
}

fn listener(name: &str, address: &str, port: u16, manager: &Value, buffer: u32) -> Value {
    json!({
        "name": name,
        "address": {"socket_address": {"address": address, "port_value": port}},
        "per_connection_buffer_limit_bytes": buffer,
        "filter_chains": [{"name": name, "filters": [manager]}],
    })
}
