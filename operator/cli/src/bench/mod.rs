//! `sallyport bench`: what inspection costs on this machine, as a capacity record.
//!
//! One run measures everything that is compared, in turns, so that a machine that changes its mood
//! changes it for all of them. What the record does not hold: TLS, streamed responses, several cores.
//! Latencies are those of one connection on a loopback that shares its cores with the load.

mod body;
pub(crate) mod children;
mod load;
mod proc;
mod record;
mod rig;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use jiff::Timestamp;
use sallyport_engine::{Decision, Engine, RequestHead, ResponseHead};

use crate::machine::{self, Machine};
use crate::{envoy, note, policy};
use record::{Figures, Memories, Record, Round, Size};
use rig::{Kind, Rig};

/// Body sizes: a short question, an agent's first turns, a long conversation, one with documents in it.
const SIZES: [usize; 4] = [512, 2 << 10, 10 << 10, 100 << 10];

/// Rounds, each with all configurations; of each figure the median counts.
const ROUNDS: usize = 5;

/// Connections under load: enough to keep Envoy busy, few enough that none starves on two cores.
const CONNECTIONS: usize = 8;

/// The most calls of one stretch: beyond this they only make the run hotter, not the figure better.
const MOST: u64 = 20_000;

/// The policy that is measured: everything that ships is on, and the upstream may be called.
const POLICY: &str = "apiVersion: sallyport.dev/v1alpha1
kind: AgentPolicy
metadata: {name: bench}
spec:
  egress: {default: Allow, rules: [{hosts: [\"127.0.0.1\"], action: Allow}]}
";

const EXAMPLES: &str = "\
Measures CPU per call of Envoy, of the filter and of the engine, at bodies of 0.5, 2, 10 and 100 KB,
against Envoy with a filter that decides nothing and against Envoy alone, on this machine.
Use a release build and an idle machine.

Examples:
  sallyport bench
  sallyport bench --seconds 120 --out policies/capacity/$(uname -m).json";

/// Measures what inspection costs here, and writes a capacity record.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Write the record as JSON to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// How long the load takes altogether, in seconds; starting takes some more
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(3..=3600))]
    seconds: u64,
    /// The Envoy 1.40 to run; left out, $SALLYPORT_ENVOY, then .cache/envoy here or above, then PATH
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let binary = envoy::find(args.envoy.as_deref())?;
    if let Some(out) = &args.out {
        // A run of minutes must not end with a directory that is not there.
        let dir = out.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
        ensure!(dir.is_dir(), "--out {}: {} is not a directory", out.display(), dir.display());
    }
    if machine::BUILD == "debug" {
        note("this is a debug build: several times slower than what ships; the record will say so");
    }
    let dir = tempfile::tempdir().context("no temporary directory")?;
    let file = dir.path().join("policy.yaml");
    std::fs::write(&file, POLICY).context("the policy can't be written")?;
    let policy = policy::load(&file)?;
    let engine = Arc::new(policy::compile(&file, &policy.spec)?);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    let seconds = Duration::from_secs(args.seconds);
    let record = runtime.block_on(measure(&binary, &file, &policy.spec, &engine, seconds))?;
    std::io::stdout().write_all(record.to_string().as_bytes())?;
    if let Some(out) = &args.out {
        let mut json = serde_json::to_string_pretty(&record)?;
        json.push('\n');
        std::fs::write(out, json).with_context(|| format!("{}: can't be written", out.display()))?;
        note(&format!("written to {}", out.display()));
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure(
    binary: &Path,
    file: &Path,
    spec: &sallyport_api::AgentPolicySpec,
    engine: &Engine,
    seconds: Duration,
) -> anyhow::Result<Record> {
    let machine = Machine::here();
    if let Some(load) = machine.load.filter(|l| *l > machine.cores as f64 / 2.0) {
        note(&format!(
            "this machine is busy (load {load} on {} cores): CPU per call is still of use, times are not",
            machine.cores
        ));
    }
    let (_upstream, port) = children::start_upstream().await?;
    let mut rigs = Vec::new();
    for kind in [Kind::Plain, Kind::Noop, Kind::Real] {
        rigs.push(Rig::start(kind, binary, spec, file, port).await?);
    }
    let real = rigs.iter().find(|r| r.kind == Kind::Real).context("no rig")?;
    let noop = rigs.iter().find(|r| r.kind == Kind::Noop).context("no rig")?;
    let extproc_idle = real.server_memory()?;
    let envoy_idle = real.envoy_memory()?;

    // Per stretch; two thirds under load for CPU, one third of single calls for latency.
    let stretch = seconds.div_f64((SIZES.len() * ROUNDS * rigs.len()) as f64);
    let (loaded, single) = (stretch.mul_f64(2.0 / 3.0), stretch.mul_f64(1.0 / 3.0));
    let mut sizes = Vec::new();
    for size in SIZES {
        let body = body::chat_call(size);
        let request = load::request(&body);
        check(engine, &body)?;
        for rig in &rigs {
            // Connections are made, caches and buffers warm.
            rig.measure(&request, CONNECTIONS, loaded.div_f64(4.0), 500).await?;
        }
        let mut rounds = Vec::new();
        for number in 0..ROUNDS {
            note(&format!("{size} bytes, round {} of {ROUNDS}", number + 1));
            let mut round =
                Round { engine: engine_us(engine, &body, loaded.div_f64(8.0))?, ..Round::default() };
            // Whoever comes first in one round comes last in another.
            for i in 0..rigs.len() {
                let rig = &rigs[(i + number) % rigs.len()];
                let mut used = rig.measure(&request, CONNECTIONS, loaded, MOST).await?;
                let one = rig.measure(&request, 1, single, MOST).await?;
                let requests = used.sample.micros.len() as u64;
                let per_second = requests as f64 / used.sample.elapsed.as_secs_f64();
                used.sample.micros = one.sample.micros;
                let figures = Figures::of(&mut used, requests, per_second);
                match rig.kind {
                    Kind::Plain => round.plain = figures,
                    Kind::Noop => round.noop = figures,
                    Kind::Real => round.real = figures,
                }
            }
            rounds.push(round);
        }
        sizes.push(Size::of(body.len(), rounds));
    }
    Ok(Record {
        schema: record::SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: machine::BUILD.to_owned(),
        envoy: "1.40.0".to_owned(),
        rules: engine.rule_count(),
        date: Timestamp::now(),
        machine,
        load_after: Machine::here().load,
        seconds: seconds.as_secs(),
        connections: CONNECTIONS,
        sizes,
        memory: Memories {
            extproc_idle,
            extproc_loaded: real.server_memory()?,
            noop_loaded: noop.server_memory()?,
            envoy_idle,
            envoy_loaded: real.envoy_memory()?,
        },
    })
}

fn head(body: &[u8]) -> RequestHead {
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    RequestHead {
        method: "POST".into(),
        scheme: "http".into(),
        host: "127.0.0.1".into(),
        port: 80,
        path: "/v1/chat/completions".into(),
        headers: vec![
            header("user-agent", "sallyport-bench"),
            header("content-type", "application/json"),
            header("accept", "application/json"),
            header("content-length", &body.len().to_string()),
        ],
        ..RequestHead::default()
    }
}

/// What is measured is the ordinary case. A body that the rules object to would measure something else.
fn check(engine: &Engine, body: &[u8]) -> anyhow::Result<()> {
    let now = Timestamp::now();
    let head = head(body);
    for (what, verdict) in
        [("head", engine.request_head(&head, now)), ("body", engine.request_body(&head, body, now).verdict)]
    {
        let rules: Vec<_> = verdict.findings.iter().map(|f| f.rule.as_str()).collect();
        ensure!(
            verdict.decision == Decision::Allow,
            "the benchmark's own {what} of {} bytes is not let pass ({}: {} {})",
            body.len(),
            verdict.decision.as_str(),
            rules.join(" "),
            verdict.message,
        );
    }
    Ok(())
}

/// CPU of the engine alone, in this thread.
fn engine_us(engine: &Engine, body: &[u8], time: Duration) -> anyhow::Result<record::EngineFigures> {
    let head = head(body);
    let answer = body::completion();
    let response =
        ResponseHead { status: 200, headers: vec![("content-type".into(), "application/json".into())] };
    let per_call = |what: &mut dyn FnMut(Timestamp)| -> anyhow::Result<f64> {
        let (start, before, mut calls) = (Instant::now(), proc::own_cpu_us()?, 0_u32);
        while calls < 3 || start.elapsed() < time {
            what(Timestamp::now());
            calls += 1;
        }
        Ok(record::tenths((proc::own_cpu_us()? - before) / f64::from(calls)))
    };
    let request_head_us = per_call(&mut |now| {
        std::hint::black_box(engine.request_head(&head, now));
    })?;
    let request_body_us = per_call(&mut |now| {
        std::hint::black_box(engine.request_body(&head, std::hint::black_box(body), now));
    })?;
    let response_head_us = per_call(&mut |now| {
        std::hint::black_box(engine.response_head(&head, &response, now));
    })?;
    let response_body_us = per_call(&mut |now| {
        std::hint::black_box(engine.response_body(&head, &response, answer.as_bytes(), now));
    })?;
    Ok(record::EngineFigures { request_head_us, request_body_us, response_head_us, response_body_us })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_benchmarks_own_bodies_pass() {
        let policy = sallyport_api::load_policy(POLICY).unwrap();
        let engine = Engine::new(&policy.spec).unwrap();
        for size in SIZES {
            check(&engine, &body::chat_call(size)).unwrap();
        }
        let head = head(b"");
        let answer = engine.response_body(
            &head,
            &ResponseHead::default(),
            body::completion().as_bytes(),
            Timestamp::now(),
        );
        assert_eq!(answer.verdict.decision, Decision::Allow, "{:?}", answer.verdict);
    }
}
