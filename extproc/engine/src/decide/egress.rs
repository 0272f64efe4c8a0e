//! What `spec.egress` says of a destination. Not a decision: Cedar reads the answer.

use sallyport_api::{DefaultAction, Egress, EgressAction, EgressRule, Listed, host_matches};

use crate::message::RequestHead;

/// What `spec.egress` says of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    Denied,
    /// By the default, or by a rule for every host.
    Allowed,
    /// By a rule that names its host.
    Named,
}

impl Listing {
    /// The same, where no more than the name is known.
    pub(crate) const fn of_name(listed: Listed) -> Self {
        match listed {
            Listed::No => Self::Denied,
            Listed::ByPattern => Self::Allowed,
            Listed::ByName => Self::Named,
        }
    }

    /// What Cedar reads as `egress`.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "deny",
            Self::Allowed | Self::Named => "allow",
        }
    }
}

/// What is said of a destination. The first rule that matches decides.
pub(crate) fn listing(egress: &Egress, head: &RequestHead) -> Listing {
    match egress.rules.iter().find(|r| matches(r, head)) {
        Some(rule) if rule.action != EgressAction::Allow => Listing::Denied,
        Some(rule) if rule.hosts.iter().any(|h| h != "*" && host_matches(h, &head.host)) => Listing::Named,
        None if egress.default != DefaultAction::Allow => Listing::Denied,
        _ => Listing::Allowed,
    }
}

fn matches(rule: &EgressRule, head: &RequestHead) -> bool {
    rule.hosts.iter().any(|h| host_matches(h, &head.host))
        && (rule.ports.is_empty() || rule.ports.contains(&head.port))
        && (rule.methods.is_empty() || rule.methods.contains(&head.method))
        && (rule.paths.is_empty() || rule.paths.iter().any(|p| path_matches(p, &head.path, rule.action)))
}

/// Paths are compared without their query. A path that could mean another one upstream (encoded letters,
/// slashes or dots, backslashes, `..`) may be any path: it matches every pattern that denies and none that
/// allows.
fn path_matches(pattern: &str, path: &str, action: EgressAction) -> bool {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let lower = path.to_ascii_lowercase();
    let ambiguous = encodes_plain(path)
        || ["%2f", "%5c", "%2e", "\\", "/../", "/./", "//", ";"].iter().any(|s| lower.contains(s))
        || lower.ends_with("/..")
        || lower.ends_with("/.");
    if ambiguous && pattern != "/*" {
        return action == EgressAction::Deny;
    }
    match pattern.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix),
        None => path == pattern,
    }
}

/// Whether a character that never needs it is percent-encoded.
fn encodes_plain(path: &str) -> bool {
    path.as_bytes().windows(3).filter(|w| w[0] == b'%').any(|w| {
        let code = std::str::from_utf8(&w[1..]).ok().and_then(|h| u8::from_str_radix(h, 16).ok());
        code.is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'~' | b'%'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_matches(pattern: &str, path: &str) -> bool {
        super::path_matches(pattern, path, EgressAction::Allow)
    }

    #[test]
    fn an_ambiguous_path_matches_what_denies() {
        for p in ["//admin/x", "/%61dmin/x", "/a/../admin", "/x/..;/admin", "/%2561dmin"] {
            assert!(super::path_matches("/admin/*", p, EgressAction::Deny), "{p}");
            assert!(!path_matches("/admin/*", p), "{p}");
        }
        assert!(!super::path_matches("/admin/*", "/docs/a%20b", EgressAction::Deny));
    }

    #[test]
    fn a_destination_is_named_by_a_rule_with_its_host() {
        let rule = |host: &str, action| EgressRule {
            hosts: vec![host.to_owned()],
            ports: vec![],
            methods: vec![],
            paths: vec![],
            action,
        };
        let head = RequestHead { host: "10.0.0.7".into(), path: "/".into(), ..RequestHead::default() };
        let of = |rules: Vec<EgressRule>| listing(&Egress { rules, ..Egress::default() }, &head);
        assert_eq!(of(vec![rule("10.0.0.7", EgressAction::Allow)]), Listing::Named);
        assert_eq!(of(vec![rule("*", EgressAction::Allow)]), Listing::Allowed);
        assert_eq!(of(vec![rule("10.0.0.8", EgressAction::Allow)]), Listing::Denied);
        let both = vec![rule("10.0.0.7", EgressAction::Deny), rule("10.0.0.7", EgressAction::Allow)];
        assert_eq!(of(both), Listing::Denied);
        let open = Egress { default: DefaultAction::Allow, ..Egress::default() };
        assert_eq!(listing(&open, &head), Listing::Allowed);
        assert_eq!(of(vec![]), Listing::Denied);
    }

    #[test]
    fn a_wildcard_means_names_below_and_not_the_name_itself() {
        assert!(host_matches("*.example.com", "a.example.com"));
        assert!(host_matches("*.example.com", "a.b.example.com"));
        assert!(!host_matches("*.example.com", "example.com"));
        assert!(!host_matches("*.example.com", ".example.com"));
        assert!(!host_matches("*.example.com", "badexample.com"));
        assert!(host_matches("*", "anything"));
        // One label with a dot in it: of the nameservers of `com`.
        assert!(!host_matches("*.example.com", r"a\.example.com"));
    }

    #[test]
    fn an_ambiguous_path_matches_no_pattern() {
        assert!(path_matches("/v1/*", "/v1/chat?x=/../"));
        assert!(path_matches("/v1/chat", "/v1/chat?x"));
        for p in ["/v1/../admin", "/v1/%2e%2e/admin", "/v1/..%2fadmin", "/v1//x", "/v1/..;/x", "/v1\\..\\x"] {
            assert!(!path_matches("/v1/*", p), "{p}");
        }
    }
}
