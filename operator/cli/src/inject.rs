//! `sallyport inject`: the pod as the webhook would make it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::core::v1::{LimitRange, Pod};
use sallyport_api::AgentPolicyObject;
use sallyport_plan::inject::{Facts, Images, InjectSettings, Outcome, inject};
use serde_json::Value;

use crate::{EXIT_BAD_INPUT, note, policy};

const EXAMPLES: &str = "\
Examples:
  sallyport inject --dry-run -f pod.yaml --policy policy.yaml
  sallyport inject --dry-run -f deployment.yaml --policy policy.yaml | diff pod.yaml -

In a cluster the webhook does this to every pod that asks for it; nothing has to be injected by hand.";

/// Prints a pod as the webhook would make it; exit status 1 if it would be refused.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    given: Given,
    /// Only print; the only way there is, because pods are injected by the webhook
    #[arg(long)]
    dry_run: bool,
}

/// A pod and its surroundings, from files.
#[derive(Debug, clap::Args)]
pub(crate) struct Given {
    /// The pod, or a workload (Deployment, Job, ...) whose template is taken; `-` is standard input
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    around: Around,
}

/// A pod's surroundings, from files.
#[derive(Debug, clap::Args)]
pub(crate) struct Around {
    /// AgentPolicy files of the pod's namespace
    #[arg(long = "policy", value_name = "FILE", num_args = 1..)]
    policies: Vec<PathBuf>,
    /// What the namespace's label sallyport.dev/inject says: enabled, required or disabled
    #[arg(long, value_name = "VALUE", default_value = "enabled")]
    namespace_label: String,
    /// The operator's settings: key config.yaml of ConfigMap sallyport-config
    #[arg(long, value_name = "FILE")]
    pub(crate) settings: Option<PathBuf>,
}

/// A pod and its surroundings, read.
pub(crate) struct Loaded {
    pub(crate) pod: Pod,
    pub(crate) policies: Vec<AgentPolicyObject>,
    pub(crate) namespace: String,
    pub(crate) namespace_label: Option<String>,
    pub(crate) limit_ranges: Vec<LimitRange>,
    pub(crate) settings: InjectSettings,
}

impl Around {
    /// Reads and checks the files; the pod's own is `file`.
    pub(crate) fn load(&self, file: &Path) -> anyhow::Result<Loaded> {
        let pod = read_pod(file)?;
        let mut policies = Vec::new();
        for path in &self.policies {
            let loaded = policy::load(path)?;
            // One that the operator would not accept is never in force.
            policy::compile(path, &loaded.spec)?;
            policies.push(AgentPolicyObject::new(&loaded.metadata.name, loaded.spec));
        }
        let settings = match &self.settings {
            None => default_settings(),
            Some(path) => parse(path, &read(path)?)?,
        };
        let namespace_label = Some(self.namespace_label.clone());
        Ok(Loaded {
            namespace: pod.metadata.namespace.clone().unwrap_or_else(|| "default".into()),
            pod,
            policies,
            namespace_label,
            limit_ranges: Vec::new(),
            settings,
        })
    }
}

impl Loaded {
    /// What the webhook would do.
    pub(crate) fn outcome(&self) -> Outcome {
        let facts = Facts {
            namespace: &self.namespace,
            namespace_inject: self.namespace_label.as_deref(),
            policies: &self.policies,
            limit_ranges: &self.limit_ranges,
        };
        inject(&self.pod, &facts, &self.settings)
    }

    /// `namespace/name`, as far as the pod has a name.
    pub(crate) fn name(&self) -> String {
        let meta = &self.pod.metadata;
        let name = meta.name.as_deref().or(meta.generate_name.as_deref()).unwrap_or("(no name)");
        format!("{}/{name}", self.namespace)
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !args.dry_run {
        note(
            "error: pods are injected by the webhook, when they are made; add --dry-run to print what it \
             would make of this one",
        );
        return Ok(ExitCode::from(EXIT_BAD_INPUT));
    }
    let loaded = args.given.around.load(&args.given.file)?;
    match loaded.outcome() {
        Outcome::Guarded(injection) => {
            for warning in &injection.warnings {
                note(&format!("warning: {warning}"));
            }
            std::io::stdout().write_all(serde_saphyr::to_string(&injection.pod)?.as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Skipped(skip) => {
            note(&format!("pod {} stays as it is ({}): {skip}", loaded.name(), skip.reason()));
            std::io::stdout().write_all(serde_saphyr::to_string(&loaded.pod)?.as_bytes())?;
            Ok(ExitCode::SUCCESS)
        }
        Outcome::Refused(refusal) => {
            note(&format!("pod {} is refused ({}): {refusal}", loaded.name(), refusal.reason()));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("standard input can't be read");
    }
    std::fs::read_to_string(path).with_context(|| format!("{}: can't be read", path.display()))
}

pub(crate) fn parse<T: serde::de::DeserializeOwned>(path: &Path, text: &str) -> anyhow::Result<T> {
    serde_saphyr::from_str(text).map_err(|e| anyhow!("{}: {e}", path.display()))
}

/// Reads a pod, or makes the one that a workload would.
fn read_pod(path: &Path) -> anyhow::Result<Pod> {
    let object: Value = parse(path, &read(path)?)?;
    let kind = object["kind"].as_str().unwrap_or_default();
    let template = match kind {
        "Pod" => &object,
        "CronJob" => &object["spec"]["jobTemplate"]["spec"]["template"],
        _ => &object["spec"]["template"],
    };
    if template.is_null() {
        bail!("{}: kind `{kind}` is neither a Pod nor a workload with a pod template", path.display());
    }
    let mut pod: Pod =
        serde_json::from_value(template.clone()).map_err(|e| anyhow!("{}: {e}", path.display()))?;
    let from = |field: &str| object["metadata"][field].as_str().map(str::to_owned);
    pod.metadata.namespace = pod.metadata.namespace.or_else(|| from("namespace"));
    if kind != "Pod" && pod.metadata.generate_name.is_none() {
        pod.metadata.generate_name = from("name").map(|n| format!("{n}-"));
    }
    Ok(pod)
}

/// What stands in for the operator's settings.
pub(crate) fn default_settings() -> InjectSettings {
    let image = |name: &str| format!("sallyport/{name}:{}", env!("CARGO_PKG_VERSION"));
    InjectSettings {
        images: Images { extproc: image("extproc"), envoy: image("envoy"), capture: image("capture") },
        image_pull_policy: None,
        image_pull_secrets: Vec::new(),
        // What the plugin's being there changes is whether the pod is refused, which is the cluster's matter.
        cni: true,
        discovery: "https://sallyport-operator.sallyport-system.svc:8443".into(),
    }
}
