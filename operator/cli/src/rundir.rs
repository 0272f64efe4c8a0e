//! The directory of one run: sockets, Envoy's bootstrap; private, and gone afterwards.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

/// The kernel's limit for a socket's path is 107 bytes; the longest name in here is `extproc.sock`.
const LONGEST: usize = 107 - "/extproc.sock".len();

/// What is written into a run directory, and removed from one that is not ours to remove.
const FILES: [&str; 6] = ["extproc.sock", "admin.sock", "envoy.json", "upstream.pem", "bundle.pem", "env"];

/// A private directory.
#[derive(Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Set where the directory is ours; it goes with us.
    made: Option<TempDir>,
}

impl RunDir {
    /// A fresh directory, or the named one. A named one that another run uses is refused.
    pub(crate) fn create(named: Option<&Path>) -> anyhow::Result<Self> {
        match named {
            Some(path) => Self::named(path).with_context(|| format!("--run-dir {}", path.display())),
            None => Self::fresh(),
        }
    }

    fn fresh() -> anyhow::Result<Self> {
        let mut private = tempfile::Builder::new();
        private.prefix("sallyport-").permissions(Permissions::from_mode(0o700));
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_dir());
        let temp = std::env::temp_dir();
        // A runtime directory may belong to someone else (after `sudo`), or have a long name.
        let dir = runtime
            .and_then(|dir| private.tempdir_in(dir).ok())
            .filter(|dir| dir.path().as_os_str().len() <= LONGEST)
            .map_or_else(|| private.tempdir_in(&temp), Ok)
            .with_context(|| format!("no directory can be made in {}", temp.display()))?;
        let run = Self { path: dir.path().to_owned(), made: Some(dir) };
        run.check_length()?;
        Ok(run)
    }

    fn named(path: &Path) -> anyhow::Result<Self> {
        let path = std::path::absolute(path)?;
        let run = match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let parent = path.parent().context("is no directory")?;
                let name = path.file_name().context("is no directory")?;
                let made = tempfile::Builder::new()
                    .prefix(name)
                    .rand_bytes(0)
                    .permissions(Permissions::from_mode(0o700))
                    .tempdir_in(parent)
                    .context("can't be made")?;
                Self { path, made: Some(made) }
            }
            found => {
                let found = found.context("can't be looked at")?;
                ensure!(found.is_dir(), "is not a directory");
                ensure!(found.uid() == rustix::process::getuid().as_raw(), "belongs to another user");
                ensure!(
                    found.mode().trailing_zeros() >= 6, // nothing for group and others
                    "is open to other users; whoever reaches its sockets commands Envoy. Close it: chmod 700 {}",
                    path.display()
                );
                Self { path, made: None }
            }
        };
        run.check_length()?;
        if run.made.is_none() {
            for socket in ["extproc.sock", "admin.sock"] {
                ensure!(
                    UnixStream::connect(run.path.join(socket)).is_err(),
                    "is in use by another run ({socket} answers); choose another --run-dir"
                );
            }
            run.clear();
        }
        Ok(run)
    }

    fn check_length(&self) -> anyhow::Result<()> {
        ensure!(
            self.path.as_os_str().len() <= LONGEST,
            "{} is too long a path for sockets (more than {LONGEST} bytes); give a shorter one with --run-dir",
            self.path.display()
        );
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what was written, and the directory if it was made here.
    pub(crate) fn remove(self) -> anyhow::Result<()> {
        self.clear();
        match self.made {
            Some(dir) => dir.close().context("the run directory can't be removed"),
            None => Ok(()),
        }
    }

    fn clear(&self) {
        for file in FILES {
            // Not there is what is wanted.
            let _ = fs::remove_file(self.path.join(file));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_fresh_directory_is_private_and_goes() {
        let run = RunDir::create(None).unwrap();
        let path = run.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        fs::write(path.join("envoy.json"), "{}").unwrap();
        run.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_named_directory_is_made_private_or_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        let run = RunDir::create(Some(&path)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        run.remove().unwrap();
        assert!(!path.exists());

        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let e = format!("{:#}", RunDir::create(Some(&path)).unwrap_err());
        assert!(e.contains("chmod 700"), "{e}");

        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        let listener = UnixListener::bind(path.join("admin.sock")).unwrap();
        let e = format!("{:#}", RunDir::create(Some(&path)).unwrap_err());
        assert!(e.contains("in use"), "{e}");
        drop(listener);
        let run = RunDir::create(Some(&path)).unwrap();
        assert!(!path.join("admin.sock").exists());
        run.remove().unwrap();
        assert!(path.exists(), "a directory that was there stays");

        let long = temp.path().join("x".repeat(120));
        let e = format!("{:#}", RunDir::create(Some(&long)).unwrap_err());
        assert!(e.contains("too long"), "{e}");
    }
}
