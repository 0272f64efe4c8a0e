//! The operator's metrics. Their names are public API and stand here, nowhere else.

use std::time::Duration;

use jiff::Timestamp;
use prometheus::{
    Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

/// Names of the metrics.
pub mod names {
    /// Seconds since 1970 at which a certificate is valid no longer, by `certificate`.
    pub const CERTIFICATE_EXPIRY: &str = "sallyport_operator_certificate_expiry_seconds";
    /// Certificates that took another's place, by `certificate`.
    pub const CERTIFICATE_ROTATIONS: &str = "sallyport_operator_certificate_rotations_total";
    /// Writes of `caBundle`, by `kind`.
    pub const CA_BUNDLE_WRITES: &str = "sallyport_operator_ca_bundle_writes_total";
    /// Writes of the trust ConfigMap, by `outcome`.
    pub const TRUST_WRITES: &str = "sallyport_operator_trust_writes_total";
    /// 1 while this replica holds the lease.
    pub const LEADER: &str = "sallyport_operator_leader";
    /// Admission requests, by `webhook`, `outcome` and `reason`.
    pub const ADMISSION_REQUESTS: &str = "sallyport_operator_admission_requests_total";
    /// How long admission took, by `webhook`.
    pub const ADMISSION_SECONDS: &str = "sallyport_operator_admission_duration_seconds";
    /// Events that were not written, by `reason`.
    pub const EVENTS_DROPPED: &str = "sallyport_operator_events_dropped_total";
    /// Open connections, by `listener`.
    pub const CONNECTIONS: &str = "sallyport_operator_connections";
    /// Connections that were turned away, by `listener` and `reason`.
    pub const CONNECTIONS_REFUSED: &str = "sallyport_operator_connections_refused_total";
}

/// Values of the label `certificate`.
pub mod certificate {
    /// The authority that signs.
    pub const CA: &str = "ca";
    /// What TLS serves.
    pub const SERVING: &str = "serving";
}

/// Every metric of the process, in one registry. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    expiry: GaugeVec,
    rotations: IntCounterVec,
    bundle_writes: IntCounterVec,
    trust_writes: IntCounterVec,
    leader: IntGauge,
    admissions: IntCounterVec,
    admission_seconds: HistogramVec,
    events_dropped: IntCounterVec,
    connections: IntGaugeVec,
    refused: IntCounterVec,
}

impl Metrics {
    /// Registers everything in a registry of its own.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let vec = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(vec.clone()))?;
            Ok::<_, prometheus::Error>(vec)
        };
        let rotations = counter(
            names::CERTIFICATE_ROTATIONS,
            "Certificates that took another's place.",
            &["certificate"],
        )?;
        let bundle_writes =
            counter(names::CA_BUNDLE_WRITES, "Writes of caBundle in webhook configurations.", &["kind"])?;
        let trust_writes = counter(names::TRUST_WRITES, "Writes of the trust ConfigMap.", &["outcome"])?;
        let admissions =
            counter(names::ADMISSION_REQUESTS, "Admission requests.", &["webhook", "outcome", "reason"])?;
        let events_dropped = counter(names::EVENTS_DROPPED, "Events that were not written.", &["reason"])?;
        let refused = counter(
            names::CONNECTIONS_REFUSED,
            "Connections that were turned away.",
            &["listener", "reason"],
        )?;
        let expiry = GaugeVec::new(
            Opts::new(
                names::CERTIFICATE_EXPIRY,
                "When a certificate is valid no longer, seconds since 1970.",
            ),
            &["certificate"],
        )?;
        registry.register(Box::new(expiry.clone()))?;
        let leader = IntGauge::new(names::LEADER, "1 while this replica holds the lease.")?;
        registry.register(Box::new(leader.clone()))?;
        let admission_seconds = HistogramVec::new(
            // Injection takes a millisecond, compiling a policy tens of them; the API server waits 5 s.
            HistogramOpts::new(names::ADMISSION_SECONDS, "How long admission took.")
                .buckets(vec![0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0]),
            &["webhook"],
        )?;
        registry.register(Box::new(admission_seconds.clone()))?;
        let connections =
            IntGaugeVec::new(Opts::new(names::CONNECTIONS, "Open connections."), &["listener"])?;
        registry.register(Box::new(connections.clone()))?;
        Ok(Self {
            registry,
            expiry,
            rotations,
            bundle_writes,
            trust_writes,
            leader,
            admissions,
            admission_seconds,
            events_dropped,
            connections,
            refused,
        })
    }

    /// Where other parts register theirs.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Everything, in Prometheus' text format.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        let mut out = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut out)?;
        Ok(String::from_utf8_lossy(&out).into_owned())
    }

    /// A certificate is valid until then.
    pub fn certificate_expires(&self, certificate: &str, at: Timestamp) {
        self.expiry.with_label_values(&[certificate]).set(at.as_second() as f64);
    }

    /// A certificate took another's place.
    pub fn certificate_rotated(&self, certificate: &str) {
        self.rotations.with_label_values(&[certificate]).inc();
    }

    /// `caBundle` was written.
    pub fn ca_bundle_written(&self, kind: &str) {
        self.bundle_writes.with_label_values(&[kind]).inc();
    }

    /// A trust ConfigMap was written, or not.
    pub fn trust_written(&self, ok: bool) {
        self.trust_writes.with_label_values(&[if ok { "ok" } else { "error" }]).inc();
    }

    /// This replica holds the lease, or does not.
    pub fn leads(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// An admission request was answered.
    pub fn admitted(&self, webhook: &str, outcome: &str, reason: &str, took: Duration) {
        self.admissions.with_label_values(&[webhook, outcome, reason]).inc();
        self.admission_seconds.with_label_values(&[webhook]).observe(took.as_secs_f64());
    }

    /// An Event was not written.
    pub fn event_dropped(&self, reason: &str) {
        self.events_dropped.with_label_values(&[reason]).inc();
    }

    /// A connection is open until the gauge is dropped.
    pub fn connected(&self, listener: &str) -> Connected {
        let gauge = self.connections.with_label_values(&[listener]);
        gauge.inc();
        Connected(gauge)
    }

    /// A connection was turned away.
    pub fn refused(&self, listener: &str, reason: &str) {
        self.refused.with_label_values(&[listener, reason]).inc();
    }
}

/// Counts one open connection.
#[derive(Debug)]
pub struct Connected(IntGauge);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}
