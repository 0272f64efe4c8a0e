//! What a measurement was taken on. A number without its machine is no number.

use serde::{Deserialize, Serialize};

/// The machine, as far as a reader needs it to judge a figure.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) arch: String,
    pub(crate) kernel: String,
    /// The load average over one minute when the measurement began.
    pub(crate) load: Option<f64>,
}

impl Machine {
    pub(crate) fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let cpu = cpuinfo.lines().find_map(|l| Some(l.strip_prefix("model name")?.split_once(':')?.1.trim()));
        Self {
            cpu: cpu.unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            arch: std::env::consts::ARCH.to_owned(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: read("/proc/loadavg").split(' ').next().and_then(|l| l.parse().ok()),
        }
    }

    /// One line for people.
    pub(crate) fn line(&self) -> String {
        let load = self.load.map(|l| format!(", load {l}")).unwrap_or_default();
        format!("{}, {} cores, {}, kernel {}{load}", self.cpu, self.cores, self.arch, self.kernel)
    }
}

/// `release` or `debug`: a debug build's timings are several times too slow.
pub(crate) const BUILD: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

/// The value that the share `p` of the values does not exceed (nearest rank); sorts the values.
pub(crate) fn percentile(values: &mut [f64], p: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[allow(clippy::cast_sign_loss, reason = "p and the length are not negative")]
    let rank = (p * values.len() as f64).ceil() as usize;
    values.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut values, 0.5), 50.0);
        assert_eq!(percentile(&mut values, 0.99), 99.0);
        assert_eq!(percentile(&mut [7.0], 0.99), 7.0);
        assert_eq!(percentile(&mut [], 0.5), 0.0);
    }
}
