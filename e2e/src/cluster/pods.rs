//! Pods by their label, as kubectl lists them.

use serde_json::Value;

use super::kubectl::{Failed, kubectl};

/// The label of the operator's pods.
pub const OPERATOR: &str = "app.kubernetes.io/name=sallyport-operator";
/// The label of the CNI plugin's daemons.
pub const CNI: &str = "app.kubernetes.io/name=sallyport-cni";

/// The pods of a namespace that have a label (`KEY=VALUE`), those included that are about to go.
pub fn pods_of(namespace: &str, label: &str) -> Result<Vec<Value>, Failed> {
    let mut list = kubectl(&["get", "pods", "-n", namespace, "-l", label, "-o", "json"])?.json();
    match list["items"].take() {
        Value::Array(pods) => Ok(pods),
        other => panic!("no list of pods: {other}"),
    }
}

/// A pod's name.
pub fn name_of(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().expect("every pod has a name")
}
