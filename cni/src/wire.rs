//! What the plugin and the daemon say to each other: one line of JSON each way over a unix socket, the pod's
//! network namespace as an open file beside the first byte.
//!
//! The file, not its path: the daemon is in a container and need not see where the runtime keeps it.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::conf::Attachment;

/// The longest line. All annotations of an object together may have 256 KiB.
pub const MOST_BYTES: usize = 512 << 10;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Command {
    /// Write the rules.
    Add,
    /// Look whether they are there.
    Check,
    /// The pod goes.
    Del,
    /// Forget all but these.
    Gc,
}

/// What the plugin asks for.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// What is to be done.
    pub command: Command,
    /// The container's id.
    #[serde(default)]
    pub container_id: String,
    /// The pod's namespace.
    #[serde(default)]
    pub namespace: String,
    /// The pod's name.
    #[serde(default)]
    pub pod: String,
    /// The pod's annotation `sallyport.dev/status`.
    #[serde(default)]
    pub status: String,
    /// GC: what stays.
    #[serde(default)]
    pub valid: Vec<Attachment>,
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    /// Done.
    Done,
    /// Not done.
    Failed {
        /// One of [`crate::conf::code`].
        code: u32,
        /// Why.
        message: String,
    },
}

/// Writes a line, with an open file where there is one.
pub fn send<T: Serialize>(
    stream: &mut UnixStream,
    message: &T,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().collect();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::Error::other("no room for one file"));
    }
    let sent = sendmsg(&*stream, &[IoSlice::new(&line)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(line.get(sent..).unwrap_or_default())
}

/// Reads a line, and the open file that came with it.
pub fn receive<T: serde::de::DeserializeOwned>(stream: &mut UnixStream) -> io::Result<(T, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut line = vec![0; 16 << 10];
    let got =
        recvmsg(&*stream, &mut [IoSliceMut::new(&mut line)], &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    line.truncate(got);
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    while line.last() != Some(&b'\n') {
        let mut more = [0; 16 << 10];
        match stream.read(&mut more)? {
            0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side closed")),
            n => line.extend_from_slice(&more[..n]),
        }
        if line.len() > MOST_BYTES {
            return Err(io::Error::other(format!("longer than {MOST_BYTES} bytes")));
        }
    }
    Ok((serde_json::from_slice(&line)?, file))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_line_and_a_file_arrive_however_long_the_line_is() {
        for length in [0, 100_000] {
            let (mut here, mut there) = UnixStream::pair().unwrap();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(b"x").unwrap();
            let sending = std::thread::spawn(move || {
                let message = "a".repeat(length);
                send(&mut here, &message, Some(file.as_fd())).unwrap();
            });
            let (got, file): (String, _) = receive(&mut there).unwrap();
            sending.join().unwrap();
            assert_eq!(got.len(), length);
            assert_eq!(std::fs::File::from(file.unwrap()).metadata().unwrap().len(), 1);
        }
    }

    #[test]
    fn what_is_cut_off_too_long_or_no_json_is_an_error() {
        for bytes in [&b"{"[..], b"{}x\n", &vec![b' '; MOST_BYTES + 20_000]] {
            let (mut here, mut there) = UnixStream::pair().unwrap();
            let bytes = bytes.to_vec();
            // The reader may have gone before the last byte.
            let sending = std::thread::spawn(move || drop(here.write_all(&bytes)));
            assert!(receive::<Reply>(&mut there).is_err());
            drop(there);
            sending.join().unwrap();
        }
    }
}
