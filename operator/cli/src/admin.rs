//! Envoy's admin interface, over its unix socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// An answer takes milliseconds; beyond this Envoy hangs.
const DEADLINE: Duration = Duration::from_secs(2);

/// A client of one Envoy's admin socket. Every call is its own connection: there are a dozen in a
/// process' life.
#[derive(Clone, Debug)]
pub(crate) struct Admin {
    socket: PathBuf,
}

impl Admin {
    pub(crate) fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Whether Envoy serves: all listeners up, not draining.
    pub(crate) async fn live(&self) -> bool {
        self.call(Method::GET, "/ready").await.is_ok_and(|body| body.trim() == "LIVE")
    }

    /// Calls that are being answered right now, over all listeners. Tunnels are none: they stay open for as
    /// long as a client keeps its connection, and the calls inside are counted themselves.
    pub(crate) async fn active_requests(&self) -> anyhow::Result<u64> {
        let count = async |counter: &str| {
            let path = format!("/stats?filter=%5Ehttp%5C..*%5C.{counter}%24&usedonly");
            anyhow::Ok(sum(&self.call(Method::GET, &path).await?, "admin"))
        };
        // Tunnels first: one that closes in between may not hide a call.
        let tunnels = count("downstream_cx_upgrades_active").await?;
        Ok(count("downstream_rq_active").await?.saturating_sub(tunnels))
    }

    /// Answers `Connection: close` from now on, and goes on serving what is open.
    pub(crate) async fn drain(&self) -> anyhow::Result<()> {
        self.call(Method::POST, "/healthcheck/fail").await?;
        self.call(Method::POST, "/drain_listeners?graceful").await?;
        Ok(())
    }

    pub(crate) async fn quit(&self) -> anyhow::Result<()> {
        self.call(Method::POST, "/quitquitquit").await.map(drop)
    }

    async fn call(&self, method: Method, path: &str) -> anyhow::Result<String> {
        timeout(DEADLINE, call(&self.socket, method, path))
            .await
            .with_context(|| format!("Envoy's admin interface did not answer {path} within {DEADLINE:?}"))?
            .with_context(|| format!("Envoy's admin interface, {path}"))
    }
}

async fn call(socket: &Path, method: Method, path: &str) -> anyhow::Result<String> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let request =
        Request::builder().method(method).uri(path).header("host", "admin").body(Empty::<Bytes>::new())?;
    // The connection is driven here, beside the request, so that nothing outlives the call.
    let answer = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        let body = String::from_utf8_lossy(&body).into_owned();
        if !status.is_success() {
            bail!("status {status}: {}", body.trim());
        }
        Ok(body)
    };
    tokio::pin!(answer);
    tokio::pin!(connection);
    tokio::select! {
        answer = &mut answer => answer,
        // The connection may end first, its answer already on the way to us.
        end = &mut connection => { end?; answer.await }
    }
}

/// Adds up `name: value` lines of `/stats`, except those whose second part is `except`: the admin
/// interface counts the request that asks.
fn sum(stats: &str, except: &str) -> u64 {
    stats
        .lines()
        .filter_map(|line| line.rsplit_once(": "))
        .filter(|(name, _)| name.split('.').nth(1) != Some(except))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn the_asking_request_is_not_counted() {
        let stats = "http.admin.downstream_rq_active: 1\nhttp.proxy.downstream_rq_active: 2\n\
                     http.base_url_15002.downstream_rq_active: 3\n";
        assert_eq!(sum(stats, "admin"), 5);
        assert_eq!(sum("", "admin"), 0);
        assert_eq!(sum("nonsense\nx: y\n", "admin"), 0);
    }
}
