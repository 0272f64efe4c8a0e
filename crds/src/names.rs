//! Names that more than one part of Sallyport writes or reads: labels, annotations, containers, ports,
//! condition types and reasons. All of them are public API.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Label on a namespace (`enabled`, `required`, `disabled`), label or annotation on a pod (`true`, `false`).
pub const INJECT: &str = "sallyport.dev/inject";
/// A pod's annotation: the name of the policy it wants among those that select it.
pub const POLICY: &str = "sallyport.dev/policy";
/// Label, written by injection: `true` on every guarded pod.
pub const GUARDED: &str = "sallyport.dev/guarded";
/// Annotation, written by injection: JSON, what was injected.
pub const STATUS: &str = "sallyport.dev/status";
/// Annotation on a namespace or an AgentPolicy: `true` blocks every call of its guarded pods.
pub const KILL: &str = "sallyport.dev/kill";

/// Annotation on the CRD: a number that grows with every change of its schema.
pub const CRD_VERSION: &str = "sallyport.dev/crd-version";

/// The init container that writes the capture rules.
pub const CAPTURE_CONTAINER: &str = "sallyport-capture";
/// The sidecar's container that decides.
pub const EXTPROC_CONTAINER: &str = "sallyport-extproc";
/// The sidecar's container that carries the traffic.
pub const ENVOY_CONTAINER: &str = "sallyport-envoy";

/// Volume of both sidecar containers: sockets and Envoy's configuration. `emptyDir`, in memory.
pub const RUN_VOLUME: &str = "sallyport-run";
/// Volume of extproc alone: the last good bundle. `emptyDir`, in memory.
pub const STATE_VOLUME: &str = "sallyport-state";
/// Volume of extproc alone: the operator's authorities and this pod's token. Projected.
pub const IDENTITY_VOLUME: &str = "sallyport-identity";
/// Where [`RUN_VOLUME`] is mounted.
pub const RUN_DIR: &str = "/run/sallyport";
/// Where [`STATE_VOLUME`] is mounted.
pub const STATE_DIR: &str = "/var/lib/sallyport";
/// Where [`IDENTITY_VOLUME`] is mounted: `ca.crt` and `token`.
pub const IDENTITY_DIR: &str = "/var/run/secrets/sallyport.dev";

/// The ConfigMap, in every namespace with guarded pods, that holds the operator's authorities.
pub const TRUST_CONFIG_MAP: &str = "sallyport-trust";
/// The key in [`TRUST_CONFIG_MAP`]: PEM certificates, one or more.
pub const TRUST_KEY: &str = "ca.crt";
/// Annotation on the Secret `sallyport-ca`: asks for a new authority before its time. The operator takes it off.
pub const ROTATE: &str = "sallyport.dev/rotate";
/// The audience of the tokens by which a pod proves itself to the operator.
pub const AUDIENCE: &str = "sallyport.dev";

/// Label on the ConfigMaps by which the operator's replicas tell the leader what their sidecars said.
pub const SHARD: &str = "sallyport.dev/shard";
/// The field manager of everything the operator writes, and the reporting controller of its Events.
pub const FIELD_MANAGER: &str = "sallyport-operator";

/// The user and group of both sidecar containers. No other container of a guarded pod may have it: the
/// capture rules let this user's traffic out.
pub const SIDECAR_UID: i64 = 14_337;

/// Port of the transparent listener, to which captured connections are redirected.
pub const TRANSPARENT_PORT: u16 = 15_001;
/// Port of the explicit proxy, on the loopback.
pub const PROXY_PORT: u16 = 15_002;
/// Port of the resolver, UDP and TCP, on the loopback: every query to port 53 is redirected to it.
pub const DNS_PORT: u16 = 15_053;
/// Port on which extproc serves its own and Envoy's metrics, and `/ready`.
pub const METRICS_PORT: u16 = 15_020;
/// Port on the loopback by which extproc checks that the pod is captured.
pub const CHECK_PORT: u16 = 15_021;
/// What extproc dials for that check, one address for each family: documentation addresses, which nobody has.
/// The capture rules bring the sidecar's user from [`CHECK_PORT`] there to its own loopback; without them
/// nobody answers.
pub const CHECK_ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 21)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x21))];

/// Condition types of an AgentPolicy.
pub mod conditions {
    /// The policy is valid and, among those that select the same pods, in force.
    pub const ACCEPTED: &str = "Accepted";
    /// Everything the policy refers to exists.
    pub const RESOLVED_REFS: &str = "ResolvedRefs";
    /// A bundle was made of it and is offered to sidecars.
    pub const PROGRAMMED: &str = "Programmed";
    /// Guarded pods acknowledged the newest bundle.
    pub const ENFORCED: &str = "Enforced";
    /// Pods run with fields that only a restart changes.
    pub const ROLLOUT_REQUIRED: &str = "RolloutRequired";
}

/// Reasons of conditions and of Events.
pub mod reasons {
    /// Accepted, ResolvedRefs, Programmed: as it should be.
    pub const VALID: &str = "Valid";
    /// Accepted=False: the engine can't load it.
    pub const INVALID: &str = "Invalid";
    /// Accepted=False: every pod it selects is another policy's.
    pub const CONFLICTED: &str = "Conflicted";
    /// Enforced=True: every pod acknowledged.
    pub const ALL_PODS: &str = "AllPods";
    /// Enforced=False: some pods have not acknowledged yet.
    pub const SOME_PODS: &str = "SomePods";
    /// Enforced=Unknown: no guarded pod runs.
    pub const NO_PODS: &str = "NoPods";
    /// Enforced=False: a sidecar refused the bundle.
    pub const NACKED: &str = "Nacked";
    /// Enforced=False: the capture mode can be got round, so nothing is promised.
    pub const ADVISORY: &str = "Advisory";
    /// Enforced=False: a sidecar is too old for this bundle.
    pub const SIDECAR_TOO_OLD: &str = "SidecarTooOld";
    /// Enforced=True and everything is blocked by [`super::KILL`].
    pub const KILLED: &str = "Killed";
    /// RolloutRequired=True: some pods run with older pod fields.
    pub const STALE_PODS: &str = "StalePods";
    /// RolloutRequired=False: every pod runs with the newest pod fields.
    pub const UP_TO_DATE: &str = "UpToDate";
    /// Event: the kill switch is off again.
    pub const UNKILLED: &str = "Unkilled";
    /// Event: a pod was guarded.
    pub const INJECTED: &str = "Injected";
    /// Event: a pod that asked for it was not guarded, or was refused.
    pub const INJECTION_SKIPPED: &str = "InjectionSkipped";
    /// Event: the policy is gone and running pods keep its last good bundle.
    pub const POLICY_DELETED: &str = "PolicyDeleted";
}
