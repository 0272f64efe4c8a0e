//! A real cluster, driven as its users drive it: by `kubectl` and `helm`.
//!
//! The suite expects a cluster that is up (`KUBECONFIG`), with the images of this checkout on its node. It
//! installs the charts itself, once, the way the README says.

mod kubectl;
mod namespace;
mod pods;
mod process;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use kubectl::{Output, helm, kubectl, kubectl_input, shell};
pub use namespace::{Namespace, Pod, agent_image, cni_spec, usual_spec};
pub use pods::{CNI, OPERATOR, name_of, pods_of};
pub use process::{file_in, node_root, resident_kib, restart_program, signal, signal_program};

/// How long anything in the cluster may take before the test gives up: images are on the node, so a pod
/// starts in seconds; a loaded machine gets many times that.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// The operator's namespace.
pub const SYSTEM: &str = "sallyport-system";

/// Installs both charts, once for all tests of this process, and waits until the operator serves.
pub fn installed() {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        install();
    });
}

/// The commands of the README's section `In a cluster`, as they stand there.
pub fn readme_commands() -> Vec<String> {
    let readme = include_str!("../../README.md");
    let section = readme.split_once("## In a cluster").expect("the README has the section").1;
    let block = section.split("```").nth(1).expect("a block of commands");
    let lines = block.lines().filter_map(|l| l.trim().strip_prefix("$ "));
    lines.map(|l| l.split("  #").next().unwrap_or(l).trim().to_owned()).collect()
}

/// Installs both charts with the README's commands, the CNI plugin besides; the node has this checkout's images
/// under the names that the chart gives them. What is installed already stays.
pub fn install() {
    for line in readme_commands().iter().filter(|l| l.starts_with("helm install ")) {
        let status = line.replace("helm install", "helm status").replace(" --create-namespace", "");
        let words: Vec<_> = status.split(' ').skip(1).filter(|w| !w.starts_with("charts/")).collect();
        if helm(&words).is_ok() {
            continue;
        }
        let line =
            if line.ends_with("crds") { line.clone() } else { format!("{line} --set cni.enabled=true") };
        println!("$ {line}");
        if let Err(e) = shell(&line) {
            panic!("{e}\n{}", state_of(SYSTEM));
        }
    }
    await_operator();
    await_cni();
}

/// Waits until the daemon of the CNI plugin is ready on every node, where it is installed: what starts earlier is
/// not captured.
pub fn await_cni() {
    if kubectl(&["get", "daemonset", "sallyport-cni", "-n", SYSTEM]).is_ok()
        && let Err(e) =
            kubectl(&["rollout", "status", "daemonset/sallyport-cni", "-n", SYSTEM, "--timeout=120s"])
    {
        panic!("{e}\n{}", state_of(SYSTEM));
    }
}

/// Upgrades both charts, as docs/install.md says.
pub fn upgrade() {
    upgrade_with(&[]);
}

/// As [`upgrade`], with more arguments for the main chart.
pub fn upgrade_with(more: &[&str]) {
    helm(&["upgrade", "sallyport-crds", "charts/sallyport-crds", "--wait"]).expect("the CRDs");
    let mut args =
        vec!["upgrade", "sallyport", "charts/sallyport", "-n", SYSTEM, "--wait", "--timeout", "180s"];
    args.extend(more);
    if let Err(e) = helm(&args) {
        panic!("{e}\n{}", state_of(SYSTEM));
    }
    await_operator();
}

/// Waits until the operator's webhook answers: a Service does so only once kube-proxy has its endpoints.
pub fn await_operator() {
    const POLICY: &str =
        "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {name: probe}\nspec: {}\n";
    await_condition("the operator's webhook answers", || {
        kubectl_input(&["apply", "--dry-run=server", "-n", "default", "-f", "-"], POLICY).ok()
    });
}

/// Polls until there is a value; fails with what was waited for.
pub fn await_condition<T>(what: &str, probe: impl FnMut() -> Option<T>) -> T {
    await_within(DEADLINE, what, probe)
}

/// As [`await_condition`], with a deadline of its own.
pub fn await_within<T>(deadline: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(start.elapsed() < deadline, "{what}: not within {deadline:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What is in a namespace, and what its containers said: for the message of a failed test.
pub fn state_of(namespace: &str) -> String {
    let mut text = String::new();
    for args in [
        &["get", "pods,agentpolicies,events", "-o", "wide", "--sort-by=.metadata.creationTimestamp"][..],
        &["describe", "pods"][..],
    ] {
        let all: Vec<_> = args.iter().copied().chain(["-n", namespace]).collect();
        text += &kubectl(&all).map_or_else(|e| e.to_string(), |o| o.stdout);
    }
    let names =
        kubectl(&["get", "pods", "-n", namespace, "-o", "name"]).map(|o| o.stdout).unwrap_or_default();
    for pod in names.lines() {
        text.extend(["--- ", pod, "\n"]);
        text += &kubectl(&["logs", "-n", namespace, pod, "--all-containers", "--tail=40", "--prefix"])
            .map_or_else(|e| e.to_string(), |o| o.stdout);
    }
    text
}
