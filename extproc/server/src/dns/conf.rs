//! The pod's nameservers and search domains.
//!
//! Read once, before the agent runs, and kept: an agent that is root may write the file later.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::{fs, io};

use sallyport_api::ends_label;
use serde::{Deserialize, Serialize};

use crate::sidecar::replace;

/// Where it stands in every container.
pub const RESOLV_CONF: &str = "/etc/resolv.conf";
const KEPT: &str = "resolver.json";
/// What the C library takes.
const MOST_NAMESERVERS: usize = 3;
/// What Kubernetes lets a pod have.
const MOST_SEARCH: usize = 32;

/// What of `resolv.conf` counts here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Conf {
    /// Nameservers, in the order in which they are asked.
    pub nameservers: Vec<SocketAddr>,
    /// Search domains: lower case, no dot at their end.
    pub search: Vec<String>,
    /// Names with fewer dots are tried with the search domains first.
    pub ndots: usize,
}

impl Conf {
    /// Reads the text of a `resolv.conf`; lines that are not understood say nothing.
    pub fn parse(text: &str) -> Self {
        let mut conf = Self { ndots: 1, ..Self::default() };
        for line in text.lines() {
            let mut words = line.split(['#', ';']).next().unwrap_or_default().split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    // A zone (`%eth0`) makes it link-local, which no cluster's nameserver is.
                    let address = words.next().and_then(|w| w.parse::<IpAddr>().ok());
                    conf.nameservers.extend(address.map(|a| SocketAddr::new(a, 53)));
                }
                Some("search") => {
                    let domain = |w: &str| w.trim_matches('.').to_ascii_lowercase();
                    conf.search = words.map(domain).filter(|d| !d.is_empty()).take(MOST_SEARCH).collect();
                }
                Some("options") => {
                    let ndots = words.find_map(|w| w.strip_prefix("ndots:")?.parse().ok());
                    conf.ndots = ndots.unwrap_or(conf.ndots).min(15);
                }
                _ => {}
            }
        }
        conf.nameservers.truncate(MOST_NAMESERVERS);
        conf
    }

    /// What was kept in `state_dir`, else what stands in `file`, which is kept from now on.
    pub fn of_pod(state_dir: &Path, file: &Path) -> io::Result<Self> {
        if let Ok(bytes) = fs::read(state_dir.join(KEPT))
            && let Ok(conf) = serde_json::from_slice(&bytes)
        {
            return Ok(conf);
        }
        let conf = Self::parse(&fs::read_to_string(file)?);
        replace(state_dir, KEPT, &serde_json::to_vec(&conf).map_err(io::Error::other)?)?;
        Ok(conf)
    }

    /// The cluster's own domain (`cluster.local`), from the search domain `svc.cluster.local`.
    pub fn cluster_domain(&self) -> Option<&str> {
        // The shortest: a namespace may be called `svc`.
        self.search.iter().filter_map(|s| s.strip_prefix("svc.")).min_by_key(|domain| domain.len())
    }

    /// The names that a stub resolver would ask for `host`, in its order.
    pub fn candidates(&self, host: &str) -> Vec<String> {
        let mut names: Vec<String> = self.search.iter().map(|s| format!("{host}.{s}")).collect();
        let absolute = host.matches('.').count() >= self.ndots;
        names.insert(if absolute { 0 } else { names.len() }, host.to_owned());
        names.retain(|n| n.len() <= 253);
        names
    }
}

/// Whether `name` is `domain` or below it.
pub(crate) fn within(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || ends_label(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "search a.svc.cluster.local svc.cluster.local cluster.local corp.test\n\
                       nameserver 10.96.0.10\nnameserver fe80::1%eth0\nnameserver fd00::a # two\noptions ndots:5 edns0\n";

    #[test]
    fn a_pod_s_file_is_read() {
        let conf = Conf::parse(POD);
        assert_eq!(
            conf.nameservers,
            ["10.96.0.10:53", "[fd00::a]:53"].map(|a| a.parse::<SocketAddr>().unwrap())
        );
        assert_eq!((conf.search.len(), conf.ndots), (4, 5));
        assert_eq!(conf.cluster_domain(), Some("cluster.local"));
        let odd = Conf::parse("search svc.svc.cluster.local svc.cluster.local cluster.local");
        assert_eq!(odd.cluster_domain(), Some("cluster.local"));
        assert_eq!(Conf::parse("nonsense\noptions x\n").ndots, 1);
    }

    #[test]
    fn search_domains_come_first_for_short_names_only() {
        let conf = Conf { ndots: 2, ..Conf::parse("search x.test y.test") };
        assert_eq!(conf.candidates("a.b"), ["a.b.x.test", "a.b.y.test", "a.b"]);
        assert_eq!(conf.candidates("a.b.c"), ["a.b.c", "a.b.c.x.test", "a.b.c.y.test"]);
    }

    #[test]
    fn what_was_read_first_counts_although_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("resolv.conf");
        fs::write(&file, POD).unwrap();
        let first = Conf::of_pod(dir.path(), &file).unwrap();
        fs::write(&file, "nameserver 203.0.113.9\n").unwrap();
        assert_eq!(Conf::of_pod(dir.path(), &file).unwrap(), first);
    }
}
