//! A sizing in words.

use std::fmt::Write as _;
use std::time::Duration;

use super::{CallCost, Sizing};

impl Sizing {
    /// CPU request of both containers together: `250m`, `2`, `1500m`.
    pub fn cpu(&self) -> String {
        millis(self.extproc_cpu_millis.saturating_add(self.envoy_cpu_millis))
    }

    /// Both containers together, for one column: `250m / 96Mi, 61 % at 50 rps`.
    pub fn summary(&self) -> String {
        format!(
            "{} / {}, {} % at {} rps",
            self.cpu(),
            mebibytes(self.extproc_memory_bytes.saturating_add(self.envoy_memory_bytes)),
            self.load_percent,
            self.terms.requests_per_second
        )
    }

    /// The sum, line by line, for people.
    pub fn explain(&self) -> String {
        let t = &self.terms;
        let mut out = String::new();
        // Writing to a String does not fail.
        let mut line = |text: String| {
            let _ = writeln!(out, "{text}");
        };
        line(self.summary());
        line(String::new());
        line(format!(
            "load      {} calls/s, request bodies {}, response bodies {}, body cap {}",
            t.requests_per_second,
            bytes(t.request_bytes),
            bytes(t.response_bytes),
            bytes(t.max_body_bytes.into())
        ));
        line(format!("record    {}", self.record));
        line(String::new());
        for (name, cost, request) in
            [("extproc", t.extproc, self.extproc_cpu_millis), ("Envoy", t.envoy, self.envoy_cpu_millis)]
        {
            line(format!("{name} CPU"));
            line(format!("  a call    {}", call(cost)));
            line(format!(
                "  request   {} calls/s x {} x {:.2} headroom, at least {} = {}; no limit",
                t.requests_per_second,
                micros(cost.call),
                1.0 + f64::from(t.headroom_percent) / 100.0,
                millis(Self::LEAST_CPU_MILLIS),
                millis(request)
            ));
        }
        line(format!("  workers   {}", self.concurrency));
        line("Timeouts".into());
        line(format!(
            "  message   {} of scans of the body cap take less than {}; x {}, at least {} = {}",
            "99.9 %",
            time(t.scan_p999),
            Self::TIMEOUT_FACTOR,
            time(Self::LEAST_MESSAGE_TIMEOUT),
            time(self.message_timeout)
        ));
        line(format!("  scan      half of it = {}", time(self.scan_timeout)));
        line("Bodies held at once".into());
        line(format!(
            "  budget    the most of: {} at this load, {} that can be scanned in time, {} for {} of the largest = {}",
            bytes(t.held_bytes),
            bytes(t.scannable_bytes),
            bytes(Self::LEAST_BODIES * u64::from(t.max_body_bytes)),
            Self::LEAST_BODIES,
            bytes(self.budget_bytes)
        ));
        line(format!(
            "  in flight {} calls, if an upstream takes {} to answer",
            t.calls_in_flight,
            time(Self::ANSWER)
        ));
        line("Memory, request and limit".into());
        line(format!(
            "  extproc   {} + 2 x budget + {} a call in flight = {}",
            bytes(t.loaded_bytes[0]),
            bytes(Self::EXTPROC_CALL_BYTES),
            mebibytes(self.extproc_memory_bytes)
        ));
        line(format!(
            "  Envoy     {} + budget + {} a call in flight = {}",
            bytes(t.loaded_bytes[1]),
            bytes(Self::ENVOY_CALL_BYTES),
            mebibytes(self.envoy_memory_bytes)
        ));
        out
    }
}

fn call(cost: CallCost) -> String {
    format!(
        "{} + {} a KiB of request + {} a KiB of response = {}",
        micros(cost.fixed),
        micros(cost.request_kib),
        micros(cost.response_kib),
        micros(cost.call)
    )
}

/// A CPU quantity as Kubernetes writes it.
fn millis(millis: u32) -> String {
    if millis.is_multiple_of(1_000) { (millis / 1_000).to_string() } else { format!("{millis}m") }
}

fn mebibytes(bytes: u64) -> String {
    format!("{}Mi", bytes.div_ceil(1 << 20))
}

fn bytes(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_024 => return format!("{bytes} B"),
        1_024..1_048_576 => (1_u64 << 10, "KiB"),
        _ => (1 << 20, "MiB"),
    };
    if bytes.is_multiple_of(unit) {
        format!("{} {name}", bytes / unit)
    } else {
        format!("{:.1} {name}", bytes as f64 / unit as f64)
    }
}

fn micros(nanos: u64) -> String {
    format!("{:.1} µs", nanos as f64 / 1_000.0)
}

fn time(time: Duration) -> String {
    if time.subsec_nanos() == 0 {
        format!("{} s", time.as_secs())
    } else {
        format!("{} ms", time.as_millis())
    }
}

#[cfg(test)]
mod tests {
    use sallyport_api::AgentPolicySpec;

    use super::*;

    #[test]
    fn the_summary_is_the_sum_of_both_containers() {
        let mut s = crate::size(&AgentPolicySpec::default());
        (s.extproc_cpu_millis, s.envoy_cpu_millis, s.load_percent) = (150, 100, 61);
        (s.extproc_memory_bytes, s.envoy_memory_bytes) = (48 << 20, 48 << 20);
        assert_eq!(s.summary(), "250m / 96Mi, 61 % at 50 rps");
        s.envoy_cpu_millis = 1_850;
        assert_eq!(s.cpu(), "2");
    }

    #[test]
    fn every_figure_that_a_sidecar_gets_is_explained() {
        let s = crate::size(&AgentPolicySpec::default());
        let text = s.explain();
        for figure in [
            millis(s.extproc_cpu_millis),
            millis(s.envoy_cpu_millis),
            mebibytes(s.extproc_memory_bytes),
            mebibytes(s.envoy_memory_bytes),
            time(s.message_timeout),
            time(s.scan_timeout),
            bytes(s.budget_bytes),
            s.record.clone(),
            "50 calls/s".into(),
        ] {
            assert!(text.contains(&figure), "{figure} is not in\n{text}");
        }
    }
}
