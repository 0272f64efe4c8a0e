//! Whom upstreams are checked against, and whom agents must trust: files, and the variables that name them.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use jiff::Timestamp;
use sallyport_extproc::tls::{Authority, Minter, Tls, mozilla_roots};

/// What programs call the file of authorities that replaces their own: all of Mozilla's and ours.
const BUNDLE_VARIABLES: [&str; 8] = [
    "SSL_CERT_FILE",                    // OpenSSL and what is built on it, Go, rustls-native-certs
    "REQUESTS_CA_BUNDLE",               // Python requests
    "CURL_CA_BUNDLE",                   // curl
    "PIP_CERT",                         // pip
    "GIT_SSL_CAINFO",                   // git
    "AWS_CA_BUNDLE",                    // AWS CLI and boto3
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", // gRPC in C++, Python, Ruby
    "CARGO_HTTP_CAINFO",                // cargo
];
/// What programs call the file of authorities that they take besides their own.
const EXTRA_VARIABLES: [&str; 2] = [
    "NODE_EXTRA_CA_CERTS", // Node
    "DENO_CERT",           // Deno
];

/// Files that certificates are made and checked by.
#[derive(Debug)]
pub(super) struct Trust {
    /// What serves certificates.
    pub(super) tls: Tls,
    /// Whom upstreams are checked against.
    pub(super) upstream: PathBuf,
    /// Our authority alone.
    pub(super) authority: PathBuf,
    /// Whom agents trust.
    bundle: PathBuf,
}

impl Trust {
    /// Opens the authority, and writes the other files into the run directory.
    pub(super) fn open(authority: &Path, run_dir: &Path, more: Option<&Path>) -> anyhow::Result<Self> {
        let mut roots = mozilla_roots();
        if let Some(file) = more {
            let text = fs::read_to_string(file).with_context(|| format!("--ca-bundle {}", file.display()))?;
            ensure!(
                text.contains("-----BEGIN CERTIFICATE-----"),
                "--ca-bundle {}: holds no certificate (PEM)",
                file.display()
            );
            roots = format!("{roots}{}\n", text.trim_end());
        }
        let opened = Authority::open(authority, Timestamp::now()).context("--authority")?;
        let (upstream, bundle) = (run_dir.join("upstream.pem"), run_dir.join("bundle.pem"));
        write(&upstream, &roots)?;
        write(&bundle, &format!("{roots}{}", opened.certificate()))?;
        let authority = std::path::absolute(authority.join("ca.pem"))?;
        Ok(Self { tls: Tls::new(Minter::new(opened)?), upstream, authority, bundle })
    }

    /// A file for shells to read: `. FILE`.
    pub(super) fn write_env(&self, file: &Path, proxy: &str) -> anyhow::Result<()> {
        let mut text = String::from("# Sends programs through `sallyport up`: . this file\n");
        let mut set = |name: &str, value: &str| {
            let _ = writeln!(text, "export {name}='{}'", value.replace('\'', r"'\''"));
        };
        for name in ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"] {
            set(name, proxy);
        }
        for name in BUNDLE_VARIABLES {
            set(name, &self.bundle.to_string_lossy());
        }
        for name in EXTRA_VARIABLES {
            set(name, &self.authority.to_string_lossy());
        }
        // Node's own fetch asks the proxy only then (Node 22.21 and 24 on).
        set("NODE_USE_ENV_PROXY", "1");
        write(file, &text)
    }
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(file, text).with_context(|| format!("{}: can't be written", file.display()))
}

/// Where the authority is kept, unless somebody says otherwise: it must outlive a run, or programs would have
/// to be told of another one each time.
pub(super) fn authority_dir() -> anyhow::Result<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    let state = variable("XDG_STATE_HOME").or_else(|| variable("HOME").map(|h| h.join(".local/state")));
    let state = state.context(
        "no directory for the authority: neither XDG_STATE_HOME nor HOME is set; name one with --authority",
    )?;
    Ok(state.join("sallyport/authority"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundles_hold_what_they_should_and_the_variables_name_them() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("it's run");
        fs::create_dir(&run).unwrap();
        let more = dir.path().join("more.pem");
        let (other, _) = Authority::make(Timestamp::now()).unwrap();
        fs::write(&more, other.certificate()).unwrap();
        let trust = Trust::open(&dir.path().join("ca"), &run, Some(&more)).unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        let (upstream, bundle, own) = (read(&trust.upstream), read(&trust.bundle), read(&trust.authority));
        assert!(upstream.contains(other.certificate().trim()) && bundle.contains(other.certificate().trim()));
        // Upstreams that our own authority signed would be us.
        assert!(!upstream.contains(own.trim()) && bundle.contains(own.trim()));
        let env = run.join("env");
        trust.write_env(&env, "http://127.0.0.1:1").unwrap();
        let shell = r#". "$1" && cat "$SSL_CERT_FILE" && echo "$NODE_EXTRA_CA_CERTS $https_proxy""#;
        let out = std::process::Command::new("sh").args(["-c", shell, "sh"]).arg(&env).output().unwrap();
        let said = String::from_utf8(out.stdout).unwrap();
        assert!(said.starts_with(&bundle), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(said.ends_with(&format!("{} http://127.0.0.1:1\n", trust.authority.display())), "{said}");

        fs::write(&more, "nothing").unwrap();
        let e = format!("{:#}", Trust::open(&dir.path().join("ca"), &run, Some(&more)).unwrap_err());
        assert!(e.contains("holds no certificate"), "{e}");
    }
}
