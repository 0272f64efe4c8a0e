//! `sallyport explain`: what would happen, and why.
//!
//! From files, or for a pod that runs: then its namespace, its policies and the operator's settings are read
//! from the cluster, and what is said holds for the pod made anew. It reads only.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{ConfigMap, LimitRange, Namespace, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use sallyport_api::AgentPolicyObject;
use sallyport_api::names::{GUARDED, INJECT, POLICY, STATUS};
use sallyport_plan::inject::{Injection, Outcome, pod_fields_digest};
use sallyport_plan::size;
use serde_json::Value;

use crate::cluster::{self, Where};
use crate::inject::{Around, Loaded, default_settings, parse};
use crate::{note, policy};

/// The ConfigMap that holds the operator's settings, and their key.
const SETTINGS: (&str, &str) = ("sallyport-config", "config.yaml");

const EXAMPLES: &str = "\
Examples:
  sallyport explain pod support-bot-7d9f -n agents            a pod of the cluster, with its policies
  sallyport explain pod -f pod.yaml --policy policy.yaml      everything from files
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
    Pod(PodArgs),
}

#[derive(Debug, clap::Args)]
struct PodArgs {
    /// The name of a pod in the cluster
    #[arg(required_unless_present = "file", conflicts_with_all = ["file", "policies", "namespace_label"])]
    name: Option<String>,
    /// Its namespace
    #[arg(short, long, default_value = "default", conflicts_with = "file")]
    namespace: String,
    /// The pod, or a workload (Deployment, Job, ...) whose template is taken; `-` is standard input
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    around: Around,
    #[command(flatten)]
    place: Where,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let What::Pod(args) = &args.what;
    let mut out = std::io::stdout().lock();
    let loaded = match (&args.file, &args.name) {
        (Some(file), _) => args.around.load(file)?,
        (None, name) => {
            let name = name.as_deref().unwrap_or_default();
            let loaded = cluster::block_on(async {
                let client = cluster::connect().await?;
                look_up(&client, args, name).await
            })?;
            running(&mut out, &loaded)?;
            loaded
        }
    };
    let name = loaded.name();
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

/// Reads what the webhook would know of a pod that is there.
async fn look_up(client: &Client, args: &PodArgs, name: &str) -> Result<Loaded> {
    let namespace = args.namespace.as_str();
    let (all, here) = (ListParams::default(), || client.clone());
    let pod = Api::<Pod>::namespaced(here(), namespace).get_opt(name).await?.with_context(|| {
        format!("namespace {namespace} has no pod {name}; kubectl get pods -n {namespace}")
    })?;
    let labels = Api::<Namespace>::all(here()).get(namespace).await?.metadata.labels.unwrap_or_default();
    let mut policies = Api::<AgentPolicyObject>::namespaced(here(), namespace).list(&all).await?.items;
    // As the operator does: one that does not load guards no pod.
    policies.retain(|p| match policy::compile(Path::new(&p.name_any()), &p.spec) {
        Ok(_) => true,
        Err(e) => {
            note(&format!("warning: left out, because it does not load: {e:#}"));
            false
        }
    });
    let limit_ranges = Api::<LimitRange>::namespaced(here(), namespace).list(&all).await?.items;
    let settings = if let Some(path) = &args.around.settings {
        parse(path, &std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?)?
    } else {
        let (map, key) = SETTINGS;
        let place = &args.place.operator_namespace;
        match Api::<ConfigMap>::namespaced(here(), place).get(map).await {
            Ok(map) => parse(Path::new(SETTINGS.0), map.data.unwrap_or_default().get(key).map_or("", |t| t))?,
            Err(e) => {
                note(&format!(
                    "warning: the operator's settings can't be read, the shipped ones stand in: {e}"
                ));
                default_settings()
            }
        }
    };
    Ok(Loaded {
        namespace: namespace.to_owned(),
        pod,
        policies,
        namespace_label: labels.get(INJECT).cloned(),
        limit_ranges,
        settings,
    })
}

/// What the pod is now.
fn running(out: &mut impl std::io::Write, loaded: &Loaded) -> Result<()> {
    let name = loaded.name();
    if loaded.pod.labels().get(GUARDED).is_none_or(|v| v != "true") {
        writeln!(out, "pod {name} is not guarded; made anew:")?;
        return Ok(());
    }
    let status: Value = loaded
        .pod
        .annotations()
        .get(STATUS)
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let said = |field: &str| status[field].as_str().unwrap_or("?").to_owned();
    let by = said("policy");
    writeln!(out, "pod {name} is guarded by AgentPolicy `{by}`, injected by version {}", said("version"))?;
    let named = |p: &&AgentPolicyObject| p.name_any() == by;
    match loaded.policies.iter().find(named) {
        None => writeln!(out, "  the policy is gone; the pod enforces what it had last")?,
        Some(policy) if pod_fields_digest(&policy.spec, &loaded.settings) != said("digest") => {
            writeln!(out, "  it runs with older capture, isolation or capacity than the policy: restart it")?;
        }
        Some(_) => writeln!(out, "  its capture, isolation and capacity are the policy's of now")?,
    }
    writeln!(out, "made anew:")?;
    Ok(())
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
