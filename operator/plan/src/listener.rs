//! The listeners: an explicit HTTP proxy, and one listener per base URL.
//!
//! No tunnel is opened on any of them, because its bytes could not be inspected. CONNECT and websocket are
//! let in as far as the filter, so that an attempt leaves a receipt; after it stands a route that never
//! forwards, for a filter that only observes or is down. Every other upgrade Envoy refuses by itself.

use sallyport_api::AgentPolicySpec;
use serde_json::{Value, json};

use crate::cluster::{BY_NAME, base_url_name, dns_cache};
use crate::extension;
use crate::http::{Manager, manager};
use crate::settings::{BaseUrl, ProxyListener, Settings};

/// The explicit proxy.
pub(crate) fn proxy(
    spec: &AgentPolicySpec,
    settings: &Settings,
    proxy: &ProxyListener,
    buffer: u32,
) -> Value {
    const NAME: &str = "proxy";
    let routes = json!([
        {"match": {"connect_matcher": {}}, "direct_response": {"status": 403}},
        no_upgrade(),
        // `GET https://...` without a tunnel would go on in clear to a host that expects TLS.
        {"match": {"prefix": "/", "headers": [{"name": ":scheme", "string_match": {"exact": "https"}}]},
         "direct_response": {"status": 403}},
        route(&json!({"cluster": BY_NAME})),
    ]);
    let forward = extension(
        "envoy.filters.http.dynamic_forward_proxy",
        "envoy.extensions.filters.http.dynamic_forward_proxy.v3.FilterConfig",
        json!({"dns_cache_config": dns_cache()}),
    );
    let filter = manager(
        spec,
        settings,
        buffer,
        Manager {
            name: NAME,
            upstream: None,
            routes,
            filters: vec![forward],
            upgrades: json!([{"upgrade_type": "CONNECT"}, {"upgrade_type": "websocket"}]),
        },
    );
    listener(NAME, &proxy.address.to_string(), proxy.port, &filter, buffer)
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
            filters: Vec::new(),
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
