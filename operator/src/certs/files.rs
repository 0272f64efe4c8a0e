//! Certificates that something else renews: `tls.crt`, `tls.key` and `ca.crt` in one directory, as a
//! mounted Secret of cert-manager has them.
//!
//! Files are read at each look and compared by content: a mounted Secret changes by a symbolic link, whose
//! times say little. A half-written or wrong set is reported and the last good one stays in use.

use std::path::{Path, PathBuf};

use super::mint::{self, Leaf, MintError};
use super::{Certificates, LOOK};

/// Why a directory can't be served from.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file can't be read.
    #[error("{path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {error}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: MintError,
    },
}

/// What one look found.
#[derive(Clone, PartialEq, Eq)]
struct Files {
    chain: Vec<u8>,
    key: Vec<u8>,
    authorities: Vec<u8>,
}

/// Serves from the directory and follows its changes. The first look must succeed.
pub async fn run(dir: PathBuf, certificates: Certificates) -> anyhow::Result<()> {
    let mut held = load(&dir, &certificates, None).await?;
    let mut look = tokio::time::interval(LOOK);
    loop {
        look.tick().await;
        match load(&dir, &certificates, Some(&held)).await {
            Ok(files) => held = files,
            Err(error) => tracing::error!(%error, "the last good certificate stays in use"),
        }
    }
}

async fn load(dir: &Path, certificates: &Certificates, held: Option<&Files>) -> Result<Files, FilesError> {
    let (chain, key, ca) = (dir.join("tls.crt"), dir.join("tls.key"), dir.join("ca.crt"));
    let files = Files { chain: get(&chain).await?, key: get(&key).await?, authorities: get(&ca).await? };
    if held == Some(&files) {
        return Ok(files);
    }
    let content = |path: PathBuf| move |error| FilesError::Content { path, error };
    let expires = mint::pem_expiry(&files.authorities).map_err(content(ca.clone()))?;
    let bundle = std::str::from_utf8(&files.authorities)
        .map_err(|e| content(ca)(MintError::Certificate(e.to_string())))?;
    let leaf: Leaf = mint::read(&files.chain, &files.key).map_err(content(chain))?;
    certificates.trust(bundle, expires);
    certificates.serve(leaf);
    Ok(files)
}

async fn get(path: &Path) -> Result<Vec<u8>, FilesError> {
    tokio::fs::read(path).await.map_err(|error| FilesError::Read { path: path.into(), error })
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::metrics::Metrics;

    async fn put(dir: &Path, name: &str, text: &str) {
        tokio::fs::write(dir.join(name), text).await.unwrap();
    }

    #[tokio::test]
    async fn a_renewed_certificate_is_served_and_a_wrong_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let certificates = Certificates::new(Metrics::new().unwrap());
        let one = mint::authority(Timestamp::now()).unwrap();
        put(dir.path(), "tls.crt", &one.cert).await;
        put(dir.path(), "tls.key", &one.key.0).await;
        assert!(load(dir.path(), &certificates, None).await.is_err(), "no ca.crt yet");
        put(dir.path(), "ca.crt", &one.cert).await;
        let held = load(dir.path(), &certificates, None).await.unwrap();
        let served = certificates.leaf().unwrap();
        assert!(certificates.ready(Timestamp::now()));

        let two = mint::authority(Timestamp::now()).unwrap();
        put(dir.path(), "tls.crt", &two.cert).await;
        let error = load(dir.path(), &certificates, Some(&held)).await.err().unwrap().to_string();
        assert!(error.contains("tls.crt"), "{error}");
        assert_eq!(certificates.leaf().unwrap().key.cert, served.key.cert, "the key is still the old one");

        put(dir.path(), "tls.key", &two.key.0).await;
        load(dir.path(), &certificates, Some(&held)).await.unwrap();
        assert_ne!(certificates.leaf().unwrap().key.cert, served.key.cert);
    }
}
