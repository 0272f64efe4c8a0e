//! Envoy's configuration in a pod: a bootstrap, and listeners that change while Envoy runs.

use sallyport_api::AgentPolicySpec;
use serde_json::{Value, json};

/// Renders the bundle's `envoy` part: `bootstrap` is Envoy's static configuration, `listeners` the
/// DiscoveryResponse that the bootstrap has Envoy watch as a file.
pub fn render_sidecar(spec: &AgentPolicySpec) -> Value {
    let _ = spec;
    json!({"bootstrap": {}, "listeners": {}})
}
