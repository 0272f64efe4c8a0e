//! What discovery and status count.

use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

/// Upper bounds of the ack latency's buckets, in seconds: dense around the targets, 1 s and 3 s.
const ACK_BUCKETS: [f64; 12] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0];

/// Counters, whether or not anything gathers them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics(Option<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    subscribers: IntGauge,
    sent: IntCounter,
    acks: IntCounter,
    nacks: IntCounter,
    ack_seconds: Histogram,
    reviews: IntCounterVec,
    refused: IntCounterVec,
    status_patches: IntCounterVec,
    events: IntCounterVec,
    enforced_pods: IntGaugeVec,
    running_pods: IntGaugeVec,
    killed: IntGaugeVec,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self(Inner::new().inspect_err(|error| tracing::error!(%error, "no metrics")).ok())
    }

    /// Has the registry gather them.
    pub(crate) fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let Some(m) = &self.0 else { return Ok(()) };
        registry.register(Box::new(m.subscribers.clone()))?;
        for counter in [&m.sent, &m.acks, &m.nacks] {
            registry.register(Box::new(counter.clone()))?;
        }
        registry.register(Box::new(m.ack_seconds.clone()))?;
        for counter in [&m.reviews, &m.refused, &m.status_patches, &m.events] {
            registry.register(Box::new(counter.clone()))?;
        }
        for gauge in [&m.enforced_pods, &m.running_pods, &m.killed] {
            registry.register(Box::new(gauge.clone()))?;
        }
        Ok(())
    }

    pub(crate) fn connected(&self) {
        self.with(|m| m.subscribers.inc());
    }

    pub(crate) fn disconnected(&self) {
        self.with(|m| m.subscribers.dec());
    }

    pub(crate) fn sent(&self) {
        self.with(|m| m.sent.inc());
    }

    pub(crate) fn acked(&self, after: Option<std::time::Duration>) {
        self.with(|m| {
            m.acks.inc();
            if let Some(after) = after {
                m.ack_seconds.observe(after.as_secs_f64());
            }
        });
    }

    pub(crate) fn nacked(&self) {
        self.with(|m| m.nacks.inc());
    }

    pub(crate) fn review(&self, result: &str) {
        self.with(|m| m.reviews.with_label_values(&[result]).inc());
    }

    pub(crate) fn refused(&self, reason: &str) {
        self.with(|m| m.refused.with_label_values(&[reason]).inc());
    }

    pub(crate) fn status_patch(&self, result: &str) {
        self.with(|m| m.status_patches.with_label_values(&[result]).inc());
    }

    pub(crate) fn event(&self, result: &str) {
        self.with(|m| m.events.with_label_values(&[result]).inc());
    }

    /// How many of a policy's pods enforce its newest bundle, and how many run.
    pub(crate) fn policy(&self, namespace: &str, policy: &str, enforced: u32, running: u32) {
        self.with(|m| {
            m.enforced_pods.with_label_values(&[namespace, policy]).set(enforced.into());
            m.running_pods.with_label_values(&[namespace, policy]).set(running.into());
        });
    }

    /// The policy is gone, or another replica counts it.
    pub(crate) fn forget_policy(&self, namespace: &str, policy: &str) {
        self.with(|m| {
            // An error says that there was no such series.
            m.enforced_pods.remove_label_values(&[namespace, policy]).ok();
            m.running_pods.remove_label_values(&[namespace, policy]).ok();
        });
    }

    /// A kill switch is on, or not any more.
    pub(crate) fn killed(&self, scope: &str, on: bool) {
        self.with(|m| {
            if on {
                m.killed.with_label_values(&[scope]).set(1);
            } else {
                m.killed.remove_label_values(&[scope]).ok();
            }
        });
    }

    fn with(&self, count: impl FnOnce(&Inner)) {
        if let Some(inner) = &self.0 {
            count(inner);
        }
    }
}

impl Inner {
    fn new() -> Result<Self, prometheus::Error> {
        let by = |name: &str, help: &str, label: &str| {
            IntCounterVec::new(Opts::new(format!("sallyport_operator_{name}"), help), &[label])
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            IntGaugeVec::new(Opts::new(format!("sallyport_operator_{name}"), help), labels)
        };
        let policy = ["namespace", "policy"];
        Ok(Self {
            subscribers: IntGauge::new(
                "sallyport_operator_subscribers",
                "Streams of sidecars to this replica",
            )?,
            sent: IntCounter::new("sallyport_operator_bundles_sent_total", "Bundles sent to sidecars")?,
            acks: IntCounter::new("sallyport_operator_acks_total", "Bundles that sidecars put in force")?,
            nacks: IntCounter::new("sallyport_operator_nacks_total", "Bundles that sidecars refused")?,
            ack_seconds: Histogram::with_opts(
                HistogramOpts::new(
                    "sallyport_operator_ack_seconds",
                    "Seconds from sending a bundle to its acknowledgement",
                )
                .buckets(ACK_BUCKETS.to_vec()),
            )?,
            reviews: by("token_reviews_total", "TokenReviews asked of the API server", "result")?,
            refused: by("streams_refused_total", "Streams refused or ended for a reason", "reason")?,
            status_patches: by("status_patches_total", "Patches of policies' status", "result")?,
            events: by("events_total", "Kubernetes Events published", "result")?,
            enforced_pods: gauge(
                "policy_enforced_pods",
                "Running guarded pods that enforce the policy's newest bundle; from the leader",
                &policy,
            )?,
            running_pods: gauge(
                "policy_running_pods",
                "Running guarded pods of the policy; from the leader",
                &policy,
            )?,
            killed: gauge("killed", "1 while a kill switch with effect is on; from the leader", &["scope"])?,
        })
    }
}
