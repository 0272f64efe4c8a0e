//! How much a sidecar needs for the load that a policy states.
//!
//! `size(spec)` reads a capacity record that `sallyport bench` took, and nothing else: the same policy gives
//! the same figures everywhere. `docs/sizing.md` tells the sum to people; every constant that the record
//! does not hold stands here with its reason.
//!
//! Not guaranteed: the promise itself. A node's cores differ from the record's, and texts made of what rules
//! look for cost a hundred times as much as prose. CPU has no limit, so that a busy moment takes what the
//! node has to spare instead of being throttled into timeouts.

mod explain;
mod record;

use std::time::Duration;

use sallyport_api::{AgentPolicySpec, quantity};

use record::{Cost, Record};

/// What one sidecar gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizing {
    /// CPU request of extproc, in thousandths of a core.
    pub extproc_cpu_millis: u32,
    /// Memory request and limit of extproc, in bytes.
    pub extproc_memory_bytes: u64,
    /// CPU request of Envoy, in thousandths of a core.
    pub envoy_cpu_millis: u32,
    /// Memory request and limit of Envoy, in bytes.
    pub envoy_memory_bytes: u64,
    /// Envoy's worker threads.
    pub concurrency: u32,
    /// How long Envoy waits for each answer of the filter.
    pub message_timeout: Duration,
    /// How long extproc lets one scan take.
    pub scan_timeout: Duration,
    /// Bytes of bodies that extproc holds at once.
    pub budget_bytes: u64,
    /// How much of the CPU request the stated load takes, in percent.
    pub load_percent: u32,
    /// Name of the bench record it was computed from.
    pub record: String,
    /// The terms of the sum, for [`Sizing::explain`].
    pub terms: Terms,
}

/// The terms of the sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// `spec.capacity.requestsPerSecond`.
    pub requests_per_second: u32,
    /// `spec.capacity.headroomPercent`.
    pub headroom_percent: u32,
    /// `spec.capacity.requestBodyP95`, in bytes, no more than `spec.limits.maxBodyBytes`.
    pub request_bytes: u64,
    /// `spec.capacity.responseBodyP95`, in bytes.
    pub response_bytes: u64,
    /// `spec.limits.maxBodyBytes`.
    pub max_body_bytes: u32,
    /// What a call costs extproc.
    pub extproc: CallCost,
    /// What a call costs Envoy.
    pub envoy: CallCost,
    /// The 99.9th percentile of a scan of the largest body.
    pub scan_p999: Duration,
    /// Memory of extproc and of Envoy after load, without what the stated load adds, in bytes.
    pub loaded_bytes: [u64; 2],
    /// Calls that wait for an upstream at the stated load.
    pub calls_in_flight: u64,
    /// Bytes of bodies that are held at the stated load.
    pub held_bytes: u64,
    /// Bytes that can be scanned within the scan timeout.
    pub scannable_bytes: u64,
}

/// CPU of a call, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallCost {
    /// For a call without bodies.
    pub fixed: u64,
    /// For each KiB of the request's body.
    pub request_kib: u64,
    /// For each KiB of the response's body.
    pub response_kib: u64,
    /// For a call of the stated sizes.
    pub call: u64,
}

impl Sizing {
    /// The least CPU request of each container: starting, probes and counters take as much without a call.
    pub const LEAST_CPU_MILLIS: u32 = 50;
    /// CPU requests are multiples of this: the record is not more exact.
    pub const CPU_STEP_MILLIS: u32 = 10;
    /// Memory is a multiple of this.
    pub const MEMORY_STEP_BYTES: u64 = 16 << 20;
    /// The least message timeout: Envoy's own default, below which a worker that the scheduler kept waiting
    /// is taken for a filter that hangs.
    pub const LEAST_MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);
    /// A message may take so many times the slowest ordinary scan of the largest body. Four, because others
    /// are scanned beside it, and because a node may be half as fast as the record's machine.
    pub const TIMEOUT_FACTOR: u32 = 4;
    /// Timeouts are multiples of this.
    pub const TIMEOUT_STEP: Duration = Duration::from_millis(50);
    /// At least so many of the largest bodies fit into the budget: an agent's call, its answer, and the same
    /// of one tool beside it.
    pub const LEAST_BODIES: u64 = 4;
    /// How long an upstream is thought to take for an answer. Assumed, not measured: LLMs take seconds.
    pub const ANSWER: Duration = Duration::from_secs(10);
    /// What a call in flight costs extproc besides its bodies. Assumed: a gRPC stream and its state.
    pub const EXTPROC_CALL_BYTES: u64 = 16 << 10;
    /// What a call in flight costs Envoy besides its bodies. Assumed: two streams, a connection, read buffers.
    pub const ENVOY_CALL_BYTES: u64 = 64 << 10;
}

/// Computes what one sidecar gets for this policy.
///
/// A size that can't be read, which validation does not let in, counts as the largest body.
pub fn size(spec: &AgentPolicySpec) -> Sizing {
    let record = Record::shipped();
    let (capacity, cap) = (&spec.capacity, spec.limits.max_body_bytes);
    // A request beyond the cap is refused before it costs a scan. A longer response is scanned as a stream.
    let request_bytes = quantity::bytes(&capacity.request_body_p95).unwrap_or(cap.into()).min(cap.into());
    let response_bytes = quantity::bytes(&capacity.response_body_p95).unwrap_or(cap.into());
    let rate = f64::from(capacity.requests_per_second);

    // Every call is taken to have bodies of the 95th percentile.
    let call = |cost: Cost| cost.of(request_bytes as f64 / 1024.0, response_bytes as f64 / 1024.0);
    let (extproc, envoy) = (record.extproc(), record.envoy());
    let needs = [rate * call(extproc) / 1_000.0, rate * call(envoy) / 1_000.0];
    let headroom = 1.0 + f64::from(capacity.headroom_percent) / 100.0;
    let [extproc_cpu_millis, envoy_cpu_millis] = needs.map(|need| cpu(need * headroom));
    let concurrency = envoy_cpu_millis.div_ceil(1_000).max(1);

    let scan_p999 = micros(record.scan_p999(cap));
    let message_timeout =
        up_to(scan_p999 * Sizing::TIMEOUT_FACTOR, Sizing::TIMEOUT_STEP).max(Sizing::LEAST_MESSAGE_TIMEOUT);

    // Little's law: what is held is what arrives, times how long it is held. No message is held for longer
    // than its timeout. A streamed response is held in windows, never whole.
    let held_response = response_bytes.min(cap.into());
    let held_bytes =
        (rate * message_timeout.as_secs_f64() * (request_bytes + held_response) as f64 * headroom).ceil();
    // Half: the verdict must come from the filter, which says why, and not from Envoy, which can't.
    let scan_timeout = message_timeout / 2;
    // More than can be scanned in time need not be let in: it would time out instead of being refused at once.
    let per_byte = record.scan(cap) / f64::from(cap.max(1));
    let cores = f64::from(extproc_cpu_millis.div_ceil(1_000).max(1));
    let scannable = if per_byte > 0.0 { micros_of(scan_timeout) * cores / per_byte } else { 0.0 };
    let (held_bytes, scannable_bytes) = (whole(held_bytes), whole(scannable));
    let budget_bytes = held_bytes
        .max(scannable_bytes)
        .max(Sizing::LEAST_BODIES * u64::from(cap))
        .checked_next_multiple_of(1 << 20)
        .unwrap_or(u64::MAX);

    let calls_in_flight = whole((rate * Sizing::ANSWER.as_secs_f64()).ceil());
    let loaded_bytes = [record.memory.extproc_loaded_kib << 10, record.memory.envoy_loaded_kib << 10];
    // The filter may hold a body twice, while it is decoded or redacted; Envoy holds it once, and waits.
    let extproc_memory_bytes =
        memory(loaded_bytes[0] + 2 * budget_bytes + calls_in_flight * Sizing::EXTPROC_CALL_BYTES);
    let envoy_memory_bytes =
        memory(loaded_bytes[1] + budget_bytes + calls_in_flight * Sizing::ENVOY_CALL_BYTES);

    let cost = |cost: Cost| CallCost {
        fixed: nanos(cost.fixed),
        request_kib: nanos(cost.request_kib),
        response_kib: nanos(cost.response_kib),
        call: nanos(call(cost)),
    };
    Sizing {
        extproc_cpu_millis,
        extproc_memory_bytes,
        envoy_cpu_millis,
        envoy_memory_bytes,
        concurrency,
        message_timeout,
        scan_timeout,
        budget_bytes,
        load_percent: percent(needs[0] + needs[1], extproc_cpu_millis.saturating_add(envoy_cpu_millis)),
        record: record.name.clone(),
        terms: Terms {
            requests_per_second: capacity.requests_per_second,
            headroom_percent: capacity.headroom_percent,
            request_bytes,
            response_bytes,
            max_body_bytes: cap,
            extproc: cost(extproc),
            envoy: cost(envoy),
            scan_p999,
            loaded_bytes,
            calls_in_flight,
            held_bytes,
            scannable_bytes,
        },
    }
}

/// A CPU request for this need, in thousandths of a core.
fn cpu(need_millis: f64) -> u32 {
    let need = u32::try_from(whole(need_millis.ceil())).unwrap_or(u32::MAX);
    need.checked_next_multiple_of(Sizing::CPU_STEP_MILLIS).unwrap_or(u32::MAX).max(Sizing::LEAST_CPU_MILLIS)
}

/// A memory request for this need, in bytes.
fn memory(need: u64) -> u64 {
    need.checked_next_multiple_of(Sizing::MEMORY_STEP_BYTES).unwrap_or(u64::MAX)
}

fn percent(need_millis: f64, request_millis: u32) -> u32 {
    u32::try_from(whole((need_millis * 100.0 / f64::from(request_millis)).round())).unwrap_or(u32::MAX)
}

/// The next multiple of a step.
fn up_to(time: Duration, step: Duration) -> Duration {
    let steps = time.as_micros().div_ceil(step.as_micros().max(1));
    step * u32::try_from(steps).unwrap_or(u32::MAX)
}

fn micros(micros: f64) -> Duration {
    Duration::from_micros(whole(micros.ceil()))
}

fn micros_of(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn nanos(micros: f64) -> u64 {
    whole((micros * 1_000.0).round())
}

/// A float that is not negative as a whole number; `as` keeps what is too large at the largest.
#[allow(clippy::cast_sign_loss, reason = "no figure here is negative")]
fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(change: impl FnOnce(&mut AgentPolicySpec)) -> Sizing {
        let mut spec = AgentPolicySpec::default();
        change(&mut spec);
        size(&spec)
    }

    #[test]
    fn the_default_load_fits_an_ordinary_pod() {
        let s = size(&AgentPolicySpec::default());
        assert!((100..=500).contains(&(s.extproc_cpu_millis + s.envoy_cpu_millis)), "{s:?}");
        assert!(s.extproc_memory_bytes + s.envoy_memory_bytes <= 384 << 20, "{s:?}");
        assert_eq!(s.concurrency, 1);
        assert!((1..=100).contains(&s.load_percent), "{s:?}");
    }

    #[test]
    fn the_sum_is_rate_times_cost_times_headroom() {
        let s = with(|s| s.capacity.requests_per_second = 1_000);
        for (cost, request) in [(s.terms.extproc, s.extproc_cpu_millis), (s.terms.envoy, s.envoy_cpu_millis)]
        {
            let sum = cost.fixed + 8 * cost.request_kib + 16 * cost.response_kib;
            assert!(sum.abs_diff(cost.call) <= 24, "{cost:?}");
            // 1,000 calls a second: nanoseconds per call are millionths of a core.
            let need = sum as f64 * 1.3 / 1_000.0;
            let request = f64::from(request);
            assert!(request >= need && request < need + 11.0, "{need} {request}");
        }
        assert_eq!(s.concurrency, s.envoy_cpu_millis.div_ceil(1_000));
        assert!((70..=77).contains(&s.load_percent), "30 % above the load: {}", s.load_percent);
    }

    #[test]
    fn more_load_never_gets_less() {
        let figures = |s: &Sizing| {
            [
                s.extproc_cpu_millis.into(),
                s.envoy_cpu_millis.into(),
                s.extproc_memory_bytes,
                s.envoy_memory_bytes,
                s.concurrency.into(),
                s.budget_bytes,
            ]
        };
        let steps = [1, 10, 50, 200, 1_000, 5_000, 100_000];
        for pair in steps.windows(2) {
            let [less, more] = [pair[0], pair[1]].map(|n| with(|s| s.capacity.requests_per_second = n));
            assert!(figures(&less).iter().zip(figures(&more)).all(|(a, b)| *a <= b), "{less:?} {more:?}");
        }
        for pair in ["0", "512", "8Ki", "100k", "1Mi", "1Gi"].windows(2) {
            let [less, more] = [pair[0], pair[1]].map(|n| with(|s| s.capacity.response_body_p95 = n.into()));
            assert!(figures(&less).iter().zip(figures(&more)).all(|(a, b)| *a <= b), "{less:?} {more:?}");
        }
    }

    #[test]
    fn timeouts_follow_the_body_cap_and_the_filter_answers_first() {
        let caps = [4 << 10, 1 << 20, 64 << 20];
        let sizings = caps.map(|cap| with(|s| s.limits.max_body_bytes = cap));
        for s in &sizings {
            assert!(s.message_timeout >= Sizing::LEAST_MESSAGE_TIMEOUT);
            assert!(s.message_timeout >= s.terms.scan_p999 * 4);
            assert!(s.scan_timeout < s.message_timeout);
            assert!(s.scan_timeout >= s.terms.scan_p999, "an ordinary scan of the cap is let end");
        }
        assert!(sizings[0].message_timeout < sizings[2].message_timeout);
    }

    #[test]
    fn the_budget_holds_four_of_the_largest_bodies_and_memory_holds_the_budget() {
        for cap in [4 << 10, 1 << 20, 64 << 20] {
            let s = with(|s| s.limits.max_body_bytes = cap);
            assert!(s.budget_bytes >= 4 * u64::from(cap));
            assert!(s.extproc_memory_bytes >= 2 * s.budget_bytes + s.terms.loaded_bytes[0]);
            assert!(s.envoy_memory_bytes >= s.budget_bytes + s.terms.loaded_bytes[1]);
        }
    }

    #[test]
    fn requests_beyond_the_cap_cost_no_more_than_the_cap() {
        let at = |size: &str| with(|s| s.capacity.request_body_p95 = size.into()).extproc_cpu_millis;
        assert_eq!(at("1Mi"), at("1Gi"));
        // What validation would have refused counts as the largest body, not as none.
        assert_eq!(at("nonsense"), at("1Mi"));
    }

    #[test]
    fn the_largest_load_does_not_overflow() {
        let s = with(|s| {
            s.capacity.requests_per_second = 100_000;
            s.capacity.request_body_p95 = "1Gi".into();
            s.capacity.response_body_p95 = "1Gi".into();
            s.capacity.headroom_percent = 1_000;
            s.limits.max_body_bytes = 64 << 20;
        });
        assert!(s.extproc_cpu_millis > 1_000_000 && s.budget_bytes > 1 << 40, "{s:?}");
    }

    #[test]
    fn a_calm_pod_gets_the_floor() {
        let s = with(|s| s.capacity.requests_per_second = 1);
        assert_eq!((s.extproc_cpu_millis, s.envoy_cpu_millis), (50, 50));
    }
}
