//! What the leader shows of policies in its metrics: the numbers of their status, for alerts.

use std::collections::{BTreeMap, BTreeSet};

use crate::discovery::metrics::Metrics;
use crate::index::state::PolicyKey;

/// The series that are shown. A replica that leads no longer shows none: two would be added up.
pub(super) struct Gauges {
    metrics: Metrics,
    /// Whether each was missing in the round before. One that is being compiled misses a round, and an alert
    /// would begin to wait anew.
    policies: BTreeMap<PolicyKey, bool>,
    scopes: BTreeSet<String>,
}

/// A policy's numbers.
pub(super) struct Numbers<'a> {
    pub(super) enforced: u32,
    pub(super) running: u32,
    /// The kill switch that is on.
    pub(super) killed: Option<&'a str>,
}

impl Gauges {
    pub(super) fn new(metrics: Metrics) -> Self {
        Self { metrics, policies: BTreeMap::new(), scopes: BTreeSet::new() }
    }

    /// Shows these, and no others.
    pub(super) fn show<'a>(&mut self, all: impl IntoIterator<Item = (&'a PolicyKey, Numbers<'a>)>) {
        let (mut here, mut scopes) = (BTreeSet::new(), BTreeSet::new());
        for (key, numbers) in all {
            self.metrics.policy(&key.0, &key.1, numbers.enforced, numbers.running);
            here.insert(key);
            scopes.extend(numbers.killed.map(str::to_owned));
        }
        let metrics = &self.metrics;
        self.policies.retain(|key, missing| {
            let gone = !here.contains(key) && std::mem::replace(missing, true);
            if gone {
                metrics.forget_policy(&key.0, &key.1);
            }
            !gone
        });
        self.policies.extend(here.into_iter().map(|key| (key.clone(), false)));
        for gone in self.scopes.difference(&scopes) {
            metrics.killed(gone, false);
        }
        for scope in &scopes {
            metrics.killed(scope, true);
        }
        self.scopes = scopes;
    }

    /// Shows nothing.
    pub(super) fn clear(&mut self) {
        for (namespace, name) in self.policies.keys() {
            self.metrics.forget_policy(namespace, name);
        }
        for scope in &self.scopes {
            self.metrics.killed(scope, false);
        }
        self.policies.clear();
        self.scopes.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use prometheus::{Registry, TextEncoder};

    use super::*;

    #[test]
    fn what_is_gone_is_shown_no_longer() {
        let (metrics, registry) = (Metrics::new(), Registry::new());
        metrics.register(&registry).unwrap();
        let lines = || {
            let page = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
            let ours = |l: &&str| l.contains("policy_") || l.contains("_killed");
            page.lines().filter(|l| !l.starts_with('#')).filter(ours).map(str::to_owned).collect::<Vec<_>>()
        };
        let (a, b) = (("ns".to_owned(), "a".to_owned()), ("ns".to_owned(), "b".to_owned()));
        let numbers = |killed| Numbers { enforced: 1, running: 2, killed };
        let mut gauges = Gauges::new(metrics);
        gauges.show([(&a, numbers(None)), (&b, numbers(Some("agentpolicy ns/b")))]);
        assert_eq!(
            lines(),
            [
                "sallyport_operator_killed{scope=\"agentpolicy ns/b\"} 1",
                "sallyport_operator_policy_enforced_pods{namespace=\"ns\",policy=\"a\"} 1",
                "sallyport_operator_policy_enforced_pods{namespace=\"ns\",policy=\"b\"} 1",
                "sallyport_operator_policy_running_pods{namespace=\"ns\",policy=\"a\"} 2",
                "sallyport_operator_policy_running_pods{namespace=\"ns\",policy=\"b\"} 2",
            ]
        );
        gauges.show([(&a, numbers(None))]);
        assert_eq!(lines().len(), 4, "a policy that misses one round stays, its kill switch does not");
        gauges.show([(&a, numbers(None))]);
        assert_eq!(lines().len(), 2);
        gauges.clear();
        assert!(lines().is_empty());
    }
}
