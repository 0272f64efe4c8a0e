//! The pack file: its types, and the checks that refuse a bad one with its place.

use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

use regex_automata::util::syntax;
use regex_syntax::hir::Hir;
use serde::{Deserialize, Serialize};

use super::gate;
use crate::finding::{Category, Severity, Surface};
use crate::validate;

/// Why a pack was refused.
#[derive(Debug, thiserror::Error)]
#[error("pack {pack}: {problem}")]
pub struct PackError {
    /// The pack's name, or where the text came from.
    pub pack: String,
    /// What is wrong, with the rule or the line it stands in.
    pub problem: String,
}

/// A versioned file of rules.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Pack {
    /// The pack's name, as policies write it.
    pub pack: String,
    /// Raised with every change.
    pub version: u32,
    /// One line about it.
    pub title: String,
    /// Its rules.
    pub rules: Vec<Rule>,
}

/// One detection.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Stable id, for example `SLP-SEC-0001`.
    pub id: String,
    /// One line about it.
    pub title: String,
    /// What a finding is about.
    pub category: Category,
    /// How bad a finding is.
    pub severity: Severity,
    /// How sure a finding is, 0 to 100.
    pub score: u8,
    /// Where the rule looks; empty means everywhere.
    #[serde(default)]
    pub surfaces: Vec<Surface>,
    /// Whether the rule looks only at values that should be data: by their name neither a statement nor a
    /// command nor a document.
    #[serde(default)]
    pub values: bool,
    /// The pattern, in the syntax of the `regex` crate. Empty for a scanner of the engine's own.
    #[serde(default)]
    pub pattern: String,
    /// The gate's literals, in lower case; derived from the pattern where the file gives none.
    #[serde(default)]
    pub literals: Vec<String>,
    /// What finds candidates where no literal can.
    #[serde(default)]
    pub scanner: Option<Scanner>,
    /// A check on what the pattern found.
    #[serde(default)]
    pub validator: Option<Validator>,
    /// Words of which one must stand close by.
    #[serde(default)]
    pub near: Option<Near>,
    /// Patterns that make a match harmless.
    #[serde(default)]
    pub except: Vec<String>,
    /// OWASP, ATLAS, CWE ids.
    #[serde(default)]
    pub references: Vec<String>,
    /// Its own tests.
    pub tests: Tests,
}

/// What finds candidates for a rule that has no literal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scanner {
    /// Runs of at least seven digits, single separators allowed; the pattern runs around them.
    Digits,
    /// Every `@`; the pattern runs around it.
    At,
    /// Structural: a JSON object with two members of one name.
    DuplicateKeys,
    /// Structural: JSON nested deeper, or of more values, than the engine reads.
    JsonLimits,
    /// Structural: a URL longer than 8 KiB.
    UrlLength,
    /// Structural: a control character, raw or encoded, in a URL.
    UrlControl,
    /// Structural: more findings in one message than the engine keeps.
    TooManyFindings,
    /// Structural: a rule that could not run.
    BrokenRule,
    /// SQL in a value: a condition that closes the value's quote or is always true.
    SqlBoolean,
    /// SQL in a value: a second result set.
    SqlUnion,
    /// SQL in a value: a second statement.
    SqlStacked,
    /// SQL in a value: a function or procedure of the server.
    SqlFunction,
    /// SQL in a value: a statement, or one in brackets.
    SqlStatement,
    /// SQL in a value: the rest of the statement cut off by a comment.
    SqlComment,
    /// SQL in a value: columns counted, groups asked for.
    SqlProbe,
    /// A command chained to a value.
    ShellChain,
    /// A URL whose scheme is no web server's.
    UrlScheme,
    /// A URL whose host is an address in another spelling than the usual one.
    UrlSpelling,
    /// A URL of an address that is not public, or a name that means one.
    UrlPrivate,
    /// A URL that two readers take for two hosts.
    UrlConfusion,
    /// A URL within a parameter of another, to an address that is not public.
    UrlNested,
    /// A URL whose host name is made from an address.
    UrlRebinding,
    /// A URL whose path climbs.
    UrlTraversal,
    /// A URL that carries text or bytes in a part that should be short.
    UrlPayload,
    /// A URL or host name that carries data in its labels.
    HostLabels,
    /// A host name that is made to be taken for another.
    HostLookalike,
    /// A URL in a text that carries another text in an encoding. Needs literals.
    LinkPayload,
    /// Structural: a label of a name with more entropy than `dns.maxLabelEntropy`.
    DnsEntropy,
    /// Structural: a name, or a label of one, longer than people give.
    DnsLength,
    /// Structural: names asked faster than an agent needs them.
    DnsRate,
    /// Structural: many names below one domain in a minute.
    DnsSpread,
}

impl Scanner {
    /// Whether the engine's own code finds it, without a pattern.
    pub const fn own(self) -> bool {
        !matches!(self, Self::Digits | Self::At)
    }

    /// Whether it looks only at texts in which one of the rule's literals stands.
    pub(crate) const fn behind_literals(self) -> bool {
        matches!(self, Self::LinkPayload)
    }

    /// Whether it is found in the tokens of a value.
    pub(crate) const fn reads_values(self) -> bool {
        self.reads_sql() || matches!(self, Self::ShellChain)
    }

    /// Whether it is found in the tokens of SQL.
    pub(crate) const fn reads_sql(self) -> bool {
        matches!(
            self,
            Self::SqlBoolean
                | Self::SqlUnion
                | Self::SqlStacked
                | Self::SqlFunction
                | Self::SqlStatement
                | Self::SqlComment
                | Self::SqlProbe
        )
    }

    /// Whether it is found in the parts of a URL.
    pub(crate) const fn reads_urls(self) -> bool {
        matches!(
            self,
            Self::UrlScheme
                | Self::UrlSpelling
                | Self::UrlPrivate
                | Self::UrlConfusion
                | Self::UrlNested
                | Self::UrlRebinding
                | Self::UrlTraversal
                | Self::UrlPayload
                | Self::HostLabels
                | Self::HostLookalike
        )
    }
}

/// A check on what a pattern found.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Validator {
    /// A named check, for example `luhn`.
    Named(String),
    /// Shannon entropy of at least so many bits per byte.
    Entropy {
        /// Bits per byte.
        entropy: f64,
    },
    /// Several checks, all of which must hold.
    All(Vec<Validator>),
}

impl fmt::Display for Validator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(n) => f.write_str(n),
            Self::Entropy { entropy } => write!(f, "entropy >= {entropy}"),
            Self::All(all) => {
                for (i, v) in all.iter().enumerate() {
                    write!(f, "{}{v}", if i == 0 { "" } else { " and " })?;
                }
                Ok(())
            }
        }
    }
}

impl Validator {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Named(n) if validate::by_name(n).is_none() => Err(format!("no validator is called `{n}`")),
            Self::All(all) => all.iter().try_for_each(Self::check),
            _ => Ok(()),
        }
    }

    /// Whether `hit` passes.
    pub(crate) fn accepts(&self, hit: &str) -> bool {
        match self {
            Self::Named(n) => validate::by_name(n).is_some_and(|v| v(hit)),
            Self::Entropy { entropy } => validate::entropy(hit) >= *entropy,
            Self::All(all) => all.iter().all(|v| v.accepts(hit)),
        }
    }
}

/// Words of which one must stand close to a match, in any case.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Near {
    /// The words.
    pub words: Vec<String>,
    /// Bytes on either side of the match.
    pub within: usize,
}

/// A rule's own tests.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Tests {
    /// Texts the rule must find.
    pub positive: Vec<TestCase>,
    /// Near misses it must leave alone.
    pub negative: Vec<TestCase>,
}

/// One test: a text, and where it is seen.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(from = "RawCase")]
pub struct TestCase {
    /// Where the text is seen; the rule's first surface where the file names none.
    pub surface: Option<Surface>,
    /// The text.
    pub text: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawCase {
    Plain(String),
    Placed(Placed),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Placed {
    surface: Surface,
    text: String,
    /// How often the text stands in a row; for tests of lengths.
    #[serde(default = "once")]
    repeat: usize,
}

const fn once() -> usize {
    1
}

/// Breaks up tokens in pack files so that secret scanners leave this repository alone.
const SPLITTER: &str = "{+}";

/// A test's text is no longer than this, however often the file says that it stands in a row: no limit that
/// a rule is about is beyond it.
const LONGEST_CASE: usize = 4 << 20;

impl From<RawCase> for TestCase {
    fn from(raw: RawCase) -> Self {
        match raw {
            RawCase::Plain(text) => Self { surface: None, text: text.replace(SPLITTER, "") },
            RawCase::Placed(Placed { surface, text, repeat }) => {
                let text = text.replace(SPLITTER, "");
                let most = LONGEST_CASE / text.len().max(1);
                Self { surface: Some(surface), text: text.repeat(repeat.min(most)) }
            }
        }
    }
}

/// The packs compiled into this binary, `core` first.
const SHIPPED: [(&str, &str); 8] = [
    ("core", include_str!("../../../../policies/packs/core.yaml")),
    ("secrets", include_str!("../../../../policies/packs/secrets.yaml")),
    ("dns", include_str!("../../../../policies/packs/dns.yaml")),
    ("prompt-injection", include_str!("../../../../policies/packs/prompt-injection.yaml")),
    ("destructive", include_str!("../../../../policies/packs/destructive.yaml")),
    ("pii", include_str!("../../../../policies/packs/pii.yaml")),
    ("web-attacks", include_str!("../../../../policies/packs/web-attacks.yaml")),
    ("urls", include_str!("../../../../policies/packs/urls.yaml")),
];

/// Every pack compiled into this binary, `core` first. Parsed once per process.
pub fn shipped() -> Result<&'static [Pack], PackError> {
    static PACKS: OnceLock<Vec<Pack>> = OnceLock::new();
    if let Some(packs) = PACKS.get() {
        return Ok(packs);
    }
    let packs = SHIPPED
        .iter()
        .map(|(name, text)| {
            let pack = parse_pack(text)?;
            if pack.pack == *name {
                Ok(pack)
            } else {
                Err(PackError { pack: (*name).into(), problem: format!("calls itself `{}`", pack.pack) })
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut seen = std::collections::BTreeSet::new();
    for pack in &packs {
        for rule in &pack.rules {
            if !seen.insert(rule.id.as_str()) {
                return Err(PackError {
                    pack: pack.pack.clone(),
                    problem: format!("rule id {} is taken by another rule", rule.id),
                });
            }
        }
    }
    Ok(PACKS.get_or_init(|| packs))
}

/// Parses and checks one pack. Patterns are parsed, not yet compiled; gates are derived.
pub fn parse_pack(yaml: &str) -> Result<Pack, PackError> {
    let mut pack: Pack = serde_saphyr::from_str(yaml)
        .map_err(|e| PackError { pack: "file".into(), problem: e.to_string() })?;
    let name = pack.pack.clone();
    for rule in &mut pack.rules {
        check_rule(rule)
            .map_err(|p| PackError { pack: name.clone(), problem: format!("rule {}: {p}", rule.id) })?;
    }
    Ok(pack)
}

/// How a pattern is read: as bytes where it holds nothing outside ASCII, else as Unicode with the Perl
/// classes of ASCII. In bytes `[^x]` is one state instead of a tree of UTF-8 sequences, and a bounded
/// repetition of it costs a hundredth; a match then may start or end inside a character, which the search
/// mends.
pub(crate) fn reading(pattern: &str) -> (Cow<'_, str>, syntax::Config) {
    let config = syntax::Config::new();
    let names_unicode = [r"\p", r"\P", r"\u", r"\x{"].iter().any(|e| pattern.contains(e));
    if pattern.is_ascii() && !names_unicode {
        (Cow::Borrowed(pattern), config.unicode(false).utf8(false))
    } else {
        (Cow::Owned(ascii_classes(pattern)), config)
    }
}

/// Parses a pattern as the engine will compile it.
pub(crate) fn parse_pattern(pattern: &str) -> Result<Hir, String> {
    let (pattern, config) = reading(pattern);
    syntax::parse_with(&pattern, &config).map_err(|e| format!("pattern: {e}"))
}

/// The pattern with `\w`, `\d`, `\s`, `\b` and their opposites read as ASCII. A Unicode `\w` is an automaton of
/// 700 ranges, and repeated a few times it makes a pattern of megabytes; the `unicode` view shows other
/// spaces and look-alike letters as ASCII anyway.
fn ascii_classes(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len() + 32);
    let mut chars = pattern.chars().peekable();
    // Brackets within brackets are classes too in this syntax.
    let mut depth = 0usize;
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let Some(e) = chars.next() else {
                    out.push(c);
                    break;
                };
                match (e, depth) {
                    ('w', 0) => out.push_str("[0-9A-Za-z_]"),
                    ('w', _) => out.push_str("0-9A-Za-z_"),
                    ('W', _) => out.push_str("[^0-9A-Za-z_]"),
                    ('d', 0) => out.push_str("[0-9]"),
                    ('d', _) => out.push_str("0-9"),
                    ('D', _) => out.push_str("[^0-9]"),
                    ('s', 0) => out.push_str(r"[\t\n\x0B\x0C\r ]"),
                    ('s', _) => out.push_str(r"\t\n\x0B\x0C\r "),
                    ('S', _) => out.push_str(r"[^\t\n\x0B\x0C\r ]"),
                    ('b', 0) if chars.peek() != Some(&'{') => out.push_str(r"(?-u:\b)"),
                    _ => {
                        out.push('\\');
                        out.push(e);
                    }
                }
            }
            '[' => {
                depth += 1;
                out.push(c);
                // `]` first in a class is a letter of it.
                if chars.peek() == Some(&'^') {
                    out.extend(chars.next());
                }
                if chars.peek() == Some(&']') {
                    out.extend(chars.next());
                }
            }
            ']' => {
                depth = depth.saturating_sub(1);
                out.push(c);
            }
            _ => out.push(c),
        }
    }
    out
}

fn check_rule(rule: &mut Rule) -> Result<(), String> {
    if rule.id.is_empty()
        || !rule.id.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'-')
    {
        return Err("an id is made of capitals, digits and dashes".into());
    }
    if rule.score > 100 {
        return Err(format!("score {} is above 100", rule.score));
    }
    let own = rule.scanner.is_some_and(Scanner::own);
    if own != rule.pattern.is_empty() {
        return Err("needs a pattern or a scanner of the engine's own, and not both".into());
    }
    if rule.scanner.is_some_and(Scanner::reads_values) && !rule.values {
        return Err("this scanner reads values: it needs `values: true`".into());
    }
    if !own {
        let hir = parse_pattern(&rule.pattern)?;
        if rule.scanner.is_none() && rule.literals.is_empty() {
            rule.literals = gate::required_literals(&hir)
                .ok_or(
                    "no literal of three bytes or more stands in every match; name `literals` or a `scanner`",
                )?
                .into_iter()
                .map(|l| String::from_utf8_lossy(&l).into_owned())
                .collect();
        }
    }
    if rule.scanner.is_some_and(Scanner::behind_literals) && rule.literals.is_empty() {
        return Err("this scanner runs where a literal stands: it needs `literals`".into());
    }
    for l in &mut rule.literals {
        l.make_ascii_lowercase();
        if l.len() < gate::LEAST_LITERAL {
            return Err(format!("literal `{l}` is shorter than {} bytes", gate::LEAST_LITERAL));
        }
    }
    if let Some(v) = &rule.validator {
        v.check()?;
    }
    if let Some(near) = &rule.near
        && (near.words.is_empty() || near.words.iter().any(String::is_empty) || near.within > 4096)
    {
        return Err("near: needs words, and `within` of at most 4096 bytes".into());
    }
    for e in &rule.except {
        parse_pattern(e).map_err(|p| format!("except: {p}"))?;
    }
    // No text shows these to a rule alone; tests of the engine do.
    let unshowable = matches!(
        rule.scanner,
        Some(Scanner::TooManyFindings | Scanner::BrokenRule | Scanner::DnsRate | Scanner::DnsSpread)
    );
    if !unshowable && (rule.tests.positive.len() < 2 || rule.tests.negative.len() < 2) {
        return Err("tests: needs two positive and two negative cases at least".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_repeats_its_text_without_end_is_kept_short() {
        let yaml = format!(
            "pack: p\nversion: 1\ntitle: t\nrules:\n- {{id: A-1, title: t, category: url, severity: low, score: 1, pattern: abc, \
             tests: {{positive: [abc, {{surface: url, text: abc, repeat: {}}}], negative: [b, c]}}}}",
            u64::MAX
        );
        let pack = parse_pack(&yaml).unwrap();
        assert!((1000..=LONGEST_CASE).contains(&pack.rules[0].tests.positive[1].text.len()));
    }

    #[test]
    fn perl_classes_mean_ascii_inside_and_outside_of_brackets() {
        assert_eq!(
            ascii_classes(r"a\w+\\w[\w.-][^\s]\bx"),
            r"a[0-9A-Za-z_]+\\w[0-9A-Za-z_.-][^\t\n\x0B\x0C\r ](?-u:\b)x"
        );
        assert_eq!(ascii_classes(r"[]\d]\d[[:alpha:]\w]\w"), r"[]0-9][0-9][[:alpha:]0-9A-Za-z_][0-9A-Za-z_]");
        for p in [r"[^\W\d]", r"[\S]", r"\b{start}x", r"\B", r"a\", "[", "]"] {
            let ours = regex_syntax::Parser::new().parse(&ascii_classes(p)).is_ok();
            assert_eq!(ours, regex_syntax::Parser::new().parse(p).is_ok(), "{p}");
        }
    }
}
