//! Processes, as the node sees them: those of containers, and those that the cluster itself is made of.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::kubectl::shell;

/// Sends a signal to a container's first process; the suite runs on the node, as root.
pub fn signal(pod: &Value, container: &str, signal: Signal) {
    let pid = pid(pod, container).unwrap_or_else(|| panic!("no process of {container} on this node"));
    kill_process(pid, signal).unwrap_or_else(|e| panic!("{container}, process {pid:?}: {e}"));
}

/// A file as a container sees it, read from the node.
pub fn file_in(pod: &Value, container: &str, path: &str) -> std::io::Result<String> {
    let pid = pid(pod, container).ok_or_else(|| std::io::Error::other("no such process"))?;
    std::fs::read_to_string(format!("/proc/{}/root{path}", pid.as_raw_nonzero()))
}

/// The node's file system as its container runtime and kubelet see it, by way of their process: the CNI folders are
/// there and nowhere else. None where the cluster is not that of `e2e/node`.
pub fn node_root() -> Option<std::path::PathBuf> {
    let state = std::path::PathBuf::from(std::env::var_os("KUBECONFIG")?).parent()?.join("pid/containerd");
    let pid = std::fs::read_to_string(state).ok()?.split_whitespace().next()?.to_owned();
    Some(std::path::Path::new("/proc").join(pid).join("root"))
}

/// Resident memory of a container's first process, in KiB.
pub fn resident_kib(pod: &Value, container: &str) -> Option<u64> {
    let pid = pid(pod, container)?.as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// Sends a signal to one of the cluster's own programs, such as `kube-apiserver`.
pub fn signal_program(name: &str, signal: Signal) {
    // Process id and start time, as e2e/node keeps them beside the credentials.
    let file = node().join("pid").join(name);
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let pid = text.split(' ').next().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
    let pid = pid.unwrap_or_else(|| panic!("{}: no process id: {text}", file.display()));
    kill_process(pid, signal).unwrap_or_else(|e| panic!("{name}, process {pid:?}: {e}"));
}

/// Kills one of the cluster's own programs and starts it again after this long.
pub fn restart_program(name: &str, away: Duration) {
    let line = format!("SALLYPORT_NODE_RUN={} e2e/node/restart {name} {}", node().display(), away.as_secs());
    shell(&line).unwrap_or_else(|e| panic!("{e}"));
}

/// The folder of the cluster's state, where `KUBECONFIG` is.
fn node() -> PathBuf {
    let file = PathBuf::from(std::env::var("KUBECONFIG").expect("eval \"$(e2e/node/env)\" first"));
    file.parent().expect("a file in a folder").into()
}

/// The process whose control group is the container's and whose parent is not.
fn pid(pod: &Value, container: &str) -> Option<Pid> {
    let status = &pod["status"];
    let id = ["initContainerStatuses", "containerStatuses"]
        .iter()
        .filter_map(|list| status[list].as_array())
        .flatten()
        .find(|c| c["name"] == container)?["containerID"]
        .as_str()?
        .split_once("://")?
        .1
        .to_owned();
    let mut found: Vec<i32> = std::fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(&id))
        })
        .collect();
    found.sort_unstable();
    Pid::from_raw(*found.first()?)
}
