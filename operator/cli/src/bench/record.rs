//! The capacity record: what was measured, on what, and how far the rounds lie apart.

use std::fmt;

use jiff::Timestamp;
use serde::Serialize;

use super::proc::Memory;
use super::rig::Used;
use crate::machine::{Machine, percentile};
use crate::table::Table;

/// Raised when a field changes its meaning.
pub(super) const SCHEMA: u32 = 1;

/// One run.
#[derive(Debug, Serialize)]
pub(super) struct Record {
    pub(super) schema: u32,
    pub(super) version: String,
    pub(super) build: String,
    pub(super) envoy: String,
    pub(super) rules: usize,
    pub(super) date: Timestamp,
    pub(super) machine: Machine,
    /// The load average when it was over; the run itself adds one or two.
    pub(super) load_after: Option<f64>,
    pub(super) seconds: u64,
    pub(super) connections: usize,
    pub(super) sizes: Vec<Size>,
    pub(super) memory: Memories,
}

/// Figures of one configuration in one round.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Figures {
    pub(super) requests: u64,
    /// CPU per call, under load.
    pub(super) envoy_us: f64,
    pub(super) server_us: f64,
    pub(super) per_second: f64,
    /// Time of a call, one at a time.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

impl Figures {
    pub(super) fn of(used: &mut Used, requests: u64, per_second: f64) -> Self {
        Self {
            requests,
            envoy_us: tenths(used.envoy_us),
            server_us: tenths(used.server_us),
            per_second: tenths(per_second),
            p50_us: tenths(percentile(&mut used.sample.micros, 0.5)),
            p99_us: tenths(percentile(&mut used.sample.micros, 0.99)),
        }
    }
}

/// No digit that the measurement does not have.
pub(super) fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// CPU of the engine alone.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[allow(clippy::struct_field_names, reason = "the unit belongs to the name in the record")]
pub(super) struct EngineFigures {
    pub(super) request_head_us: f64,
    pub(super) request_body_us: f64,
    pub(super) response_head_us: f64,
    /// For the record's one short answer, whatever the request.
    pub(super) response_body_us: f64,
}

impl EngineFigures {
    /// Everything an exchange asks.
    fn exchange_us(&self) -> f64 {
        self.request_head_us + self.request_body_us + self.response_head_us + self.response_body_us
    }
}

/// All configurations, once.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Round {
    pub(super) plain: Figures,
    pub(super) noop: Figures,
    pub(super) real: Figures,
    pub(super) engine: EngineFigures,
}

/// All rounds of one body size, and their medians.
#[derive(Debug, Serialize)]
pub(super) struct Size {
    pub(super) body_bytes: usize,
    /// Calls through the filter, all rounds.
    pub(super) requests: u64,
    pub(super) envoy_us: f64,
    pub(super) server_us: f64,
    /// `Engine::request_body` alone, in process.
    pub(super) engine_us: f64,
    /// Both heads and both bodies.
    pub(super) engine_exchange_us: f64,
    pub(super) noop_envoy_us: f64,
    pub(super) noop_server_us: f64,
    pub(super) plain_envoy_us: f64,
    /// Calls per second at the record's number of connections; the load takes its share of the cores.
    pub(super) per_second: f64,
    pub(super) plain_per_second: f64,
    /// Time of a call, one at a time: through the filter, and what of that is not there without it.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) added_p50_us: f64,
    pub(super) added_p99_us: f64,
    /// The part of `added_p50_us` that a filter deciding nothing adds, too.
    pub(super) noop_added_p50_us: f64,
    /// `server_us` of the round with the least and of the one with the most.
    pub(super) server_us_range: [f64; 2],
    pub(super) rounds: Vec<Round>,
}

impl Size {
    pub(super) fn of(body_bytes: usize, rounds: Vec<Round>) -> Self {
        let all = |f: &dyn Fn(&Round) -> f64| rounds.iter().map(f).collect::<Vec<f64>>();
        let median = |f: &dyn Fn(&Round) -> f64| tenths(percentile(&mut all(f), 0.5));
        let mut servers = all(&|r| r.real.server_us);
        Self {
            body_bytes,
            requests: rounds.iter().map(|r| r.real.requests).sum(),
            envoy_us: median(&|r| r.real.envoy_us),
            server_us: median(&|r| r.real.server_us),
            engine_us: median(&|r| r.engine.request_body_us),
            engine_exchange_us: median(&|r| r.engine.exchange_us()),
            noop_envoy_us: median(&|r| r.noop.envoy_us),
            noop_server_us: median(&|r| r.noop.server_us),
            plain_envoy_us: median(&|r| r.plain.envoy_us),
            per_second: median(&|r| r.real.per_second),
            plain_per_second: median(&|r| r.plain.per_second),
            p50_us: median(&|r| r.real.p50_us),
            p99_us: median(&|r| r.real.p99_us),
            // Differences within a round, so that what slowed the whole round cancels out.
            added_p50_us: median(&|r| r.real.p50_us - r.plain.p50_us),
            added_p99_us: median(&|r| r.real.p99_us - r.plain.p99_us),
            noop_added_p50_us: median(&|r| r.noop.p50_us - r.plain.p50_us),
            server_us_range: [percentile(&mut servers, 0.0), percentile(&mut servers, 1.0)],
            rounds,
        }
    }
}

/// Resident memory, in KiB.
#[derive(Debug, Serialize)]
pub(super) struct Memories {
    pub(super) extproc_idle: Memory,
    pub(super) extproc_loaded: Memory,
    pub(super) noop_loaded: Memory,
    pub(super) envoy_idle: Memory,
    pub(super) envoy_loaded: Memory,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "sallyport {} ({} build), {} rules, Envoy {}, {}\n{}\n",
            self.version,
            self.build,
            self.rules,
            self.envoy,
            self.date.strftime("%Y-%m-%d %H:%M UTC"),
            self.machine.line(),
        )?;
        let title = format!(
            "CPU per call, microseconds (median of {} rounds, {} connections)",
            self.sizes.first().map_or(0, |s| s.rounds.len()),
            self.connections
        );
        let head = [
            "body",
            "calls",
            "Envoy",
            "filter",
            "of it engine",
            "no-op Envoy",
            "no-op filter",
            "Envoy alone",
        ];
        let mut cpu = Table::new(title, &head);
        let head = ["body", "p50", "p99", "added p50", "added p99", "no-op adds p50"];
        let mut latency = Table::new("Time of a call, microseconds, one at a time", &head);
        let us = |value: f64| format!("{value:.0}");
        for s in &self.sizes {
            let body = format!("{:.1} KB", s.body_bytes as f64 / 1024.0);
            cpu.row([
                body.clone(),
                s.requests.to_string(),
                us(s.envoy_us),
                us(s.server_us),
                us(s.engine_exchange_us),
                us(s.noop_envoy_us),
                us(s.noop_server_us),
                us(s.plain_envoy_us),
            ]);
            latency.row([
                body,
                us(s.p50_us),
                us(s.p99_us),
                us(s.added_p50_us),
                us(s.added_p99_us),
                us(s.noop_added_p50_us),
            ]);
        }
        let mut memory = Table::new("Resident memory, MiB", &["<process", "now", "peak", "private"]);
        for (name, m) in [
            ("filter, idle", self.memory.extproc_idle),
            ("filter, after load", self.memory.extproc_loaded),
            ("no-op filter, after load", self.memory.noop_loaded),
            ("Envoy, idle", self.memory.envoy_idle),
            ("Envoy, after load", self.memory.envoy_loaded),
        ] {
            let mib = |kib: u64| format!("{:.1}", kib as f64 / 1024.0);
            memory.row([name.to_owned(), mib(m.rss_kib), mib(m.peak_kib), mib(m.anon_kib)]);
        }
        write!(f, "{cpu}\n{latency}\n{memory}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_rounds_and_differences_within_them() {
        let round = |plain: f64, real: f64, server: f64| Round {
            plain: Figures { p50_us: plain, ..Figures::default() },
            real: Figures { p50_us: real, server_us: server, requests: 10, ..Figures::default() },
            ..Round::default()
        };
        let size =
            Size::of(512, vec![round(100.0, 150.0, 7.0), round(900.0, 940.0, 5.0), round(90.0, 150.0, 6.0)]);
        assert_eq!(size.added_p50_us, 50.0);
        assert_eq!(size.server_us, 6.0);
        assert_eq!(size.server_us_range, [5.0, 7.0]);
        assert_eq!(size.requests, 30);
    }
}
