//! `sallyport lint`: would this AgentPolicy be taken?

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::policy;

const EXAMPLES: &str = "\
Examples:
  sallyport lint policy.yaml
  sallyport lint policies/samples/*.yaml";

/// Checks AgentPolicy files: fields, values, packs, overrides and Cedar; exit status 1 if one is bad.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The files to check
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    let mut bad = 0;
    for path in &args.files {
        // As it would be taken by the filter: loaded, then compiled.
        match policy::load(path).and_then(|p| policy::compile(path, &p.spec)) {
            Ok(engine) => writeln!(out, "{}: ok, {} rules", path.display(), engine.rule_count())?,
            Err(e) => {
                bad += 1;
                writeln!(out, "{e:#}")?;
            }
        }
    }
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
