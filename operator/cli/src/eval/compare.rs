//! What changed between two evaluations.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use super::report::{Report, first, percent};
use super::score::Rate;
use crate::table::Table;

pub(super) fn print(
    out: &mut dyn Write,
    name: &str,
    old: &Report,
    new: &Report,
    most: usize,
) -> io::Result<()> {
    writeln!(out, "\nCompared with {name} of {}", old.date.strftime("%Y-%m-%d %H:%M UTC"))?;
    if old.machine.cpu != new.machine.cpu || old.build != new.build {
        writeln!(out, "  (another machine or build: don't compare the times)")?;
    }
    if (old.attacks, old.benign) != (new.attacks, new.benign) {
        writeln!(
            out,
            "  (other rows: {} attacks and {} benign then, {} and {} now)",
            old.attacks, old.benign, new.attacks, new.benign
        )?;
    }
    let (o, n) = (&old.scores, &new.scores);
    let mut table = Table::new("", &["<", "then %", "now %", "points", "hits"]);
    let by_name = |m: &BTreeMap<String, Rate>, what: &str| -> BTreeMap<String, Rate> {
        m.iter().map(|(k, r)| (format!("{what} {k}"), *r)).collect()
    };
    let detectors = |s: &super::score::Scores| -> BTreeMap<String, Rate> {
        s.false_positives.iter().map(|(d, r)| (format!("false positives {}", d.as_str()), *r)).collect()
    };
    let before = [by_name(&o.recall_by_category, "recall"), by_name(&o.recall_apart, "apart"), detectors(o)];
    let after = [by_name(&n.recall_by_category, "recall"), by_name(&n.recall_apart, "apart"), detectors(n)];
    for (before, after) in before.iter().zip(&after) {
        let names: BTreeSet<_> = before.keys().chain(after.keys()).collect();
        for name in names {
            let (b, a) = (before.get(name), after.get(name));
            if let Some(cells) = change(name, b, a) {
                table.row(cells);
            }
        }
    }
    if table.is_empty() {
        writeln!(out, "  no rate changed")?;
    } else {
        write!(out, "{table}")?;
    }
    writeln!(
        out,
        "  p50 {:.1} -> {:.1} us, p99 {:.1} -> {:.1} us",
        old.latency.p50, new.latency.p50, old.latency.p99, new.latency.p99
    )?;

    let missed = |r: &Report| -> BTreeSet<String> { r.scores.missed.values().flatten().cloned().collect() };
    let alarms = |r: &Report| -> BTreeSet<String> {
        let alarms = r.scores.false_alarms.iter();
        alarms.flat_map(|(d, list)| list.iter().map(move |a| format!("{} ({})", a.id, d.as_str()))).collect()
    };
    let (m0, m1, a0, a1) = (missed(old), missed(new), alarms(old), alarms(new));
    for (title, ids) in [
        ("newly missed", m1.difference(&m0)),
        ("no longer missed", m0.difference(&m1)),
        ("new false positives", a1.difference(&a0)),
        ("false positives gone", a0.difference(&a1)),
    ] {
        let ids: Vec<String> = ids.cloned().collect();
        writeln!(out, "  {title}: {} {}", ids.len(), first(&ids, most))?;
    }
    Ok(())
}

/// A row for a rate that changed, came or went.
fn change(name: &str, before: Option<&Rate>, after: Option<&Rate>) -> Option<[String; 5]> {
    let share = |r: Option<&Rate>| r.map_or_else(|| "-".into(), |r| percent(r.share));
    let hits = |r: Option<&Rate>| r.map_or_else(|| "-".into(), |r| format!("{}/{}", r.hits, r.rows));
    if before.map(|r| (r.hits, r.rows)) == after.map(|r| (r.hits, r.rows)) {
        return None;
    }
    let points = match (before, after) {
        (Some(b), Some(a)) => format!("{:+.1}", (a.share - b.share) * 100.0),
        _ => String::new(),
    };
    let hits = format!("{} -> {}", hits(before), hits(after));
    Some([name.to_owned(), share(before), share(after), points, hits])
}
