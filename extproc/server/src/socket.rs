//! The unix socket: only its owner may ever connect, and a live one is never taken over.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening socket's file; removed when dropped, unless somebody else's stands in its place by then.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

/// Binds a socket that only its owner may connect to.
///
/// It is made in a directory that nobody else may enter and then moved to its place: between `bind` and
/// `chmod` a socket at its final path would be open to whoever the umask lets in.
pub(crate) fn bind(path: &Path) -> Result<(UnixListener, SocketFile)> {
    refuse_unless_stale(path)?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let private = parent.join(format!(".{}", std::process::id()));
    // Left behind by a process of the same id that was killed at the wrong moment.
    let _ = std::fs::remove_dir_all(&private);
    std::fs::DirBuilder::new().mode(0o700).create(&private)?;
    let bound = bind_in(&private, path);
    let _ = std::fs::remove_dir_all(&private);
    bound
}

fn bind_in(private: &Path, path: &Path) -> Result<(UnixListener, SocketFile)> {
    let inner = private.join("s");
    let listener = UnixListener::bind(&inner)?;
    std::fs::set_permissions(&inner, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    std::fs::rename(&inner, path)?;
    let file = SocketFile { path: path.to_owned(), inode: inode(path)? };
    Ok((listener, file))
}

/// A socket file outlives the process that made it: one that nobody answers on may be replaced. What is no
/// socket is not ours to replace.
fn refuse_unless_stale(path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(Error::new(ErrorKind::AlreadyExists, "the path exists and is not a socket"));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(Error::new(ErrorKind::AddrInUse, "another process answers on this socket")),
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => Ok(()),
        Err(e) => Err(e),
    }
}

fn inode(path: &Path) -> Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|now| now == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_its_owner_s_alone_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let (_listener, file) = bind(&path).unwrap();
        assert_eq!(std::fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_socket_is_not_taken_over_and_a_dead_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let (listener, file) = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(listener);
        let (_listener, second) = bind(&path).unwrap();
        drop(file);
        assert!(path.exists(), "the first one's end does not remove the second one's socket");
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
