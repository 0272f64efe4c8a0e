//! `sallyport explain`: what would happen, and why.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;

use sallyport_api::names::POLICY;
use sallyport_plan::inject::{Injection, Outcome};
use sallyport_plan::size;

use crate::inject::{Given, Loaded};

const EXAMPLES: &str = "\
Examples:
  sallyport explain pod -f pod.yaml --policy policy.yaml
  sallyport explain pod -f deployment.yaml --policy a.yaml b.yaml --namespace-label required";

/// Says what would happen, and why.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Whether a pod would be guarded, by which policy, and what its sidecar gets; exit status 1 if refused
    #[command(after_help = EXAMPLES)]
    Pod(Given),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let What::Pod(given) = &args.what;
    let loaded = given.load()?;
    let name = loaded.name();
    let mut out = std::io::stdout().lock();
    match loaded.outcome() {
        Outcome::Skipped(skip) => {
            writeln!(out, "pod {name} would stay as it is: {}\n  {skip}", skip.reason())?;
        }
        Outcome::Refused(refusal) => {
            writeln!(out, "pod {name} would be refused: {}\n  {refusal}", refusal.reason())?;
            return Ok(ExitCode::FAILURE);
        }
        Outcome::Guarded(injection) => guarded(&mut out, &loaded, &injection)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn guarded(out: &mut impl std::io::Write, loaded: &Loaded, injection: &Injection) -> anyhow::Result<()> {
    writeln!(out, "pod {} would be guarded by AgentPolicy `{}`", loaded.name(), injection.policy)?;
    writeln!(out, "  {}", chosen(loaded, &injection.policy))?;
    let named = |p: &&sallyport_api::AgentPolicyObject| p.metadata.name.as_deref() == Some(&injection.policy);
    if let Some(policy) = loaded.policies.iter().find(named) {
        let (spec, sizing) = (&policy.spec, size(&policy.spec));
        writeln!(out, "  mode {:?}, capture {:?}", spec.mode, spec.capture.mode)?;
        writeln!(
            out,
            "  sidecar: extproc {}m CPU and {} MiB, envoy {}m CPU and {} MiB, {} worker(s)",
            sizing.extproc_cpu_millis,
            sizing.extproc_memory_bytes >> 20,
            sizing.envoy_cpu_millis,
            sizing.envoy_memory_bytes >> 20,
            sizing.concurrency,
        )?;
        writeln!(
            out,
            "  for {} requests per second, {} % of the CPU request (record {})",
            spec.capacity.requests_per_second,
            sizing.load_percent,
            if sizing.record.is_empty() { "none" } else { &sizing.record },
        )?;
    }
    for warning in &injection.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    Ok(())
}

/// Why it is this policy.
fn chosen(loaded: &Loaded, policy: &str) -> String {
    let meta = &loaded.pod.metadata;
    if meta.annotations.as_ref().is_some_and(|a| a.contains_key(POLICY)) {
        return format!("the pod's annotation {POLICY} names it");
    }
    let empty = BTreeMap::new();
    let labels = meta.labels.as_ref().unwrap_or(&empty);
    let others: Vec<&str> = loaded
        .policies
        .iter()
        .filter(|p| p.spec.selector.matches(labels))
        .filter_map(|p| p.metadata.name.as_deref())
        .filter(|name| *name != policy)
        .collect();
    if others.is_empty() {
        return "it is the only one given that selects the pod".into();
    }
    format!(
        "{} selects the pod too; in a cluster the oldest is taken, then the first by name (annotate the pod \
         with {POLICY} to choose)",
        others.join(", ")
    )
}
