//! What TLS costs. Measures and prints, compares nothing; for a machine with nothing else to do:
//!
//! ```text
//! SALLYPORT_EXTPROC=$PWD/target/release/sallyport-extproc \
//!     cargo test -p sallyport-e2e --test tls_cost -- --ignored --nocapture
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use sallyport_e2e::client::Call;
use sallyport_e2e::rig::{Filter, Plan, Rig};
use serde_json::json;

const NAMES: usize = 500;
const CALLS: usize = 2_000;
const ROUNDS: usize = 5;

fn micros(mut times: Vec<Duration>, percent: usize) -> u128 {
    times.sort();
    times[(times.len() - 1) * percent / 100].as_micros()
}

/// Private memory of a process, KiB.
fn private(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let lines = text.lines().filter(|l| l.starts_with("Private_"));
    lines.filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

/// CPU time of a process, all threads, microseconds.
fn cpu(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanos = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    nanos.sum::<u64>() / 1_000
}

fn rig(tls: bool) -> Rig {
    let plan = Plan::new(Filter::Honest).policy(|spec| {
        spec.egress.rules[0].hosts.push("*.test".into());
    });
    if tls { plan.tls().start() } else { plan.start() }
}

#[test]
#[ignore = "measures"]
fn handshakes_and_memory() {
    let rig = rig(true);
    // The filter compiles its patterns first, and everything comes to its ordinary size.
    for _ in 0..NAMES {
        rig.get("/echo").connect().unwrap();
    }
    std::thread::sleep(Duration::from_secs(5));
    let call = |i: usize| rig.get("/echo").server_name(&format!("n{i}.test")).connect().unwrap();
    let (envoy, filter) = (private(rig.envoy_pid()), private(rig.filter_pid()));
    let mut first = Vec::new();
    let mut again = Vec::new();
    for i in 0..NAMES {
        first.push(call(i));
        again.push(call(i));
    }
    for (what, times) in [("first", first), ("again", again)] {
        println!("{what}: p50 {} us, p99 {} us", micros(times.clone(), 50), micros(times, 99));
    }
    let per_hundred = |before: u64, pid: u32| (private(pid).saturating_sub(before)) * 100 / NAMES as u64;
    println!(
        "memory per 100 names: Envoy {} KiB, filter {} KiB",
        per_hundred(envoy, rig.envoy_pid()),
        per_hundred(filter, rig.filter_pid())
    );
}

#[test]
#[ignore = "measures"]
fn requests() {
    let (clear, tls) = (rig(false), rig(true));
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "word ".repeat(90)}]});
    let call = |rig: &Rig| -> Call { rig.post("/echo", &body) };
    for rig in [&clear, &tls] {
        call(rig).repeat(CALLS / 4).unwrap();
    }
    for round in 0..ROUNDS {
        for (what, rig) in [("clear", &clear), ("tls", &tls)] {
            let before = (cpu(rig.envoy_pid()), cpu(rig.filter_pid()));
            let times = call(rig).repeat(CALLS).unwrap();
            let each = |now: u64, then: u64| (now - then) / CALLS as u64;
            println!(
                "round {round}, {what}: CPU per call Envoy {} us, filter {} us; p50 {} us",
                each(cpu(rig.envoy_pid()), before.0),
                each(cpu(rig.filter_pid()), before.1),
                micros(times, 50)
            );
        }
    }
}
