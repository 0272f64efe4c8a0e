//! The last good bundle, on a disk that outlives the process: with every operator gone, a container that
//! starts again enforces what it enforced.
//!
//! Not guaranteed: anything against who can write to the directory. It is mounted in this container alone.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use prost::Message as _;
use sallyport_proto::discovery::Bundle;

use crate::discovery::{Held, Refused, Verified};

const FILE: &str = "bundle.pb";
const ASIDE: &str = "bundle.corrupt.pb";

/// The directory with the last good bundle.
#[derive(Clone, Debug)]
pub(crate) struct State {
    dir: PathBuf,
}

/// Why what is kept can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    #[error("it can't be read: {0}")]
    Read(#[from] io::Error),
    #[error("it is no bundle: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error("{0}")]
    Refused(#[from] Refused),
}

// === impl State ===

impl State {
    pub(crate) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The bundle that was kept last, checked as one that comes from the operator is.
    pub(crate) fn load(&self) -> Result<Option<Verified>, Unusable> {
        let bytes = match fs::read(self.dir.join(FILE)) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let bundle = Bundle::decode(bytes.as_slice())?;
        Ok(Some(Verified::new(bundle, &Held::default())?))
    }

    /// Keeps a bundle; the one before stays until this one is whole on the disk.
    pub(crate) fn keep(&self, bundle: &Bundle) -> io::Result<()> {
        replace(&self.dir, FILE, &bundle.encode_to_vec())
    }

    /// Moves what can't be used out of the way, for whoever wants to know why.
    pub(crate) fn set_aside(&self) -> io::Result<()> {
        fs::rename(self.dir.join(FILE), self.dir.join(ASIDE))
    }
}

/// Writes a file that only its owner may read, in one step as everybody else sees it.
pub(crate) fn replace(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.new"));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    // `mode` counts only where the file is made.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(name))?;
    fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use sallyport_proto::discovery::{
        ENVOY_PART, Kill, POLICY_PART, Part, SCHEMA, bundle_digest, part_digest,
    };

    use super::*;

    fn bundle() -> Bundle {
        let part = |name: &str, content: &'static [u8]| Part {
            name: name.into(),
            digest: part_digest(content),
            content: Some(content.into()),
        };
        let parts = vec![part(POLICY_PART, b"{}"), part(ENVOY_PART, b"{\"x\":1}")];
        let kill = Some(Kill { by: "namespace a".into() });
        let mut bundle = Bundle { schema: SCHEMA, parts, kill, ..Bundle::default() };
        bundle.digest = bundle_digest(&bundle);
        bundle
    }

    #[test]
    fn what_is_kept_comes_back_and_is_its_owner_s_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::new(dir.path());
        assert!(state.load().unwrap().is_none());
        state.keep(&bundle()).unwrap();
        assert_eq!(state.load().unwrap().unwrap().bundle(), &bundle());
        let mode = fs::metadata(dir.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn no_damage_to_the_file_goes_unnoticed() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::new(dir.path());
        let good = bundle().encode_to_vec();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            fs::write(dir.path().join(FILE), &bad).unwrap();
            // Who threw the kill switch is for people, and no part of the digest.
            if let Ok(Some(loaded)) = state.load() {
                assert!(loaded.kill().is_some() && loaded.digest() == bundle().digest, "byte {at}");
            }
        }
        fs::write(dir.path().join(FILE), &good[..good.len() / 2]).unwrap();
        assert!(state.load().is_err());
        state.set_aside().unwrap();
        assert!(state.load().unwrap().is_none());
        assert!(dir.path().join(ASIDE).exists());
    }
}
