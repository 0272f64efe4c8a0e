//! The demo: `sallyport up` with a sample policy, and an agent that meets what agents meet.
//!
//! Nothing is staged. The calls go through the Envoy and the filter that a guarded pod runs, to a small
//! upstream in this process; a row's decision is what the filter recorded, and a row that does not come
//! out as expected fails the demo.

mod guard;
mod rows;
mod table;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::client::{Answer, Call};
use crate::upstream::Upstream;
use guard::Guard;
use rows::{Row, rows};
use table::Line;

/// Calls per row whose median is shown. Odd, and few enough that the demo stays short.
const REPEATS: usize = 15;

/// Runs the demo; false if a row came out otherwise than expected.
pub fn run(policy: &Path) -> anyhow::Result<bool> {
    let upstream = Upstream::start(0).context("no port for the demo's upstream")?;
    eprintln!("an upstream listens on {}: an LLM API, an MCP server and web pages", upstream.url(""));
    eprintln!("starting: sallyport up -f {}", policy.display());
    let mut guard = Guard::start(policy, &upstream)?;
    eprintln!("ready; the proxy is {}\n", guard.proxy);

    let mut lines = Vec::new();
    for (i, row) in rows().iter().enumerate() {
        eprintln!("  {}/{} {}", i + 1, rows().len(), row.what);
        lines.push(play(row, &upstream, &mut guard)?);
    }
    eprintln!();
    table::print(&lines);
    guard.stop();

    let failed = lines.iter().filter(|l| l.problem.is_some()).count();
    if failed > 0 {
        println!("\n{failed} of {} rows did not come out as expected.", lines.len());
        return Ok(false);
    }
    println!(
        "\nEvery row came out as expected. Try it on your own agent:\n  \
         target/release/sallyport up -f {} --base-url 15002=https://api.openai.com\n  \
         OPENAI_BASE_URL=http://127.0.0.1:15002/v1 <your agent>",
        policy.display()
    );
    Ok(true)
}

fn play(row: &Row, upstream: &Upstream, guard: &mut Guard) -> anyhow::Result<Line> {
    let call = (row.call)(&guard.routes(upstream));
    // The first call of a kind opens connections; it is not what a running agent feels.
    call.send().with_context(|| format!("{}: no connection", row.what))?;
    guard.forget();
    let before = upstream.seen.requests(row.path);
    let answer = call.send()?;
    let record = guard.record(row.decision);
    let reached = upstream.seen.requests(row.path) > before;

    let problem = row.check(&answer, record.as_ref(), reached);
    let latency = latency(row, upstream, guard, &answer)?;
    guard.forget();
    Ok(Line {
        what: row.what,
        status: answer.status,
        words: (row.words)(&answer),
        decision: record.as_ref().map_or_else(|| "allow".to_owned(), |r| r.decision.clone()),
        rules: record.map(|r| r.why()).unwrap_or_default(),
        latency,
        problem,
    })
}

/// What the way through the sidecar adds to a call, or how soon a refusal came.
fn latency(row: &Row, upstream: &Upstream, guard: &Guard, answer: &Answer) -> anyhow::Result<String> {
    let through = (row.call)(&guard.routes(upstream));
    if row.streams {
        return Ok(format!("ended at {:.0} ms", millis(answer.took)));
    }
    if row.refused {
        return Ok(format!("refused in {:.1} ms", millis(median(&through)?)));
    }
    let direct = (row.call)(&guard::Routes::direct(upstream));
    let (through, direct) = (median(&through)?, median(&direct)?);
    Ok(format!("{:+.1} ms", millis(through) - millis(direct)))
}

fn median(call: &Call) -> anyhow::Result<Duration> {
    let mut times = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        let start = Instant::now();
        call.send()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[REPEATS / 2])
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}
