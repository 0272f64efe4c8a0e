//! Envoy's configuration in a pod: a bootstrap, and listeners that change while Envoy runs.
//!
//! The bootstrap holds what never changes with a policy but by a restart (sockets, clusters); the listeners
//! are a file beside it, replaced by rename, which Envoy watches.
//!
//! Plain HTTP only: on the transparent listener TLS is closed, not tunnelled. A host that egress permits is
//! reached over http, on the port its name says (80 if it says none).

use sallyport_api::names::{DNS_PORT, METRICS_PORT, PROXY_PORT, RUN_DIR, TRANSPARENT_PORT};
use sallyport_api::{AgentPolicySpec, CaptureMode};
use serde_json::{Value, json};

use crate::digest::sha256_hex;
use crate::settings::{ProxyListener, Settings};
use crate::{bootstrap, buffer_limit, cluster, listener, size};

/// Name of the transparent listener for IPv4.
pub const TRANSPARENT: &str = "transparent";
/// Name of the transparent listener for IPv6. A kernel without IPv6 can't open it, and then it may be left
/// out: there is no IPv6 connection to capture.
pub const TRANSPARENT_V6: &str = "transparent_v6";

/// Renders the bundle's `envoy` part: `bootstrap` is Envoy's static configuration, `listeners` the
/// DiscoveryResponse that the bootstrap has Envoy watch as a file.
pub fn render_sidecar(spec: &AgentPolicySpec) -> Value {
    let settings = settings(spec);
    let buffer = buffer_limit(spec, &settings);
    let dialled = match spec.capture.mode {
        CaptureMode::Explicit => cluster::by_name(spec, &settings, buffer),
        CaptureMode::Cni | CaptureMode::Init => cluster::by_address(&settings, buffer),
    };
    let clusters = [cluster::extproc(&settings, buffer), dialled];
    let mut bootstrap = bootstrap(&settings, &[], &clusters);
    bootstrap["dynamic_resources"] = json!({"lds_config": {
        "resource_api_version": "V3",
        // The directory is watched, because the file is replaced, not written.
        "path_config_source": {
            "path": format!("{RUN_DIR}/lds.json"),
            "watched_directory": {"path": RUN_DIR},
        },
    }});
    let listeners = match (spec.capture.mode, &settings.proxy) {
        (CaptureMode::Explicit, Some(proxy)) => vec![listener::proxy(spec, &settings, proxy, buffer)],
        _ => [(TRANSPARENT, "0.0.0.0"), (TRANSPARENT_V6, "::")]
            .map(|(name, address)| {
                listener::transparent(spec, &settings, name, address, TRANSPARENT_PORT, buffer)
            })
            .to_vec(),
    };
    json!({"bootstrap": bootstrap, "listeners": discovery_response(listeners)})
}

fn settings(spec: &AgentPolicySpec) -> Settings {
    let sizing = size(spec);
    let (proxy, own_ports) = match spec.capture.mode {
        CaptureMode::Explicit => (Some(ProxyListener::loopback(PROXY_PORT)), vec![METRICS_PORT]),
        CaptureMode::Cni | CaptureMode::Init => {
            (None, vec![TRANSPARENT_PORT, PROXY_PORT, METRICS_PORT, DNS_PORT])
        }
    };
    Settings { proxy, own_ports, message_timeout: sizing.message_timeout, ..Settings::new(RUN_DIR) }
}

fn discovery_response(mut listeners: Vec<Value>) -> Value {
    for listener in &mut listeners {
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
    }
    let resources = Value::Array(listeners);
    json!({"version_info": sha256_hex(&resources.to_string()), "resources": resources})
}
