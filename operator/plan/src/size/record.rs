//! The capacity record, and the straight lines that are drawn through its points.
//!
//! Not guaranteed: that another machine, other traffic or other rules cost the same. A record is one
//! machine on one day; `docs/sizing.md` says how far it was off.

use std::sync::LazyLock;

use serde::Deserialize;

/// The record that ships.
static SHIPPED: LazyLock<Record> = LazyLock::new(|| {
    // What does not parse can't ship: a test reads it. An empty record would leave every figure at its floor.
    serde_json::from_str(include_str!("../../../../policies/capacity/x86_64-2cores.json")).unwrap_or_default()
});

/// What was measured; the schema is described in `policies/capacity/README.md`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Record {
    /// Raised when a field changes its meaning.
    #[allow(dead_code, reason = "read by the test that holds it to 1")]
    pub(super) schema: u32,
    pub(super) name: String,
    #[allow(dead_code, reason = "for people")]
    pub(super) date: String,
    #[allow(dead_code, reason = "for people")]
    version: String,
    #[allow(dead_code, reason = "for people")]
    envoy: String,
    #[allow(dead_code, reason = "for people")]
    rules: u32,
    #[allow(dead_code, reason = "for people")]
    machine: Machine,
    /// CPU of whole calls, by the size of the request's body; the answer is always the same short one.
    pub(super) calls: Vec<Call>,
    /// CPU of the engine alone for the body of a response.
    pub(super) response_scans: Vec<Scan>,
    /// Time of scans of large bodies.
    pub(super) cap_scans: Vec<CapScan>,
    pub(super) memory: Memory,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(dead_code, reason = "for people")]
struct Machine {
    cpu: String,
    cores: u32,
    arch: String,
    kernel: String,
    load: f64,
}

/// CPU of calls of one size.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Call {
    pub(super) request_bytes: u32,
    pub(super) response_bytes: u32,
    pub(super) extproc_micros: f64,
    pub(super) envoy_micros: f64,
    /// The same with a filter that decides nothing: what carrying the bytes costs.
    pub(super) noop_extproc_micros: f64,
}

/// CPU of one scan.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Scan {
    pub(super) bytes: u32,
    pub(super) micros: f64,
}

/// Times of scans of one size.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CapScan {
    pub(super) bytes: u32,
    #[allow(dead_code, reason = "for people")]
    scans: u32,
    /// Of CPU: what a scan takes where nobody disturbs it.
    pub(super) cpu_micros: f64,
    #[allow(dead_code, reason = "for people")]
    p99_micros: f64,
    pub(super) p999_micros: f64,
}

/// Resident memory.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(clippy::struct_field_names, reason = "the unit belongs to the name in the record")]
pub(super) struct Memory {
    #[allow(dead_code, reason = "for people")]
    extproc_idle_kib: u64,
    pub(super) extproc_loaded_kib: u64,
    #[allow(dead_code, reason = "for people")]
    envoy_idle_kib: u64,
    pub(super) envoy_loaded_kib: u64,
}

/// A cost that grows with a size: so much for anything, and so much for each KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Line {
    pub(super) fixed: f64,
    pub(super) per_kib: f64,
}

impl Line {
    /// The line with the least squared distance to the points (KiB, micros). Neither part is ever negative:
    /// noise on small bodies must not make large ones pay back.
    pub(super) fn fit(points: &[(f64, f64)]) -> Self {
        if points.is_empty() {
            return Self::default();
        }
        let n = points.len() as f64;
        let mean_x = points.iter().map(|p| p.0).sum::<f64>() / n;
        let mean_y = points.iter().map(|p| p.1).sum::<f64>() / n;
        let spread: f64 = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
        let along: f64 = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum();
        let slope = if spread > 0.0 { (along / spread).max(0.0) } else { 0.0 };
        let fixed = mean_y - slope * mean_x;
        if fixed >= 0.0 {
            return Self { fixed, per_kib: slope };
        }
        // The best line through the origin instead.
        let squares: f64 = points.iter().map(|p| p.0 * p.0).sum();
        let products: f64 = points.iter().map(|p| p.0 * p.1).sum();
        Self { fixed: 0.0, per_kib: if squares > 0.0 { (products / squares).max(0.0) } else { 0.0 } }
    }

    /// The cost at a size.
    pub(super) fn at(&self, kib: f64) -> f64 {
        self.fixed + self.per_kib * kib
    }
}

/// What a call costs, by its sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    /// Microseconds of CPU for a call without bodies.
    pub(super) fixed: f64,
    /// For each KiB of the request's body.
    pub(super) request_kib: f64,
    /// For each KiB of the response's body.
    pub(super) response_kib: f64,
}

impl Cost {
    /// Microseconds of CPU of one call.
    pub(super) fn of(&self, request_kib: f64, response_kib: f64) -> f64 {
        self.fixed + self.request_kib * request_kib + self.response_kib * response_kib
    }
}

impl Record {
    /// The record that ships.
    pub(super) fn shipped() -> &'static Self {
        &SHIPPED
    }

    /// The filter's CPU per call.
    pub(super) fn extproc(&self) -> Cost {
        let line = self.line(|c| c.extproc_micros);
        // Scanning it, and carrying it: the calls all had the same answer, so they can't tell.
        let scan =
            Line::fit(&self.response_scans.iter().map(|s| (kib(s.bytes), s.micros)).collect::<Vec<_>>());
        let carry = self.line(|c| c.noop_extproc_micros);
        let response_kib = scan.per_kib + carry.per_kib;
        Cost { fixed: self.without_answer(line, response_kib), request_kib: line.per_kib, response_kib }
    }

    /// Envoy's CPU per call. It does the same with a response as with a request: it hands it to the filter
    /// and takes it back.
    pub(super) fn envoy(&self) -> Cost {
        let line = self.line(|c| c.envoy_micros);
        Cost {
            fixed: self.without_answer(line, line.per_kib),
            request_kib: line.per_kib,
            response_kib: line.per_kib,
        }
    }

    /// Microseconds of an undisturbed scan of so many bytes.
    pub(super) fn scan(&self, bytes: u32) -> f64 {
        let points: Vec<_> = self.cap_scans.iter().map(|s| (kib(s.bytes), s.cpu_micros)).collect();
        Line::fit(&points).at(kib(bytes))
    }

    /// Microseconds that 999 scans of 1,000 stay below. What makes the slowest ones slow is the scheduler,
    /// which does not ask how large a body is: the widest gap between CPU and p99.9 is added to the line of
    /// the CPU.
    pub(super) fn scan_p999(&self, bytes: u32) -> f64 {
        let tail = self.cap_scans.iter().map(|s| s.p999_micros - s.cpu_micros).fold(0.0, f64::max);
        self.scan(bytes) + tail
    }

    fn line(&self, cost: impl Fn(&Call) -> f64) -> Line {
        Line::fit(&self.calls.iter().map(|c| (kib(c.request_bytes), cost(c))).collect::<Vec<_>>())
    }

    /// The fixed part of a line through calls that all had the same answer, less that answer.
    fn without_answer(&self, line: Line, response_kib: f64) -> f64 {
        let answer = self.calls.first().map_or(0.0, |c| kib(c.response_bytes));
        (line.fixed - response_kib * answer).max(0.0)
    }
}

pub(super) fn kib(bytes: u32) -> f64 {
    f64::from(bytes) / 1024.0
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::float_cmp, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-6
    }

    #[test]
    fn a_line_through_points_on_a_line_is_that_line() {
        let line = Line::fit(&[(0.5, 101.0), (2.0, 104.0), (10.0, 120.0), (100.0, 300.0)]);
        assert!(close(line.fixed, 100.0) && close(line.per_kib, 2.0), "{line:?}");
        assert!(close(line.at(16.0), 132.0));
    }

    #[test]
    fn a_line_has_the_least_squared_distance_to_its_points() {
        let points = [(0.0, 10.0), (1.0, 30.0), (2.0, 20.0)];
        let line = Line::fit(&points);
        let error = |l: &Line| points.iter().map(|p| (l.at(p.0) - p.1).powi(2)).sum::<f64>();
        for (fixed, per_kib) in [(0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1)] {
            let other = Line { fixed: line.fixed + fixed, per_kib: line.per_kib + per_kib };
            assert!(error(&line) < error(&other), "{line:?} {other:?}");
        }
    }

    #[test]
    fn noise_never_makes_a_cost_negative() {
        for points in [
            &[][..],
            &[(1.0, 5.0)],
            &[(1.0, 5.0), (1.0, 7.0)],
            &[(1.0, 9.0), (10.0, 2.0)],
            &[(1.0, 0.0), (2.0, 0.0), (3.0, 30.0)],
        ] {
            let line = Line::fit(points);
            assert!(line.fixed >= 0.0 && line.per_kib >= 0.0, "{points:?}: {line:?}");
        }
        assert_eq!(Line::fit(&[(1.0, 9.0), (10.0, 2.0)]), Line { fixed: 5.5, per_kib: 0.0 });
    }

    #[test]
    fn the_shipped_record_is_read_and_says_who_it_is() {
        let text = include_str!("../../../../policies/capacity/x86_64-2cores.json");
        let record: Record = serde_json::from_str(text).unwrap();
        assert_eq!(record.schema, 1);
        assert_eq!(record.name, format!("x86_64-2cores-{}", record.date));
        assert_eq!(Record::shipped().name, record.name);
    }

    /// The error of the fit, which `docs/sizing.md` states.
    #[test]
    fn the_lines_stay_near_what_was_measured() {
        let record = Record::shipped();
        let (extproc, envoy) = (record.extproc(), record.envoy());
        for call in &record.calls {
            let (request, response) = (kib(call.request_bytes), kib(call.response_bytes));
            let both = extproc.of(request, response) + envoy.of(request, response);
            let measured = call.extproc_micros + call.envoy_micros;
            let off = (both - measured).abs() / measured;
            assert!(off < 0.35, "{} bytes: {both:.0} instead of {measured:.0}", call.request_bytes);
        }
    }

    #[test]
    fn a_scan_takes_longer_the_larger_the_body_and_its_tail_is_above_it() {
        let record = Record::shipped();
        assert!(record.scan(1 << 20) > 3.0 * record.scan(256 << 10));
        assert!(record.scan_p999(1 << 20) > record.scan(1 << 20));
    }
}
