//! The command for people: one module per command, all of them thin around the engine, the filter's
//! server and the planner, so that what a laptop shows is what a guarded pod does.

#![forbid(unsafe_code)]
// A test may stop at what it did not expect; the commands may not.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::float_cmp))]

mod admin;
mod bench;
mod check;
mod cluster;
mod envoy;
mod eval;
mod explain;
mod inject;
mod lint;
mod machine;
mod policy;
mod rules;
mod rundir;
mod scan;
mod size;
mod status;
mod table;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A line of input was bad, or the command line itself was.
const EXIT_BAD_INPUT: u8 = 2;

const EXAMPLES: &str = "\
Examples:
  sallyport up -f policies/samples/support-bot.yaml      inspect this laptop's agents
  echo '{\"id\":1,\"surface\":\"text\",\"text\":\"hello\"}' | sallyport scan
  sallyport eval corpora/                                recall and false positives

Documentation: docs/ in the source tree. Exit status: 0 done, 1 failed, 2 bad input.";

/// Inspects what AI agents send and receive.
#[derive(Debug, Parser)]
#[command(name = "sallyport", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Args),
    Scan(scan::Args),
    Eval(eval::Args),
    Rules(rules::Args),
    Lint(lint::Args),
    Bench(bench::Args),
    Size(size::Args),
    Check(check::Args),
    Status(status::Args),
    Inject(inject::Args),
    Explain(explain::Args),
    /// The filter that `bench` measures
    #[command(hide = true)]
    BenchExtproc(bench::children::ExtprocArgs),
    /// The upstream behind it
    #[command(hide = true)]
    BenchUpstream(bench::children::UpstreamArgs),
    /// Becomes another program, tied to the life of its parent
    #[command(hide = true)]
    Tether(envoy::Tether),
}

/// Parses the command line, runs the command, and says how it went.
pub fn run() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Up(args) => up::run(&args),
        Command::Scan(args) => scan::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Rules(args) => rules::run(&args),
        Command::Lint(args) => lint::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Size(args) => size::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Inject(args) => inject::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::BenchExtproc(args) => args.run(),
        Command::BenchUpstream(args) => args.run(),
        Command::Tether(args) => args.run(),
    };
    match outcome {
        Ok(code) => code,
        // A reader that closes the pipe early (`| head`) has seen what it wanted.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            note(&format!("error: {e:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Says something on standard error. A terminal that is gone is no reason to stop (`eprintln!` would).
fn note(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<std::io::Error>())
        .any(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
