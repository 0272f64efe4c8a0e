//! Which names a policy lets an agent resolve, and which networks they may lead to.
//!
//! Not decisions: the engine hands the answers to Cedar.

use std::net::IpAddr;

use crate::{AgentPolicySpec, DefaultAction, Egress, EgressAction};

/// Whether a host pattern (`*`, `*.suffix` or a name) matches a host in lower case.
pub fn host_matches(pattern: &str, host: &str) -> bool {
    if pattern == "*" {
        return true;
    }
    match pattern.strip_prefix("*.") {
        Some(suffix) => host.strip_suffix(suffix).is_some_and(|head| head.len() > 1 && head.ends_with('.')),
        None => pattern == host,
    }
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
        let mut listed = Listed::No;
        for rule in &self.rules {
            let Some(by) = rule.hosts.iter().filter(|p| host_matches(p, host)).map(|p| by(p)).max() else {
                continue;
            };
            let always = rule.ports.is_empty() && rule.methods.is_empty() && rule.paths.is_empty();
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
    use crate::EgressRule;

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
