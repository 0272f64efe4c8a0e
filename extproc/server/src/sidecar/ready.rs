//! Whether a bundle is in force, asked once a second by a probe that starts this program anew each time.
//!
//! A line on a unix socket, and no HTTP: the probe is to cost nothing. It is answered by the thread that answers
//! Envoy, so that one that hangs is not ready.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::sync::watch;

use super::apply::InForce;
use super::captured::Captured;
use crate::socket::{self, SocketFile};

const SOCKET: &str = "ready.sock";
const READY: &str = "ready";
/// The probe gives up after a second by itself.
const PROBE_TIMEOUT: Duration = Duration::from_millis(900);

/// The socket that is asked.
pub(crate) struct ReadySocket {
    listener: std::os::unix::net::UnixListener,
    _file: SocketFile,
}

// === impl ReadySocket ===

impl ReadySocket {
    pub(crate) fn bind(run_dir: &Path) -> io::Result<Self> {
        let (listener, file) = socket::bind(&run_dir.join(SOCKET))?;
        Ok(Self { listener, _file: file })
    }

    /// Answers for ever.
    pub(crate) async fn serve(
        self,
        in_force: watch::Receiver<Option<Arc<InForce>>>,
        captured: watch::Receiver<Captured>,
    ) -> io::Result<()> {
        let listener = tokio::net::UnixListener::from_std(self.listener)?;
        loop {
            let mut stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) => {
                    // Out of file descriptors, say; accepting goes on when there are some again.
                    tracing::warn!("ready: {e}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let line = match (captured.borrow().fine(), &*in_force.borrow()) {
                (Err(why), _) => why,
                (Ok(()), Some(_)) => READY.to_owned(),
                (Ok(()), None) => "no bundle is in force: the operator has not sent one yet".to_owned(),
            };
            // A line fits into the socket's buffer: nobody is waited for.
            let _ = stream.write_all(format!("{line}\n").as_bytes()).await;
        }
    }
}

/// Asks; the error says why it is not ready.
pub fn ask(run_dir: &Path) -> Result<(), String> {
    let path = run_dir.join(SOCKET);
    let name = |e: io::Error| format!("{}: {e}", path.display());
    let stream = UnixStream::connect(&path).map_err(name)?;
    stream.set_read_timeout(Some(PROBE_TIMEOUT)).map_err(name)?;
    let mut line = String::new();
    stream.take(1024).read_to_string(&mut line).map_err(name)?;
    match line.trim() {
        READY => Ok(()),
        "" => Err(format!("{}: no answer", path.display())),
        reason => Err(reason.to_owned()),
    }
}
