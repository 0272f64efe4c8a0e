//! The pure functions of the operator: [`render`], [`inject()`], [`size()`].
//!
//! `render(policy, settings)` gives Envoy's static bootstrap as JSON. It reads no file, no clock and no
//! environment: the same arguments give the same bytes, on a laptop (`sallyport up`) and in a pod.
//!
//! What it does *not* hold: policy. Which host, prompt or tool call passes is decided by the filter's
//! process on every message; Envoy only has to bring every message there, and to refuse what it can't
//! bring there. In a pod the listeners are a watched file of their own, see [`sidecar`]; whatever else stands
//! here changes with a restart of Envoy only.

mod access_log;
pub mod capture;
mod cluster;
mod digest;
mod filter;
mod http;
pub mod inject;
mod listener;
mod local_reply;
mod settings;
pub mod sidecar;
pub mod size;
mod tls;

use sallyport_api::AgentPolicySpec;
use serde_json::{Value, json};

pub use inject::inject;
pub use local_reply::codes;
pub use settings::{AccessLog, BaseUrl, ProxyListener, Scheme, Settings, Upstream};
pub use size::size;
pub use tls::NO_SERVER_NAME;

/// Renders Envoy's bootstrap.
///
/// Of the policy are read its Listener fields (`mode`, `failurePolicy`, `limits.maxBodyBytes`, `egress.platform`),
/// and whether `egress` names the loopback.
pub fn render(spec: &AgentPolicySpec, settings: &Settings) -> Value {
    let buffer = buffer_limit(spec, settings);
    let mut listeners = Vec::new();
    let mut clusters = vec![cluster::extproc(settings, buffer)];
    if let Some(proxy) = &settings.proxy {
        listeners.push(listener::proxy(spec, settings, proxy, buffer));
        clusters.push(cluster::by_name(spec, settings, buffer));
        if settings.intercept_tls {
            listeners.push(listener::tunnel(spec, settings, buffer));
            clusters.push(tls::tunnel_cluster(settings));
            clusters.push(tls::by_name_tls(spec, settings, buffer));
        }
    }
    for base in &settings.base_urls {
        listeners.push(listener::base_url(spec, settings, base, buffer));
        clusters.push(cluster::fixed(settings, base, buffer));
    }
    let mut bootstrap = bootstrap(settings, &listeners, &clusters);
    if settings.intercept_tls && settings.proxy.is_some() {
        tls::add_to_bootstrap(&mut bootstrap);
    }
    bootstrap
}

/// What every bootstrap has in common.
fn bootstrap(settings: &Settings, listeners: &[Value], clusters: &[Value]) -> Value {
    json!({
        "node": {"id": settings.node_id, "cluster": "sallyport"},
        // A TCP admin port would be open to everything that shares the loopback with the agent, and it
        // can stop Envoy. A socket of mode 0600 (384) belongs to the proxy's user alone.
        "admin": {"address": {"pipe": {"path": path(&settings.admin_socket()), "mode": 384}}},
        "static_resources": {"listeners": listeners, "clusters": clusters},
        "stats_config": {"stats_matcher": {"exclusion_list": {"patterns": [
            // Nobody reads these, and each costs memory in every sidecar.
            {"prefix": "runtime."},
            {"prefix": "vhost."},
            {"prefix": "filesystem."},
            {"prefix": "dns."},
            {"suffix": ".external.upstream_rq_time"},
            {"contains": ".ssl.certificate."},
        ]}}},
        // The one bound that holds for every listener together. Buffers are per connection, so this
        // number times the buffer limit is what a flood can make Envoy hold.
        "overload_manager": {"resource_monitors": [extension(
            "envoy.resource_monitors.global_downstream_max_connections",
            "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
            json!({"max_active_downstream_connections": settings.max_connections}),
        )]},
    })
}

/// The soft limit of Envoy's buffers: the largest body that may be held, and headroom, so that a body
/// of exactly the cap is not refused here. The filter's process enforces the cap itself; this is what
/// ends a body that would grow without bound.
fn buffer_limit(spec: &AgentPolicySpec, settings: &Settings) -> u32 {
    spec.limits.max_body_bytes.saturating_add(settings.buffer_headroom_bytes)
}

/// An Envoy extension: name, type and configuration.
fn extension(name: &str, kind: &str, mut config: Value) -> Value {
    if let Some(fields) = config.as_object_mut() {
        fields.insert("@type".into(), json!(format!("type.googleapis.com/{kind}")));
    }
    json!({"name": name, "typed_config": config})
}

fn path(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}
