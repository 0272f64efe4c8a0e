//! What is read off the operator's pods and off processes on the node.

use std::collections::BTreeMap;

use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{OPERATOR, SYSTEM, pods_of, resident_kib};
use serde_json::Value;

/// The operator's pods that are there and not about to go.
pub(crate) fn operators() -> Vec<Value> {
    let mut all = pods_of(SYSTEM, OPERATOR).unwrap();
    all.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    all
}

/// Resident memory of each replica, in MiB.
pub(crate) fn operator_memory() -> Vec<f64> {
    operators().iter().filter_map(|pod| resident_kib(pod, "operator")).map(mib).collect()
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52")]
pub(crate) fn mib(kib: u64) -> f64 {
    (kib as f64 / 1024.0 * 10.0).round() / 10.0
}

/// Samples of every replica's metrics, summed by their name with labels.
pub(crate) fn metrics() -> BTreeMap<String, f64> {
    let mut sum = BTreeMap::new();
    for pod in operators() {
        let Some(ip) = pod["status"]["podIP"].as_str() else { continue };
        let Ok(answer) = Call::get(format!("http://{ip}:8080/metrics")).send() else { continue };
        for line in answer.text().lines().filter(|l| !l.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            *sum.entry(name.to_owned()).or_insert(0.0) += value.parse::<f64>().unwrap_or(0.0);
        }
    }
    sum
}

/// The bound below which this share of the acknowledgements since `before` came, by the operator's own clock:
/// from sending a bundle to its acknowledgement.
pub(crate) fn ack_seconds(before: &BTreeMap<String, f64>, share: f64) -> Option<f64> {
    let now = metrics();
    let since = |name: &str| now.get(name).unwrap_or(&0.0) - before.get(name).unwrap_or(&0.0);
    let all = since("sallyport_operator_ack_seconds_count");
    let mut buckets: Vec<_> = now
        .keys()
        .filter_map(|name| {
            let bound = name.strip_prefix("sallyport_operator_ack_seconds_bucket{le=\"")?;
            Some((bound.strip_suffix("\"}")?.parse::<f64>().ok()?, since(name)))
        })
        .collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    buckets.into_iter().find(|(_, below)| all > 0.0 && *below >= all * share).map(|(bound, _)| bound)
}

/// Of sorted values.
pub(crate) fn percentile(sorted: &[u128], percent: usize) -> u128 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

/// Milliseconds that passed from then.
pub(crate) fn millis_since(times: &[u128], then: u128) -> Vec<u128> {
    times.iter().map(|at| at.saturating_sub(then) / 1000).collect()
}

/// Growth a minute of samples (seconds, value): the straight line with the least squared distance.
#[expect(clippy::cast_precision_loss, reason = "a handful of samples")]
pub(crate) fn slope_a_minute(samples: &[(f64, f64)]) -> f64 {
    let n = samples.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| samples.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(|s| s.0), mean(|s| s.1));
    let over: f64 = samples.iter().map(|s| (s.0 - x) * (s.1 - y)).sum();
    let under: f64 = samples.iter().map(|s| (s.0 - x) * (s.0 - x)).sum();
    over / under * 60.0
}
