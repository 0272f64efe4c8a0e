//! What the CNI specification says: configuration, errors, versions. Versions 0.3.0 to 1.1.0.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The plugin's name: its file's, and its `type` in a configuration.
pub const PLUGIN: &str = "sallyport-cni";
/// Versions of the specification that are spoken, oldest first. Before 0.3.0 there are no chains.
pub const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// The capability by which a runtime passes a pod's annotations.
pub const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";
/// Where the daemon listens, as the node sees it.
pub const SOCKET: &str = "/run/sallyport-cni/cni.sock";

/// The plugin's entry in a list of plugins.
pub fn entry(socket: &str) -> Value {
    serde_json::json!({
        "type": PLUGIN,
        "capabilities": {ANNOTATIONS: true},
        "socket": socket,
    })
}

/// The configuration on standard input, as far as it matters here; runtimes add fields of their own.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Config {
    /// The version that the answer must be in.
    pub cni_version: String,
    /// The network's name.
    pub name: String,
    /// Where the daemon listens; empty is [`SOCKET`].
    pub socket: String,
    /// What the plugin before this one answered; passed on as it is.
    pub prev_result: Option<Value>,
    /// What the runtime passes for the declared capabilities.
    pub runtime_config: RuntimeConfig,
    /// GC: the attachments that are still in use.
    #[serde(rename = "cni.dev/valid-attachments")]
    pub valid_attachments: Option<Vec<Attachment>>,
}

/// What the runtime passes for the declared capabilities.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct RuntimeConfig {
    /// The pod's annotations; `None` from a runtime that does not know the capability.
    #[serde(rename = "io.kubernetes.cri.pod-annotations")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// One interface in one container.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Attachment {
    /// The container's id.
    #[serde(rename = "containerID", default)]
    pub container_id: String,
    /// The interface's name.
    #[serde(default)]
    pub ifname: String,
}

/// Codes of errors: those of the specification, and from 100 our own.
pub mod code {
    /// The configuration's version is not spoken here.
    pub const VERSION: u32 = 1;
    /// A variable of the environment is missing or wrong.
    pub const ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO: u32 = 5;
    /// What came is no JSON, or not of the expected shape.
    pub const DECODE: u32 = 6;
    /// The configuration is wrong.
    pub const CONFIG: u32 = 7;
    /// It may work in a moment: the runtime should try again.
    pub const LATER: u32 = 11;
    /// The pod's annotation is not understood.
    pub const STATUS: u32 = 100;
    /// The rules could not be written.
    pub const RULES: u32 = 101;
    /// CHECK: the rules are not there.
    pub const NO_RULES: u32 = 102;
}

/// An error as the specification wants it on standard output.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// One of [`code`].
    pub code: u32,
    /// What is wrong, and what to do about it.
    pub message: String,
}

// === impl Error ===

impl Error {
    /// An error with this code.
    pub fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The error in the given version.
    pub fn json(&self, version: &str) -> Value {
        serde_json::json!({"cniVersion": version, "code": self.code, "msg": format!("sallyport: {}", self.message)})
    }
}
