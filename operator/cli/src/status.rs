//! `sallyport status`: policies, and which pods enforce them.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use sallyport_api::AgentPolicyObject;
use sallyport_api::names::conditions;
use serde::Serialize;

use crate::cluster::{self, Subscriber, Where};
use crate::table::Table;

const EXAMPLES: &str = "\
Examples:
  sallyport status                     policies of every namespace, and their pods
  sallyport status -n agents --stale   only pods that don't enforce the newest bundle
  sallyport status -o json";

/// Shows policies, and which pods enforce their newest generation
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Only this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only pods that don't enforce the newest bundle
    #[arg(long)]
    stale: bool,
    /// How it is printed
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    place: Where,
}

/// How a report is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// For people
    #[default]
    Text,
    /// For programs
    Json,
}

#[derive(Debug, Serialize)]
struct PolicyRow {
    namespace: String,
    name: String,
    mode: String,
    accepted: String,
    enforced: String,
    reason: String,
    capacity: String,
    digest: String,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    cluster::block_on(async {
        let client = cluster::connect().await?;
        let policies: Api<AgentPolicyObject> = match &args.namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        };
        let policies: Vec<_> =
            policies.list(&ListParams::default()).await?.items.iter().map(PolicyRow::new).collect();
        let operators = cluster::operator_pods(&client, &args.place.operator_namespace).await?;
        let (mut pods, silent) = cluster::subscribers(&client, &operators).await;
        pods.retain(|p| args.namespace.as_ref().is_none_or(|n| *n == p.namespace));
        if args.stale {
            pods.retain(|p| !p.acked);
        }
        let mut out = std::io::stdout().lock();
        match args.output {
            Format::Json => {
                let all = serde_json::json!({"policies": policies, "pods": pods, "silentReplicas": silent});
                writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
            }
            Format::Text => {
                write!(out, "{}", policy_table(&policies))?;
                write!(out, "\n{}", pod_table(&pods))?;
                for replica in &silent {
                    writeln!(out, "\nno answer from the operator's replica {replica}")?;
                }
            }
        }
        Ok(if silent.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    })
}

impl PolicyRow {
    fn new(policy: &AgentPolicyObject) -> Self {
        let status = policy.status.clone().unwrap_or_default();
        let condition = |kind: &str| status.conditions.iter().find(|c| c.type_ == kind);
        let said = |kind: &str| condition(kind).map_or_else(|| "Unknown".to_owned(), |c| c.status.clone());
        let accepted = condition(conditions::ACCEPTED).filter(|c| c.status != "True");
        let worst = accepted.or_else(|| condition(conditions::ENFORCED).filter(|c| c.status != "True"));
        Self {
            namespace: policy.namespace().unwrap_or_default(),
            name: policy.name_any(),
            mode: format!("{:?}", policy.spec.mode),
            accepted: said(conditions::ACCEPTED),
            enforced: status.enforced.clone(),
            reason: worst.map(|c| format!("{}: {}", c.reason, c.message)).unwrap_or_default(),
            capacity: status.capacity.summary.clone(),
            digest: short(&status.digest),
        }
    }
}

fn policy_table(rows: &[PolicyRow]) -> Table {
    let head = &["<NAMESPACE", "<POLICY", "<MODE", "<ACCEPTED", "<ENFORCED", "<DIGEST", "<PER POD", "<WHY"];
    let mut table = Table::new("Policies", head);
    for r in rows {
        table.row([
            r.namespace.clone(),
            r.name.clone(),
            r.mode.clone(),
            r.accepted.clone(),
            r.enforced.clone(),
            r.digest.clone(),
            r.capacity.clone(),
            r.reason.clone(),
        ]);
    }
    table
}

fn pod_table(pods: &[Subscriber]) -> Table {
    let mut table =
        Table::new("Pods", &["<NAMESPACE", "<POD", "<POLICY", "<IN FORCE", "<STATE", "<VERSION", "<SINCE"]);
    for p in pods {
        let state = match &p.nack_error {
            Some(error) => format!("refused: {error}"),
            None if p.too_old => "too old: restart the pod".to_owned(),
            None if p.digest.is_empty() => "no policy".to_owned(),
            None if p.acked => "newest".to_owned(),
            None => "behind".to_owned(),
        };
        table.row([
            p.namespace.clone(),
            p.pod.clone(),
            p.policy.clone().unwrap_or_default(),
            short(&p.in_force),
            state,
            p.version.clone(),
            p.since.clone(),
        ]);
    }
    table
}

/// Enough of a digest to tell two apart.
pub(crate) fn short(digest: &str) -> String {
    digest.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_state_says_whether_it_enforces_the_newest() {
        let pod = |in_force: &str, error: Option<&str>, too_old| Subscriber {
            in_force: in_force.into(),
            digest: "b".into(),
            acked: in_force == "b",
            nack_error: error.map(str::to_owned),
            too_old,
            ..Subscriber::default()
        };
        let unguided = Subscriber::default();
        let pods = [
            pod("b", None, false),
            pod("a", None, false),
            pod("a", Some("line 3"), false),
            pod("a", None, true),
            unguided,
        ];
        let text = pod_table(&pods).to_string();
        for state in ["newest", "behind", "refused: line 3", "too old", "no policy"] {
            assert!(text.contains(state), "{text}");
        }
    }
}
