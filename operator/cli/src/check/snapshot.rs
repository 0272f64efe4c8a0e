//! Everything the checks look at, read once.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams, PostParams};
use kube::{Client, ResourceExt as _};
use sallyport_api::names;
use sallyport_api::{AgentPolicyObject, AgentPolicySpec};

use super::metrics::Metrics;
use crate::cluster::{self, Subscriber};

/// One pod's answer on its metrics port.
#[derive(Clone, Debug)]
pub(crate) struct Scrape {
    pub(crate) pod: String,
    pub(crate) metrics: Result<Metrics, String>,
    /// The answerer's clock less ours, in seconds.
    pub(crate) skew: Option<i64>,
}

/// Everything the checks look at.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub(crate) version: Option<(u32, u32)>,
    pub(crate) crd: Option<CustomResourceDefinition>,
    pub(crate) deployment: Option<Deployment>,
    /// The daemon of the CNI plugin.
    pub(crate) cni: Option<DaemonSet>,
    pub(crate) operators: Vec<Scrape>,
    pub(crate) lease: Option<Lease>,
    pub(crate) mutating: Option<MutatingWebhookConfiguration>,
    pub(crate) validating: Option<ValidatingWebhookConfiguration>,
    /// What a policy that must be refused met: `Ok` is the refusal's text.
    pub(crate) webhook: Option<Result<String, String>>,
    pub(crate) namespaces: Vec<Namespace>,
    /// Every pod of a namespace that is opted in, and every guarded one.
    pub(crate) pods: Vec<Pod>,
    pub(crate) policies: Vec<AgentPolicyObject>,
    /// Namespace to its trust bundle.
    pub(crate) trust: BTreeMap<String, String>,
    pub(crate) sidecars: Vec<Scrape>,
    pub(crate) subscribers: Vec<Subscriber>,
}

impl Default for Scrape {
    fn default() -> Self {
        Self { pod: String::new(), metrics: Err("not asked".into()), skew: None }
    }
}

/// How many sidecars are asked: enough to see what is common, few enough to stay quick.
const MOST_SIDECARS: usize = 100;

/// Reads it all. An error means that the cluster can't be read at all; anything less is for a check to say.
pub(crate) async fn take(client: &Client, namespace: &str) -> Result<Snapshot> {
    let version = client.apiserver_version().await.context("the API server does not answer")?;
    let number = |text: &str| text.trim_end_matches('+').parse::<u32>().unwrap_or_default();
    let mut snapshot =
        Snapshot { version: Some((number(&version.major), number(&version.minor))), ..Snapshot::default() };
    let all = ListParams::default();
    snapshot.crd =
        Api::<CustomResourceDefinition>::all(client.clone()).get_opt("agentpolicies.sallyport.dev").await?;
    snapshot.deployment =
        Api::<Deployment>::namespaced(client.clone(), namespace).get_opt("sallyport-operator").await?;
    snapshot.cni = Api::<DaemonSet>::namespaced(client.clone(), namespace).get_opt("sallyport-cni").await?;
    snapshot.lease =
        Api::<Lease>::namespaced(client.clone(), namespace).get_opt("sallyport-operator").await?;
    snapshot.mutating = Api::<MutatingWebhookConfiguration>::all(client.clone()).get_opt("sallyport").await?;
    snapshot.validating =
        Api::<ValidatingWebhookConfiguration>::all(client.clone()).get_opt("sallyport").await?;
    snapshot.namespaces = Api::<Namespace>::all(client.clone()).list(&all).await?.items;
    let mut seen = std::collections::BTreeSet::new();
    let opted = snapshot.namespaces.iter().filter(|n| opted_in(n)).map(kube::ResourceExt::name_any);
    for name in opted.collect::<Vec<_>>() {
        let pods = Api::<Pod>::namespaced(client.clone(), &name).list(&all).await?.items;
        snapshot.pods.extend(pods.into_iter().filter(|p| seen.insert(p.uid())));
    }
    let guarded = ListParams::default().labels(&format!("{}=true", names::GUARDED));
    let pods = Api::<Pod>::all(client.clone()).list(&guarded).await?.items;
    snapshot.pods.extend(pods.into_iter().filter(|p| seen.insert(p.uid())));
    if snapshot.crd.is_some() {
        snapshot.policies = Api::<AgentPolicyObject>::all(client.clone()).list(&all).await?.items;
        snapshot.webhook = Some(probe_webhook(client).await);
    }
    let named = ListParams::default().fields(&format!("metadata.name={}", names::TRUST_CONFIG_MAP));
    for map in Api::<ConfigMap>::all(client.clone()).list(&named).await?.items {
        let bundle = map.data.as_ref().and_then(|d| d.get(names::TRUST_KEY)).cloned().unwrap_or_default();
        snapshot.trust.insert(map.namespace().unwrap_or_default(), bundle);
    }
    let operators = cluster::operator_pods(client, namespace).await?;
    for pod in &operators {
        snapshot.operators.push(scrape(client, pod, 8080).await);
    }
    snapshot.subscribers = cluster::subscribers(client, &operators).await.0;
    let running = snapshot.pods.iter().filter(|p| guarded_and_running(p)).take(MOST_SIDECARS).cloned();
    for pod in running.collect::<Vec<_>>() {
        snapshot.sidecars.push(scrape(client, &pod, names::METRICS_PORT).await);
    }
    Ok(snapshot)
}

async fn scrape(client: &Client, pod: &Pod, port: u16) -> Scrape {
    let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    match cluster::ask(client, pod, port, "/metrics").await {
        Ok((text, date)) => Scrape {
            pod: name,
            metrics: Ok(Metrics::parse(&text)),
            skew: date.map(|d| d.as_second() - Timestamp::now().as_second()),
        },
        Err(e) => Scrape { pod: name, metrics: Err(format!("{e:#}")), skew: None },
    }
}

/// A policy that only the webhook can refuse, tried without being kept.
async fn probe_webhook(client: &Client) -> Result<String, String> {
    let mut spec = AgentPolicySpec::default();
    spec.detection.packs = Some(vec!["sallyport-check".into()]);
    let probe = AgentPolicyObject::new("sallyport-check", spec);
    let policies: Api<AgentPolicyObject> = Api::namespaced(client.clone(), "default");
    match policies.create(&PostParams { dry_run: true, field_manager: None }, &probe).await {
        Ok(_) => Err("a policy with an unknown pack was taken: the webhook was not asked".into()),
        Err(kube::Error::Api(e)) if e.message.contains("sallyport-check") && e.message.contains("denied") => {
            Ok(e.message.clone())
        }
        Err(e) => Err(e.to_string()),
    }
}

/// Whether a namespace takes part.
pub(crate) fn opted_in(namespace: &Namespace) -> bool {
    namespace.labels().get(names::INJECT).is_some_and(|v| v == "enabled" || v == "required")
}

/// Whether a pod is guarded and runs.
pub(crate) fn guarded_and_running(pod: &Pod) -> bool {
    is_guarded(pod) && pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running")
}

/// Whether a pod is guarded.
pub(crate) fn is_guarded(pod: &Pod) -> bool {
    pod.labels().get(names::GUARDED).is_some_and(|v| v == "true")
}
