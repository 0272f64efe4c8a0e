//! Rules compiled together, and the search that runs them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, AhoCorasickKind, MatchKind};
use regex_automata::meta::Regex;
use regex_automata::nfa::thompson::WhichCaptures;
use regex_automata::{Input, util::captures::Captures};

use super::gate;
use super::pack::{Pack, Rule, Scanner, parse_pattern, reading};
use crate::detect::MOST_FINDINGS;
use crate::finding::Surface;
use crate::{url, value};

/// A regex's own memory while it is compiled, in bytes; a shipped pattern needs a tenth of it.
const REGEX_LIMIT: usize = 4 << 20;
/// What the lazily built part of a regex may hold per thread, in bytes; it grows as far as texts make it. A
/// smaller one thrashes on wide patterns, and what stands in for it is two hundred times slower.
const REGEX_CACHE: usize = 2 << 20;
/// Matches of one rule in one text that are kept. One more than findings of a message are, so that nothing
/// is left out in silence.
const MOST_MATCHES: usize = MOST_FINDINGS + 1;
/// A pattern wider than this runs over the whole text instead of around its hits.
const WIDEST: usize = 8192;

/// One rule, ready to run.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    pub(crate) rule: Rule,
    /// The pack it came from.
    pub(crate) pack: &'static str,
    /// One bit per surface, in the lower half for texts of every kind, in the upper one for values only.
    surfaces: u32,
    /// The longest match in bytes, where one exists.
    width: Option<usize>,
    /// Which group is the finding.
    group: usize,
    /// Compiled at first use: most rules of most sidecars never see a candidate.
    regex: OnceLock<Option<Regex>>,
    except: OnceLock<Option<Vec<Regex>>>,
}

/// What a rule found in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hit {
    pub(crate) rule: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The rule could not run; the whole text is its finding.
    pub(crate) broken: bool,
}

/// All rules of a policy and their gate.
#[derive(Debug)]
pub(crate) struct RuleSet {
    pub(crate) rules: Vec<CompiledRule>,
    gate: Option<Gate>,
    /// The gate of rules about values only: their literals are ordinary words elsewhere.
    values: Option<Gate>,
    digits: Vec<u32>,
    at: Vec<u32>,
    /// Rules that the engine's own code finds in values and in URLs.
    sql: Vec<(Scanner, u32)>,
    shell: Vec<(Scanner, u32)>,
    urls: Vec<(Scanner, u32)>,
    /// Words that rules want near a match.
    near: Option<AhoCorasick>,
}

/// Literals, and the rules behind each of them.
#[derive(Debug)]
struct Gate {
    automaton: AhoCorasick,
    behind: Vec<Vec<u32>>,
}

impl Gate {
    fn new(literals: BTreeMap<String, Vec<u32>>) -> Result<Option<Self>, String> {
        debug_assert!(literals.keys().all(|l| l.len() >= gate::LEAST_LITERAL));
        if literals.is_empty() {
            return Ok(None);
        }
        // A DFA costs memory once and answers in one look-up per byte whatever the number of rules.
        let automaton = AhoCorasickBuilder::new()
            .ascii_case_insensitive(true)
            .match_kind(MatchKind::Standard)
            .kind(Some(AhoCorasickKind::DFA))
            .build(literals.keys())
            .map_err(|e| format!("the gate could not be built: {e}"))?;
        Ok(Some(Self { automaton, behind: literals.into_values().collect() }))
    }
}

const fn bit(surface: Surface) -> u32 {
    1 << surface as u32
}

/// What is known of a text before it is searched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    mask: u32,
    url: bool,
}

impl Kind {
    /// A text of `surface`; `value` where it should be data.
    pub(crate) const fn new(surface: Surface, value: bool) -> Self {
        let mask = bit(surface);
        Self {
            mask: if value { mask | mask << VALUES } else { mask },
            url: matches!(surface, Surface::Url) || value,
        }
    }
    /// The same for rules about values only: the others have seen the text already.
    pub(crate) const fn values_only(self) -> Self {
        Self { mask: self.mask & !EVERY, ..self }
    }
    /// The same for a part of a URL that was taken apart as a whole.
    pub(crate) const fn part_of_url(self) -> Self {
        self.values_only().view()
    }
    /// A view of the text: a URL is taken apart as it came.
    const fn view(self) -> Self {
        Self { url: false, ..self }
    }
}

/// How far the bits of rules about values are from those of the others.
const VALUES: u32 = 16;
/// The bits of rules about texts of every kind.
const EVERY: u32 = (1 << VALUES) - 1;

const fn bit_of_urls() -> u32 {
    bit(Surface::Url)
}

/// Compiles a pattern for memory rather than speed: it runs around a gate's hits only, and a sidecar may
/// hold several hundred. Groups are kept only where one is the finding.
fn compile(pattern: &str, groups: bool) -> Option<Regex> {
    let captures = if groups { WhichCaptures::All } else { WhichCaptures::Implicit };
    let config = Regex::config()
        .nfa_size_limit(Some(REGEX_LIMIT))
        .hybrid_cache_capacity(REGEX_CACHE)
        .onepass(false)
        .dfa(false)
        .which_captures(captures);
    let (pattern, syntax) = reading(pattern);
    Regex::builder().configure(config).syntax(syntax).build(&pattern).ok()
}

impl CompiledRule {
    fn new(rule: Rule, pack: &'static str) -> Result<Self, String> {
        let surfaces = if rule.surfaces.is_empty() {
            Surface::ALL.iter().fold(0, |m, s| m | bit(*s))
        } else {
            rule.surfaces.iter().fold(0, |m, s| m | bit(*s))
        };
        let surfaces = if rule.values { surfaces << VALUES } else { surfaces };
        let (mut width, mut group) = (Some(0), 0);
        if !rule.pattern.is_empty() {
            let hir = parse_pattern(&rule.pattern)?;
            width = hir.properties().maximum_len().filter(|w| *w <= WIDEST);
            group = group_named_hit(&hir).unwrap_or(0);
        } else if rule.scanner.is_some_and(Scanner::behind_literals) {
            // It reads the text once, whatever the number of literals.
            width = None;
        }
        Ok(Self { rule, pack, surfaces, width, group, regex: OnceLock::new(), except: OnceLock::new() })
    }

    fn regex(&self) -> Option<&Regex> {
        self.regex.get_or_init(|| compile(&self.rule.pattern, self.group != 0)).as_ref()
    }

    fn except(&self) -> Option<&[Regex]> {
        self.except.get_or_init(|| self.rule.except.iter().map(|e| compile(e, false)).collect()).as_deref()
    }

    /// Whether every regex of the rule compiles within its bounds.
    pub(crate) fn compiles(&self) -> bool {
        (self.rule.pattern.is_empty() || self.regex().is_some()) && self.except().is_some()
    }

    fn confirms(&self, text: &str, start: usize, end: usize, except: &[Regex]) -> bool {
        let hit = &text[start..end];
        self.rule.validator.as_ref().is_none_or(|v| v.accepts(hit))
            && self.rule.near.as_ref().is_none_or(|n| {
                let bytes = text.as_bytes();
                let before = &bytes[start.saturating_sub(n.within)..start];
                let after = &bytes[end..bytes.len().min(end + n.within)];
                n.words
                    .iter()
                    .any(|w| contains_fold(before, w.as_bytes()) || contains_fold(after, w.as_bytes()))
            })
            && !except.iter().any(|e| e.is_match(hit))
    }

    /// Runs the pattern over `from..to` of `text`; the characters around that range are seen by `\b`.
    fn run(&self, index: usize, text: &str, from: usize, to: usize, out: &mut Vec<Hit>) {
        let (Some(regex), Some(except)) = (self.regex(), self.except()) else {
            out.push(Hit { rule: index, start: 0, end: text.len(), broken: true });
            return;
        };
        let already = out.len();
        // Only groups need room, and few rules have one.
        let mut captures = (self.group != 0).then(|| regex.create_captures());
        let mut at = from;
        while at <= to && out.len() - already < MOST_MATCHES {
            let input = Input::new(text.as_bytes()).span(at..to);
            let (found, whole) = if let Some(captures) = &mut captures {
                regex.search_captures(&input, captures);
                let Some(m) = captures.get_match() else { break };
                (hit_span(captures, self.group).unwrap_or((m.start(), m.end())), m.end())
            } else {
                let Some(m) = regex.find(input) else { break };
                ((m.start(), m.end()), m.end())
            };
            // What follows the hit in its match may stand before the next one: items of a list share the
            // character between them.
            at = found.1.min(whole).max(at + 1);
            let (start, end) = (floor(text, found.0), ceil(text, found.1));
            if start < end && self.confirms(text, start, end, except) {
                out.push(Hit { rule: index, start, end, broken: false });
            }
        }
    }
}

fn hit_span(caps: &Captures, group: usize) -> Option<(usize, usize)> {
    caps.get_group(group).or_else(|| caps.get_group(0)).map(|s| (s.start, s.end))
}

fn group_named_hit(hir: &regex_syntax::hir::Hir) -> Option<usize> {
    use regex_syntax::hir::HirKind;
    match hir.kind() {
        HirKind::Capture(c) if c.name.as_deref() == Some("hit") => Some(c.index as usize),
        HirKind::Capture(c) => group_named_hit(&c.sub),
        HirKind::Repetition(r) => group_named_hit(&r.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().find_map(group_named_hit),
        _ => None,
    }
}

/// Whether `hay` contains `word`, ASCII case folded. Both are short here.
fn contains_fold(hay: &[u8], word: &[u8]) -> bool {
    hay.len() >= word.len() && hay.windows(word.len()).any(|w| w.eq_ignore_ascii_case(word))
}

/// Where a rule's pattern still has to run.
#[derive(Clone, Copy)]
struct Window {
    rule: u32,
    from: usize,
    to: usize,
}

/// The windows of one search. Those of one rule are merged as they come, so that a text made of hits is
/// read once per rule, not once per hit.
#[derive(Default)]
struct Windows {
    open: Vec<Window>,
    /// For each rule, the place of its latest window in `open`, plus one. Filled at the first hit: clean
    /// text allocates nothing.
    latest: Vec<u32>,
}

impl Windows {
    fn add(&mut self, rules: usize, w: Window) {
        if self.latest.is_empty() {
            self.latest = vec![0; rules];
        }
        let latest = &mut self.latest[w.rule as usize];
        // A gate reports hits by their end, so a window may start a literal's length before the last.
        if let Some(last) = (*latest as usize).checked_sub(1).map(|i| &mut self.open[i])
            && w.from <= last.to
        {
            last.from = last.from.min(w.from);
            last.to = last.to.max(w.to);
            return;
        }
        self.open.push(w);
        *latest = self.open.len() as u32;
    }
}

/// Selections of packs whose rules are kept compiled. A sidecar has one, and two while a policy changes; an
/// operator has as many as its policies differ in this.
const KEPT: usize = 8;

impl RuleSet {
    /// The rules of shipped packs, compiled once for every policy that selects the same: a policy's edit
    /// then costs its Cedar, and not the compiling of rules that it left as they were.
    pub(crate) fn of_packs(packs: &[&'static Pack]) -> Result<Arc<Self>, String> {
        static COMPILED: Mutex<Vec<(Vec<&'static str>, Arc<RuleSet>)>> = Mutex::new(Vec::new());
        let names: Vec<&'static str> = packs.iter().map(|p| p.pack.as_str()).collect();
        // Held while compiling: who wants the same waits for it, instead of doing it again.
        let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = compiled.iter().position(|(n, _)| *n == names) {
            let known = compiled.remove(at);
            let rules = Arc::clone(&known.1);
            compiled.push(known);
            return Ok(rules);
        }
        let rules = packs.iter().flat_map(|p| p.rules.iter().map(|r| (p.pack.as_str(), r.clone())));
        let rules = Arc::new(Self::new(rules)?);
        if compiled.len() == KEPT {
            compiled.remove(0);
        }
        compiled.push((names, Arc::clone(&rules)));
        Ok(rules)
    }

    /// Compiles rules together.
    pub(crate) fn new(rules: impl IntoIterator<Item = (&'static str, Rule)>) -> Result<Self, String> {
        let mut set = Self {
            rules: vec![],
            gate: None,
            values: None,
            digits: vec![],
            at: vec![],
            sql: vec![],
            shell: vec![],
            urls: vec![],
            near: None,
        };
        let mut literals: [BTreeMap<String, Vec<u32>>; 2] = Default::default();
        for (pack, rule) in rules {
            let index = set.rules.len() as u32;
            match rule.scanner {
                Some(Scanner::Digits) => set.digits.push(index),
                Some(Scanner::At) => set.at.push(index),
                Some(s) if s.reads_sql() => set.sql.push((s, index)),
                Some(s) if s.reads_values() => set.shell.push((s, index)),
                Some(s) if s.reads_urls() => set.urls.push((s, index)),
                Some(s) if !s.behind_literals() => {}
                _ => {
                    for l in &rule.literals {
                        literals[usize::from(rule.values)].entry(l.clone()).or_default().push(index);
                    }
                }
            }
            set.rules.push(CompiledRule::new(rule, pack)?);
        }
        let words: BTreeSet<&str> = set
            .rules
            .iter()
            .filter_map(|r| r.rule.near.as_ref())
            .flat_map(|n| &n.words)
            .map(String::as_str)
            .collect();
        if !words.is_empty() {
            let near = AhoCorasickBuilder::new().ascii_case_insensitive(true).build(words);
            set.near = Some(near.map_err(|e| format!("the words near matches could not be gathered: {e}"))?);
        }
        let [every, values] = literals;
        set.gate = Gate::new(every)?;
        set.values = Gate::new(values)?;
        Ok(set)
    }

    fn gates(&self) -> impl Iterator<Item = &Gate> {
        [&self.gate, &self.values].into_iter().flatten()
    }

    /// Bytes the compiled gates hold.
    pub(crate) fn gate_bytes(&self) -> usize {
        self.gates().map(|g| g.automaton.memory_usage()).sum()
    }

    /// The place of the structural rule for `scanner` on `surface`, if one is on.
    pub(crate) fn structural(&self, scanner: Scanner, surface: Surface) -> Option<usize> {
        self.rules.iter().position(|r| r.rule.scanner == Some(scanner) && r.surfaces & bit(surface) != 0)
    }

    /// Whether a value's name may matter to a rule: it holds a literal of the gate, or a word that some
    /// rule wants near a match.
    pub(crate) fn speaks_of(&self, name: &str) -> bool {
        let gate = self.gate.as_ref().map(|g| &g.automaton);
        [gate, self.near.as_ref()].into_iter().flatten().any(|a| a.is_match(name))
    }

    /// Compiles every pattern now rather than at its first candidate.
    pub(crate) fn warm(&self) {
        for rule in &self.rules {
            rule.compiles();
        }
    }

    /// Finds everything in `text`, which is a reading of one that came.
    pub(crate) fn search_view(&self, kind: Kind, text: &str, out: &mut Vec<Hit>) {
        self.search(kind.view(), text, out);
    }

    /// Finds everything that the rules for texts of that kind find in `text`.
    pub(crate) fn search(&self, kind: Kind, text: &str, out: &mut Vec<Hit>) {
        let bit = kind.mask;
        let mut windows = Windows::default();
        let every = self.gate.as_ref().filter(|_| bit & EVERY != 0);
        let values = self.values.as_ref().filter(|_| bit & !EVERY != 0);
        for gate in [every, values].into_iter().flatten() {
            for m in gate.automaton.find_overlapping_iter(text) {
                for &index in &gate.behind[m.pattern().as_usize()] {
                    if self.rules[index as usize].surfaces & bit != 0 {
                        self.open(&mut windows, index, text, m.start(), m.end());
                    }
                }
            }
        }
        if self.digits.iter().any(|i| self.rules[*i as usize].surfaces & bit != 0) {
            for (start, end) in DigitRuns::new(text.as_bytes()) {
                for &index in &self.digits {
                    if self.rules[index as usize].surfaces & bit != 0 {
                        self.open(&mut windows, index, text, start, end);
                    }
                }
            }
        }
        if self.at.iter().any(|i| self.rules[*i as usize].surfaces & bit != 0) {
            for at in memchr::memchr_iter(b'@', text.as_bytes()) {
                for &index in &self.at {
                    if self.rules[index as usize].surfaces & bit != 0 {
                        self.open(&mut windows, index, text, at, at + 1);
                    }
                }
            }
        }
        for w in windows.open {
            let index = w.rule as usize;
            match self.rules[index].rule.scanner {
                Some(Scanner::LinkPayload) => self.links(index, text, out),
                _ => self.rules[index].run(index, text, w.from, w.to, out),
            }
        }
        if bit >> VALUES != 0 {
            let signs = value::Signs::of(text);
            if !self.sql.is_empty() {
                value::scan_sql(text, signs, |s, from, to| self.own(&self.sql, bit, s, text, from, to, out));
            }
            if !self.shell.is_empty() {
                value::scan_shell(text, signs, |s, from, to| {
                    self.own(&self.shell, bit, s, text, from, to, out);
                });
            }
        }
        if kind.url && !self.urls.is_empty() {
            let sole = bit & bit_of_urls() != 0;
            let either = bit | bit >> VALUES;
            url::scan(text, sole, |s, from, to| self.own(&self.urls, either, s, text, from, to, out));
        }
    }

    /// Texts in an encoding that stand in URLs.
    fn links(&self, rule: usize, text: &str, out: &mut Vec<Hit>) {
        let Some(except) = self.rules[rule].except() else {
            out.push(Hit { rule, start: 0, end: text.len(), broken: true });
            return;
        };
        let already = out.len();
        url::links(text, |start, end| {
            if out.len() - already < MOST_MATCHES && self.rules[rule].confirms(text, start, end, except) {
                out.push(Hit { rule, start, end, broken: false });
            }
        });
    }

    /// Notes what the engine's own code found for the rules that name its scanner. A second finding of a
    /// rule in one text says nothing more.
    #[allow(clippy::too_many_arguments, reason = "a closure's tail, called in three places")]
    fn own(
        &self,
        rules: &[(Scanner, u32)],
        bit: u32,
        scanner: Scanner,
        text: &str,
        from: usize,
        to: usize,
        out: &mut Vec<Hit>,
    ) {
        let (start, end) = (floor(text, from.min(text.len())), ceil(text, to.min(text.len())));
        for (s, index) in rules {
            let rule = *index as usize;
            if *s != scanner || self.rules[rule].surfaces & bit == 0 || out.iter().any(|h| h.rule == rule) {
                continue;
            }
            let Some(except) = self.rules[rule].except() else {
                out.push(Hit { rule, start: 0, end: text.len(), broken: true });
                continue;
            };
            if self.rules[rule].confirms(text, start, end, except) {
                out.push(Hit { rule, start, end, broken: false });
            }
        }
    }

    /// Notes that a rule has to run around a hit of its gate.
    fn open(&self, windows: &mut Windows, rule: u32, text: &str, start: usize, end: usize) {
        let (from, to) = match self.rules[rule as usize].width {
            Some(w) => {
                (floor(text, start.saturating_sub(w)), ceil(text, end.saturating_add(w).min(text.len())))
            }
            None => (0, text.len()),
        };
        windows.add(self.rules.len(), Window { rule, from, to });
    }
}

fn floor(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn ceil(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}

/// Runs of at least seven digits in which single spaces, dashes, dots, slashes or brackets may stand
/// between digits: what card, account and telephone numbers look like.
struct DigitRuns<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> DigitRuns<'a> {
    const LEAST: usize = 7;
    const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }
}

impl Iterator for DigitRuns<'_> {
    type Item = (usize, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.bytes;
        while self.at < bytes.len() {
            if !bytes[self.at].is_ascii_digit() {
                self.at += 1;
                continue;
            }
            let start = self.at;
            let mut digits = 0;
            let mut end = start;
            let mut at = start;
            while at < bytes.len() {
                if bytes[at].is_ascii_digit() {
                    digits += 1;
                    end = at + 1;
                } else if at > end || !matches!(bytes[at], b' ' | b'-' | b'.' | b'/' | b'(' | b')') {
                    break;
                }
                at += 1;
            }
            self.at = at.max(end);
            if digits >= Self::LEAST {
                return Some((start, end));
            }
        }
        None
    }
}
