//! Many sidecars as the operator sees them: each its own TLS connection, its own pod's token and its own
//! acknowledgements, without the pod.
//!
//! `sallyport-e2e-subscribers ADDRESS SERVER-NAME CA-FILE TOKENS-FILE` subscribes once for each line of the
//! tokens' file and prints one line per event: `bundle DIGEST MICROS-SINCE-EPOCH`, `back MICROS-SINCE-EPOCH` when
//! a stream began again, `ended REASON`. A stream that ends is begun again with the sidecar's own pauses.

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use sallyport_proto::discovery::{Ack, DiscoveryClient, Hello, Request, Response, SCHEMA, SubscribeRequest};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

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
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for token in tokens {
            all.spawn(keep_subscribed(endpoint.clone(), token));
        }
        while all.join_next().await.is_some() {}
    });
    Ok(())
}

async fn keep_subscribed(endpoint: Endpoint, token: String) {
    let mut in_force = String::new();
    let mut failures = 0;
    loop {
        let (mut begun, mut asked) = (false, None);
        if let Err(e) = subscribe(&endpoint, &token, &mut in_force, &mut begun).await {
            asked = e.downcast_ref::<Status>().and_then(retry_after);
            say(&format!("ended {}", reason(&e)));
        }
        // As the sidecar does: within a second after a stream that was of use, else 1 to 30 s with full jitter,
        // and never before it was asked to come.
        let most = if begun { 1 } else { 30.min(1_u32 << failures.min(5)) };
        failures = if begun { 0 } else { failures + 1 };
        let jitter = Duration::from_secs(u64::from(most)).mul_f64(fraction());
        let pause = asked.map_or(jitter, |asked: Duration| asked + jitter.min(Duration::from_secs(1)));
        tokio::time::sleep(pause).await;
    }
}

async fn subscribe(
    endpoint: &Endpoint,
    token: &str,
    in_force: &mut String,
    begun: &mut bool,
) -> anyhow::Result<()> {
    let channel = endpoint.connect().await.context("no connection")?;
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
    *begun = true;
    if !in_force.is_empty() {
        say(&format!("back {}", micros()));
    }
    while let Some(answer) = answers.next().await {
        let Some(Response::Bundle(bundle)) = answer?.kind else { continue };
        in_force.clone_from(&bundle.digest);
        sender.send(SubscribeRequest { kind: Some(Request::Ack(Ack { digest: bundle.digest })) }).await?;
        say(&format!("bundle {in_force} {}", micros()));
    }
    bail!("the operator ended the stream")
}

/// How long the operator asks to stay away.
fn retry_after(status: &Status) -> Option<Duration> {
    status.metadata().get("retry-after")?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

/// Without what differs from one subscriber to the next, so that reasons can be counted.
fn reason(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) if status.code() == tonic::Code::ResourceExhausted => "told to come later".into(),
        Some(status) => format!("{:?}: {}", status.code(), status.message()),
        None => error.to_string(),
    }
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
