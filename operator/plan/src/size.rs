//! How much a sidecar needs for the load that a policy states.

use std::time::Duration;

use sallyport_api::AgentPolicySpec;

/// What one sidecar gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizing {
    /// CPU request of extproc, in thousandths of a core.
    pub extproc_cpu_millis: u32,
    /// Memory request and limit of extproc, in bytes.
    pub extproc_memory_bytes: u64,
    /// CPU request of Envoy, in thousandths of a core.
    pub envoy_cpu_millis: u32,
    /// Memory request and limit of Envoy, in bytes.
    pub envoy_memory_bytes: u64,
    /// Envoy's worker threads.
    pub concurrency: u32,
    /// How long Envoy waits for each answer of the filter.
    pub message_timeout: Duration,
    /// How long extproc lets one scan take.
    pub scan_timeout: Duration,
    /// Bytes of bodies that extproc holds at once.
    pub budget_bytes: u64,
    /// How much of the CPU request the stated load takes, in percent.
    pub load_percent: u32,
    /// Name of the bench record it was computed from.
    pub record: String,
}

/// Computes what one sidecar gets for this policy.
pub fn size(spec: &AgentPolicySpec) -> Sizing {
    let _ = spec;
    Sizing {
        extproc_cpu_millis: 100,
        extproc_memory_bytes: 160 << 20,
        envoy_cpu_millis: 100,
        envoy_memory_bytes: 128 << 20,
        concurrency: 1,
        message_timeout: Duration::from_secs(1),
        scan_timeout: Duration::from_millis(500),
        budget_bytes: 64 << 20,
        load_percent: 0,
        record: String::new(),
    }
}
