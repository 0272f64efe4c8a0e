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
use std::sync::{Arc, OnceLock};

use cedar_policy::{
    Authorizer, Context, Decision as CedarDecision, Effect, Entities, EntityId, EntityTypeName, EntityUid,
    PolicyId, PolicySet, Request, RestrictedExpression as Expr, Schema, ValidationMode, Validator,
};
use miette::Diagnostic;
use sallyport_api::{AgentPolicySpec, OverrideAction};

use super::egress::Listing;
use super::memo::{Key, Memo, Reads};
use super::reach::Reach;
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
    pub(crate) egress: Listing,
    pub(crate) tunnel: bool,
    /// A name is asked of the resolver, rather than a message sent.
    pub(crate) resolve: bool,
    pub(crate) reach: Reach,
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

#[derive(Clone, Debug)]
struct Info {
    id: String,
    decision: Decision,
    code: Option<Code>,
}

/// The answer to one question: the policies that determined it.
type Answer = Vec<Info>;

#[derive(Clone)]
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
    resolve: EntityUid,
    reads: Reads,
    memo: Memo<Answer>,
    /// Used in debug builds, where every context is checked against it.
    schema: Schema,
}

impl std::fmt::Debug for Policies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policies").field("sets", &self.sets.len()).finish_non_exhaustive()
    }
}

/// What every policy starts from.
#[derive(Clone)]
struct Shipped {
    schema: Schema,
    core: Set,
    namespace: Set,
}

/// The shipped schema and policies, parsed and validated once per process.
fn shipped() -> Result<&'static Shipped, String> {
    static SHIPPED: OnceLock<Result<Shipped, String>> = OnceLock::new();
    let load = || {
        let (schema, _) = Schema::from_cedarschema_str(SCHEMA).map_err(|e| format!("schema: {e}"))?;
        let core = load("core", CORE, &schema)?;
        let namespace = load("namespace", NAMESPACE, &schema)?;
        Ok(Shipped { schema, core, namespace })
    };
    SHIPPED.get_or_init(load).as_ref().map_err(Clone::clone)
}

impl Policies {
    /// Loads the shipped policies and those of `spec`.
    pub(crate) fn new(spec: &AgentPolicySpec) -> Result<Self, String> {
        let Shipped { schema, core, mut namespace } = shipped()?.clone();
        add_inline(&mut namespace, &spec.cedar.inline, &schema)?;
        let name = |n: &str| n.parse::<EntityTypeName>().map_err(|e| e.to_string());
        let uid = |t: &str, id: &str| {
            Ok::<_, String>(EntityUid::from_type_name_and_id(name(t)?, EntityId::new(id)))
        };
        let sets = vec![core, namespace];
        let mut reads = Reads::default();
        for set in &sets {
            reads.add(&set.policies)?;
        }
        Ok(Self {
            sets,
            reads,
            memo: Memo::new(),
            authorizer: Authorizer::new(),
            entities: Entities::empty(),
            host: name("Sallyport::Host")?,
            principal: uid("Sallyport::Agent", "local")?,
            request: uid("Sallyport::Action", "request")?,
            response: uid("Sallyport::Action", "response")?,
            resolve: uid("Sallyport::Action", "resolve")?,
            schema,
        })
    }

    /// Decides on a message: once as a whole, and once for each of its findings.
    pub(crate) fn decide(&self, ask: &Ask<'_>, findings: &[Found<'_>]) -> Outcome {
        let mut out = Outcome::default();
        let base = self.base_key(ask, findings);
        self.ask(ask, findings, &base, None, &mut out);
        for (i, found) in findings.iter().enumerate() {
            let decision = if out.decision == Decision::Block && i >= ASKED_AFTER_BLOCK {
                Decision::Allow
            } else {
                self.ask(ask, findings, &base, Some(found), &mut out)
            };
            out.findings.push(decision);
        }
        out
    }

    /// Asks one question; folds the answer into `out` and returns it.
    fn ask(
        &self,
        ask: &Ask<'_>,
        findings: &[Found<'_>],
        base: &Key,
        found: Option<&Found<'_>>,
        out: &mut Outcome,
    ) -> Decision {
        let key = found.map(|f| self.finding_key(base, f));
        let answer: Arc<Answer> =
            self.memo.get(&key.as_ref().unwrap_or(base).0, || self.answer(ask, findings, found));
        let mut strongest = Decision::Allow;
        for info in answer.iter() {
            let reason = Reason { policy: info.id.clone(), decision: info.decision };
            if !out.reasons.contains(&reason) {
                out.reasons.push(reason);
            }
            // A host that is not allowed is the plainer reason than the address it would have led to.
            let plainer = info.code == Some(Code::EgressDenied)
                && matches!(
                    out.code,
                    Some(Code::DestinationNotBound | Code::DestinationUnresolved | Code::DestinationDenied)
                );
            if info.decision > out.decision
                || (info.decision == out.decision && (out.code.is_none() || plainer))
            {
                out.decision = info.decision;
                out.code = info.code;
            }
            strongest = strongest.max(info.decision);
        }
        strongest
    }

    /// The values of a message that the answer may depend on.
    fn base_key(&self, ask: &Ask<'_>, findings: &[Found<'_>]) -> Key {
        let r = &self.reads;
        let mut key = Key(Vec::with_capacity(64));
        key.number(i64::from(ask.direction == Direction::Request) | i64::from(ask.resolve) << 1);
        key.number(ask.reach as i64);
        let text = |key: &mut Key, name: &str, value: &str| {
            if r.context(name) {
                key.text(value);
            }
        };
        if r.resource() || r.context("host") {
            key.text(&ask.head.host);
        }
        text(&mut key, "method", &ask.head.method);
        text(&mut key, "scheme", &ask.head.scheme);
        text(&mut key, "path", path_of(ask.head));
        text(&mut key, "protocol", protocol_of(ask.protocol));
        text(&mut key, "mcpMethod", ask.mcp_method);
        key.number(ask.egress as i64 | i64::from(ask.tunnel) << 2);
        if r.context("port") {
            key.number(i64::from(ask.head.port));
        }
        if r.context("status") {
            key.number(i64::from(ask.status));
        }
        if r.context("tools") {
            key.texts(ask.tools.iter().map(String::as_str));
        }
        if r.context("exceptions") {
            key.texts(ask.exceptions.iter().copied());
        }
        if r.context("rules") {
            key.texts(findings.iter().map(|f| f.finding.rule.as_str()));
        }
        if r.context("categories") {
            key.texts(findings.iter().map(|f| f.finding.category.as_str()));
        }
        if r.context("score") {
            key.number(i64::from(score_of(findings)));
        }
        key
    }

    fn finding_key(&self, base: &Key, found: &Found<'_>) -> Key {
        let mut key = Key(base.0.clone());
        let f = found.finding;
        for (name, value) in [
            ("rule", f.rule.as_str()),
            ("pack", found.pack),
            ("category", f.category.as_str()),
            ("surface", f.surface.as_str()),
            ("role", found.role),
            ("path", f.path.as_str()),
        ] {
            if self.reads.finding(name) {
                key.text(value);
            }
        }
        key.number(f.severity.level() << 8 | i64::from(f.score));
        key.number(found.over.map_or(0, |o| 1 + o as i64) << 1 | i64::from(found.redactable));
        key
    }

    /// Asks every set.
    fn answer(&self, ask: &Ask<'_>, findings: &[Found<'_>], found: Option<&Found<'_>>) -> Answer {
        let mut answer = Answer::new();
        let policy_error = |id: String| Info { id, decision: Decision::Block, code: Some(Code::PolicyError) };
        let Some(request) = self.request(ask, findings, found) else {
            return vec![policy_error("context".to_owned())];
        };
        for set in &self.sets {
            let response = self.authorizer.is_authorized(&request, &set.policies, &self.entities);
            let before = answer.len();
            for error in response.diagnostics().errors() {
                let cedar_policy::AuthorizationError::PolicyEvaluationError(e) = error;
                let id =
                    set.info.get(e.policy_id()).map_or_else(|| e.policy_id().to_string(), |i| i.id.clone());
                answer.push(policy_error(id));
            }
            if response.decision() == CedarDecision::Allow {
                continue;
            }
            for id in response.diagnostics().reason() {
                let Some(info) = set.info.get(id) else { continue };
                let unredactable = info.decision == Decision::Redact && found.is_none_or(|f| !f.redactable);
                let decision = if unredactable { Decision::Block } else { info.decision };
                let code = match decision {
                    Decision::Hold => Some(Code::Held),
                    Decision::Block => Some(info.code.unwrap_or(Code::PolicyDenied)),
                    _ => None,
                };
                answer.push(Info { id: info.id.clone(), decision, code });
            }
            if answer.len() == before {
                answer.push(policy_error(format!("{}: no permit matches", set.name)));
            }
        }
        answer
    }

    fn request(&self, ask: &Ask<'_>, findings: &[Found<'_>], found: Option<&Found<'_>>) -> Option<Request> {
        let mut pairs = base_context(ask, findings);
        if let Some(found) = found {
            pairs.push(("finding".into(), finding_record(found)?));
        }
        let context = Context::from_pairs(pairs).ok()?;
        let action = match ask.direction {
            _ if ask.resolve => &self.resolve,
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

/// The path without its query.
fn path_of(head: &RequestHead) -> &str {
    head.path.split('?').next().unwrap_or_default()
}

const fn protocol_of(protocol: &Protocol) -> &'static str {
    match protocol {
        Protocol::Unknown => "",
        Protocol::Chat => "chat",
        Protocol::Mcp { .. } => "mcp",
    }
}

fn score_of(findings: &[Found<'_>]) -> u8 {
    findings.iter().map(|f| f.finding.score).max().unwrap_or(0)
}

fn base_context(ask: &Ask<'_>, findings: &[Found<'_>]) -> Vec<(String, Expr)> {
    let rules: BTreeSet<&str> = findings.iter().map(|f| f.finding.rule.as_str()).collect();
    let categories: BTreeSet<&str> = findings.iter().map(|f| f.finding.category.as_str()).collect();
    let set = |items: &mut dyn Iterator<Item = &str>| Expr::new_set(items.map(text).collect::<Vec<_>>());
    [
        ("method", text(&ask.head.method)),
        ("scheme", text(&ask.head.scheme)),
        ("host", text(&ask.head.host)),
        ("port", Expr::new_long(i64::from(ask.head.port))),
        ("path", text(path_of(ask.head))),
        ("status", Expr::new_long(i64::from(ask.status))),
        ("protocol", text(protocol_of(ask.protocol))),
        ("mcpMethod", text(ask.mcp_method)),
        ("tools", set(&mut ask.tools.iter().map(String::as_str))),
        ("egress", text(ask.egress.as_str())),
        ("egressListed", Expr::new_bool(ask.egress == Listing::Named)),
        ("tunnel", Expr::new_bool(ask.tunnel)),
        ("destination", text(ask.reach.as_str())),
        ("rules", set(&mut rules.into_iter())),
        ("categories", set(&mut categories.into_iter())),
        ("score", Expr::new_long(i64::from(score_of(findings)))),
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
            Some("destination_not_bound") => Some(Code::DestinationNotBound),
            Some("destination_unresolved") => Some(Code::DestinationUnresolved),
            Some("destination_denied") => Some(Code::DestinationDenied),
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
