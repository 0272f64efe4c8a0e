//! `sallyport rules`: what the shipped rules are, what one of them knows, and whether they keep what
//! their own tests promise.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, bail};
use jiff::Timestamp;
use sallyport_api::AgentPolicySpec;
use sallyport_engine::rules::{Pack, Rule, parse_pack, run_tests, shipped};
use sallyport_engine::{Engine, Surface};

use crate::table::Table;

const EXAMPLES: &str = "\
Examples:
  sallyport rules list --pack secrets
  sallyport rules explain SLP-SEC-0001
  sallyport rules test
  sallyport rules test --pack-file policies/packs/secrets.yaml";

/// Lists, explains and tests the rules.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Lists the shipped rules
    List {
        /// Only the rules of this pack
        #[arg(long, value_name = "PACK")]
        pack: Option<String>,
        /// As JSON, patterns and tests included
        #[arg(long)]
        json: bool,
    },
    /// Shows everything a rule knows, and what the shipped policies make of it
    Explain {
        /// The rule's id, such as SLP-SEC-0001
        #[arg(value_name = "ID")]
        id: String,
    },
    /// Runs the tests that stand beside the rules; exit status 1 if one fails
    Test {
        /// Test this pack file instead of the shipped packs
        #[arg(long, value_name = "FILE")]
        pack_file: Option<PathBuf>,
    },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::List { pack, json } => list(pack.as_deref(), *json),
        Command::Explain { id } => explain(id),
        Command::Test { pack_file } => test(pack_file.as_ref()),
    }
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("can't print")
}

fn list(wanted: Option<&str>, as_json: bool) -> anyhow::Result<ExitCode> {
    let mut packs: Vec<&Pack> = shipped()?.iter().collect();
    if let Some(wanted) = wanted {
        let names: Vec<_> = packs.iter().map(|p| p.pack.clone()).collect();
        packs.retain(|p| p.pack == wanted);
        if packs.is_empty() {
            bail!("--pack: no pack is called `{wanted}`; there are {}", names.join(", "));
        }
    }
    if as_json {
        print(&(serde_json::to_string_pretty(&packs)? + "\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = String::new();
    for pack in &packs {
        let title =
            format!("{} (version {}, {} rules): {}", pack.pack, pack.version, pack.rules.len(), pack.title);
        let mut table = Table::new(title, &["<id", "<category", "<severity", "score", "<title"]);
        for rule in &pack.rules {
            table.row([
                rule.id.clone(),
                rule.category.as_str().to_owned(),
                rule.severity.as_str().to_owned(),
                rule.score.to_string(),
                rule.title.clone(),
            ]);
        }
        let _ = writeln!(out, "{table}");
    }
    let total: usize = packs.iter().map(|p| p.rules.len()).sum();
    let _ = writeln!(out, "{total} rules");
    print(&out)?;
    Ok(ExitCode::SUCCESS)
}

fn explain(id: &str) -> anyhow::Result<ExitCode> {
    let packs = shipped()?;
    let found = packs.iter().find_map(|p| {
        let rule = p.rules.iter().find(|r| r.id.eq_ignore_ascii_case(id))?;
        Some((p, rule))
    });
    let Some((pack, rule)) = found else {
        let mut near: Vec<&str> = packs.iter().flat_map(|p| &p.rules).map(|r| r.id.as_str()).collect();
        near.sort_by_key(|known| distance(known, id));
        near.truncate(3);
        bail!("no rule is called `{id}`; close are {}; all: sallyport rules list", near.join(", "));
    };
    print(&describe(pack, rule)?)?;
    Ok(ExitCode::SUCCESS)
}

/// How unlike two ids are: positions that differ, and the difference in length.
fn distance(a: &str, b: &str) -> usize {
    let b = b.to_ascii_uppercase();
    a.bytes().zip(b.bytes()).filter(|(x, y)| x != y).count() + a.len().abs_diff(b.len())
}

fn describe(pack: &Pack, rule: &Rule) -> anyhow::Result<String> {
    let mut out = format!("{}  {}\n", rule.id, rule.title);
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "  {name:<11}{value}");
    };
    line("pack", &format!("{} (version {})", pack.pack, pack.version));
    line("category", rule.category.as_str());
    line("severity", rule.severity.as_str());
    line("score", &format!("{} of 100", rule.score));
    line("surfaces", &if rule.surfaces.is_empty() { "every one".to_owned() } else { names(&rule.surfaces) });
    if let Some(scanner) = rule.scanner {
        let name = serde_json::to_value(scanner)?;
        let how = if scanner.own() { "the engine's own code, no pattern" } else { "finds the candidates" };
        line("scanner", &format!("{} ({how})", name.as_str().unwrap_or_default()));
    }
    if !rule.literals.is_empty() {
        line("gate", &rule.literals.join("  "));
    }
    if !rule.pattern.is_empty() {
        line("pattern", &rule.pattern);
    }
    if let Some(validator) = &rule.validator {
        line("validator", &validator.to_string());
    }
    if let Some(near) = &rule.near {
        line("near", &format!("one of {} within {} bytes", near.words.join(", "), near.within));
    }
    for except in &rule.except {
        line("except", except);
    }
    if !rule.references.is_empty() {
        line("references", &rule.references.join(" "));
    }
    line("tests", &format!("{} positive, {} negative", rule.tests.positive.len(), rule.tests.negative.len()));
    if rule.tests.positive.is_empty() {
        out.push_str("\nIt has no test to ask the shipped policies with.\n");
        return Ok(out);
    }
    out.push_str("\nWhat the shipped policies make of it, on its own positive tests:\n");
    for (surface, outcome) in outcomes(rule)? {
        let _ = writeln!(out, "  {:<15}{outcome}", surface.as_str());
    }
    Ok(out)
}

fn names(surfaces: &[Surface]) -> String {
    surfaces.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(" ")
}

/// Asks the engine instead of reading Cedar: per surface, the decision on the first positive test that
/// the rule finds there, with the policies behind it and other rules that found something, too.
fn outcomes(rule: &Rule) -> anyhow::Result<BTreeMap<Surface, String>> {
    let engine = Engine::new(&AgentPolicySpec::default()).map_err(|e| anyhow!("the shipped policy: {e}"))?;
    let surfaces = if rule.surfaces.is_empty() { Surface::ALL.to_vec() } else { rule.surfaces.clone() };
    let mut outcomes = BTreeMap::new();
    for surface in surfaces {
        let mut verdicts: Vec<_> = rule
            .tests
            .positive
            .iter()
            .flat_map(|case| {
                // Some rules are about the shape of a document, which a text does not have.
                let now = Timestamp::now();
                [
                    engine.scan_text(surface, &case.text, now),
                    engine.scan_json(surface, case.text.as_bytes(), now),
                ]
            })
            .filter(|v| v.findings.iter().any(|f| f.rule == rule.id))
            .map(|v| {
                let others: std::collections::BTreeSet<_> =
                    v.findings.iter().map(|f| f.rule.clone()).filter(|r| *r != rule.id).collect();
                (others, v)
            })
            .collect();
        // The fewer others had a say, the more the decision tells about this rule.
        verdicts.sort_by_key(|(others, _)| others.len());
        let outcome = match verdicts.first() {
            None => "none of its tests is found here".to_owned(),
            Some((others, verdict)) => {
                let policies: Vec<_> = verdict.reasons.iter().map(|r| r.policy.as_str()).collect();
                let by =
                    if policies.is_empty() { String::new() } else { format!(" by {}", policies.join(", ")) };
                let with = others.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
                let with = if with.is_empty() { with } else { format!(" (with {with})") };
                format!("{}{by}{with}", verdict.decision.as_str())
            }
        };
        outcomes.insert(surface, outcome);
    }
    Ok(outcomes)
}

fn test(file: Option<&PathBuf>) -> anyhow::Result<ExitCode> {
    let of_file;
    let packs = match file {
        None => shipped()?,
        Some(path) => {
            let place = path.display();
            let text = std::fs::read_to_string(path).with_context(|| format!("{place}: can't be read"))?;
            of_file = [parse_pack(&text).map_err(|e| anyhow!("{place}: {e}"))?];
            &of_file
        }
    };
    let (mut passed, mut failed, mut out) = (0, 0, String::new());
    for pack in packs {
        let place = file.map_or_else(|| pack.pack.clone(), |f| f.display().to_string());
        let report = run_tests(pack);
        passed += report.passed;
        failed += report.failures.len();
        for failure in &report.failures {
            let _ = writeln!(out, "{place}: {failure}");
        }
    }
    let _ = writeln!(out, "{passed} passed, {failed} failed");
    print(&out)?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
