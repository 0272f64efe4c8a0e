//! Metrics: their names, which are public API, and the counters behind them.
//!
//! A message costs a handful of atomic additions: every counter that it may touch is looked up once, at
//! start.

use std::time::Duration;

use prometheus::{
    Encoder as _, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};
use sallyport_engine::{Category, Code, Decision, Verdict};

use crate::observer::{Direction, LogObserver, MessageKind, NameRecord, NameSource, Observer, Record, code};

/// The names of all metrics.
pub mod name {
    /// Messages that were decided, by direction, decision, reason and whether it was carried out.
    pub const DECISIONS: &str = "sallyport_decisions_total";
    /// What was found in them, by category and by what was decided about it.
    pub const FINDINGS: &str = "sallyport_findings_total";
    /// Microseconds from a message of Envoy's to its answer, by kind of message.
    pub const ANSWER_MICROS: &str = "sallyport_answer_microseconds";
    /// Bytes of bodies that arrived, by direction.
    pub const BODY_BYTES: &str = "sallyport_body_bytes_total";
    /// HTTP exchanges that are open.
    pub const STREAMS: &str = "sallyport_streams_open";
    /// Bytes of bodies that are held.
    pub const BUDGET_USED: &str = "sallyport_budget_used_bytes";
    /// Bytes of bodies that may be held.
    pub const BUDGET_LIMIT: &str = "sallyport_budget_limit_bytes";
    /// Messages whose scan did not end in time.
    pub const SCAN_TIMEOUTS: &str = "sallyport_scan_timeouts_total";
    /// How long ago the thread that answers Envoy was last seen alive.
    pub const HEARTBEAT_AGE: &str = "sallyport_heartbeat_age_seconds";
    /// How long the bundle has been in force, in this process.
    pub const BUNDLE_AGE: &str = "sallyport_bundle_age_seconds";
    /// Always 1: which bundle is in force.
    pub const BUNDLE_INFO: &str = "sallyport_bundle_info";
    /// The generation of the policy in force.
    pub const BUNDLE_GENERATION: &str = "sallyport_bundle_generation";
    /// 1 where the kill switch is on.
    pub const KILLED: &str = "sallyport_killed";
    /// 1 where the pod should be captured and its network namespace lacks the rules.
    pub const CAPTURE_MISSING: &str = "sallyport_capture_missing";
    /// 1 where there is a stream to the operator.
    pub const CONNECTED: &str = "sallyport_discovery_connected";
    /// Answers to bundles, by outcome (`ack`, `nack`).
    pub const BUNDLES: &str = "sallyport_discovery_bundles_total";
    /// Names that were asked of the resolver, by decision, reason and where the answer came from.
    pub const NAMES: &str = "sallyport_names_total";
    /// Addresses that are bound to names.
    pub const BINDINGS: &str = "sallyport_bound_addresses";
    /// Always 1: the version that runs.
    pub const BUILD_INFO: &str = "sallyport_extproc_build_info";
    /// 1 where Envoy's own metrics could be read for this page.
    pub const ENVOY_UP: &str = "sallyport_envoy_up";
}

/// Every name, for whoever checks dashboards and alerts against them.
pub fn names() -> Vec<&'static str> {
    vec![
        name::DECISIONS,
        name::FINDINGS,
        name::ANSWER_MICROS,
        name::BODY_BYTES,
        name::STREAMS,
        name::BUDGET_USED,
        name::BUDGET_LIMIT,
        name::SCAN_TIMEOUTS,
        name::HEARTBEAT_AGE,
        name::BUNDLE_AGE,
        name::BUNDLE_INFO,
        name::BUNDLE_GENERATION,
        name::KILLED,
        name::CAPTURE_MISSING,
        name::CONNECTED,
        name::BUNDLES,
        name::NAMES,
        name::BINDINGS,
        name::BUILD_INFO,
        name::ENVOY_UP,
    ]
}

const DIRECTIONS: [Direction; 2] = [Direction::Request, Direction::Response];
const DECISIONS: [Decision; 5] =
    [Decision::Allow, Decision::Flag, Decision::Redact, Decision::Hold, Decision::Block];
/// The reason of a message that was not refused.
const NO_REASON: &str = "none";
const CATEGORIES: [Category; 16] = [
    Category::Injection,
    Category::Jailbreak,
    Category::Secret,
    Category::Pii,
    Category::Destructive,
    Category::Command,
    Category::Sqli,
    Category::Web,
    Category::Mcp,
    Category::Exfil,
    Category::Ssrf,
    Category::Url,
    Category::Confidential,
    Category::Identity,
    Category::Bias,
    Category::Protocol,
];
/// From a header that nothing is found in to the longest scan timeout that makes sense.
const MICROS: [f64; 14] = [
    10., 25., 50., 100., 250., 500., 1_000., 2_500., 5_000., 10_000., 25_000., 100_000., 500_000., 2_000_000.,
];

/// What is in force, for the page.
#[derive(Clone, Debug, Default)]
pub struct BundleFacts {
    /// The policy's namespace.
    pub namespace: String,
    /// The policy's name.
    pub policy: String,
    /// The policy's generation.
    pub generation: i64,
    /// The bundle's digest.
    pub digest: String,
    /// How long it has been in force.
    pub age: Duration,
}

/// The process's metrics.
pub struct Metrics {
    registry: Registry,
    /// By direction, decision, reason (none, then [`Code::ALL`]) and whether it was carried out.
    decisions: Vec<IntCounter>,
    /// By category and decision.
    findings: Vec<IntCounter>,
    names: IntCounterVec,
    /// Addresses that are bound to names; set before the page is written.
    pub bindings: IntGauge,
    answers: Vec<Histogram>,
    bytes: Vec<IntCounter>,
    streams: IntGauge,
    scan_timeouts: IntCounter,
    bundle_info: IntGaugeVec,
    bundle_age: IntGauge,
    bundle_generation: IntGauge,
    /// Bytes that are held; set before the page is written.
    pub budget_used: IntGauge,
    /// Bytes that may be held.
    pub budget_limit: IntGauge,
    /// Seconds since the last beat; set before the page is written.
    pub heartbeat_age: IntGauge,
    /// 1 where the kill switch is on.
    pub killed: IntGauge,
    /// 1 where the pod should be captured and is not.
    pub capture_missing: IntGauge,
    /// 1 where there is a stream to the operator.
    pub connected: IntGauge,
    /// Bundles that were put in force.
    pub acks: IntCounter,
    /// Bundles that were refused.
    pub nacks: IntCounter,
    /// 1 where Envoy's metrics could be read.
    pub envoy_up: IntGauge,
}

// === impl Metrics ===

impl Metrics {
    /// Registers everything. Fails only where two names are the same.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let add = |c: &dyn Fn() -> Box<dyn prometheus::core::Collector>| registry.register(c());
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let vec = IntCounterVec::new(Opts::new(name, help), labels)?;
            add(&|| Box::new(vec.clone()))?;
            Ok::<_, prometheus::Error>(vec)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help)?;
            add(&|| Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let vec = IntGaugeVec::new(Opts::new(name, help), labels)?;
            add(&|| Box::new(vec.clone()))?;
            Ok::<_, prometheus::Error>(vec)
        };

        let labels = ["direction", "decision", "reason", "enforced"];
        let vec = counters(name::DECISIONS, "Messages that were decided", &labels)?;
        let reasons = || std::iter::once(NO_REASON).chain(Code::ALL.iter().map(|c| c.as_str()));
        let mut decisions = Vec::new();
        for direction in DIRECTIONS {
            for decision in DECISIONS {
                for reason in reasons() {
                    for enforced in ["false", "true"] {
                        // One that can't be has no line on the page either.
                        let possible = decision.refuses() != (reason == NO_REASON);
                        decisions.push(if possible {
                            vec.with_label_values(&[direction.as_str(), decision.as_str(), reason, enforced])
                        } else {
                            IntCounter::new("unused", "unused")?
                        });
                    }
                }
            }
        }
        let vec = counters(name::FINDINGS, "What was found in messages", &["category", "decision"])?;
        let findings = CATEGORIES
            .iter()
            .flat_map(|c| DECISIONS.map(|d| vec.with_label_values(&[c.as_str(), d.as_str()])))
            .collect();
        let names = counters(
            name::NAMES,
            "Names that were asked of the resolver",
            &["decision", "reason", "source", "enforced"],
        )?;
        names.with_label_values(&["allow", NO_REASON, NameSource::Cache.as_str(), "true"]);
        let opts = HistogramOpts::new(name::ANSWER_MICROS, "Microseconds from a message to its answer");
        let vec = HistogramVec::new(opts.buckets(MICROS.to_vec()), &["message"])?;
        registry.register(Box::new(vec.clone()))?;
        let answers = MessageKind::ALL.iter().map(|k| vec.with_label_values(&[k.as_str()])).collect();
        let vec = counters(name::BODY_BYTES, "Bytes of bodies that arrived", &["direction"])?;
        let bytes = DIRECTIONS.iter().map(|d| vec.with_label_values(&[d.as_str()])).collect();
        let scan_timeouts = IntCounter::new(name::SCAN_TIMEOUTS, "Scans that did not end in time")?;
        registry.register(Box::new(scan_timeouts.clone()))?;
        let bundles = counters(name::BUNDLES, "Answers to the operator's bundles", &["outcome"])?;
        let build = gauges(name::BUILD_INFO, "The version that runs", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            decisions,
            findings,
            names,
            bindings: gauge(name::BINDINGS, "Addresses that are bound to names")?,
            answers,
            bytes,
            scan_timeouts,
            streams: gauge(name::STREAMS, "HTTP exchanges that are open")?,
            bundle_info: gauges(
                name::BUNDLE_INFO,
                "Which bundle is in force",
                &["namespace", "policy", "digest"],
            )?,
            bundle_age: gauge(name::BUNDLE_AGE, "How long the bundle has been in force in this process")?,
            bundle_generation: gauge(name::BUNDLE_GENERATION, "The generation of the policy in force")?,
            budget_used: gauge(name::BUDGET_USED, "Bytes of bodies that are held")?,
            budget_limit: gauge(name::BUDGET_LIMIT, "Bytes of bodies that may be held")?,
            heartbeat_age: gauge(name::HEARTBEAT_AGE, "Seconds since the answering thread was last seen")?,
            killed: gauge(name::KILLED, "1 where the kill switch is on")?,
            capture_missing: gauge(name::CAPTURE_MISSING, "1 where the pod should be captured and is not")?,
            connected: gauge(name::CONNECTED, "1 where there is a stream to the operator")?,
            acks: bundles.with_label_values(&["ack"]),
            nacks: bundles.with_label_values(&["nack"]),
            envoy_up: gauge(name::ENVOY_UP, "1 where Envoy's own metrics could be read")?,
            registry,
        })
    }

    /// Says which bundle is in force.
    pub fn bundle(&self, facts: Option<&BundleFacts>) {
        self.bundle_info.reset();
        let Some(facts) = facts else { return };
        self.bundle_info.with_label_values(&[&facts.namespace, &facts.policy, &facts.digest]).set(1);
        self.bundle_generation.set(facts.generation);
        self.bundle_age.set(seconds(facts.age));
    }

    /// The page, in Prometheus' text format.
    pub fn page(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut page = Vec::with_capacity(32 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut page)?;
        Ok(page)
    }

    fn found(&self, verdict: &Verdict) {
        for finding in &verdict.findings {
            let place = index(&CATEGORIES, finding.category).zip(index(&DECISIONS, finding.decision));
            if let Some((category, decision)) = place
                && let Some(counter) = self.findings.get(category * DECISIONS.len() + decision)
            {
                counter.inc();
            }
        }
    }

    fn decision(&self, record: &Record<'_>) -> Option<&IntCounter> {
        let decision = record.verdict.decision;
        let reason = match record.code() {
            None if decision.refuses() => index(&Code::ALL, Code::Internal)? + 1,
            None => 0,
            Some(code) => index(&Code::ALL, code)? + 1,
        };
        let row = index(&DIRECTIONS, record.direction)? * DECISIONS.len() + index(&DECISIONS, decision)?;
        self.decisions.get((row * (Code::ALL.len() + 1) + reason) * 2 + usize::from(record.enforced))
    }
}

fn index<T: PartialEq + Copy>(all: &[T], one: T) -> Option<usize> {
    all.iter().position(|x| *x == one)
}

pub(crate) fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Counts every message, and writes its log line.
#[derive(Debug)]
pub struct MetricsObserver {
    metrics: std::sync::Arc<Metrics>,
    log: LogObserver,
}

impl MetricsObserver {
    /// Counts into these.
    pub fn new(metrics: std::sync::Arc<Metrics>) -> Self {
        Self { metrics, log: LogObserver }
    }
}

impl Observer for MetricsObserver {
    fn record(&self, record: &Record<'_>) {
        let metrics = &*self.metrics;
        if let Some(counter) = metrics.decision(record) {
            counter.inc();
        }
        if record.code() == Some(Code::ScanTimeout) {
            metrics.scan_timeouts.inc();
        }
        if let Some(counter) = index(&DIRECTIONS, record.direction).and_then(|i| metrics.bytes.get(i)) {
            counter.inc_by(record.bytes);
        }
        metrics.found(record.verdict);
        self.log.record(record);
    }

    fn resolved(&self, record: &NameRecord<'_>) {
        let reason = code(record.verdict).map_or(NO_REASON, Code::as_str);
        let enforced = if record.enforced { "true" } else { "false" };
        let labels = [record.verdict.decision.as_str(), reason, record.source.as_str(), enforced];
        self.metrics.names.with_label_values(&labels).inc();
        self.metrics.found(record.verdict);
        self.log.resolved(record);
    }

    fn answered(&self, kind: MessageKind, took: Duration) {
        if let Some(histogram) = self.metrics.answers.get(kind as usize) {
            histogram.observe(took.as_secs_f64() * 1e6);
        }
    }

    fn opened(&self) {
        self.metrics.streams.inc();
    }

    fn closed(&self) {
        self.metrics.streams.dec();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sallyport_engine::Protocol;

    use super::*;

    #[test]
    fn every_metric_on_the_page_is_among_the_names_and_no_other() {
        let metrics = Metrics::new().unwrap();
        metrics.bundle(Some(&BundleFacts::default()));
        let page = String::from_utf8(metrics.page().unwrap()).unwrap();
        let mut found: Vec<&str> =
            page.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let mut names = names();
        found.sort_unstable();
        names.sort_unstable();
        assert_eq!(found, names);
    }

    #[test]
    fn a_message_is_counted_by_what_was_decided_and_why() {
        let metrics = Arc::new(Metrics::new().unwrap());
        let observer = MetricsObserver::new(Arc::clone(&metrics));
        for (direction, decision, code) in [
            (Direction::Request, Decision::Allow, None),
            (Direction::Response, Decision::Block, Some(Code::Killed)),
            (Direction::Response, Decision::Block, Some(Code::ScanTimeout)),
        ] {
            let verdict = Verdict { decision, code, ..Verdict::default() };
            observer.record(&Record {
                request_id: "",
                direction,
                method: "",
                host: "",
                path: "",
                verdict: &verdict,
                enforced: true,
                complete: true,
                protocol: &Protocol::Unknown,
                bytes: 7,
                held: 0,
                micros: 0,
            });
        }
        observer.answered(MessageKind::ResponseBody, Duration::from_micros(40));
        let page = String::from_utf8(metrics.page().unwrap()).unwrap();
        for line in [
            r#"sallyport_decisions_total{decision="allow",direction="request",enforced="true",reason="none"} 1"#,
            r#"sallyport_decisions_total{decision="block",direction="response",enforced="true",reason="killed"} 1"#,
            r#"sallyport_body_bytes_total{direction="response"} 14"#,
            "sallyport_scan_timeouts_total 1",
            r#"sallyport_answer_microseconds_bucket{message="response_body",le="50"} 1"#,
            r#"sallyport_answer_microseconds_bucket{message="response_body",le="25"} 0"#,
        ] {
            assert!(page.lines().any(|l| l == line), "{line} in\n{page}");
        }
    }
}
