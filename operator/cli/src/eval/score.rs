//! What counts as found, and what as a false alarm.

use std::collections::{BTreeMap, BTreeSet};

use sallyport_engine::{Category, Decision, Finding, Verdict};
use serde::{Deserialize, Serialize};

use super::corpus::{Label, Row};

/// What a corpus can call a row a clean negative for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Detector {
    Injection,
    Secret,
    Pii,
    Command,
    Exfil,
    Ssrf,
    Sqli,
    Mcp,
}

impl Detector {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Injection => "injection",
            Self::Secret => "secret",
            Self::Pii => "pii",
            Self::Command => "command",
            Self::Exfil => "exfil",
            Self::Ssrf => "ssrf",
            Self::Sqli => "sqli",
            Self::Mcp => "mcp",
        }
    }

    /// The detector a finding belongs to. Categories that no corpus has negatives for belong to none;
    /// they still count where rows above `allow` are counted.
    pub(super) const fn of(category: Category) -> Option<Self> {
        Some(match category {
            Category::Injection | Category::Jailbreak => Self::Injection,
            Category::Secret => Self::Secret,
            Category::Pii => Self::Pii,
            Category::Command | Category::Destructive => Self::Command,
            Category::Exfil => Self::Exfil,
            Category::Ssrf => Self::Ssrf,
            Category::Sqli => Self::Sqli,
            Category::Mcp => Self::Mcp,
            _ => return None,
        })
    }
}

/// Hits among rows, with the 95 % interval of the share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(super) struct Rate {
    pub(super) hits: u64,
    pub(super) rows: u64,
    pub(super) share: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Rate {
    pub(super) fn of(hits: u64, rows: u64) -> Self {
        let (low, high) = wilson(hits, rows);
        let share = if rows == 0 { 0.0 } else { hits as f64 / rows as f64 };
        Self { hits, rows, share, low, high }
    }

    pub(super) fn count(&mut self, hit: bool) {
        *self = Self::of(self.hits + u64::from(hit), self.rows + 1);
    }
}

/// Wilson's score interval at 95 %: honest also for few rows and for shares near 0 and 1, where the
/// textbook interval claims certainty.
pub(super) fn wilson(hits: u64, rows: u64) -> (f64, f64) {
    const Z: f64 = 1.959_963_984_540_054;
    if rows == 0 {
        return (0.0, 1.0);
    }
    let (n, p) = (rows as f64, hits as f64 / rows as f64);
    let z2 = Z * Z;
    let centre = p + z2 / (2.0 * n);
    let half = Z * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z2 / n;
    (((centre - half) / scale).max(0.0), ((centre + half) / scale).min(1.0))
}

/// Why an attack is counted apart: text inspection alone is not expected to find it.
pub(super) fn apart(row: &Row) -> Option<&'static str> {
    match (row.category.as_str(), row.difficulty.as_deref(), row.paranoia) {
        ("malicious_code_request", ..) => Some("malicious_code_request"),
        ("pii_soft", ..) => Some("pii_soft"),
        (_, Some("implicit"), _) => Some("implicit"),
        (_, Some("context_dependent"), _) => Some("context_dependent"),
        (.., Some(2..)) => Some("crs_paranoia_2"),
        _ => None,
    }
}

/// Benign content made to look like an attack; counted apart from ordinary content.
pub(super) fn hard(row: &Row) -> Option<String> {
    let class = row.category.as_str();
    if row.imperative {
        Some(format!("{class} (imperative)"))
    } else if class == "secret_near_miss"
        || class.starts_with("security_doc")
        || class.ends_with("_lookalike")
    {
        Some(class.to_owned())
    } else {
        None
    }
}

/// Whether an attack was detected.
pub(super) fn detected(row: &Row, verdict: &Verdict) -> bool {
    if verdict.decision == Decision::Allow {
        return false;
    }
    let wanted = match row.category.as_str() {
        "secret" => Category::Secret,
        "pii" | "pii_soft" => Category::Pii,
        _ => return true,
    };
    let (false, Some(text)) = (row.spans.is_empty(), &row.text) else { return true };
    // For secrets and personal data the place matters: a redaction elsewhere leaves them in the text.
    let spans: Vec<_> = row.spans.iter().filter_map(|s| s.bytes(text)).collect();
    verdict
        .findings
        .iter()
        .filter(|f| f.category == wanted && f.decision != Decision::Allow)
        .any(|f| spans.iter().any(|s| s.start < f.end && f.start < s.end))
}

/// The findings that have a part in a decision above `allow`.
fn above_allow(verdict: &Verdict) -> impl Iterator<Item = &Finding> {
    let decided = verdict.decision != Decision::Allow;
    verdict.findings.iter().filter(move |f| decided && f.decision != Decision::Allow)
}

/// The detectors that raised an alarm, each with the rules behind it.
pub(super) fn alarms(verdict: &Verdict) -> BTreeMap<Detector, BTreeSet<&str>> {
    let mut alarms: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for f in above_allow(verdict) {
        if let Some(detector) = Detector::of(f.category) {
            alarms.entry(detector).or_default().insert(f.rule.as_str());
        }
    }
    alarms
}

/// False alarms of a group of benign rows.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Negatives {
    /// Rows on which some detector that `benign_for` names raised an alarm.
    pub(super) any: Rate,
    /// Rows with a decision above `allow`, for whatever reason: also for content that some detector is
    /// right to find, such as the addresses in a customer's record.
    pub(super) above_allow: Rate,
    /// Per detector, over the rows whose `benign_for` names it.
    pub(super) detectors: BTreeMap<Detector, Rate>,
}

/// A benign row that a detector took for something else.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Alarm {
    pub(super) id: String,
    pub(super) rules: Vec<String>,
}

impl Alarm {
    fn new(row: &Row, rules: &BTreeSet<&str>) -> Self {
        Self { id: row.id.clone(), rules: rules.iter().map(ToString::to_string).collect() }
    }
}

/// Everything counted so far.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Scores {
    /// Attacks detected, by corpus; without the rows counted apart.
    pub(super) recall_by_corpus: BTreeMap<String, Rate>,
    /// The same, by category.
    pub(super) recall_by_category: BTreeMap<String, Rate>,
    /// By difficulty, where rows state one; here with the rows counted apart.
    pub(super) recall_by_difficulty: BTreeMap<String, Rate>,
    /// Attacks that text inspection alone is not expected to find.
    pub(super) recall_apart: BTreeMap<String, Rate>,
    /// False alarms per detector on ordinary benign content.
    pub(super) false_positives: BTreeMap<Detector, Rate>,
    /// False alarms per corpus on ordinary benign content.
    pub(super) false_positives_by_corpus: BTreeMap<String, Negatives>,
    /// Benign rows with a decision above `allow`, by the rules that have a part in it; hard negatives
    /// included, whatever `benign_for` says.
    pub(super) above_allow_by_rule: BTreeMap<String, u64>,
    /// False alarms on content made to look like an attack, by kind.
    pub(super) hard_negatives: BTreeMap<String, Negatives>,
    /// Near misses of secrets that some secret rule took: no false positive by itself, because a
    /// generic rule may take them.
    pub(super) near_misses: Rate,
    /// Those near misses, with the rules that took them.
    pub(super) near_misses_taken: Vec<Alarm>,
    /// Ids of attacks not detected, by category, or by `apart: class`.
    pub(super) missed: BTreeMap<String, Vec<String>>,
    /// Benign rows with a false alarm, by detector, hard negatives included.
    pub(super) false_alarms: BTreeMap<Detector, Vec<Alarm>>,
}

impl Scores {
    pub(super) fn count(&mut self, corpus: &str, row: &Row, verdict: &Verdict) {
        match row.label {
            Label::Attack => self.count_attack(corpus, row, detected(row, verdict)),
            Label::Benign => self.count_benign(corpus, row, verdict),
        }
    }

    fn count_attack(&mut self, corpus: &str, row: &Row, hit: bool) {
        let class = if let Some(class) = apart(row) {
            self.recall_apart.entry(class.to_owned()).or_default().count(hit);
            format!("apart: {class}")
        } else {
            self.recall_by_corpus.entry(corpus.to_owned()).or_default().count(hit);
            self.recall_by_category.entry(row.category.clone()).or_default().count(hit);
            row.category.clone()
        };
        if let Some(difficulty) = &row.difficulty {
            self.recall_by_difficulty.entry(difficulty.clone()).or_default().count(hit);
        }
        if !hit {
            self.missed.entry(class).or_default().push(row.id.clone());
        }
    }

    fn count_benign(&mut self, corpus: &str, row: &Row, verdict: &Verdict) {
        let alarms = alarms(verdict);
        let hard = hard(row);
        let negatives = match &hard {
            Some(class) => self.hard_negatives.entry(class.clone()).or_default(),
            None => self.false_positives_by_corpus.entry(corpus.to_owned()).or_default(),
        };
        let named: BTreeSet<_> = row.benign_for.iter().copied().collect();
        negatives.any.count(named.iter().any(|d| alarms.contains_key(d)));
        negatives.above_allow.count(verdict.decision != Decision::Allow);
        let rules: BTreeSet<_> = above_allow(verdict).map(|f| f.rule.as_str()).collect();
        for rule in rules {
            *self.above_allow_by_rule.entry(rule.to_owned()).or_default() += 1;
        }
        for detector in named {
            let rules = alarms.get(&detector);
            negatives.detectors.entry(detector).or_default().count(rules.is_some());
            if hard.is_none() {
                self.false_positives.entry(detector).or_default().count(rules.is_some());
            }
            if let Some(rules) = rules {
                self.false_alarms.entry(detector).or_default().push(Alarm::new(row, rules));
            }
        }
        if row.category == "secret_near_miss" {
            let rules = alarms.get(&Detector::Secret);
            self.near_misses.count(rules.is_some());
            self.near_misses_taken.extend(rules.map(|rules| Alarm::new(row, rules)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sallyport_engine::{Severity, Surface};

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 5e-5
    }

    #[test]
    fn wilson_gives_the_published_values() {
        for (hits, rows, low, high) in [
            // Newcombe 1998, table I, method 3.
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0000, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ] {
            let (l, h) = wilson(hits, rows);
            assert!(close(l, low) && close(h, high), "{hits}/{rows}: {l} {h}");
        }
        assert_eq!(wilson(0, 0), (0.0, 1.0));
        assert!(close(wilson(20, 20).1, 1.0));
    }

    fn row(json: &str) -> Row {
        serde_json::from_str(json).unwrap()
    }

    fn verdict(decision: Decision, findings: &[(Category, usize, usize)]) -> Verdict {
        let finding = |&(category, start, end): &(Category, usize, usize)| Finding {
            rule: format!("SLP-{}", category.as_str()),
            category,
            severity: Severity::High,
            score: 90,
            surface: Surface::RequestBody,
            path: String::new(),
            start,
            end,
            view: "raw",
            evidence: String::new(),
            decision,
        };
        Verdict { decision, findings: findings.iter().map(finding).collect(), ..Verdict::default() }
    }

    const SECRET: &str = r#"{"id":"s","surface":"text","text":"é key","label":"attack","category":"secret",
        "spans":[{"start":2,"end":5}]}"#;

    #[test]
    fn a_secret_is_found_where_it_stands_and_nowhere_else() {
        let row = row(SECRET);
        // "key" is characters 2..5 and bytes 3..6.
        for (findings, hit) in [
            (&[(Category::Secret, 3, 6)][..], true),
            (&[(Category::Secret, 5, 9)], true),
            (&[(Category::Secret, 0, 3)], false),
            (&[(Category::Pii, 3, 6)], false),
            (&[], false),
        ] {
            assert_eq!(detected(&row, &verdict(Decision::Redact, findings)), hit, "{findings:?}");
            assert!(!detected(&row, &verdict(Decision::Allow, findings)));
        }
    }

    #[test]
    fn without_spans_the_decision_is_what_counts() {
        let row = row(r#"{"id":"s","surface":"text","text":"key","label":"attack","category":"secret"}"#);
        assert!(detected(&row, &verdict(Decision::Flag, &[])));
    }

    #[test]
    fn benign_rows_count_only_for_the_detectors_they_name() {
        let mut scores = Scores::default();
        let benign = row(r#"{"id":"b","surface":"text","text":"x","label":"benign","category":"benign_doc",
            "benign_for":["injection","secret"]}"#);
        let found = verdict(Decision::Flag, &[(Category::Jailbreak, 0, 1), (Category::Pii, 0, 1)]);
        scores.count("c", &benign, &found);
        scores.count("c", &benign, &verdict(Decision::Flag, &[(Category::Pii, 0, 1)]));
        scores.count("c", &benign, &verdict(Decision::Allow, &[(Category::Secret, 0, 1)]));
        let rate = |d| (scores.false_positives[&d].hits, scores.false_positives[&d].rows);
        assert_eq!(rate(Detector::Injection), (1, 3));
        assert_eq!(rate(Detector::Secret), (0, 3));
        assert!(!scores.false_positives.contains_key(&Detector::Pii));
        let corpus = &scores.false_positives_by_corpus["c"];
        assert_eq!((corpus.any.hits, corpus.above_allow.hits), (1, 2));
        assert_eq!(scores.false_alarms[&Detector::Injection][0].rules, ["SLP-jailbreak"]);
    }

    #[test]
    fn hard_negatives_and_unexpected_attacks_stand_apart() {
        for (json, class) in [
            (r#""label":"benign","category":"secret_near_miss""#, Some("secret_near_miss")),
            (
                r#""label":"benign","category":"security_doc_quoting_payload""#,
                Some("security_doc_quoting_payload"),
            ),
            (r#""label":"benign","category":"pii_lookalike""#, Some("pii_lookalike")),
            (
                r#""label":"benign","category":"benign_tool_def","imperative":true"#,
                Some("benign_tool_def (imperative)"),
            ),
            (r#""label":"benign","category":"benign_tool_def""#, None),
        ] {
            let row = row(&format!(r#"{{"id":"b","surface":"text","text":"x",{json}}}"#));
            assert_eq!(hard(&row).as_deref(), class);
        }
        for (json, class) in [
            (r#""category":"prompt_injection","difficulty":"implicit""#, Some("implicit")),
            (r#""category":"prompt_injection","difficulty":"context_dependent""#, Some("context_dependent")),
            (r#""category":"prompt_injection","difficulty":"explicit""#, None),
            (r#""category":"sqli","paranoia":2"#, Some("crs_paranoia_2")),
            (r#""category":"sqli","paranoia":1"#, None),
            (r#""category":"pii_soft""#, Some("pii_soft")),
        ] {
            let row = row(&format!(r#"{{"id":"a","surface":"text","text":"x","label":"attack",{json}}}"#));
            assert_eq!(apart(&row), class);
            let mut scores = Scores::default();
            scores.count("c", &row, &verdict(Decision::Block, &[]));
            assert_eq!(scores.recall_by_corpus.is_empty(), class.is_some());
        }
    }
}
