//! Many sidecars as the operator sees them: each its own TLS connection, its own pod's token and its own
//! acknowledgements, without the pod.
//!
//! `sallyport-e2e-subscribers ADDRESS SERVER-NAME CA-FILE TOKENS-FILE` subscribes once for each line of the
//! tokens' file and prints one line per event: `ready N`, `bundle DIGEST MICROS-SINCE-EPOCH`, `ended REASON`.
//! A stream that ends is begun again, with the sidecar's own back-off.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use sallyport_proto::discovery::{Ack, DiscoveryClient, Hello, Request, Response, SCHEMA, SubscribeRequest};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

#[derive(Clone)]
struct Target {
    endpoint: Endpoint,
    first: Arc<AtomicUsize>,
    count: usize,
}

/// Runs until it is killed.
pub fn main(args: &[String]) -> anyhow::Result<()> {
    let [address, name, authorities, tokens] = args else {
        bail!("usage: sallyport-e2e-subscribers ADDRESS SERVER-NAME CA-FILE TOKENS-FILE")
    };
    let address: SocketAddr = address.parse()?;
    let authorities = Certificate::from_pem(std::fs::read(authorities)?);
    let tokens = std::fs::read_to_string(tokens)?;
    let tokens: Vec<_> = tokens.lines().map(str::to_owned).collect();
    let tls = ClientTlsConfig::new().ca_certificate(authorities).domain_name(name.as_str());
    let endpoint = Endpoint::from_shared(format!("https://{address}"))?
        .tls_config(tls)?
        .connect_timeout(Duration::from_secs(10));
    let target = Target { endpoint, first: Arc::default(), count: tokens.len() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for token in tokens {
            all.spawn(keep_subscribed(target.clone(), token));
        }
        while all.join_next().await.is_some() {}
    });
    Ok(())
}

async fn keep_subscribed(target: Target, token: String) {
    let mut in_force = String::new();
    let mut wait = 1.0;
    loop {
        let had = !in_force.is_empty();
        if let Err(e) = subscribe(&target, &token, &mut in_force, had).await {
            say(&format!("ended {e:#}"));
        }
        // As the sidecar does: 1 to 30 s, with full jitter.
        tokio::time::sleep(Duration::from_secs_f64(fraction() * wait)).await;
        wait = (wait * 2.0_f64).min(30.0);
    }
}

async fn subscribe(target: &Target, token: &str, in_force: &mut String, had: bool) -> anyhow::Result<()> {
    let channel = target.endpoint.connect().await.context("no connection")?;
    let (sender, receiver) = mpsc::channel(4);
    let hello = Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        schema_least: SCHEMA,
        schema_most: SCHEMA,
        held: Vec::new(),
        in_force: in_force.clone(),
    };
    sender.send(SubscribeRequest { kind: Some(Request::Hello(hello)) }).await?;
    let mut request = tonic::Request::new(ReceiverStream::new(receiver));
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse()?);
    let mut answers = DiscoveryClient::new(channel).subscribe(request).await?.into_inner();
    if had {
        say("again");
    }
    while let Some(answer) = answers.next().await {
        let Some(Response::Bundle(bundle)) = answer?.kind else { continue };
        say(&format!("bundle {} {}", bundle.digest, micros()));
        let new = in_force.is_empty();
        in_force.clone_from(&bundle.digest);
        sender.send(SubscribeRequest { kind: Some(Request::Ack(Ack { digest: bundle.digest })) }).await?;
        if new && target.first.fetch_add(1, Ordering::Relaxed) + 1 == target.count {
            say(&format!("ready {}", target.count));
        }
    }
    bail!("the operator ended the stream")
}

/// Microseconds since the epoch: one clock for every process of the machine.
pub fn micros() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_micros())
}

/// Between 0 and 1, different for every call: enough to spread reconnections.
fn fraction() -> f64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    let random = std::hash::RandomState::new().build_hasher().finish();
    (random >> 11) as f64 / (1_u64 << 53) as f64
}

fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
