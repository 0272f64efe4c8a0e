//! `sallyport eval`: how much of what is labelled an attack is found, and how much else with it.

mod compare;
mod corpus;
mod report;
mod score;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jiff::Timestamp;
use sallyport_engine::{Engine, Verdict};

use crate::machine::{self, Machine};
use crate::policy;
use corpus::{Label, Row};
use report::{Latency, Report};
use score::Scores;

const EXAMPLES: &str = "\
A directory of corpora holds *.jsonl and *.jsonl.gz, one labelled row a line:
  {\"id\", \"surface\", \"text\" or \"json\", \"label\": \"attack\"|\"benign\", \"category\",
   \"spans\", \"benign_for\", \"difficulty\", ...}
An attack is detected when its decision is not `allow`; a secret or personal datum only when a
finding overlaps a labelled span. A detector has a false positive only on benign rows whose
`benign_for` names it. Intervals are Wilson's, 95 %.

Examples:
  sallyport eval corpora/
  sallyport eval corpora/ --json before.json
  sallyport eval corpora/ --compare before.json --misses 20";

/// Scores the engine on labelled corpora: recall, false positives, time.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The directory that holds the corpora
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The AgentPolicy to decide by; left out, everything that ships is on
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Write everything as JSON to this file, all ids included; `-` is standard output, without the table
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// How many missed ids to print per category, and false alarms per detector
    #[arg(long, value_name = "N", default_value_t = 5)]
    misses: usize,
    /// A file that --json wrote earlier: print what changed since
    #[arg(long, value_name = "OLD.json")]
    compare: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Everything that can be wrong with the command line, before minutes of work.
    let old = args.compare.as_deref().map(report::load).transpose()?;
    let engine = policy::engine(args.policy.as_deref())?;
    let files = corpus::files(&args.dir)?;

    let machine = Machine::here();
    let mut scores = Scores::default();
    let mut clock = Clock::default();
    let mut progress = Progress::new();
    let (mut attacks, mut benign) = (0, 0);
    for (i, file) in files.iter().enumerate() {
        let name = corpus::name(file).unwrap_or_default();
        for row in corpus::rows(file)? {
            let verdict = clock.look(&engine, &row);
            scores.count(name, &row, &verdict);
            match row.label {
                Label::Attack => attacks += 1,
                Label::Benign => benign += 1,
            }
            progress.tick(|| {
                let rows = attacks + benign;
                format!("{rows} rows, corpus {} of {}: {name}", i + 1, files.len())
            });
        }
    }
    progress.done();

    let report = Report {
        schema: report::SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: machine::BUILD.to_owned(),
        policy: args.policy.as_ref().map_or_else(|| "shipped".to_owned(), |p| p.display().to_string()),
        rules: engine.rule_count(),
        date: Timestamp::now(),
        machine,
        corpora: files.len(),
        attacks,
        benign,
        latency: clock.latency(),
        scores,
    };
    let as_json = args.json.as_deref() == Some(Path::new("-"));
    if let Some(path) = &args.json {
        let mut json = serde_json::to_string_pretty(&report)?;
        json.push('\n');
        if as_json {
            std::io::stdout().write_all(json.as_bytes())?;
        } else {
            std::fs::write(path, json).with_context(|| format!("{}: can't be written", path.display()))?;
        }
    }
    if !as_json {
        let mut out = std::io::stdout().lock();
        report.print(&mut out, args.misses)?;
        if let (Some(old), Some(path)) = (&old, &args.compare) {
            compare::print(&mut out, &path.display().to_string(), old, &report, args.misses)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Times every look.
#[derive(Debug, Default)]
struct Clock {
    micros: Vec<f64>,
    bytes: u64,
}

impl Clock {
    fn look(&mut self, engine: &Engine, row: &Row) -> Verdict {
        let now = Timestamp::now();
        let text = row.text.as_deref().unwrap_or_default();
        let json = row.json.as_ref().map(|j| j.get().as_bytes());
        self.bytes += json.map_or(text.len(), <[u8]>::len) as u64;
        let start = Instant::now();
        let verdict = match json {
            Some(json) => engine.scan_json(row.surface, json, now),
            None => engine.scan_text(row.surface, text, now),
        };
        self.micros.push(start.elapsed().as_secs_f64() * 1e6);
        verdict
    }

    fn latency(mut self) -> Latency {
        let total: f64 = self.micros.iter().sum();
        Latency {
            p50: machine::percentile(&mut self.micros, 0.5),
            p99: machine::percentile(&mut self.micros, 0.99),
            max: machine::percentile(&mut self.micros, 1.0),
            seconds: total / 1e6,
            bytes: self.bytes,
        }
    }
}

/// A word on standard error when it takes long: every second on a terminal, every ten in a log.
#[derive(Debug)]
struct Progress {
    last: Instant,
    terminal: bool,
    said: bool,
}

impl Progress {
    fn new() -> Self {
        Self { last: Instant::now(), terminal: std::io::stderr().is_terminal(), said: false }
    }

    fn tick(&mut self, text: impl FnOnce() -> String) {
        let every = Duration::from_secs(if self.terminal { 1 } else { 10 });
        if self.last.elapsed() < every {
            return;
        }
        self.last = Instant::now();
        self.said = true;
        if self.terminal {
            eprint!("\r\x1b[K{}", text());
        } else {
            eprintln!("{}", text());
        }
    }

    fn done(&self) {
        if self.said && self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
