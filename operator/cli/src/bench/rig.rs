//! What is measured: three times Envoy before the same upstream. Alone, with a filter that decides
//! nothing, and with the filter.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use sallyport_api::AgentPolicySpec;
use sallyport_plan::{AccessLog, BaseUrl, Scheme, Settings, Upstream};
use serde_json::Value;
use tokio::process::Child;

use super::children::start_extproc;
use super::load::{self, Plan, Sample};
use super::proc::{self, Memory};
use crate::admin::Admin;
use crate::envoy::Envoy;
use crate::rundir::RunDir;

/// What stands between Envoy and the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Noop,
    Real,
}

/// One Envoy with its filter.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) kind: Kind,
    envoy: Envoy,
    extproc: Option<Child>,
    target: SocketAddr,
    /// Last, so that it goes after those who use it.
    _run_dir: RunDir,
}

/// What one stretch of load took.
#[derive(Clone, Debug)]
pub(super) struct Used {
    pub(super) sample: Sample,
    /// Microseconds of CPU per call.
    pub(super) envoy_us: f64,
    pub(super) server_us: f64,
}

impl Rig {
    pub(super) async fn start(
        kind: Kind,
        binary: &Path,
        spec: &AgentPolicySpec,
        policy: &Path,
        upstream: u16,
    ) -> anyhow::Result<Self> {
        let run_dir = RunDir::create(None)?;
        let port = free_port()?;
        let mut settings = Settings::new(run_dir.path());
        settings.access_log = AccessLog::Off;
        settings.base_urls = vec![BaseUrl {
            port,
            upstream: Upstream { scheme: Scheme::Http, host: "127.0.0.1".into(), port: upstream },
        }];
        // A machine under load is no reason to cut what is being measured.
        settings.message_timeout = Duration::from_secs(5);
        let mut bootstrap = sallyport_plan::render(spec, &settings);
        let socket = settings.extproc_socket();
        let extproc = match kind {
            Kind::Plain => {
                remove_filter(&mut bootstrap);
                None
            }
            Kind::Noop => Some(start_extproc(&socket, None).await?),
            Kind::Real => Some(start_extproc(&socket, Some(policy)).await?),
        };
        let file = run_dir.path().join("envoy.json");
        std::fs::write(&file, bootstrap.to_string()).context("Envoy's bootstrap can't be written")?;
        let mut envoy = Envoy::start(binary, &file, Admin::new(settings.admin_socket()))?;
        envoy.ready().await?;
        let target = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Ok(Self { kind, envoy, extproc, target, _run_dir: run_dir })
    }

    /// Drives load and reads what it took of each process.
    pub(super) async fn measure(
        &self,
        request: &[u8],
        connections: usize,
        time: Duration,
        most: u64,
    ) -> anyhow::Result<Used> {
        let plan = Plan { target: self.target, request: request.to_vec(), connections, time, most };
        let before = self.cpu()?;
        let sample = load::drive(plan).await.with_context(|| format!("{:?}", self.kind))?;
        let after = self.cpu()?;
        let calls = sample.micros.len() as f64;
        Ok(Used { sample, envoy_us: (after.0 - before.0) / calls, server_us: (after.1 - before.1) / calls })
    }

    fn cpu(&self) -> anyhow::Result<(f64, f64)> {
        let envoy = proc::cpu_us(self.envoy.pid().context("Envoy is gone")?)?;
        let server = self.extproc.as_ref().map(|c| proc::cpu_us(c.id().context("the filter is gone")?));
        Ok((envoy, server.transpose()?.unwrap_or(0.0)))
    }

    pub(super) fn envoy_memory(&self) -> anyhow::Result<Memory> {
        proc::memory(self.envoy.pid().context("Envoy is gone")?)
    }

    pub(super) fn server_memory(&self) -> anyhow::Result<Memory> {
        let id = self.extproc.as_ref().and_then(Child::id).context("the filter is gone")?;
        proc::memory(id)
    }
}

/// A port that was free a moment ago. Envoy says so if it is not any more.
fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

/// Takes the filter out of a bootstrap; everything else stays as it is.
fn remove_filter(value: &mut Value) {
    match value {
        Value::Array(items) => {
            items.retain(|i| i["name"] != "envoy.filters.http.ext_proc");
            items.iter_mut().for_each(remove_filter);
        }
        Value::Object(fields) => fields.values_mut().for_each(remove_filter),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_the_filter_goes() {
        let mut value =
            json!({"a": [{"http_filters": [{"name": "envoy.filters.http.ext_proc"}, {"name": "x"}]}]});
        remove_filter(&mut value);
        assert_eq!(value, json!({"a": [{"http_filters": [{"name": "x"}]}]}));

        let mut settings = Settings::new("/run");
        settings.access_log = AccessLog::Off; // it names the filter, too
        settings.base_urls = vec![BaseUrl { port: 1, upstream: "http://127.0.0.1:2".parse().unwrap() }];
        let mut rendered = sallyport_plan::render(&AgentPolicySpec::default(), &settings);
        remove_filter(&mut rendered);
        assert!(!rendered.to_string().contains("filters.http.ext_proc"));
        assert!(rendered.to_string().contains("filters.http.router"));
    }
}
