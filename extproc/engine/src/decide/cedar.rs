//! Cedar decides everything.
//!
//! This file is the only place where findings become a decision; a test greps that it stays so. Three
//! readings of Cedar that differ from the language's own, each on the closed side:
//!
//! - A policy that errors is skipped by Cedar. Here it blocks, with reason `policy_error`.
//! - A denial without a determining policy (no `permit` matched) blocks.
//! - `redact` of a finding that stands in no body (a header, a URL) can't be carried out: it blocks.
//!
//! Each graded action is a `forbid` with `@action("flag|redact|hold|block")`. The core's and the
//! namespace's policies are separate sets, decided apart and combined by maximum, so that nothing in one
//! can reach the other.

use std::collections::{BTreeSet, HashMap};

use cedar_policy::{
    Authorizer, Context, Decision as CedarDecision, Effect, Entities, EntityId, EntityTypeName, EntityUid,
    PolicyId, PolicySet, Request, RestrictedExpression as Expr, Schema, ValidationMode, Validator,
};
use miette::Diagnostic;
use sallyport_api::{AgentPolicySpec, OverrideAction};

use crate::body::extract::Direction;
use crate::finding::Finding;
use crate::message::RequestHead;
use crate::verdict::{Code, Decision, Protocol, Reason};

const SCHEMA: &str = include_str!("../../../../policies/cedar/schema.cedarschema");
const CORE: &str = include_str!("../../../../policies/cedar/core.cedar");
const NAMESPACE: &str = include_str!("../../../../policies/cedar/namespace.cedar");

/// What a message is, for Cedar.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) direction: Direction,
    pub(crate) head: &'a RequestHead,
    /// 0 in requests.
    pub(crate) status: u16,
    pub(crate) protocol: &'a Protocol,
    pub(crate) mcp_method: &'a str,
    pub(crate) tools: &'a [String],
    pub(crate) egress_allowed: bool,
    pub(crate) tunnel: bool,
    pub(crate) exceptions: &'a [&'a str],
}

/// A finding as Cedar sees it.
pub(crate) struct Found<'a> {
    pub(crate) finding: &'a Finding,
    pub(crate) pack: &'static str,
    pub(crate) role: &'static str,
    pub(crate) over: Option<OverrideAction>,
    /// Whether it stands in a body and can be cut out of it.
    pub(crate) redactable: bool,
}

/// What Cedar said.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) decision: Decision,
    pub(crate) code: Option<Code>,
    pub(crate) reasons: Vec<Reason>,
    /// What each finding led to, in their order.
    pub(crate) findings: Vec<Decision>,
}

/// After a block is certain, so many findings are still asked about, so that the refused client learns
/// more than one rule at a time; the rest can change nothing.
const ASKED_AFTER_BLOCK: usize = 16;

struct Info {
    id: String,
    decision: Decision,
    code: Option<Code>,
}

struct Set {
    name: &'static str,
    policies: PolicySet,
    info: HashMap<PolicyId, Info>,
}

/// The policies of one AgentPolicy, ready to be asked.
pub(crate) struct Policies {
    sets: Vec<Set>,
    authorizer: Authorizer,
    entities: Entities,
    host: EntityTypeName,
    principal: EntityUid,
    request: EntityUid,
    response: EntityUid,
    /// Used in debug builds, where every context is checked against it.
    schema: Schema,
}

impl std::fmt::Debug for Policies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policies").field("sets", &self.sets.len()).finish_non_exhaustive()
    }
}

impl Policies {
    /// Loads the shipped policies and those of `spec`.
    pub(crate) fn new(spec: &AgentPolicySpec) -> Result<Self, String> {
        let (schema, _) = Schema::from_cedarschema_str(SCHEMA).map_err(|e| format!("schema: {e}"))?;
        let core = load("core", CORE, &schema)?;
        let mut namespace = load("namespace", NAMESPACE, &schema)?;
        add_inline(&mut namespace, &spec.cedar.inline, &schema)?;
        let name = |n: &str| n.parse::<EntityTypeName>().map_err(|e| e.to_string());
        let uid = |t: &str, id: &str| {
            Ok::<_, String>(EntityUid::from_type_name_and_id(name(t)?, EntityId::new(id)))
        };
        Ok(Self {
            sets: vec![core, namespace],
            authorizer: Authorizer::new(),
            entities: Entities::empty(),
            host: name("Sallyport::Host")?,
            principal: uid("Sallyport::Agent", "local")?,
            request: uid("Sallyport::Action", "request")?,
            response: uid("Sallyport::Action", "response")?,
            schema,
        })
    }

    /// Decides on a message: once as a whole, and once for each of its findings.
    pub(crate) fn decide(&self, ask: &Ask<'_>, findings: &[Found<'_>]) -> Outcome {
        let mut out = Outcome::default();
        let base = base_context(ask, findings);
        self.ask(ask, &base, None, &mut out);
        let mut known: HashMap<(&str, &str, &str, &str), Decision> = HashMap::new();
        for (i, found) in findings.iter().enumerate() {
            if out.decision == Decision::Block && i >= ASKED_AFTER_BLOCK {
                out.findings.push(Decision::Allow);
                continue;
            }
            let f = found.finding;
            let key = (f.rule.as_str(), f.surface.as_str(), found.role, f.path.as_str());
            let decision = if let Some(d) = known.get(&key) {
                *d
            } else {
                let d = self.ask(ask, &base, Some(found), &mut out);
                known.insert(key, d);
                d
            };
            out.findings.push(decision);
        }
        out
    }

    /// Asks every set one question; folds the answers into `out` and returns the strongest.
    fn ask(
        &self,
        ask: &Ask<'_>,
        base: &[(String, Expr)],
        found: Option<&Found<'_>>,
        out: &mut Outcome,
    ) -> Decision {
        let mut strongest = Decision::Allow;
        let mut fold = |decision: Decision, code: Option<Code>, policy: String| {
            let reason = Reason { policy, decision };
            if !out.reasons.contains(&reason) {
                out.reasons.push(reason);
            }
            if decision > out.decision || (decision == out.decision && out.code.is_none()) {
                out.decision = decision;
                out.code = code;
            }
            strongest = strongest.max(decision);
        };
        let Some(request) = self.request(ask, base, found) else {
            fold(Decision::Block, Some(Code::PolicyError), "context".to_owned());
            return strongest;
        };
        for set in &self.sets {
            let response = self.authorizer.is_authorized(&request, &set.policies, &self.entities);
            let mut determined = false;
            for error in response.diagnostics().errors() {
                let cedar_policy::AuthorizationError::PolicyEvaluationError(e) = error;
                let id =
                    set.info.get(e.policy_id()).map_or_else(|| e.policy_id().to_string(), |i| i.id.clone());
                determined = true;
                fold(Decision::Block, Some(Code::PolicyError), id);
            }
            if response.decision() == CedarDecision::Allow {
                continue;
            }
            for id in response.diagnostics().reason() {
                let Some(info) = set.info.get(id) else { continue };
                determined = true;
                let unredactable = info.decision == Decision::Redact && found.is_none_or(|f| !f.redactable);
                let decision = if unredactable { Decision::Block } else { info.decision };
                let code = match decision {
                    Decision::Hold => Some(Code::Held),
                    Decision::Block => Some(info.code.unwrap_or(Code::PolicyDenied)),
                    _ => None,
                };
                fold(decision, code, info.id.clone());
            }
            if !determined {
                fold(Decision::Block, Some(Code::PolicyError), format!("{}: no permit matches", set.name));
            }
        }
        strongest
    }

    fn request(&self, ask: &Ask<'_>, base: &[(String, Expr)], found: Option<&Found<'_>>) -> Option<Request> {
        let mut pairs = base.to_vec();
        if let Some(found) = found {
            pairs.push(("finding".into(), finding_record(found)?));
        }
        let context = Context::from_pairs(pairs).ok()?;
        let action = match ask.direction {
            Direction::Request => &self.request,
            Direction::Response => &self.response,
        };
        let host = EntityUid::from_type_name_and_id(self.host.clone(), EntityId::new(&ask.head.host));
        // Checking a context costs more than deciding on it; the contexts are ours, so tests check them.
        let schema = cfg!(debug_assertions).then_some(&self.schema);
        Request::new(self.principal.clone(), action.clone(), host, context, schema).ok()
    }
}

fn text(s: &str) -> Expr {
    Expr::new_string(s.to_owned())
}

fn base_context(ask: &Ask<'_>, findings: &[Found<'_>]) -> Vec<(String, Expr)> {
    let path = ask.head.path.split('?').next().unwrap_or_default();
    let protocol = match ask.protocol {
        Protocol::Unknown => "",
        Protocol::Chat => "chat",
        Protocol::Mcp { .. } => "mcp",
    };
    let rules: BTreeSet<&str> = findings.iter().map(|f| f.finding.rule.as_str()).collect();
    let categories: BTreeSet<&str> = findings.iter().map(|f| f.finding.category.as_str()).collect();
    let score = findings.iter().map(|f| f.finding.score).max().unwrap_or(0);
    let set = |items: &mut dyn Iterator<Item = &str>| Expr::new_set(items.map(text).collect::<Vec<_>>());
    [
        ("method", text(&ask.head.method)),
        ("scheme", text(&ask.head.scheme)),
        ("host", text(&ask.head.host)),
        ("port", Expr::new_long(i64::from(ask.head.port))),
        ("path", text(path)),
        ("status", Expr::new_long(i64::from(ask.status))),
        ("protocol", text(protocol)),
        ("mcpMethod", text(ask.mcp_method)),
        ("tools", set(&mut ask.tools.iter().map(String::as_str))),
        ("egress", text(if ask.egress_allowed { "allow" } else { "deny" })),
        ("tunnel", Expr::new_bool(ask.tunnel)),
        ("rules", set(&mut rules.into_iter())),
        ("categories", set(&mut categories.into_iter())),
        ("score", Expr::new_long(i64::from(score))),
        ("exceptions", set(&mut ask.exceptions.iter().copied())),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .to_vec()
}

fn finding_record(found: &Found<'_>) -> Option<Expr> {
    let f = found.finding;
    let mut fields = vec![
        ("rule", text(&f.rule)),
        ("pack", text(found.pack)),
        ("category", text(f.category.as_str())),
        ("severity", Expr::new_long(f.severity.level())),
        ("score", Expr::new_long(i64::from(f.score))),
        ("surface", text(f.surface.as_str())),
        ("role", text(found.role)),
        ("path", text(&f.path)),
    ];
    if let Some(over) = found.over {
        fields.push((
            "override",
            text(match over {
                OverrideAction::Allow => "allow",
                OverrideAction::Flag => "flag",
                OverrideAction::Redact => "redact",
                OverrideAction::Hold => "hold",
                OverrideAction::Block => "block",
            }),
        ));
    }
    Expr::new_record(fields.into_iter().map(|(k, v)| (k.to_owned(), v))).ok()
}

fn load(name: &'static str, source: &str, schema: &Schema) -> Result<Set, String> {
    let policies: PolicySet = source.parse().map_err(|e| place(name, source, &e))?;
    let result = Validator::new(schema.clone()).validate(&policies, ValidationMode::Strict);
    if let Some(e) = result.validation_errors().next() {
        return Err(place(name, source, e));
    }
    let mut info = HashMap::new();
    for p in policies.policies() {
        let id = p.annotation("id").filter(|i| !i.is_empty());
        let id = id.ok_or_else(|| format!("{name}: policy {} has no @id(\"...\")", p.id()))?.to_owned();
        if p.effect() == Effect::Permit {
            continue;
        }
        let decision = match p.annotation("action") {
            Some("flag") => Decision::Flag,
            Some("redact") => Decision::Redact,
            Some("hold") => Decision::Hold,
            Some("block") => Decision::Block,
            other => {
                let found = other.map_or_else(|| "nothing".to_owned(), |o| format!("`{o}`"));
                return Err(format!(
                    "{name}: policy `{id}`: @action is {found}, expected \"flag\", \"redact\", \"hold\" or \"block\""
                ));
            }
        };
        let code = match p.annotation("code") {
            None => None,
            Some("egress_denied") => Some(Code::EgressDenied),
            Some("tunnel_denied") => Some(Code::TunnelDenied),
            Some("bad_url") => Some(Code::BadUrl),
            Some(other) => return Err(format!("{name}: policy `{id}`: @code(\"{other}\") is not known")),
        };
        info.insert(p.id().clone(), Info { id, decision, code });
    }
    if policies.templates().next().is_some() {
        return Err(format!("{name}: templates (?principal, ?resource) are not supported"));
    }
    Ok(Set { name, policies, info })
}

/// Adds a namespace's own policies to the shipped ones.
fn add_inline(namespace: &mut Set, source: &str, schema: &Schema) -> Result<(), String> {
    const NAME: &str = "spec.cedar.inline";
    if source.trim().is_empty() {
        return Ok(());
    }
    let inline = load(NAME, source, schema)?;
    if let Some(p) = inline.policies.policies().find(|p| p.effect() == Effect::Permit) {
        return Err(format!(
            "{NAME}: policy `{}` is a permit; what is not forbidden is permitted already, so it would change nothing. Write a forbid, with `unless` for what it should let through",
            p.annotation("id").unwrap_or_default()
        ));
    }
    let mut seen: BTreeSet<&str> = namespace.info.values().map(|i| i.id.as_str()).collect();
    for i in inline.info.values() {
        if !seen.insert(&i.id) {
            return Err(format!("{NAME}: the @id `{}` is taken by another policy", i.id));
        }
    }
    let renamed = namespace.policies.merge(&inline.policies, true).map_err(|e| format!("{NAME}: {e}"))?;
    for (id, info) in inline.info {
        let id = renamed.get(&id).cloned().unwrap_or(id);
        namespace.info.insert(id, info);
    }
    Ok(())
}

/// An error with the line and column it stands at.
fn place(name: &str, source: &str, error: &dyn Diagnostic) -> String {
    let label = error.labels().and_then(|mut l| l.next());
    let help = error.help().map(|h| format!(" ({h})")).unwrap_or_default();
    match label {
        Some(l) => {
            let before = &source[..l.offset().min(source.len())];
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            format!("{name}: line {line}, column {column}: {error}{help}")
        }
        None => format!("{name}: {error}{help}"),
    }
}
