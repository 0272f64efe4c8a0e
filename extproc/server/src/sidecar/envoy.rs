//! Envoy beside us: its configuration in files, and what it says on its admin socket.
//!
//! Not guaranteed: that Envoy keeps every listener as it was while it rejects an update; it takes the good
//! ones of a set and rejects the rest. The whole set before is put back then.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;

use super::state::replace;
use crate::discovery::Failed;

const BOOTSTRAP: &str = "envoy.json";
const LISTENERS: &str = "lds.json";
const SOCKET: &str = "admin.sock";

/// An answer of the admin socket takes milliseconds; one that does not come is no answer.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Envoy's metrics for a pod are well below a megabyte; an agent that makes them more gets none.
const MOST_ADMIN_BYTES: usize = 8 << 20;
/// How long Envoy may take for new listeners. It took a third of a second when measured.
const LISTENERS_TIMEOUT: Duration = Duration::from_secs(5);
const LISTENERS_PAUSE: Duration = Duration::from_millis(50);
/// A second, and then the next bundle is not kept waiting any longer.
const SETTLE_LOOKS: u32 = 20;
/// Of Envoy's own words, at most.
const MOST_WORDS: usize = 1024;

/// Also counters that still stand at zero: an alert on what must never happen needs the series.
const METRICS_PATH: &str = "/stats/prometheus?filter=ext_proc%7Cdownstream_rq_%7Cdownstream_cx_%7Cupstream_%7C\
                            %5Elistener_manager%7C%5Eserver";
/// What an operator of a cluster wants to know of Envoy; the rest is some hundred families.
const FAMILIES: [&str; 6] = [
    "envoy_http_ext_proc_",
    "envoy_http_downstream_rq_",
    "envoy_http_downstream_cx_",
    "envoy_cluster_upstream_",
    "envoy_listener_manager_",
    "envoy_server_",
];

/// Envoy's two files and its admin socket.
#[derive(Clone, Debug)]
pub(crate) struct Envoy {
    dir: PathBuf,
}

/// Envoy's configuration from a bundle.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Configuration {
    bootstrap: serde_json::Map<String, Value>,
    listeners: serde_json::Map<String, Value>,
}

/// Listeners that Envoy did not take.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("Envoy's configuration can't be written: {0}")]
    Write(#[from] std::io::Error),
    #[error("Envoy rejected the listeners: {0}")]
    Rejected(String),
    #[error("Envoy did not take the listeners within {} s", LISTENERS_TIMEOUT.as_secs())]
    Silent,
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        let why = fault.to_string();
        match fault {
            Fault::Rejected(_) => Self::ForGood(why),
            Fault::Write(_) | Fault::Silent => Self::ForNow(why),
        }
    }
}

/// Why the admin socket gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    #[error("Envoy's admin socket: {0}")]
    Connect(#[from] std::io::Error),
    #[error("Envoy's admin socket: {0}")]
    Http(#[from] hyper::Error),
    #[error("Envoy's admin socket gave no answer in time")]
    Timeout,
    #[error("the answer of Envoy's admin socket: {0}")]
    Body(String),
}

/// What Envoy says of the file with its listeners.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Lds {
    taken: u64,
    rejected: u64,
    pub(crate) version: String,
}

/// What stood in the files before, to be put back.
#[derive(Debug, Default)]
pub(crate) struct Before {
    bootstrap: Option<Vec<u8>>,
    listeners: Option<Vec<u8>>,
}

// === impl Configuration ===

impl Configuration {
    /// Reads a bundle's part. Listeners on IPv6 are left out where the kernel has none: there is nothing they
    /// could receive, and Envoy would reject the whole set for one it can't open.
    pub(crate) fn read(part: &[u8]) -> Result<Self, serde_json::Error> {
        let mut configuration: Self = serde_json::from_slice(part)?;
        if std::net::UdpSocket::bind("[::]:0").is_err() {
            configuration.leave_out_ipv6();
        }
        Ok(configuration)
    }

    fn leave_out_ipv6(&mut self) {
        let ipv6 = |listener: &Value| {
            let address = listener["address"]["socket_address"]["address"].as_str().unwrap_or_default();
            address.parse::<std::net::Ipv6Addr>().is_ok()
        };
        if let Some(Value::Array(resources)) = self.listeners.get_mut("resources") {
            resources.retain(|listener| !ipv6(listener));
        }
    }
}

// === impl Envoy ===

impl Envoy {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { dir: run_dir.to_owned() }
    }

    /// Writes a configuration and, where Envoy runs, waits until it has taken the listeners. What comes back
    /// is for [`Envoy::put_back`]; after an error it was put back already.
    pub(crate) async fn configure(&self, new: &Configuration) -> Result<Before, Fault> {
        let before = Before { bootstrap: self.file(BOOTSTRAP), listeners: self.file(LISTENERS) };
        let bootstrap = json(&new.bootstrap);
        if before.bootstrap.as_ref() != Some(&bootstrap)
            && let Err(e) = replace(&self.dir, BOOTSTRAP, &bootstrap)
        {
            self.put_back(&before);
            return Err(e.into());
        }
        let listeners = json(&new.listeners);
        if before.listeners.as_ref() == Some(&listeners) {
            return Ok(before);
        }
        let running = match self.lds().await {
            Ok(lds) => Some(lds),
            Err(AdminError::Connect(_) | AdminError::Http(_)) => None,
            // It is there and says nothing: what it takes can't be known.
            Err(AdminError::Timeout | AdminError::Body(_)) => {
                self.put_back(&before);
                return Err(Fault::Silent);
            }
        };
        if let Err(e) = replace(&self.dir, LISTENERS, &listeners) {
            self.put_back(&before);
            return Err(e.into());
        }
        // One that starts later reads the file then.
        let Some(running) = running else { return Ok(before) };
        match self.taken(&running, version(&new.listeners)).await {
            Ok(()) => Ok(before),
            Err(fault) => {
                self.put_back(&before);
                self.settled().await;
                Err(fault)
            }
        }
    }

    /// Puts the files back as they were.
    pub(crate) fn put_back(&self, before: &Before) {
        // The listeners first: Envoy reads them again at every change in their directory.
        for (name, content) in [(LISTENERS, &before.listeners), (BOOTSTRAP, &before.bootstrap)] {
            let Some(content) = content else { continue };
            if self.file(name).as_ref() != Some(content)
                && let Err(e) = replace(&self.dir, name, content)
            {
                tracing::error!(target: "sallyport::bundle", "{name} can't be put back: {e}");
            }
        }
    }

    /// Waits until Envoy has taken the file that was just written.
    async fn taken(&self, before: &Lds, version: &str) -> Result<(), Fault> {
        let end = tokio::time::Instant::now() + LISTENERS_TIMEOUT;
        loop {
            match self.lds().await {
                Ok(now) if now.rejected > before.rejected => {
                    return Err(Fault::Rejected(self.words().await));
                }
                Ok(now) if now.taken > before.taken && now.version == version => return Ok(()),
                // A restarted one counts from zero, and begins with the new file.
                Ok(now) if now.taken < before.taken && now.version == version => return Ok(()),
                // Gone: the next one begins with the new file.
                Err(AdminError::Connect(_)) => return Ok(()),
                Ok(_) | Err(_) => {}
            }
            if tokio::time::Instant::now() > end {
                return Err(Fault::Silent);
            }
            tokio::time::sleep(LISTENERS_PAUSE).await;
        }
    }

    /// Waits until Envoy counts no more rejections of what was put back, or they would be taken for ones of
    /// the next bundle.
    async fn settled(&self) {
        let Ok(mut before) = self.lds().await else { return };
        for _ in 0..SETTLE_LOOKS {
            tokio::time::sleep(LISTENERS_PAUSE).await;
            match self.lds().await {
                Ok(now) if now == before => return,
                Ok(now) => before = now,
                Err(_) => return,
            }
        }
    }

    /// Why it rejected, in its own words.
    async fn words(&self) -> String {
        let dump = match self.get("/config_dump?resource=dynamic_listeners").await {
            Ok((200, body)) => serde_json::from_slice::<Value>(&body).unwrap_or_default(),
            _ => Value::Null,
        };
        let mut words: Vec<&str> = dump["configs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|listener| listener["error_state"]["details"].as_str())
            .collect();
        words.sort_unstable();
        words.dedup();
        let words = words.join("; ");
        if words.is_empty() {
            return "its log says why".to_owned();
        }
        words.chars().take(MOST_WORDS).collect()
    }

    /// What it says of its listeners.
    pub(crate) async fn lds(&self) -> Result<Lds, AdminError> {
        let (_, body) = self.get("/stats?filter=%5Elistener_manager%5C.lds%5C.").await?;
        Ok(Lds::parse(&String::from_utf8_lossy(&body)))
    }

    /// Whether it serves, with the listeners that it was given; otherwise why not.
    pub(crate) async fn ready(&self) -> Result<(), String> {
        let Some(listeners) = self.file(LISTENERS) else {
            return Err("no listeners have been written".to_owned());
        };
        match self.get("/ready").await {
            Ok((200, _)) => {}
            Ok((status, body)) => {
                let state: String = String::from_utf8_lossy(&body).trim().chars().take(64).collect();
                return Err(format!("Envoy is not ready: {status} {state}"));
            }
            Err(e) => return Err(e.to_string()),
        }
        let wanted: serde_json::Map<String, Value> = serde_json::from_slice(&listeners).unwrap_or_default();
        let now = self.lds().await.map_err(|e| e.to_string())?;
        if now.version != version(&wanted) {
            return Err("Envoy has not taken the listeners yet".to_owned());
        }
        Ok(())
    }

    /// Its metrics, as far as an operator needs them.
    pub(crate) async fn metrics(&self) -> Result<String, AdminError> {
        let (_, body) = self.get(METRICS_PATH).await?;
        Ok(families(&String::from_utf8_lossy(&body)))
    }

    async fn get(&self, path: &str) -> Result<(u16, Bytes), AdminError> {
        let ask = async {
            let stream = UnixStream::connect(self.dir.join(SOCKET)).await?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            let request = hyper::Request::get(path)
                .header(hyper::header::HOST, "admin")
                .header(hyper::header::CONNECTION, "close")
                .body(Empty::<Bytes>::new())
                .map_err(|e| AdminError::Body(e.to_string()))?;
            let answer = async {
                let response = sender.send_request(request).await?;
                let status = response.status().as_u16();
                let body = Limited::new(response.into_body(), MOST_ADMIN_BYTES).collect().await;
                Ok((status, body.map_err(|e| AdminError::Body(e.to_string()))?.to_bytes()))
            };
            // The connection works while the answer is awaited, and ends with it.
            tokio::pin!(connection, answer);
            tokio::select! {
                answer = &mut answer => answer,
                ended = &mut connection => {
                    ended?;
                    answer.await
                }
            }
        };
        tokio::time::timeout(ADMIN_TIMEOUT, ask).await.map_err(|_| AdminError::Timeout)?
    }

    fn file(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.dir.join(name)).ok()
    }
}

// === impl Lds ===

impl Lds {
    fn parse(text: &str) -> Self {
        let mut lds = Self::default();
        for line in text.lines() {
            let Some((name, value)) =
                line.strip_prefix("listener_manager.lds.").and_then(|l| l.split_once(": "))
            else {
                continue;
            };
            let number = || value.trim().parse().unwrap_or(0);
            match name {
                "update_success" => lds.taken = number(),
                // What is no DiscoveryResponse fails before it can be rejected.
                "update_rejected" | "update_failure" => lds.rejected = lds.rejected.saturating_add(number()),
                "version_text" => value.trim().trim_matches('"').clone_into(&mut lds.version),
                _ => {}
            }
        }
        lds
    }
}

fn version(listeners: &serde_json::Map<String, Value>) -> &str {
    listeners.get("version_info").and_then(Value::as_str).unwrap_or_default()
}

fn json(object: &serde_json::Map<String, Value>) -> Vec<u8> {
    // A map of values that came from JSON goes back into JSON.
    serde_json::to_vec(object).unwrap_or_default()
}

/// The lines of the chosen families.
fn families(page: &str) -> String {
    let chosen = |line: &&str| {
        let name = line.strip_prefix("# TYPE ").or_else(|| line.strip_prefix("# HELP ")).unwrap_or(line);
        FAMILIES.iter().any(|family| name.starts_with(family))
    };
    page.lines().filter(chosen).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listeners_state_is_read_from_the_statistics() {
        let text = "listener_manager.lds.update_failure: 1\nlistener_manager.lds.update_rejected: 2\n\
                    listener_manager.lds.update_success: 3\nlistener_manager.lds.version: 17\n\
                    listener_manager.lds.version_text: \"v2\"\n";
        let expected = Lds { taken: 3, rejected: 3, version: "v2".into() };
        assert_eq!(Lds::parse(text), expected);
    }

    #[test]
    fn without_ipv6_only_the_other_listeners_are_given_to_envoy() {
        let listener =
            |address: &str| serde_json::json!({"address": {"socket_address": {"address": address}}});
        let listeners = serde_json::json!({"resources": [listener("0.0.0.0"), listener("::")]});
        let part = serde_json::json!({"bootstrap": {}, "listeners": listeners});
        let mut configuration: Configuration = serde_json::from_value(part).unwrap();
        configuration.leave_out_ipv6();
        assert_eq!(configuration.listeners["resources"], serde_json::json!([listener("0.0.0.0")]));
    }

    #[test]
    fn only_chosen_families_are_passed_on() {
        let page = "# TYPE envoy_http_ext_proc_streams_started counter\n\
                    envoy_http_ext_proc_streams_started{a=\"b\"} 1\n\
                    # TYPE envoy_runtime_load_success counter\nenvoy_runtime_load_success{} 1\n";
        assert_eq!(families(page).lines().count(), 2);
    }

    #[test]
    fn bent_parts_and_pages_are_read_or_refused() {
        let part = br#"{"bootstrap":{"node":{"id":"x"}},"listeners":{"version_info":"1","resources":[{"address":{"socket_address":{"address":"::"}}}]}}"#;
        let stats = b"listener_manager.lds.update_success: 3\nlistener_manager.lds.version_text: \"v2\"\n";
        let words = [b"\"resources\":".to_vec(), b"18446744073709551615".to_vec()];
        sallyport_fuzz::fuzz("envoy", &[part.to_vec(), stats.to_vec()], &words, |bytes| {
            if let Ok(mut configuration) = serde_json::from_slice::<Configuration>(bytes) {
                configuration.leave_out_ipv6();
                version(&configuration.listeners);
            }
            let text = String::from_utf8_lossy(bytes);
            Lds::parse(&text);
            if families(&text).len() > text.len() + 1 { Err("more than there was".into()) } else { Ok(()) }
        });
    }
}
