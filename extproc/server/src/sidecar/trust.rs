//! Whom a captured pod trusts: the files that Envoy checks upstreams by, and those that the agent's programs read.
//!
//! The authority is this pod's own. Its key is made here, stays in the volume that no other container mounts, and
//! ends with the pod, so nobody outside has a reason to trust it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use sallyport_api::names::{AGENT_AUTHORITY, AGENT_BUNDLE, CLUSTER_AUTHORITY, UPSTREAM_ROOTS};

use super::Options;
use super::state::replace;
use crate::tls::{Authority, AuthorityError, Minter, Tls, Whose, mozilla_roots};

/// The authority's directory, in the state directory.
const AUTHORITY: &str = "authority";

/// Writes the files, and makes what serves certificates.
pub(super) fn prepare(options: &Options, trust_dir: &Path) -> Result<Tls> {
    let authority = options.state_dir.join(AUTHORITY);
    let authority = open(&authority, Timestamp::now()).context("the pod's authority")?;
    let roots = mozilla_roots();
    let cluster = cluster(&options.identity_dir.join(CLUSTER_AUTHORITY))?;
    let bundle = format!("{roots}{cluster}{}", authority.certificate());
    for (dir, name, text) in [
        // Not our own: nobody outside has its key.
        (options.run_dir.as_path(), UPSTREAM_ROOTS, &format!("{roots}{cluster}")),
        (trust_dir, AGENT_BUNDLE, &bundle),
        (trust_dir, AGENT_AUTHORITY, &authority.certificate().to_owned()),
    ] {
        let path = dir.join(name);
        let written = replace(dir, name, text.as_bytes())
            // Certificates; the agent is another user.
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)));
        written.with_context(|| format!("{}: can't be written", path.display()))?;
    }
    Ok(Tls::new(Minter::new(authority)?))
}

/// The authority that the API server's certificate is of; empty where the pod was given none.
fn cluster(path: &Path) -> Result<String> {
    match fs::read_to_string(path) {
        // A last line without an end would run into the next certificate.
        Ok(text) => Ok(format!("{}\n", text.trim_end())),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

/// The authority of the process before, or a new one. What can't be read is no loss: without its certificate in
/// [`AGENT_BUNDLE`] no agent was started, since no process before came as far as that.
fn open(dir: &Path, now: Timestamp) -> Result<Authority, AuthorityError> {
    match Authority::open(dir, Whose::Pod, now) {
        Err(AuthorityError::Unusable { error, .. }) => {
            tracing::error!("the pod's authority can't be used, so another is made: {error}");
            let failed = |error| AuthorityError::File { path: dir.to_owned(), error };
            fs::remove_dir_all(dir).map_err(failed)?;
            Authority::open(dir, Whose::Pod, now)
        }
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::server::Config;

    #[test]
    fn the_agent_trusts_this_pod_and_envoy_does_not() {
        let dirs = ["run", "state", "trust", "identity"].map(|_| tempfile::tempdir().unwrap());
        let [run, state, trust, identity] = dirs.each_ref().map(tempfile::TempDir::path);
        let options = Options {
            discovery: String::new(),
            run_dir: run.to_owned(),
            state_dir: state.to_owned(),
            identity_dir: identity.to_owned(),
            captured: true,
            metrics_addr: ([127, 0, 0, 1], 0).into(),
            dns_port: None,
            trust_dir: Some(trust.to_owned()),
            config: Config::new(""),
            watchdog: Duration::from_secs(1),
        };
        let prepare = || super::prepare(&options, trust).unwrap();
        let first = prepare();
        let own = fs::read_to_string(trust.join(AGENT_AUTHORITY)).unwrap();
        assert_eq!(own, first.minter().authority().certificate());
        assert!(fs::read_to_string(trust.join(AGENT_BUNDLE)).unwrap().contains(&own));
        assert!(!fs::read_to_string(run.join(UPSTREAM_ROOTS)).unwrap().contains(&own));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&trust.join(AGENT_BUNDLE)), 0o644, "the agent is another user");
        assert_eq!(mode(&state.join(AUTHORITY).join("ca.key")), 0o600);
        assert!(!trust.join("ca.key").exists());
        // The container starts again, and the agent goes on trusting what it read.
        prepare();
        assert_eq!(fs::read_to_string(trust.join(AGENT_AUTHORITY)).unwrap(), own);
        // Half of an authority: the process ended between two files.
        fs::remove_file(state.join(AUTHORITY).join("ca.pem")).unwrap();
        prepare();
        assert_ne!(fs::read_to_string(trust.join(AGENT_AUTHORITY)).unwrap(), own);
        // Upstreams may be the cluster's, too.
        let (other, _) = Authority::make(Whose::Machine, Timestamp::now()).unwrap();
        fs::write(identity.join(CLUSTER_AUTHORITY), other.certificate().trim_end()).unwrap();
        prepare();
        for file in [run.join(UPSTREAM_ROOTS), trust.join(AGENT_BUNDLE)] {
            let text = fs::read_to_string(file).unwrap();
            assert!(text.contains(other.certificate()));
            assert!(pem::parse_many(text).unwrap().len() > 50);
        }
    }
}
