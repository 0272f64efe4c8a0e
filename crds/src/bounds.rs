//! How long lists and strings of a policy may be.
//!
//! Every list and string has a bound, because the API server refuses CEL rules whose cost it can't bound.
//! The numbers that are not a format's own maximum are generous for people and small for a machine; the
//! product of nested ones (egress rules, patterns in each, length of each) is what the budget limits.

/// `metadata.name`: it stands in label values and annotations of guarded pods.
pub const POLICY_NAME: usize = 63;
/// A Kubernetes object's name.
pub const NAME: usize = 253;
/// Labels, and conditions on labels, of a selector.
pub const LABELS: usize = 32;
/// A label's key: a DNS name, a slash, 63 characters.
pub const LABEL_KEY: usize = 317;
/// Values of one condition on a label.
pub const LABEL_VALUES: usize = 32;
/// A label's value.
pub const LABEL_VALUE: usize = 63;
/// CIDRs or ports that go past the sidecar.
pub const EXCLUDES: usize = 64;
/// The longest CIDR, in IPv6.
pub const CIDR: usize = 43;
/// Allowed capabilities.
pub const CAPABILITIES: usize = 16;
/// A capability's name.
pub const CAPABILITY: usize = 32;
/// `capacity.requestsPerSecond`: far beyond what one pod's sidecar can do.
pub const REQUESTS_PER_SECOND: u32 = 100_000;
/// A quantity of bytes, written out.
pub const QUANTITY: usize = 12;
/// The largest quantity of bytes: 1 GiB.
pub const QUANTITY_BYTES: u64 = 1 << 30;
/// `capacity.headroomPercent`.
pub const HEADROOM_PERCENT: u32 = 1_000;
/// Egress rules.
pub const EGRESS_RULES: usize = 64;
/// Hosts, ports or paths of one egress rule.
pub const PATTERNS: usize = 64;
/// A host pattern: `*.` and a DNS name.
pub const HOST: usize = 255;
/// `dns.maxLabelEntropy`: no label of 63 characters has more than 6 bits each.
pub const LABEL_ENTROPY: u32 = 60;
/// Methods of one egress rule.
pub const METHODS: usize = 16;
/// A method.
pub const METHOD: usize = 32;
/// A path pattern.
pub const PATH: usize = 1_024;
/// Packs.
pub const PACKS: usize = 32;
/// A pack's name.
pub const PACK: usize = 63;
/// Rule overrides.
pub const OVERRIDES: usize = 256;
/// A rule's id.
pub const RULE: usize = 63;
/// Cedar in the policy, in characters.
pub const CEDAR: usize = 65_536;
/// Exceptions.
pub const EXCEPTIONS: usize = 64;
/// An exception's id.
pub const EXCEPTION_ID: usize = 128;
/// An exception's reason.
pub const REASON: usize = 1_024;
