//! The CEL rules of the CRD, each with the message that people get.
//!
//! The API server applies them without any help of ours. `load_policy` makes the same checks in Rust, for
//! commands that have no API server and for an operator that must not trust that the newest CRD is
//! installed; a test holds that both refuse the same cases (`crds/cases`).

use schemars::Schema;
use serde::Serialize;
use serde_json::json;

use crate::{Isolation, bounds};

/// One entry of `x-kubernetes-validations`.
#[derive(Serialize)]
pub(crate) struct Rule {
    rule: String,
    message: &'static str,
}

fn rule(rule: impl Into<String>, message: &'static str) -> Rule {
    Rule { rule: rule.into(), message }
}

const LABEL_VALUE: &str = "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$";
const LABEL_KEY: &str = "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";

/// On the object.
pub(crate) const NAME: &str = "self.metadata.name.size() <= 63";
pub(crate) const NAME_MESSAGE: &str = "metadata.name may have 63 characters at most";

pub(crate) fn hosts() -> Vec<Rule> {
    vec![
        rule("self.size() > 0", "names no host; use [\"*\"] for every host"),
        rule("!self.exists(h, h.contains('/'))", "holds a URL; give the host name only"),
        rule(
            "!self.exists(h, h.contains(':') && !h.contains('/') && !h.startsWith('['))",
            "holds a host with a port; use `ports`",
        ),
        rule(
            "self.all(h, h == h.lowerAscii())",
            "holds a host with capitals; host names are compared in lower case",
        ),
        rule(
            "!self.exists(h, h.endsWith('.'))",
            "holds a host that ends in a dot; names are compared without it",
        ),
        rule(
            "self.all(h, h == '*' || h.matches('^([*][.])?[^*]*$'))",
            "holds a host with a `*` elsewhere than as its whole first label",
        ),
        rule(
            "self.all(h, !h.startsWith('[') || (h.endsWith(']') && h.contains(':') && \
             isIP(h.substring(1, h.size() - 1)) && ip.isCanonical(h.substring(1, h.size() - 1))))",
            "holds a `[` that begins no IPv6 address in brackets in its shortest form",
        ),
        rule(
            "self.all(h, h == '*' || h.startsWith('[') || \
             h.matches('^([*][.])?[a-z0-9_-]+([.][a-z0-9_-]+)*$'))",
            "holds a host that is no name of labels of letters, digits, `-` and `_` with dots between",
        ),
    ]
}

/// Host patterns of which there may be none.
pub(crate) fn names() -> Vec<Rule> {
    hosts().split_off(1)
}

pub(crate) fn methods() -> Vec<Rule> {
    vec![rule("self.all(m, m.matches('^[A-Z]+$'))", "holds what is not a method in capitals")]
}

pub(crate) fn paths() -> Vec<Rule> {
    vec![
        rule("self.all(p, p.startsWith('/'))", "holds a path that does not start with `/`"),
        rule(
            "self.all(p, p.matches('^[^*]*[*]?$'))",
            "holds a path with a `*` that is not its last character",
        ),
    ]
}

pub(crate) fn exceptions() -> Vec<Rule> {
    vec![
        rule(
            "self.all(e, e.id.size() > 0 && e.reason.trim().size() > 0)",
            "every exception needs an `id` and a `reason`",
        ),
        rule("self.all(e, self.exists_one(o, o.id == e.id))", "two exceptions have the same `id`"),
    ]
}

pub(crate) fn cidrs() -> Vec<Rule> {
    vec![
        rule("self.all(c, isCIDR(c))", "holds what is not a CIDR, such as 10.0.0.0/8 or fd00::/8"),
        rule("!self.exists(c, c.endsWith('/0'))", "holds a network of /0, which would hold every address"),
    ]
}

pub(crate) fn capabilities() -> Vec<Rule> {
    vec![
        rule(
            "self.all(c, c.matches('^[A-Z][A-Z_]*$') && !c.startsWith('CAP_'))",
            "holds what is not a capability in capitals without `CAP_`, such as CHOWN",
        ),
        rule(
            format!("!self.exists(c, c in ['{}'])", Isolation::FORBIDDEN_CAPABILITIES.join("', '")),
            "holds a capability with which an agent could get round its sidecar",
        ),
    ]
}

pub(crate) fn runtime_class() -> Vec<Rule> {
    vec![rule(
        "self == '' || self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
        "is not the name of a RuntimeClass",
    )]
}

pub(crate) fn quantity() -> Vec<Rule> {
    vec![
        rule(
            "self.matches('^[0-9]{1,10}(k|M|Ki|Mi|Gi)?$')",
            "is not a size in bytes such as 8192, 8Ki or 1Mi",
        ),
        rule(
            "!self.matches('^[0-9]{1,10}(k|M|Ki|Mi|Gi)?$') || quantity(self).compareTo(quantity('1Gi')) <= 0",
            "is more than 1Gi",
        ),
    ]
}

pub(crate) fn packs() -> Vec<Rule> {
    vec![
        rule(
            "self.all(p, p.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'))",
            "holds what is not the name of a pack",
        ),
        rule("self.all(p, self.exists_one(o, o == p))", "names a pack twice"),
    ]
}

pub(crate) fn overrides() -> Vec<Rule> {
    vec![
        rule(
            "self.all(o, o.rule.matches('^[A-Z][A-Z0-9-]*$'))",
            "holds a `rule` that is not a rule's id, such as SLP-SEC-0001",
        ),
        rule(
            "!self.exists(o, o.rule.startsWith('SLP-CORE-'))",
            "names a rule of the pack `core`, which can't be overridden",
        ),
        rule("self.all(o, self.exists_one(p, p.rule == o.rule))", "names a rule twice"),
    ]
}

pub(crate) fn match_labels() -> Vec<Rule> {
    vec![
        rule(format!("self.all(k, k.matches('{LABEL_KEY}'))"), "holds a key that is not a label's key"),
        rule(
            format!("self.all(k, self[k].matches('{LABEL_VALUE}'))"),
            "holds a value that is not a label's value",
        ),
    ]
}

pub(crate) fn match_expressions() -> Vec<Rule> {
    vec![
        rule(
            "self.all(r, (r.operator in ['In', 'NotIn']) == (has(r.values) && r.values.size() > 0))",
            "In and NotIn need `values`; Exists and DoesNotExist take none",
        ),
        rule(format!("self.all(r, r.key.matches('{LABEL_KEY}'))"), "holds a `key` that is not a label's key"),
        rule(
            format!("self.all(r, !has(r.values) || r.values.all(v, v.matches('{LABEL_VALUE}')))"),
            "holds a value that is not a label's value",
        ),
    ]
}

/// Bounds the values of a map, for which schemars has no attribute.
pub(crate) fn label_values(schema: &mut Schema) {
    if let Some(values) = schema.get_mut("additionalProperties").and_then(|v| v.as_object_mut()) {
        values.insert("maxLength".into(), json!(bounds::LABEL_VALUE));
    }
}
