//! What the sidecar's containers ask for, so that the pod keeps its QoS class and fits its namespace.
//!
//! Quotas are not looked at: the API server refuses a pod that exceeds one, naming the quota.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, LimitRange, LimitRangeItem, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sallyport_api::CaptureMode;
use sallyport_api::names::{CAPTURE_CONTAINER, ENVOY_CONTAINER, EXTPROC_CONTAINER};

use super::Refusal;
use crate::size::Sizing;

/// nft with a hundred rules: measured at 6 MiB, with room for the shell.
const CAPTURE_MEMORY: u64 = 32 << 20;
const CAPTURE_CPU_MILLIS: u32 = 10;

/// What one of our containers asks for.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    /// The container's name.
    pub container: &'static str,
    cpu_millis: u64,
    /// None: the container may use what is idle. Throttling would ruin the slowest answers.
    cpu_limit_millis: Option<u64>,
    memory: u64,
}

impl Demand {
    /// As it stands in a container.
    pub(super) fn resources(&self) -> ResourceRequirements {
        let memory = ("memory".to_owned(), Quantity(bytes(self.memory)));
        let mut limits = BTreeMap::from([memory.clone()]);
        if let Some(cpu) = self.cpu_limit_millis {
            limits.insert("cpu".into(), Quantity(format!("{cpu}m")));
        }
        let cpu = ("cpu".to_owned(), Quantity(format!("{}m", self.cpu_millis)));
        ResourceRequirements {
            requests: Some(BTreeMap::from([cpu, memory])),
            limits: Some(limits),
            ..ResourceRequirements::default()
        }
    }
}

/// Works out what our containers ask for beside the pod's own.
pub(super) fn demands(
    sizing: &Sizing,
    mode: CaptureMode,
    pod: &PodSpec,
    ranges: &[LimitRange],
    policy: &str,
    warnings: &mut Vec<String>,
) -> Result<Vec<Demand>, Refusal> {
    let demand = |container, cpu: u32, memory| Demand {
        container,
        cpu_millis: cpu.into(),
        cpu_limit_millis: None,
        memory,
    };
    let mut all = Vec::new();
    if mode == CaptureMode::Init {
        all.push(demand(CAPTURE_CONTAINER, CAPTURE_CPU_MILLIS, CAPTURE_MEMORY));
    }
    all.push(demand(EXTPROC_CONTAINER, sizing.extproc_cpu_millis, sizing.extproc_memory_bytes));
    all.push(demand(ENVOY_CONTAINER, sizing.envoy_cpu_millis, sizing.envoy_memory_bytes));
    if guaranteed(pod) {
        for demand in &mut all {
            demand.cpu_limit_millis = Some(demand.cpu_millis);
        }
        warnings.push(
            "the pod is Guaranteed, so the sidecar gets a CPU limit equal to its request; under more than \
             the stated load (spec.capacity) it is throttled"
                .into(),
        );
    }
    for range in ranges {
        let object = range.metadata.name.as_deref().unwrap_or_default();
        for item in range.spec.iter().flat_map(|s| &s.limits) {
            match item.type_.as_str() {
                "Container" => {
                    for demand in &mut all {
                        fit(demand, item, object, policy, warnings)?;
                    }
                }
                "Pod" => fit_pod(&mut all, pod, item, object, policy)?,
                _ => {}
            }
        }
    }
    Ok(all)
}

/// Makes one container fit a LimitRange for containers.
fn fit(
    demand: &mut Demand,
    item: &LimitRangeItem,
    object: &str,
    policy: &str,
    warnings: &mut Vec<String>,
) -> Result<(), Refusal> {
    let least_cpu = bound(item.min.as_ref(), "cpu").unwrap_or(0);
    if least_cpu > demand.cpu_millis {
        demand.cpu_millis = least_cpu;
        demand.cpu_limit_millis = demand.cpu_limit_millis.map(|l| l.max(least_cpu));
        warnings.push(raised(demand.container, "cpu", object));
    }
    let least_memory = bound(item.min.as_ref(), "memory").map_or(0, |m| m.div_ceil(1000));
    if least_memory > demand.memory {
        demand.memory = least_memory;
        warnings.push(raised(demand.container, "memory", object));
    }
    if let Some(most) = bound(item.max.as_ref(), "cpu")
        && demand.cpu_millis > most
    {
        return Err(conflict(item, object, "cpu", demand, format!("{}m", demand.cpu_millis), policy));
    }
    if let Some(most) = bound(item.max.as_ref(), "memory")
        && demand.memory.saturating_mul(1000) > most
    {
        return Err(conflict(item, object, "memory", demand, bytes(demand.memory), policy));
    }
    // Left without a limit, the LimitRange would give ours its default, which knows nothing of the load.
    let given = bound(item.max.as_ref(), "cpu").or_else(|| bound(item.default.as_ref(), "cpu"));
    let ratio = item.max_limit_request_ratio.as_ref().is_some_and(|r| r.contains_key("cpu"));
    if demand.cpu_limit_millis.is_none() && (ratio || given.is_some()) {
        let limit = if ratio { demand.cpu_millis } else { given.unwrap_or(0).max(demand.cpu_millis) };
        demand.cpu_limit_millis = Some(limit);
        warnings.push(format!(
            "LimitRange `{object}` demands a CPU limit, so {} gets {limit}m; above that it is throttled",
            demand.container
        ));
    }
    Ok(())
}

fn raised(container: &str, resource: &str, object: &str) -> String {
    format!(
        "LimitRange `{object}` has a minimum of {resource} above what {container} needs; it gets the minimum"
    )
}

fn conflict(
    item: &LimitRangeItem,
    object: &str,
    resource: &str,
    demand: &Demand,
    need: String,
    policy: &str,
) -> Refusal {
    Refusal::LimitRangeConflict {
        object: object.into(),
        bound: maximum(item, resource),
        what: demand.container.into(),
        need,
        policy: policy.into(),
    }
}

/// The maximum, for people.
fn maximum(item: &LimitRangeItem, resource: &str) -> String {
    let value = item.max.as_ref().and_then(|m| m.get(resource)).map_or("", |q| &q.0);
    format!("max.{resource} {value} (type {})", item.type_)
}

/// Checks the pod as a whole against a LimitRange for pods, as the API server will: running containers,
/// ours and the pod's, added up.
fn fit_pod(
    all: &mut [Demand],
    pod: &PodSpec,
    item: &LimitRangeItem,
    object: &str,
    policy: &str,
) -> Result<(), Refusal> {
    if item.max.as_ref().is_some_and(|m| m.contains_key("cpu")) {
        for demand in all.iter_mut() {
            demand.cpu_limit_millis.get_or_insert(demand.cpu_millis);
        }
    }
    let running = || all.iter().filter(|d| d.container != CAPTURE_CONTAINER);
    let ours = |resource: &str| match resource {
        "cpu" => running().map(|d| d.cpu_limit_millis.unwrap_or(d.cpu_millis)).sum::<u64>(),
        _ => running().map(|d| d.memory.saturating_mul(1000)).sum(),
    };
    for resource in ["cpu", "memory"] {
        let Some(most) = bound(item.max.as_ref(), resource) else { continue };
        let theirs: u64 = containers(pod)
            .filter(|c| runs_on(pod, c))
            .filter_map(|c| quantity(c.resources.as_ref()?.limits.as_ref()?.get(resource)?))
            .sum();
        let need = theirs.saturating_add(ours(resource));
        if need > most {
            return Err(Refusal::LimitRangeConflict {
                object: object.into(),
                bound: maximum(item, resource),
                what: "the pod with its sidecar".into(),
                need: if resource == "cpu" { format!("{need}m") } else { bytes(need / 1000) },
                policy: policy.into(),
            });
        }
    }
    Ok(())
}

/// Whether a container runs as long as the pod does.
fn runs_on(pod: &PodSpec, container: &Container) -> bool {
    pod.containers.iter().any(|c| c.name == container.name)
        || container.restart_policy.as_deref() == Some("Always")
}

fn containers(pod: &PodSpec) -> impl Iterator<Item = &Container> {
    pod.init_containers.iter().flatten().chain(&pod.containers)
}

/// Whether Kubernetes calls the pod Guaranteed by its containers: each has limits of CPU and memory, and
/// requests that are left out or equal.
fn guaranteed(pod: &PodSpec) -> bool {
    containers(pod).all(|container| {
        ["cpu", "memory"].iter().all(|resource| {
            let Some(r) = &container.resources else { return false };
            bound(r.limits.as_ref(), resource).is_some_and(|limit| {
                limit > 0 && bound(r.requests.as_ref(), resource).is_none_or(|r| r == limit)
            })
        })
    })
}

fn bound(map: Option<&BTreeMap<String, Quantity>>, resource: &str) -> Option<u64> {
    map?.get(resource).and_then(quantity)
}

/// A quantity in thousandths of its unit, rounded up; none if it is not one. The API server has checked it.
fn quantity(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.trim();
    let split =
        text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let number: f64 = number.parse().ok()?;
    let scale = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        exponent => 10f64.powi(exponent.strip_prefix(['e', 'E'])?.parse().ok()?),
    };
    let thousandths = (number * scale * 1000.0).ceil();
    #[expect(clippy::cast_sign_loss, reason = "checked to be positive; too large saturates")]
    (thousandths >= 0.0).then_some(thousandths as u64)
}

/// Bytes as people write them.
pub(super) fn bytes(n: u64) -> String {
    if n != 0 && n.is_multiple_of(1 << 20) { format!("{}Mi", n >> 20) } else { n.to_string() }
}
