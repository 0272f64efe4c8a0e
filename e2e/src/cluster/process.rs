//! A container's process, as the node sees it.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Sends a signal to a container's first process; the suite runs on the node, as root.
pub fn signal(pod: &Value, container: &str, signal: Signal) {
    let pid = pid(pod, container).unwrap_or_else(|| panic!("no process of {container} on this node"));
    kill_process(pid, signal).unwrap_or_else(|e| panic!("{container}, process {pid:?}: {e}"));
}

/// Resident memory of a container's first process, in KiB.
pub fn resident_kib(pod: &Value, container: &str) -> Option<u64> {
    let pid = pid(pod, container)?.as_raw_nonzero();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// A file as a container sees it, read from the node.
pub fn file_in(pod: &Value, container: &str, path: &str) -> std::io::Result<String> {
    let pid = pid(pod, container).ok_or_else(|| std::io::Error::other("no such process"))?;
    std::fs::read_to_string(format!("/proc/{}/root{path}", pid.as_raw_nonzero()))
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
