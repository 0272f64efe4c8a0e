//! The result of `sallyport eval`, as JSON and as tables.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, anyhow, ensure};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::score::{Alarm, Negatives, Rate, Scores};
use crate::machine::Machine;
use crate::table::Table;

/// Raised when a field changes its meaning.
pub(super) const SCHEMA: u32 = 1;

/// Everything an evaluation yields.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Report {
    pub(super) schema: u32,
    pub(super) version: String,
    pub(super) build: String,
    pub(super) policy: String,
    pub(super) rules: usize,
    pub(super) date: Timestamp,
    pub(super) machine: Machine,
    pub(super) corpora: usize,
    pub(super) attacks: u64,
    pub(super) benign: u64,
    pub(super) latency: Latency,
    pub(super) scores: Scores,
}

/// Time per row in microseconds, one row at a time.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Latency {
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
    /// Time spent in the engine altogether.
    pub(super) seconds: f64,
    /// Bytes looked at altogether.
    pub(super) bytes: u64,
}

/// Reads what an earlier `--json` wrote.
pub(super) fn load(path: &Path) -> anyhow::Result<Report> {
    #[derive(Deserialize)]
    struct Head {
        schema: u32,
    }
    let place = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{place}: can't be read"))?;
    let not_ours = |e| anyhow!("{place}: not a file that `sallyport eval --json` wrote: {e}");
    let head: Head = serde_json::from_str(&text).map_err(not_ours)?;
    ensure!(head.schema == SCHEMA, "{place}: schema {}, this version reads {SCHEMA}", head.schema);
    serde_json::from_str(&text).map_err(not_ours)
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// hits, rows, share, interval
fn cells(rate: &Rate) -> [String; 4] {
    let Rate { hits, rows, share, low, high } = rate;
    [hits.to_string(), rows.to_string(), percent(*share), format!("{}-{}", percent(*low), percent(*high))]
}

fn recall(title: &str, first: &'static str, rates: &BTreeMap<String, Rate>) -> Table {
    let mut table = Table::new(title, &[first, "found", "rows", "%", "95 % interval"]);
    for (name, rate) in rates {
        table.row([name.clone()].into_iter().chain(cells(rate)));
    }
    table
}

fn negatives(title: &str, first: &'static str, groups: &BTreeMap<String, Negatives>) -> Table {
    let head = [first, "alarms", "rows", "%", "95 % interval", "above allow", "<by detector"];
    let mut table = Table::new(title, &head);
    for (name, group) in groups {
        let by: Vec<_> = group
            .detectors
            .iter()
            .filter(|(_, r)| r.hits > 0)
            .map(|(d, r)| format!("{} {}/{}", d.as_str(), r.hits, r.rows))
            .collect();
        let above = group.above_allow.hits.to_string();
        table.row([name.clone()].into_iter().chain(cells(&group.any)).chain([above, by.join(", ")]));
    }
    table
}

impl Report {
    pub(super) fn print(&self, out: &mut dyn Write, misses: usize) -> io::Result<()> {
        let s = &self.scores;
        writeln!(
            out,
            "sallyport {} ({} build), {} rules, policy: {}, {}\n{}\n{} corpora, {} attacks, {} benign rows\n",
            self.version,
            self.build,
            self.rules,
            self.policy,
            self.date.strftime("%Y-%m-%d %H:%M UTC"),
            self.machine.line(),
            self.corpora,
            self.attacks,
            self.benign,
        )?;
        let tables = [
            recall("Recall by category", "<category", &s.recall_by_category),
            recall("Recall by corpus", "<corpus", &s.recall_by_corpus),
            recall("Recall by stated difficulty", "<difficulty", &s.recall_by_difficulty),
            recall(
                "Counted apart: attacks that text inspection alone is not expected to find",
                "<class",
                &s.recall_apart,
            ),
            self.false_positives(),
            negatives(
                "False positives on ordinary content, any detector, by corpus",
                "<corpus",
                &s.false_positives_by_corpus,
            ),
            negatives("False positives on hard negatives, any detector, by kind", "<kind", &s.hard_negatives),
        ];
        for table in tables.iter().filter(|t| !t.is_empty()) {
            writeln!(out, "{table}")?;
        }
        if s.near_misses.rows > 0 {
            let [hits, rows, share, _] = cells(&s.near_misses);
            writeln!(
                out,
                "Near misses of secrets taken by some secret rule: {hits} of {rows} ({share} %); \
                 a generic rule may take them\n"
            )?;
        }
        let l = &self.latency;
        let rate = if l.seconds > 0.0 { l.bytes as f64 / 1e6 / l.seconds } else { 0.0 };
        writeln!(
            out,
            "Time per row: p50 {:.1} us, p99 {:.1} us, max {:.1} us; {:.1} MB/s over {:.1} MB",
            l.p50,
            l.p99,
            l.max,
            rate,
            l.bytes as f64 / 1e6,
        )?;
        self.print_ids(out, misses)
    }

    fn false_positives(&self) -> Table {
        let head = ["<detector", "alarms", "rows", "%", "95 % interval"];
        let mut table = Table::new("False positives on ordinary content, by detector", &head);
        for (detector, rate) in &self.scores.false_positives {
            table.row([detector.as_str().to_owned()].into_iter().chain(cells(rate)));
        }
        table
    }

    fn print_ids(&self, out: &mut dyn Write, most: usize) -> io::Result<()> {
        if most == 0 {
            return Ok(());
        }
        let s = &self.scores;
        if !s.above_allow_by_rule.is_empty() {
            let mut rules: Vec<_> = s.above_allow_by_rule.iter().collect();
            rules.sort_by_key(|(_, rows)| std::cmp::Reverse(**rows));
            // Twice as many: this is the list to begin with when alarms are to go down.
            let rules: Vec<_> = rules.iter().map(|(rule, rows)| format!("{rule} {rows}")).collect();
            writeln!(out, "\nBenign rows above allow, by rule: {}", first(&rules, most * 2))?;
        }
        if !s.missed.is_empty() {
            writeln!(out, "\nMissed (first {most} of each; all with --json)")?;
            for (class, ids) in &s.missed {
                writeln!(out, "  {class} ({}): {}", ids.len(), first(ids, most))?;
            }
        }
        if !s.false_alarms.is_empty() {
            writeln!(
                out,
                "\nFalse positives, hard negatives included (first {most} of each; all with --json)"
            )?;
            for (detector, alarms) in &s.false_alarms {
                writeln!(out, "  {} ({}): {}", detector.as_str(), alarms.len(), first_alarms(alarms, most))?;
            }
        }
        Ok(())
    }
}

/// The first few of a list of ids.
pub(super) fn first(ids: &[String], most: usize) -> String {
    let rest = if ids.len() > most { " ..." } else { "" };
    format!("{}{rest}", ids[..most.min(ids.len())].join(" "))
}

fn first_alarms(alarms: &[Alarm], most: usize) -> String {
    let ids: Vec<_> = alarms.iter().map(|a| format!("{} [{}]", a.id, a.rules.join(" "))).collect();
    first(&ids, most)
}
