//! Which destinations an agent may call, which names it may resolve, and which networks those may lead to.
//!
//! Not decisions: the engine hands the answers to Cedar.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::AgentPolicySpec;
#[cfg(feature = "kube")]
use crate::bounds;
#[cfg(feature = "kube")]
use crate::cel;
use crate::policy::is_default;

/// Which destinations an agent may call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Egress {
    /// What holds for a destination that no rule names.
    pub default: DefaultAction,
    /// Rules in order; the first that matches decides.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = bounds::EGRESS_RULES)))]
    pub rules: Vec<EgressRule>,
    /// What the platform serves beside the network: refused whatever the rules say, unless allowed here.
    /// What is allowed is inspected like everything else, and a rule must name its host or address. Listener.
    #[serde(skip_serializing_if = "is_default")]
    pub platform: Platform,
    /// Private networks (10.0.0.0/8, fc00::/7 and their kind) into which names of hosts outside of the cluster
    /// may lead. Names of the cluster (`*.svc`) may lead into any of them.
    #[serde(rename = "privateCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::EXCLUDES),
            inner(length(max = bounds::CIDR)),
            extend("x-kubernetes-validations" = cel::cidrs())
        )
    )]
    pub private_cidrs: Vec<String>,
}

/// What the platform serves to a pod beside the network, by exact address, port and path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Platform {
    /// The API server, at the address that every pod of the cluster is told.
    #[serde(rename = "kubernetesAPI")]
    pub kubernetes_api: DefaultAction,
    /// The pod's own cloud credentials: `169.254.170.23:80/v1/credentials` and, in the metadata service,
    /// `/computeMetadata/v1/instance/service-accounts/`.
    pub pod_identity: DefaultAction,
    /// The cloud's metadata service at `169.254.169.254:80` and `[fd00:ec2::254]:80`: every path of it.
    pub metadata: DefaultAction,
}

/// Which names the agent may resolve. Those that `egress.rules` could allow it may.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Dns {
    /// Names that may be resolved besides: exact, or `*.example.com` for every name below.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::PATTERNS),
            inner(length(max = bounds::HOST)),
            extend("x-kubernetes-validations" = cel::names())
        )
    )]
    pub allow: Vec<String>,
    /// The most entropy of one label of 16 characters or more, in tenths of a bit per character, in names that
    /// only a pattern allows. Words have 25 to 38, random letters and digits 40 to 50.
    #[cfg_attr(feature = "kube", schemars(with = "i32", range(min = 10, max = bounds::LABEL_ENTROPY)))]
    pub max_label_entropy: u32,
}

impl Default for Dns {
    fn default() -> Self {
        Self { allow: Vec::new(), max_label_entropy: 40 }
    }
}

/// What holds where no rule matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum DefaultAction {
    /// Refused. A policy that says nothing about egress denies all of it.
    #[default]
    Deny,
    /// Allowed, and inspected like everything else.
    Allow,
}

/// One egress rule; every condition it states must hold.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EgressRule {
    /// Host names. `*.example.com` matches every name below `example.com`, not the name itself.
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::PATTERNS),
            inner(length(max = bounds::HOST)),
            extend("x-kubernetes-validations" = cel::hosts())
        )
    )]
    pub hosts: Vec<String>,
    /// Ports; empty means every port.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(with = "Vec<i32>", length(max = bounds::PATTERNS), inner(range(min = 1, max = 65_535)))
    )]
    pub ports: Vec<u16>,
    /// HTTP methods in capitals; empty means every method.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::METHODS),
            inner(length(max = bounds::METHOD)),
            extend("x-kubernetes-validations" = cel::methods())
        )
    )]
    pub methods: Vec<String>,
    /// Paths: exact, or a prefix where the pattern ends in `*`; empty means every path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(
            length(max = bounds::PATTERNS),
            inner(length(max = bounds::PATH)),
            extend("x-kubernetes-validations" = cel::paths())
        )
    )]
    pub paths: Vec<String>,
    /// What the rule does.
    pub action: EgressAction,
}

/// What an egress rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum EgressAction {
    /// The call goes on to inspection.
    Allow,
    /// The call is refused.
    Deny,
}

/// Whether a host pattern (`*`, `*.suffix` or a name) matches a host in lower case.
pub fn host_matches(pattern: &str, host: &str) -> bool {
    if pattern == "*" {
        return true;
    }
    match pattern.strip_prefix("*.") {
        Some(suffix) => host.strip_suffix(suffix).is_some_and(|head| head.len() > 1 && ends_label(head)),
        None => pattern == host,
    }
}

/// Whether a text ends with the dot between two labels. In DNS a label may hold dots itself, written `\.`: to take
/// one for the other would let `x\.a.test`, which is asked of the nameservers of `test`, pass as a name below `a.test`.
pub fn ends_label(text: &str) -> bool {
    text.strip_suffix('.').is_some_and(|label| !label.ends_with('\\'))
}

/// How a policy speaks of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listed {
    /// It does not allow it.
    No,
    /// By a pattern: the agent chooses the rest of the name.
    ByPattern,
    /// By its whole name.
    ByName,
}

impl Egress {
    /// Whether some call to a host could be allowed, whatever its port, method and path.
    pub fn may_allow(&self, host: &str) -> Listed {
        self.may_allow_on(host, None)
    }

    /// Whether some call to a host on this port could be allowed; on any port where it is not known yet.
    pub fn may_allow_on(&self, host: &str, port: Option<u16>) -> Listed {
        let mut listed = Listed::No;
        for rule in &self.rules {
            let Some(by) = rule.hosts.iter().filter(|p| host_matches(p, host)).map(|p| by(p)).max() else {
                continue;
            };
            let on_port = rule.ports.is_empty() || port.is_none_or(|p| rule.ports.contains(&p));
            if !on_port {
                continue;
            }
            let every_port = rule.ports.is_empty() || port.is_some();
            let always = every_port && rule.methods.is_empty() && rule.paths.is_empty();
            match rule.action {
                EgressAction::Allow => listed = listed.max(by),
                // The first rule that matches decides: nothing after this one is asked about the host.
                EgressAction::Deny if always => return listed,
                EgressAction::Deny => {}
            }
        }
        if self.default == DefaultAction::Allow { listed.max(Listed::ByPattern) } else { listed }
    }
}

impl AgentPolicySpec {
    /// Whether the agent may resolve a name (lower case, no dot at its end).
    pub fn names(&self, host: &str) -> Listed {
        let allowed = self.dns.allow.iter().filter(|p| host_matches(p, host)).map(|p| by(p)).max();
        self.egress.may_allow(host).max(allowed.unwrap_or(Listed::No))
    }
}

fn by(pattern: &str) -> Listed {
    if pattern.starts_with('*') { Listed::ByPattern } else { Listed::ByName }
}

/// Reads a network as the policy writes it; what is none matches nothing.
pub fn network_holds(cidr: &str, address: IpAddr) -> bool {
    let Some((network, bits)) = cidr.split_once('/') else { return false };
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else { return false };
    match (network, address) {
        (IpAddr::V4(n), IpAddr::V4(a)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            (u32::from(n) ^ u32::from(a)) & mask == 0
        }
        (IpAddr::V6(n), IpAddr::V6(a)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            (u128::from(n) ^ u128::from(a)) & mask == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(host: &str, action: EgressAction, paths: &[&str]) -> EgressRule {
        EgressRule {
            hosts: vec![host.into()],
            ports: Vec::new(),
            methods: Vec::new(),
            paths: paths.iter().map(|p| (*p).to_owned()).collect(),
            action,
        }
    }

    #[test]
    fn a_name_is_allowed_where_some_call_to_it_could_be() {
        use EgressAction::{Allow, Deny};
        let rules = vec![
            rule("bad.example.com", Deny, &[]),
            rule("half.example.com", Deny, &["/admin/*"]),
            rule("api.example.com", Allow, &["/v1/*"]),
            rule("*.example.com", Allow, &[]),
        ];
        let mut spec = AgentPolicySpec::default();
        spec.egress.rules = rules;
        for (name, listed) in [
            ("api.example.com", Listed::ByName),
            ("half.example.com", Listed::ByPattern),
            ("bad.example.com", Listed::No),
            ("x.example.com", Listed::ByPattern),
            ("example.com", Listed::No),
            ("other.test", Listed::No),
        ] {
            assert_eq!(spec.names(name), listed, "{name}");
        }
        spec.dns.allow = vec!["other.test".into()];
        assert_eq!(spec.names("other.test"), Listed::ByName);
        spec.egress.default = DefaultAction::Allow;
        assert_eq!(spec.names("anything.test"), Listed::ByPattern);
        assert_eq!(spec.names("bad.example.com"), Listed::No, "a rule stands before the default");
    }

    #[test]
    fn where_the_port_is_known_the_rules_for_others_say_nothing() {
        use EgressAction::{Allow, Deny};
        let on = |ports: &[u16], rule: EgressRule| EgressRule { ports: ports.to_vec(), ..rule };
        let egress = Egress {
            rules: vec![
                rule("closed.test", Deny, &[]),
                on(&[22], rule("api.test", Deny, &[])),
                rule("api.test", Deny, &["/admin/*"]),
                on(&[443], rule("api.test", Allow, &["/v1/*"])),
                on(&[22, 8443], rule("*.test", Allow, &[])),
            ],
            ..Egress::default()
        };
        for (host, port, listed) in [
            ("api.test", Some(443), Listed::ByName),
            ("api.test", None, Listed::ByName),
            ("api.test", Some(80), Listed::No),
            ("api.test", Some(22), Listed::No),
            ("api.test", Some(8443), Listed::ByPattern),
            ("closed.test", Some(8443), Listed::No),
            ("closed.test", None, Listed::No),
            ("other.test", None, Listed::ByPattern),
            ("other.test", Some(443), Listed::No),
            ("elsewhere", None, Listed::No),
        ] {
            assert_eq!(egress.may_allow_on(host, port), listed, "{host} {port:?}");
        }
    }

    #[test]
    fn a_network_holds_its_addresses_only() {
        for (cidr, address, holds) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.1.2.3/32", "10.1.2.3", true),
            ("fd00::/8", "fd12::1", true),
            ("fd00::/8", "10.0.0.1", false),
            ("10.0.0.0/33", "10.0.0.1", false),
            ("10.0.0.0", "10.0.0.0", false),
        ] {
            assert_eq!(network_holds(cidr, address.parse().unwrap()), holds, "{cidr} {address}");
        }
    }
}
