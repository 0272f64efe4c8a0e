//! Starts the parts, watches over them, and stops them in order.
//!
//! On SIGTERM: readiness goes, so that no new work comes; the lease is given back, so that another replica
//! writes; the listeners stay for `LEAVE`, because the cluster's proxies take time to notice; then
//! connections finish what they do. A task that ends on its own ends the process, with its name.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use kube::Client;
use sallyport_plan::inject::InjectSettings;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::args::Args;
use crate::certs::{self, Certificates, own};
use crate::health::{self, Health};
use crate::metrics::Metrics;
use crate::serve::{self, Listener};
use crate::tasks::Tasks;
use crate::{discovery, index, lease, status, trust, webhook};

/// How long the listeners stay open once readiness is gone.
const LEAVE: Duration = Duration::from_secs(3);
/// How long a lease holds without renewal.
const LEASE: Duration = Duration::from_secs(15);
/// The Lease's name.
const LEASE_NAME: &str = "sallyport-operator";

/// Admission: the API server keeps few connections; each handles many requests. It speaks HTTP/1.1, leaves a
/// connection that rests after 90 s, and does not repeat a request that it had begun to write: were the
/// connection closed here first, a review would be lost now and then.
const WEBHOOK: Listener = Listener {
    name: "webhook",
    connections: 512,
    streams: 250,
    idle: Duration::from_secs(120),
    drain: Duration::from_secs(6),
};
/// One connection per guarded pod, 5,000 of them at the design's target, and as many again while they move
/// here from a replica that stops. Sidecars speak HTTP/2.
const DISCOVERY: Listener = Listener {
    name: "discovery",
    connections: 12_000,
    streams: 8,
    idle: Duration::from_secs(5),
    drain: Duration::from_secs(2),
};
const METRICS: Listener = Listener {
    name: "metrics",
    connections: 64,
    streams: 16,
    idle: Duration::from_secs(5),
    drain: Duration::from_secs(1),
};

/// Runs the process.
pub fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some("probe") {
        return crate::probe::run(words);
    }
    let args = Args::parse();
    let filter = match args.log_level.parse::<tracing_subscriber::EnvFilter>() {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("sallyport-operator: --log-level: {error}");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "starting the runtime");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "the operator ends");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let settings = settings(&args)?;
    let client = Client::try_default().await.context("finding the API server")?;
    let metrics = Metrics::new()?;

    let (leader, leads) = watch::channel(false);
    let (stop_lease, lease_stopped) = watch::channel(false);
    let (stop, stopped) = watch::channel(false);
    // Tasks that end when they are told; the others end with the process.
    let (mut serving, mut background) = (Tasks::default(), Tasks::default());
    let certificates = Certificates::new(metrics.clone());
    let (index, indexing) = index::start(client.clone(), settings.clone());

    let bound = Arc::new(AtomicBool::new(false));
    let stopping = Arc::new(AtomicBool::new(false));
    let (synced, subscribed, streams) = (index.clone(), index.clone(), index.clone());
    let health = Health {
        synced: Arc::new(move || synced.synced()),
        certificates: certificates.clone(),
        bound: bound.clone(),
        stopping: stopping.clone(),
        subscribers: Arc::new(move || serde_json::json!(discovery::subscribers(&subscribed))),
        metrics: metrics.clone(),
    };
    let tls = TlsAcceptor::from(certs::server_config(&certificates)?);
    let (admission, reporting) =
        webhook::start(client.clone(), index.clone(), settings, &args.pod_name, &metrics);
    let discovery = discovery::router(client.clone(), index.clone(), metrics.registry());
    for (address, tls, router, listener) in [
        (args.metrics_addr, None, health::router(health), METRICS),
        (args.webhook_addr, Some(tls.clone()), admission, WEBHOOK),
        (args.discovery_addr, Some(tls), discovery, DISCOVERY),
    ] {
        let socket = serve::bind(address).await?;
        let name = listener.name;
        serving.spawn(name, serve::serve(socket, tls, router, listener, metrics.clone(), stopped.clone()));
    }
    bound.store(true, Ordering::Relaxed);

    background.spawn("index", indexing);
    background.spawn("events", reporting);
    if let Some(dir) = args.tls_dir.clone() {
        background.spawn("certificates", certs::files::run(dir, certificates.clone()));
    } else {
        let own = own::Own {
            namespace: args.namespace.clone(),
            names: own::service_names(&args.service, &args.namespace),
            identity: args.pod_name.clone(),
        };
        background.spawn("certificates", own::run(client.clone(), own, certificates.clone(), leads.clone()));
    }
    let bundles = (certificates.bundle(), leads.clone(), metrics.clone());
    let name = args.webhook_config.clone();
    let (bundle, leading, counted) = bundles.clone();
    background.spawn(
        "caBundle of MutatingWebhookConfiguration",
        certs::bundles::run::<MutatingWebhookConfiguration>(
            client.clone(),
            name.clone(),
            bundle,
            leading,
            counted,
        ),
    );
    let (bundle, leading, counted) = bundles.clone();
    background.spawn(
        "caBundle of ValidatingWebhookConfiguration",
        certs::bundles::run::<ValidatingWebhookConfiguration>(client.clone(), name, bundle, leading, counted),
    );
    let (bundle, leading, counted) = bundles;
    background
        .spawn("trust", trust::run(client.clone(), index.guarded_namespaces(), bundle, leading, counted));
    let identity = status::Identity { namespace: args.namespace.clone(), pod_name: args.pod_name.clone() };
    background.spawn("status", status::run(client.clone(), index, leads, identity));
    let election = lease::Settings {
        namespace: args.namespace,
        name: LEASE_NAME.into(),
        identity: args.pod_name,
        duration: LEASE,
    };
    serving.spawn("lease", lease::run(client, election, leader, lease_stopped, metrics));

    tokio::select! {
        died = background.first_end() => return Err(died.into()),
        died = serving.first_end() => return Err(died.into()),
        _ = terminate.recv() => tracing::info!("SIGTERM"),
        _ = interrupt.recv() => tracing::info!("SIGINT"),
    }
    stopping.store(true, Ordering::Relaxed);
    stop_lease.send_replace(true);
    tokio::time::sleep(LEAVE).await;
    streams.shut_down();
    stop.send_replace(true);
    serving.all().await;
    tracing::info!("stopped");
    Ok(())
}

fn settings(args: &Args) -> anyhow::Result<InjectSettings> {
    let path = args.config.display();
    let text = std::fs::read_to_string(&args.config).with_context(|| format!("reading {path}"))?;
    serde_saphyr::from_str(&text).map_err(|e| anyhow::anyhow!("{path}: {e}"))
}
