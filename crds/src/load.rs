//! Loading an AgentPolicy from YAML or JSON, with errors that name the place.

use crate::check::{self, check_spec};
use crate::{API_VERSION, AgentPolicy, KIND};

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
    pub(crate) fn field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { field: field.into(), problem: problem.into() }
    }
}

/// Loads one AgentPolicy from YAML (JSON is YAML too).
pub fn load_policy(text: &str) -> Result<AgentPolicy, LoadError> {
    let policy: AgentPolicy = serde_saphyr::from_str(text).map_err(|e| LoadError::Shape(e.to_string()))?;
    if policy.api_version != API_VERSION || policy.kind != KIND {
        return Err(LoadError::Kind { found: format!("{} {}", policy.api_version, policy.kind) });
    }
    check::name(&policy.metadata.name)?;
    check_spec(&policy.spec)?;
    Ok(policy)
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
