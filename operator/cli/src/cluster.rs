//! A cluster, as the commands that look at one see it.

use std::future::Future;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt as _};
use serde::{Deserialize, Serialize};

/// Where the operator lives.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Where {
    /// The operator's namespace
    #[arg(long, value_name = "NAMESPACE", default_value = "sallyport-system")]
    pub(crate) operator_namespace: String,
}

/// What one replica of the operator says of a guarded pod that is connected to it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Subscriber {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    /// The policy that its newest bundle is made of.
    pub(crate) policy: Option<String>,
    /// Digest of its newest bundle.
    pub(crate) digest: String,
    /// Digest of what it has in force.
    pub(crate) in_force: String,
    /// Whether both are the same.
    pub(crate) acked: bool,
    /// The sidecar's version.
    pub(crate) version: String,
    /// When its stream began.
    pub(crate) since: String,
    /// Why it refused its newest bundle.
    pub(crate) nack_error: Option<String>,
    /// Whether it is too old for its newest bundle.
    pub(crate) too_old: bool,
}

/// Runs a command's work on a runtime of its own.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// The cluster that kubectl would talk to.
pub(crate) async fn connect() -> Result<Client> {
    Client::try_default()
        .await
        .context("no cluster: kubectl must work here first (KUBECONFIG, or ~/.kube/config)")
}

/// The operator's pods.
pub(crate) async fn operator_pods(client: &Client, namespace: &str) -> Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let list = ListParams::default().labels("app.kubernetes.io/name=sallyport-operator");
    Ok(pods
        .list(&list)
        .await
        .with_context(|| format!("the pods of namespace {namespace} can't be listed"))?
        .items)
}

/// What a pod's port answers, by way of the API server, and when.
pub(crate) async fn ask(
    client: &Client,
    pod: &Pod,
    port: u16,
    path: &str,
) -> Result<(String, Option<Timestamp>)> {
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let uri = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy{path}");
    let request = http::Request::get(uri).body(Vec::new())?;
    let answer = client.send(request.map(kube::client::Body::from)).await?;
    let date = answer.headers().get(http::header::DATE).and_then(|d| d.to_str().ok()).and_then(http_date);
    let status = answer.status();
    let body = http_body_util::BodyExt::collect(answer.into_body()).await?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    anyhow::ensure!(status.is_success(), "{name}:{port}{path} answered {status}: {}", text.trim());
    Ok((text, date))
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`.
pub(crate) fn http_date(text: &str) -> Option<Timestamp> {
    jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp())
}

/// What every replica of the operator says of its subscribers, and the replicas that said nothing.
pub(crate) async fn subscribers(client: &Client, operators: &[Pod]) -> (Vec<Subscriber>, Vec<String>) {
    let (mut all, mut silent) = (Vec::new(), Vec::new());
    for pod in operators {
        let said = match ask(client, pod, 8080, "/subscribers").await {
            Ok((text, _)) => serde_json::from_str::<Vec<Subscriber>>(&text).map_err(anyhow::Error::from),
            Err(e) => Err(e),
        };
        match said {
            Ok(mut some) => all.append(&mut some),
            Err(e) => silent.push(format!("{}: {e:#}", pod.name_any())),
        }
    }
    all.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    (all, silent)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_date_of_an_answer_is_read() {
        let date = super::http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        assert_eq!(date.to_string(), "1994-11-06T08:49:37Z");
        assert!(super::http_date("yesterday").is_none());
    }
}
