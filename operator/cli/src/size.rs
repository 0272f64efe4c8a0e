//! `sallyport size`: what a guarded pod's sidecar gets for a policy, and why.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use sallyport_plan::size::{CallCost, Sizing};
use serde_json::{Value, json};

use crate::policy;

const EXAMPLES: &str = "\
Examples:
  sallyport size -f policies/samples/support-bot.yaml
  sallyport size -f policy.yaml -o json | jq .extproc.cpu

How it is computed: docs/sizing.md.";

/// Says what a sidecar gets for a policy's spec.capacity, and shows the sum.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The AgentPolicy file
    #[arg(short = 'f', long = "file", value_name = "POLICY")]
    file: PathBuf,
    /// How it is shown
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Output {
    /// For people
    Text,
    /// For programs
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let policy = policy::load(&args.file)?;
    let sizing = sallyport_plan::size(&policy.spec);
    let mut out = std::io::stdout().lock();
    match args.output {
        Output::Text => out.write_all(sizing.explain().as_bytes())?,
        Output::Json => writeln!(out, "{:#}", json(&sizing))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The figures and the terms of the sum. Names and units are kept; new ones may come.
fn json(s: &Sizing) -> Value {
    let cost = |c: &CallCost| {
        json!({"fixedNanos": c.fixed, "requestKibNanos": c.request_kib, "responseKibNanos": c.response_kib,
            "callNanos": c.call})
    };
    let t = &s.terms;
    json!({
        "summary": s.summary(),
        "record": s.record,
        "cpu": s.cpu(),
        "loadPercent": s.load_percent,
        "extproc": {
            "cpuMillis": s.extproc_cpu_millis,
            "memoryBytes": s.extproc_memory_bytes,
            "scanTimeoutMillis": s.scan_timeout.as_millis() as u64,
            "budgetBytes": s.budget_bytes,
            "cost": cost(&t.extproc),
        },
        "envoy": {
            "cpuMillis": s.envoy_cpu_millis,
            "memoryBytes": s.envoy_memory_bytes,
            "concurrency": s.concurrency,
            "messageTimeoutMillis": s.message_timeout.as_millis() as u64,
            "cost": cost(&t.envoy),
        },
        "load": {
            "requestsPerSecond": t.requests_per_second,
            "requestBytes": t.request_bytes,
            "responseBytes": t.response_bytes,
            "headroomPercent": t.headroom_percent,
        },
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sallyport_api::AgentPolicySpec;

    use super::*;

    #[test]
    fn programs_get_the_figures_that_people_get() {
        let sizing = sallyport_plan::size(&AgentPolicySpec::default());
        let value = json(&sizing);
        assert_eq!(value["summary"], sizing.summary());
        assert_eq!(value["extproc"]["cpuMillis"], sizing.extproc_cpu_millis);
        assert_eq!(value["envoy"]["memoryBytes"], sizing.envoy_memory_bytes);
        assert_eq!(value["load"]["requestsPerSecond"], 50);
    }

    #[test]
    fn the_documentation_shows_what_the_command_says() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let policy = policy::load(&root.join("policies/samples/support-bot.yaml")).unwrap();
        let page = std::fs::read_to_string(root.join("docs/sizing.md")).unwrap();
        assert!(page.contains(&sallyport_plan::size(&policy.spec).explain()));
    }

    #[test]
    fn a_policy_that_can_not_be_sized_is_refused_with_file_and_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.yaml");
        std::fs::write(
            &file,
            "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {name: x}\n\
             spec: {capacity: {requestBodyP95: 8KB}}\n",
        )
        .unwrap();
        let error = run(&Args { file, output: Output::Text }).unwrap_err().to_string();
        assert!(error.contains("p.yaml: spec.capacity.requestBodyP95"), "{error}");
        let missing = Args { file: Path::new("/nowhere/p.yaml").into(), output: Output::Json };
        assert!(run(&missing).is_err());
    }
}
