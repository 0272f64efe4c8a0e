//! From segments to findings: every text, every view, every rule.

use std::sync::Arc;

use sallyport_api::{AgentPolicySpec, OverrideAction};
use sha2::{Digest, Sha256};

use crate::body::extract::{Extracted, Structural};
use crate::body::json::Doc;
use crate::body::segment::{Role, Segment};
use crate::finding::{Category, Finding, Surface};
use crate::rules::set::{CompiledRule, Hit, Kind, RuleSet};
use crate::rules::{Rule, Scanner};
use crate::text::views::each_view;
use crate::value::names::{is_data, node_is_data};
use crate::value::suspicious;
use crate::verdict::Decision;

/// Findings of one message that are kept: a page of addresses has hundreds. A message with more was made to
/// wear the inspection out, and the core refuses it.
pub(crate) const MOST_FINDINGS: usize = 4096;

/// Values longer than this are read without their names: what a name adds, it adds to short values.
const LONGEST_MEMBER: usize = 512;

/// The rules that are on, and what the policy makes of them.
#[derive(Debug)]
pub(crate) struct Detector {
    pub(crate) rules: Arc<RuleSet>,
    /// For each rule, the action that the policy sets by hand.
    overrides: Vec<Option<OverrideAction>>,
}

/// A finding with what only the engine needs to know of it.
pub(crate) struct Item {
    pub(crate) finding: Finding,
    pub(crate) pack: &'static str,
    pub(crate) role: Role,
    pub(crate) over: Option<OverrideAction>,
    /// The segment it stands in; none where the shape of the message gave it away.
    pub(crate) segment: Option<usize>,
}

impl Detector {
    /// Checks the overrides of `spec` against the rules that are on.
    pub(crate) fn new(spec: &AgentPolicySpec, rules: Arc<RuleSet>) -> Result<Self, String> {
        let mut overrides = vec![None; rules.rules.len()];
        for (i, over) in spec.detection.overrides.iter().enumerate() {
            let at = |p: String| format!("spec.detection.overrides[{i}]: {p}");
            let index = rules.rules.iter().position(|r| r.rule.id == over.rule).ok_or_else(|| {
                at(format!(
                    "no rule `{}` in the packs that are on; `sallyport rules list` shows them",
                    over.rule
                ))
            })?;
            if rules.rules[index].pack == "core" {
                return Err(at(format!("rule `{}` is in the core, which no policy can change", over.rule)));
            }
            if overrides[index].replace(over.action).is_some() {
                return Err(at(format!("rule `{}` is overridden twice", over.rule)));
            }
        }
        Ok(Self { rules, overrides })
    }

    /// A detector of one rule, for the rule's own tests. Every pattern of it is compiled.
    pub(crate) fn of_rule(rule: &Rule) -> Result<Self, String> {
        let rules = RuleSet::new([("test", rule.clone())])?;
        let this = Self::new(&AgentPolicySpec::default(), Arc::new(rules))?;
        if this.rules.rules.iter().all(CompiledRule::compiles) {
            Ok(this)
        } else {
            Err("a pattern of the rule is larger than the engine compiles".into())
        }
    }

    /// Everything the rules find, in the order of the text.
    pub(crate) fn find(&self, ex: &Extracted<'_>) -> Vec<Item> {
        let mut items: Vec<Item> = Vec::new();
        let mut hits: Vec<(Hit, &'static str)> = Vec::new();
        let mut full = false;
        for (index, segment) in ex.segments.iter().enumerate() {
            if full {
                break;
            }
            self.search(ex, segment, &mut hits);
            if hits.is_empty() {
                continue;
            }
            hits.sort_by_key(|(h, _)| (h.start, h.end, h.rule));
            for (hit, view) in hits.drain(..) {
                let rule = &self.rules.rules[hit.rule];
                if segment.role == Role::Credential && rule.rule.category == Category::Secret {
                    continue;
                }
                if items.len() == MOST_FINDINGS {
                    full = true;
                    continue;
                }
                if hit.broken {
                    items.extend(self.structural(&Structural {
                        scanner: Scanner::BrokenRule,
                        surface: segment.surface,
                        path: rule.rule.id.clone(),
                    }));
                    continue;
                }
                items.push(Item {
                    finding: Finding {
                        rule: rule.rule.id.clone(),
                        category: rule.rule.category,
                        severity: rule.rule.severity,
                        score: rule.rule.score,
                        surface: segment.surface,
                        path: ex.path(&segment.place),
                        start: hit.start,
                        end: hit.end,
                        view,
                        evidence: evidence(&segment.text[hit.start..hit.end]),
                        decision: Decision::Allow,
                    },
                    pack: rule.pack,
                    role: segment.role,
                    over: self.overrides[hit.rule],
                    segment: Some(index),
                });
            }
        }
        for s in &ex.structural {
            items.extend(self.structural(s));
        }
        if full {
            let surface = items.first().map_or(Surface::RequestBody, |i| i.finding.surface);
            items.extend(self.structural(&Structural {
                scanner: Scanner::TooManyFindings,
                surface,
                path: String::new(),
            }));
        }
        items
    }

    fn structural(&self, s: &Structural) -> Option<Item> {
        let index = self.rules.structural(s.scanner, s.surface)?;
        let rule = &self.rules.rules[index];
        Some(Item {
            finding: Finding {
                rule: rule.rule.id.clone(),
                category: rule.rule.category,
                severity: rule.rule.severity,
                score: rule.rule.score,
                surface: s.surface,
                path: s.path.clone(),
                start: 0,
                end: 0,
                view: "structure",
                evidence: String::new(),
                decision: Decision::Allow,
            },
            pack: rule.pack,
            role: Role::None,
            over: self.overrides[index],
            segment: None,
        })
    }

    /// One text and all its views; hits of views are mapped back, and what a view shows again is dropped.
    fn search(&self, ex: &Extracted<'_>, segment: &Segment<'_>, hits: &mut Vec<(Hit, &'static str)>) {
        let (surface, text) = (segment.surface, &*segment.text);
        let mut found = Vec::new();
        let of = Kind::new(surface, is_data(ex, segment));
        let of = if segment.is_parameter() { of.part_of_url() } else { of };
        self.rules.search(of, text, &mut found);
        hits.extend(found.drain(..).map(|h| (h, "raw")));
        if surface == Surface::ToolCall && text.starts_with('{') {
            self.arguments(text, hits);
        }
        if let Some(name) =
            ex.name(segment).filter(|n| text.len() <= LONGEST_MEMBER && self.rules.speaks_of(n))
        {
            self.member(surface, &name, text, hits);
        }
        each_view(text, |kind, view, maps| {
            // A message with that many findings is refused for their number.
            if hits.len() > MOST_FINDINGS {
                return;
            }
            self.rules.search_view(of, view, &mut found);
            for mut hit in found.drain(..) {
                for map in maps {
                    (hit.start, hit.end) = map.back(hit.start, hit.end);
                }
                add(hits, hit, kind);
            }
        });
    }

    /// The values of arguments that came as a string of JSON, which is how some APIs carry a tool call. The
    /// string itself was searched as one text; this is for the rules that ask whether a value is data.
    fn arguments(&self, text: &str, hits: &mut Vec<(Hit, &'static str)>) {
        let Ok(doc) = Doc::parse(text) else { return };
        let kind = Kind::new(Surface::ToolCall, true).values_only();
        let mut found = Vec::new();
        for id in 0..doc.len() {
            let Some((value, map)) = doc.string(id).filter(|(v, _)| v.len() >= 3 && suspicious(v)) else {
                continue;
            };
            if hits.len() > MOST_FINDINGS || !node_is_data(&doc, id) {
                continue;
            }
            let base = doc.node(id).span().start + 1;
            let mut note = |mut hit: Hit, view| {
                if let Some(map) = &map {
                    (hit.start, hit.end) = map.back(hit.start, hit.end);
                }
                (hit.start, hit.end) = (hit.start + base, hit.end + base);
                add(hits, hit, view);
            };
            self.rules.search(kind, &value, &mut found);
            found.drain(..).for_each(|h| note(h, "raw"));
            each_view(&value, |view, text, maps| {
                self.rules.search_view(kind, text, &mut found);
                for mut hit in found.drain(..) {
                    for map in maps {
                        (hit.start, hit.end) = map.back(hit.start, hit.end);
                    }
                    note(hit, view);
                }
            });
        }
    }

    /// A value together with its name, as it stands in JSON: `"password": "..."` says more than the value
    /// alone. Hits are cut to the value.
    fn member(&self, surface: Surface, name: &str, text: &str, hits: &mut Vec<(Hit, &'static str)>) {
        let before = name.len() + 5;
        let mut whole = String::with_capacity(before + text.len() + 1);
        for part in ["\"", name, "\": \"", text, "\""] {
            whole.push_str(part);
        }
        let mut found = Vec::new();
        self.rules.search_view(Kind::new(surface, false), &whole, &mut found);
        for mut hit in found {
            hit.start = hit.start.max(before) - before;
            hit.end = hit.end.min(before + text.len()).saturating_sub(before);
            if hit.start < hit.end {
                add(hits, hit, "member");
            }
        }
    }
}

/// Adds a hit unless its rule has found that place already.
fn add(hits: &mut Vec<(Hit, &'static str)>, hit: Hit, view: &'static str) {
    if !hits.iter().any(|(h, _)| h.rule == hit.rule && h.start < hit.end && hit.start < h.end) {
        hits.push((hit, view));
    }
}

/// A hash by which two findings of the same text can be recognised without keeping it.
fn evidence(text: &str) -> String {
    let head = Sha256::digest(text.as_bytes());
    let value = head.iter().take(8).fold(0u64, |v, b| v << 8 | u64::from(*b));
    format!("{value:016x}")
}
