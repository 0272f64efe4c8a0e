//! `sallyport check`: is this installation healthy, and if not, what to do.

mod checks;
mod metrics;
mod snapshot;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::cluster::{self, Where};
use crate::status::Format;

const EXAMPLES: &str = "\
Looks at the installation through the API server, changes nothing, and says for each thing that is not as
it should be what to do about it. Exit status 1 where a check failed; warnings alone leave it 0.

Examples:
  sallyport check
  sallyport check -o json | jq '.checks[] | select(.state != \"ok\")'";

/// Checks the installation in a cluster; exit status 1 where a check failed
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// How it is printed
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    place: Where,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// As it should be.
    Ok(String),
    /// It works, and someone should know.
    Warn(String),
    /// It does not work.
    Fail(String),
    /// It could not be looked at.
    Unknown(String),
}

/// One thing that is looked at.
pub(crate) struct Check {
    /// Names it in JSON, and its paragraph in docs/checks.md.
    pub(crate) id: &'static str,
    /// What should be so.
    pub(crate) title: &'static str,
    /// What to do where it is not.
    pub(crate) hint: &'static str,
    pub(crate) look: fn(&snapshot::Snapshot) -> Found,
}

#[derive(Debug, Serialize)]
struct Line<'a> {
    id: &'a str,
    title: &'a str,
    state: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
}

impl Found {
    const fn state(&self) -> &'static str {
        match self {
            Self::Ok(_) => "ok",
            Self::Warn(_) => "warning",
            Self::Fail(_) => "failed",
            Self::Unknown(_) => "unknown",
        }
    }

    fn message(self) -> String {
        match self {
            Self::Ok(m) | Self::Warn(m) | Self::Fail(m) | Self::Unknown(m) => m,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let snapshot = cluster::block_on(async {
        let client = cluster::connect().await?;
        snapshot::take(&client, &args.place.operator_namespace).await
    })?;
    let lines = look(&snapshot);
    let failed = lines.iter().filter(|l| l.state == "failed").count();
    let mut out = std::io::stdout().lock();
    match args.output {
        Format::Json => {
            let all = serde_json::json!({"failed": failed, "checks": lines});
            writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        }
        Format::Text => print(&mut out, &lines, failed)?,
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn look(snapshot: &snapshot::Snapshot) -> Vec<Line<'static>> {
    let line = |check: &'static Check| {
        let found = (check.look)(snapshot);
        let fine = matches!(found, Found::Ok(_));
        let state = found.state();
        Line {
            id: check.id,
            title: check.title,
            state,
            message: found.message(),
            hint: (!fine).then_some(check.hint),
        }
    };
    checks::ALL.iter().map(line).collect()
}

fn print(out: &mut impl std::io::Write, lines: &[Line<'_>], failed: usize) -> std::io::Result<()> {
    for line in lines {
        writeln!(out, "{:8} {}: {}", line.state, line.title, line.message)?;
        if let Some(hint) = line.hint {
            writeln!(out, "         {hint}")?;
            writeln!(out, "         docs/checks.md#{}", line.id)?;
        }
    }
    let count = |state| lines.iter().filter(|l| l.state == state).count();
    let (ok, warnings, unknown) = (count("ok"), count("warning"), count("unknown"));
    writeln!(out, "\n{ok} ok, {warnings} warnings, {failed} failed, {unknown} unknown")
}
