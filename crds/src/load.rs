//! Loading an AgentPolicy from YAML or JSON, with errors that name the place.

use crate::{API_VERSION, AgentPolicy, KIND, Limits};

/// Why a policy could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The text is not YAML, or does not have the shape of an AgentPolicy.
    #[error("{0}")]
    Shape(String),
    /// The document is something else.
    #[error("apiVersion/kind is `{found}`, expected `{API_VERSION}` `{KIND}`")]
    Kind {
        /// What the document says it is.
        found: String,
    },
    /// A field has a value that can't hold.
    #[error("{field}: {problem}")]
    Field {
        /// The field's path, for example `spec.egress.rules[0].hosts[1]`.
        field: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

impl LoadError {
    fn field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { field: field.into(), problem: problem.into() }
    }
}

/// Loads one AgentPolicy from YAML (JSON is YAML too).
pub fn load_policy(text: &str) -> Result<AgentPolicy, LoadError> {
    let policy: AgentPolicy = serde_saphyr::from_str(text).map_err(|e| LoadError::Shape(e.to_string()))?;
    if policy.api_version != API_VERSION || policy.kind != KIND {
        return Err(LoadError::Kind { found: format!("{} {}", policy.api_version, policy.kind) });
    }
    check(&policy)?;
    Ok(policy)
}

fn check(policy: &AgentPolicy) -> Result<(), LoadError> {
    if policy.metadata.name.is_empty() {
        return Err(LoadError::field("metadata.name", "is empty"));
    }
    let spec = &policy.spec;
    for (i, rule) in spec.egress.rules.iter().enumerate() {
        let at = |f: &str| format!("spec.egress.rules[{i}].{f}");
        if rule.hosts.is_empty() {
            return Err(LoadError::field(at("hosts"), "names no host; use [\"*\"] for every host"));
        }
        for (j, host) in rule.hosts.iter().enumerate() {
            check_host(host).map_err(|p| LoadError::field(at(&format!("hosts[{j}]")), p))?;
        }
        for (j, path) in rule.paths.iter().enumerate() {
            if !path.starts_with('/') {
                return Err(LoadError::field(at(&format!("paths[{j}]")), "does not start with `/`"));
            }
            if path.trim_end_matches('*').len() + 1 < path.len() || path.trim_end_matches('*').contains('*') {
                return Err(LoadError::field(at(&format!("paths[{j}]")), "may hold one `*`, at its end"));
            }
        }
        for (j, method) in rule.methods.iter().enumerate() {
            if method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase()) {
                return Err(LoadError::field(at(&format!("methods[{j}]")), "is not a method in capitals"));
            }
        }
    }
    let max = spec.limits.max_body_bytes;
    if !(Limits::LEAST_MAX_BODY_BYTES..=Limits::MOST_MAX_BODY_BYTES).contains(&max) {
        return Err(LoadError::field(
            "spec.limits.maxBodyBytes",
            format!("{max} is outside {} to {}", Limits::LEAST_MAX_BODY_BYTES, Limits::MOST_MAX_BODY_BYTES),
        ));
    }
    let mut seen = std::collections::BTreeSet::new();
    for (i, e) in spec.exceptions.iter().enumerate() {
        let at = format!("spec.exceptions[{i}]");
        if e.id.is_empty() || e.reason.trim().is_empty() {
            return Err(LoadError::field(at, "needs an `id` and a `reason`"));
        }
        if !seen.insert(&e.id) {
            return Err(LoadError::field(at, format!("repeats the id `{}`", e.id)));
        }
    }
    Ok(())
}

/// A host pattern is `*`, `*.suffix` or a name; compared in lower case, so capitals are refused here
/// rather than silently never matching.
fn check_host(host: &str) -> Result<(), String> {
    let name = host.strip_prefix("*.").unwrap_or(host);
    if host == "*" {
        return Ok(());
    }
    if name.is_empty() || name.len() > 253 {
        return Err("is empty or longer than 253 characters".into());
    }
    if name.contains('*') {
        return Err("may hold one `*`, as its first label".into());
    }
    if name.contains("://") || name.contains('/') {
        return Err(format!("`{host}` is a URL; give the host name only"));
    }
    let literal_v6 = name.starts_with('[') && name.ends_with(']');
    if name.contains(':') && !literal_v6 {
        return Err(format!("`{host}` holds a port; use `ports`"));
    }
    if literal_v6 {
        let address = name[1..name.len() - 1].parse::<std::net::Ipv6Addr>();
        if !address.is_ok_and(|a| format!("[{a}]") == name) {
            return Err(format!("`{host}` is no IPv6 address in its shortest form"));
        }
    }
    if name.ends_with('.') {
        return Err(format!("`{host}` ends in a dot; names are compared without it"));
    }
    if name.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(format!("`{host}` holds capitals; host names are compared in lower case"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(spec: &str) -> Result<AgentPolicy, LoadError> {
        load_policy(&format!(
            "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {{name: x}}\nspec:\n{spec}\n"
        ))
    }

    #[test]
    fn the_smallest_policy_denies_all_egress_and_enforces() {
        let p = with("  mode: Enforce").unwrap();
        assert_eq!(p.spec.egress.default, crate::DefaultAction::Deny);
        assert_eq!(p.spec.limits.max_body_bytes, 1 << 20);
    }

    #[test]
    fn an_unknown_field_is_refused_with_its_name_and_line() {
        let e = with("  mode: Enforce\n  egres: {}").unwrap_err().to_string();
        assert!(e.contains("egres"), "{e}");
        assert!(e.contains("line 6"), "{e}");
    }

    #[test]
    fn bad_values_name_their_field() {
        for (spec, field) in [
            ("  egress: {rules: [{hosts: [], action: Allow}]}", "spec.egress.rules[0].hosts"),
            (
                "  egress: {rules: [{hosts: [\"https://a.b\"], action: Allow}]}",
                "spec.egress.rules[0].hosts[0]",
            ),
            ("  egress: {rules: [{hosts: [\"a.b:80\"], action: Allow}]}", "use `ports`"),
            ("  egress: {rules: [{hosts: [\"A.b\"], action: Allow}]}", "capitals"),
            ("  egress: {rules: [{hosts: [\"a.*.b\"], action: Allow}]}", "first label"),
            ("  egress: {rules: [{hosts: [a.b], paths: [x], action: Allow}]}", "paths[0]"),
            ("  egress: {rules: [{hosts: [a.b], paths: [\"/a*b\"], action: Allow}]}", "paths[0]"),
            ("  egress: {rules: [{hosts: [a.b], methods: [get], action: Allow}]}", "methods[0]"),
            ("  limits: {maxBodyBytes: 1}", "spec.limits.maxBodyBytes"),
            ("  exceptions: [{id: a, until: \"2027-01-01T00:00:00Z\", reason: \" \"}]", "spec.exceptions[0]"),
        ] {
            let e = with(spec).unwrap_err().to_string();
            assert!(e.contains(field), "{spec}: {e}");
        }
    }

    #[test]
    fn another_kind_is_named() {
        let e = load_policy("apiVersion: v1\nkind: AgentPolicy\nmetadata: {name: x}\nspec: {}").unwrap_err();
        assert!(matches!(e, LoadError::Kind { .. }), "{e}");
    }
}
