//! What the kernel says a process used.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

/// Microseconds of CPU that a process' living threads have used.
///
/// From `schedstat`, in nanoseconds; where the kernel keeps none, from `stat`, in ticks of 10 ms. Threads
/// that ended take their share along; none of ours end during a measurement.
pub(super) fn cpu_us(pid: u32) -> anyhow::Result<f64> {
    let tasks = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&tasks).with_context(|| format!("{tasks}: the process is gone"))?;
    let mut total = 0.0;
    for entry in entries {
        let task = entry.with_context(|| tasks.clone())?.path();
        // A thread may end between the listing and the reading.
        total += thread_us(&task).unwrap_or_default();
    }
    ensure!(total > 0.0, "{tasks}: the kernel tells no CPU time (neither schedstat nor stat)");
    Ok(total)
}

/// Microseconds of CPU that the calling thread has used.
pub(super) fn own_cpu_us() -> anyhow::Result<f64> {
    thread_us(Path::new("/proc/thread-self")).context("/proc/thread-self: the kernel tells no CPU time")
}

fn thread_us(task: &Path) -> Option<f64> {
    let first = |file: &str| fs::read_to_string(task.join(file)).ok();
    if let Some(nanos) = first("schedstat").and_then(|s| s.split(' ').next()?.parse::<f64>().ok())
        && nanos > 0.0
    {
        return Some(nanos / 1e3);
    }
    first("stat").as_deref().and_then(ticks).map(|ticks| ticks * 10_000.0)
}

/// utime + stime, fields 14 and 15; the name before them may hold blanks and parentheses.
fn ticks(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<f64>().ok();
    Some(next()? + next()?)
}

/// Resident memory in KiB, now and at its highest.
#[allow(clippy::struct_field_names, reason = "the unit belongs to the name in the record")]
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Memory {
    pub(super) rss_kib: u64,
    pub(super) peak_kib: u64,
    /// The part that is not file pages, which sidecars on one node may share.
    pub(super) anon_kib: u64,
}

pub(super) fn memory(pid: u32) -> anyhow::Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("{path}: the process is gone"))?;
    Ok(parse_memory(&status))
}

fn parse_memory(status: &str) -> Memory {
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    Memory { rss_kib: field("VmRSS"), peak_kib: field("VmHWM"), anon_kib: field("RssAnon") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_understood() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 30 12 0 0 20 0";
        assert_eq!(ticks(stat), Some(42.0));
        let status = "Name:\tx\nVmHWM:\t  900 kB\nVmRSS:\t  800 kB\nRssAnon:\t 70 kB\n";
        assert_eq!(parse_memory(status), Memory { rss_kib: 800, peak_kib: 900, anon_kib: 70 });
    }

    #[test]
    fn work_shows_in_the_own_clock() {
        let before = own_cpu_us().unwrap();
        let mut x = 1_u64;
        for i in 0..3_000_000_u64 {
            x = std::hint::black_box(x.wrapping_mul(i | 1));
        }
        assert!(own_cpu_us().unwrap() > before);
        assert!(cpu_us(std::process::id()).unwrap() > 0.0);
    }
}
