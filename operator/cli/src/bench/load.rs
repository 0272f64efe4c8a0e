//! Load: keep-alive connections that send the same call again and again, bounded in count and time.
//!
//! HTTP is written and read by hand: what the load costs is taken from the same two cores that carry what
//! is measured.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A call on the loopback takes milliseconds, also under load; beyond this something hangs.
const DEADLINE: Duration = Duration::from_secs(10);

/// What to send, and how much of it.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) target: SocketAddr,
    pub(super) request: Vec<u8>,
    pub(super) connections: usize,
    pub(super) time: Duration,
    pub(super) most: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Microseconds of every call.
    pub(super) micros: Vec<f64>,
    pub(super) elapsed: Duration,
}

/// A chat call as bytes on the wire.
pub(super) fn request(body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: api.example.com\r\nuser-agent: sallyport-bench\r\n\
         content-type: application/json\r\naccept: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Drives the load on a thread of its own.
pub(super) async fn drive(plan: Plan) -> anyhow::Result<Sample> {
    tokio::task::spawn_blocking(move || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("no runtime for the load")?
            .block_on(all(plan))
    })
    .await
    .context("the load failed")?
}

async fn all(plan: Plan) -> anyhow::Result<Sample> {
    let plan = std::sync::Arc::new(plan);
    let sent = std::sync::Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let tasks: Vec<_> = (0..plan.connections)
        .map(|_| tokio::spawn(connection(plan.clone(), sent.clone(), start + plan.time)))
        .collect();
    let mut sample = Sample::default();
    for task in tasks {
        sample.micros.extend(task.await.context("a connection's task failed")??);
    }
    sample.elapsed = start.elapsed();
    ensure!(!sample.micros.is_empty(), "not one call in {:?}", plan.time);
    Ok(sample)
}

async fn connection(
    plan: std::sync::Arc<Plan>,
    sent: std::sync::Arc<AtomicU64>,
    end: Instant,
) -> anyhow::Result<Vec<f64>> {
    let mut stream = TcpStream::connect(plan.target).await.context("Envoy's listener")?;
    stream.set_nodelay(true)?;
    let (mut micros, mut buffer) = (Vec::new(), Vec::with_capacity(4096));
    // The first call is always made, however short the time: a sample of nothing says nothing.
    while micros.is_empty() || Instant::now() < end && sent.fetch_add(1, Ordering::Relaxed) < plan.most {
        let start = Instant::now();
        timeout(DEADLINE, call(&mut stream, &plan.request, &mut buffer))
            .await
            .map_err(|_| anyhow!("no answer within {DEADLINE:?}"))??;
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(micros)
}

async fn call(stream: &mut TcpStream, request: &[u8], buffer: &mut Vec<u8>) -> anyhow::Result<()> {
    stream.write_all(request).await?;
    buffer.clear();
    loop {
        ensure!(stream.read_buf(buffer).await? > 0, "the connection was closed before an answer");
        if let Some(status) = complete(buffer)? {
            if status != 200 {
                bail!("answered with {status}: {}", String::from_utf8_lossy(buffer));
            }
            return Ok(());
        }
    }
}

/// The status of an answer that has arrived in full; nothing if more is to come.
fn complete(bytes: &[u8]) -> anyhow::Result<Option<u16>> {
    let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&bytes[..end]).context("the answer's head is not text")?;
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).context("the answer has no status")?;
    let length = head
        .lines()
        .find_map(|l| l.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case("content-length")))
        .map(|(_, v)| v.trim().parse::<usize>())
        .transpose()?;
    Ok(match length {
        Some(length) => (bytes.len() >= end + 4 + length).then_some(status),
        None => bytes.ends_with(b"0\r\n\r\n").then_some(status), // chunked
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_complete_when_its_body_is() {
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(complete(b"HTTP/1.1 200 OK\r\n").unwrap(), None);
        assert_eq!(complete(head.as_bytes()).unwrap(), None);
        assert_eq!(complete(format!("{head}abc").as_bytes()).unwrap(), Some(200));
        let chunked = "HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n";
        assert_eq!(complete(chunked.as_bytes()).unwrap(), None);
        assert_eq!(complete(format!("{chunked}0\r\n\r\n").as_bytes()).unwrap(), Some(503));
    }
}
