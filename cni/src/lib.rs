//! Capture by CNI: two programs that share this library.
//!
//! `sallyport-cni` is the plugin. The container runtime starts it once for every pod that comes or goes, after
//! the plugins that make the pod's network. It finds out whether the pod is guarded and, if so, hands the pod's
//! network namespace to the daemon on the same node and waits for its word. Static and small: it runs among
//! the node's own files, whatever they are.
//!
//! `sallyport-cni-node` is the daemon, a pod of the DaemonSet on every node. It writes the capture rules
//! into the namespaces it is handed, with the nft of its own image, installs the plugin and its entry in the
//! node's CNI configuration, puts both back when somebody takes them away, and reads the rules' counters.
//!
//! Whether a pod is guarded, and what its policy excludes, stands in the annotation `sallyport.dev/status`, which
//! injection writes and the webhook keeps anybody from changing. The runtime passes it on. Neither program
//! asks the API server for it, so neither holds credentials with which an agent's pod could be read.
//!
//! Not guaranteed: anything on a runtime that passes no annotations to plugins (containerd before 1.6, CRI-O before
//! 1.28), or for a pod that starts before the plugin is in the node's configuration. Such a pod runs without rules,
//! and its sidecar, which checks for them from inside, does not let the agent start.

pub mod conf;
pub mod node;
pub mod plugin;
pub mod wire;
