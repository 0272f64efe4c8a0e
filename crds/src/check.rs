//! What a policy's values must be, beyond their shape: the same as the CRD's bounds and CEL rules say, for
//! whoever has no API server to ask. Each problem names its place.
//!
//! Not looked at here: whether packs and rules exist and whether Cedar compiles. The engine knows that.

use std::collections::BTreeSet;

use crate::load::LoadError;
use crate::{
    AgentPolicySpec, Capacity, Dns, Egress, Isolation, LabelOperator, Limits, Selector, bounds, quantity,
};

type Checked = Result<(), LoadError>;

/// Checks a policy's values.
pub fn check_spec(spec: &AgentPolicySpec) -> Checked {
    selector(&spec.selector)?;
    capture(spec)?;
    egress(&spec.egress)?;
    dns(&spec.dns)?;
    detection(spec)?;
    text("spec.cedar.inline", &spec.cedar.inline, bounds::CEDAR)?;
    exceptions(spec)?;
    let max = spec.limits.max_body_bytes;
    within("spec.limits.maxBodyBytes", max, Limits::LEAST_MAX_BODY_BYTES, Limits::MOST_MAX_BODY_BYTES)?;
    isolation(&spec.isolation)?;
    capacity(&spec.capacity)
}

/// Checks a policy's name.
pub(crate) fn name(name: &str) -> Checked {
    let field = "metadata.name";
    if name.is_empty() {
        return fail(field, "is empty");
    }
    text(field, name, bounds::POLICY_NAME)?;
    if !dns_name(name) {
        return fail(field, format!("`{name}` is no name of lower-case letters, digits, `-` and `.`"));
    }
    Ok(())
}

fn fail(field: impl Into<String>, problem: impl Into<String>) -> Checked {
    Err(LoadError::field(field, problem))
}

fn text(field: impl Into<String>, text: &str, max: usize) -> Checked {
    // Characters, as in the API server's maxLength.
    if text.len() > max && text.chars().count() > max {
        return fail(field, format!("has more than {max} characters"));
    }
    Ok(())
}

fn items<T>(field: impl Into<String>, list: &[T], max: usize) -> Checked {
    if list.len() > max {
        return fail(field, format!("has {} entries, {max} is the most", list.len()));
    }
    Ok(())
}

fn within(field: &str, value: u32, least: u32, most: u32) -> Checked {
    if !(least..=most).contains(&value) {
        return fail(field, format!("{value} is outside {least} to {most}"));
    }
    Ok(())
}

fn ports(field: &str, list: &[u16], max: usize) -> Checked {
    items(field, list, max)?;
    match list.iter().position(|p| *p == 0) {
        Some(i) => fail(format!("{field}[{i}]"), "0 is no port; they are 1 to 65535"),
        None => Ok(()),
    }
}

fn selector(selector: &Selector) -> Checked {
    let field = "spec.selector.matchLabels";
    if selector.match_labels.len() > bounds::LABELS {
        return fail(
            field,
            format!("has {} entries, {} is the most", selector.match_labels.len(), bounds::LABELS),
        );
    }
    for (key, value) in &selector.match_labels {
        if !label_key(key) {
            return fail(field, format!("`{key}` is not a label's key"));
        }
        if !label_value(value) {
            return fail(format!("{field}.{key}"), format!("`{value}` is not a label's value"));
        }
    }
    let field = "spec.selector.matchExpressions";
    items(field, &selector.match_expressions, bounds::LABELS)?;
    for (i, r) in selector.match_expressions.iter().enumerate() {
        let at = |f: &str| format!("{field}[{i}].{f}");
        if !label_key(&r.key) {
            return fail(at("key"), format!("`{}` is not a label's key", r.key));
        }
        items(at("values"), &r.values, bounds::LABEL_VALUES)?;
        if matches!(r.operator, LabelOperator::In | LabelOperator::NotIn) == r.values.is_empty() {
            return fail(at("values"), "In and NotIn need `values`; Exists and DoesNotExist take none");
        }
        if let Some(j) = r.values.iter().position(|v| !label_value(v)) {
            return fail(at(&format!("values[{j}]")), format!("`{}` is not a label's value", r.values[j]));
        }
    }
    Ok(())
}

fn capture(spec: &AgentPolicySpec) -> Checked {
    cidrs("spec.capture.excludeCIDRs", &spec.capture.exclude_cidrs)?;
    ports("spec.capture.excludePorts", &spec.capture.exclude_ports, bounds::EXCLUDES)
}

fn cidrs(field: &str, list: &[String]) -> Checked {
    items(field, list, bounds::EXCLUDES)?;
    for (i, cidr) in list.iter().enumerate() {
        match cidr_prefix(cidr) {
            None => {
                return fail(
                    format!("{field}[{i}]"),
                    format!("`{cidr}` is not a CIDR, such as 10.0.0.0/8 or fd00::/8"),
                );
            }
            Some(0) => {
                return fail(format!("{field}[{i}]"), "is a network of /0, which would hold every address");
            }
            Some(_) => {}
        }
    }
    Ok(())
}

fn dns(dns: &Dns) -> Checked {
    let field = "spec.dns.allow";
    items(field, &dns.allow, bounds::PATTERNS)?;
    for (i, pattern) in dns.allow.iter().enumerate() {
        host(pattern).map_err(|p| LoadError::field(format!("{field}[{i}]"), p))?;
    }
    within("spec.dns.maxLabelEntropy", dns.max_label_entropy, 10, bounds::LABEL_ENTROPY)
}

fn egress(egress: &Egress) -> Checked {
    cidrs("spec.egress.privateCIDRs", &egress.private_cidrs)?;
    items("spec.egress.rules", &egress.rules, bounds::EGRESS_RULES)?;
    for (i, rule) in egress.rules.iter().enumerate() {
        let at = |f: &str| format!("spec.egress.rules[{i}].{f}");
        if rule.hosts.is_empty() {
            return fail(at("hosts"), "names no host; use [\"*\"] for every host");
        }
        items(at("hosts"), &rule.hosts, bounds::PATTERNS)?;
        for (j, pattern) in rule.hosts.iter().enumerate() {
            host(pattern).map_err(|p| LoadError::field(at(&format!("hosts[{j}]")), p))?;
        }
        ports(&at("ports"), &rule.ports, bounds::PATTERNS)?;
        items(at("paths"), &rule.paths, bounds::PATTERNS)?;
        for (j, path) in rule.paths.iter().enumerate() {
            let at = at(&format!("paths[{j}]"));
            text(&at, path, bounds::PATH)?;
            if !path.starts_with('/') {
                return fail(at, "does not start with `/`");
            }
            if path.strip_suffix('*').unwrap_or(path).contains('*') {
                return fail(at, "may hold one `*`, at its end");
            }
        }
        items(at("methods"), &rule.methods, bounds::METHODS)?;
        for (j, method) in rule.methods.iter().enumerate() {
            let at = at(&format!("methods[{j}]"));
            text(&at, method, bounds::METHOD)?;
            if method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase()) {
                return fail(at, "is not a method in capitals");
            }
        }
    }
    Ok(())
}

fn detection(spec: &AgentPolicySpec) -> Checked {
    let field = "spec.detection.packs";
    let packs = spec.detection.packs.as_deref().unwrap_or_default();
    items(field, packs, bounds::PACKS)?;
    let mut seen = BTreeSet::new();
    for (i, pack) in packs.iter().enumerate() {
        let at = format!("{field}[{i}]");
        text(&at, pack, bounds::PACK)?;
        if !dns_name(pack) || pack.contains('.') {
            return fail(at, format!("`{pack}` is not the name of a pack"));
        }
        if !seen.insert(pack) {
            return fail(at, format!("names `{pack}` a second time"));
        }
    }
    let field = "spec.detection.overrides";
    items(field, &spec.detection.overrides, bounds::OVERRIDES)?;
    let mut seen = BTreeSet::new();
    for (i, over) in spec.detection.overrides.iter().enumerate() {
        let at = format!("{field}[{i}].rule");
        let id = &over.rule;
        text(&at, id, bounds::RULE)?;
        let allowed = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'-';
        if !id.starts_with(|c: char| c.is_ascii_uppercase()) || !id.bytes().all(allowed) {
            return fail(at, format!("`{id}` is not a rule's id, such as SLP-SEC-0001"));
        }
        if id.starts_with("SLP-CORE-") {
            return fail(at, format!("`{id}` is a rule of the pack `core`, which can't be overridden"));
        }
        if !seen.insert(id) {
            return fail(at, format!("names `{id}` a second time"));
        }
    }
    Ok(())
}

fn exceptions(spec: &AgentPolicySpec) -> Checked {
    items("spec.exceptions", &spec.exceptions, bounds::EXCEPTIONS)?;
    let mut seen = BTreeSet::new();
    for (i, e) in spec.exceptions.iter().enumerate() {
        let at = format!("spec.exceptions[{i}]");
        if e.id.is_empty() || e.reason.trim().is_empty() {
            return fail(at, "needs an `id` and a `reason`");
        }
        text(format!("{at}.id"), &e.id, bounds::EXCEPTION_ID)?;
        text(format!("{at}.reason"), &e.reason, bounds::REASON)?;
        if !seen.insert(&e.id) {
            return fail(at, format!("repeats the id `{}`", e.id));
        }
    }
    Ok(())
}

fn isolation(isolation: &Isolation) -> Checked {
    let class = &isolation.runtime_class;
    text("spec.isolation.runtimeClass", class, bounds::NAME)?;
    if !class.is_empty() && !dns_name(class) {
        return fail("spec.isolation.runtimeClass", format!("`{class}` is not the name of a RuntimeClass"));
    }
    let field = "spec.isolation.allowCapabilities";
    items(field, &isolation.allow_capabilities, bounds::CAPABILITIES)?;
    for (i, capability) in isolation.allow_capabilities.iter().enumerate() {
        let at = format!("{field}[{i}]");
        text(&at, capability, bounds::CAPABILITY)?;
        let allowed = |b: u8| b.is_ascii_uppercase() || b == b'_';
        if !capability.starts_with(|c: char| c.is_ascii_uppercase())
            || !capability.bytes().all(allowed)
            || capability.starts_with("CAP_")
        {
            return fail(
                at,
                format!("`{capability}` is not a capability in capitals without `CAP_`, such as CHOWN"),
            );
        }
        if Isolation::FORBIDDEN_CAPABILITIES.contains(&capability.as_str()) {
            return fail(at, format!("with `{capability}` an agent could get round its sidecar"));
        }
    }
    Ok(())
}

fn capacity(capacity: &Capacity) -> Checked {
    within("spec.capacity.requestsPerSecond", capacity.requests_per_second, 1, bounds::REQUESTS_PER_SECOND)?;
    within("spec.capacity.headroomPercent", capacity.headroom_percent, 0, bounds::HEADROOM_PERCENT)?;
    for (field, size) in [
        ("spec.capacity.requestBodyP95", &capacity.request_body_p95),
        ("spec.capacity.responseBodyP95", &capacity.response_body_p95),
    ] {
        match quantity::bytes(size) {
            None => return fail(field, format!("`{size}` is not a size in bytes such as 8192, 8Ki or 1Mi")),
            Some(bytes) if bytes > bounds::QUANTITY_BYTES => {
                return fail(field, format!("`{size}` is more than 1Gi"));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// A host pattern is `*`, `*.suffix` or a name; compared in lower case, so capitals are refused here
/// rather than silently never matching.
fn host(host: &str) -> Result<(), String> {
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
    if name.contains('/') {
        return Err(format!("`{host}` is a URL; give the host name only"));
    }
    if let Some(rest) = host.strip_prefix('[') {
        let address = rest.strip_suffix(']').and_then(|a| a.parse::<std::net::Ipv6Addr>().ok());
        // An address of IPv4 in IPv6's clothes is reached, and compared, as IPv4.
        return match address {
            Some(a) if a.to_ipv4_mapped().is_none() && format!("[{a}]") == host => Ok(()),
            _ => Err(format!("`{host}` is no IPv6 address in its shortest form")),
        };
    }
    if name.contains(':') {
        return Err(format!("`{host}` holds a port; use `ports`"));
    }
    if name.ends_with('.') {
        return Err(format!("`{host}` ends in a dot; names are compared without it"));
    }
    if name.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(format!("`{host}` holds capitals; host names are compared in lower case"));
    }
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    if name.split('.').any(|label| label.is_empty() || !label.bytes().all(allowed)) {
        return Err(format!(
            "`{host}` is no name of labels of letters, digits, `-` and `_` with dots between"
        ));
    }
    Ok(())
}

/// The prefix length of a CIDR, if it is one. The syntax is that of Go's `netip.ParsePrefix`, which is the
/// API server's: no leading zeros, no zone, no IPv4 in IPv6.
fn cidr_prefix(cidr: &str) -> Option<u8> {
    let (address, prefix) = cidr.split_once('/')?;
    let address: std::net::IpAddr = address.parse().ok()?;
    let most = match address {
        std::net::IpAddr::V4(_) => 32,
        std::net::IpAddr::V6(v6) if v6.to_ipv4_mapped().is_none() => 128,
        std::net::IpAddr::V6(_) => return None,
    };
    let plain = prefix == "0" || prefix.starts_with(|c: char| matches!(c, '1'..='9'));
    prefix.parse().ok().filter(|p| plain && *p <= most)
}

/// Lower-case letters, digits, `-` and `.`, not `-` or `.` at either end.
fn dns_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    ends(name, plain) && name.bytes().all(|b| plain(b) || b == b'-' || b == b'.')
}

fn label_value(value: &str) -> bool {
    value.is_empty() || label_name(value)
}

fn label_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => prefix.len() <= bounds::NAME && dns_name(prefix) && label_name(name),
        None => label_name(key),
    }
}

fn label_name(name: &str) -> bool {
    name.len() <= bounds::LABEL_VALUE
        && ends(name, |b| b.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn ends(text: &str, allowed: impl Fn(u8) -> bool) -> bool {
    matches!(text.as_bytes(), [first, ..] if allowed(*first)) && text.bytes().last().is_some_and(allowed)
}
