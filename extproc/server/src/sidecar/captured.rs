//! Whether this pod is captured, found out from inside and without a right to look at the rules.
//!
//! The capture rules bring one connection of the sidecar's user to the sidecar itself: the one to an address that
//! nobody has ([`CHECK_ADDRESSES`]). It is dialled, and must come in on a listener of ours with the port it left
//! from. Without the rules it leaves the pod; whoever answers there, our listener sees nothing. All rules are loaded
//! as one transaction, so where this one is, all of them are.
//!
//! Until it has come in once, the operator is not asked for a bundle: nothing is enforced, the sidecar is not ready,
//! and the agent is not started. Not guaranteed: that the rules are those of the policy's newest generation.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use sallyport_api::names::{CHECK_ADDRESSES, CHECK_PORT};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::metrics::Metrics;

/// A connection within the kernel takes no time; this is for a machine that has none to spare.
const PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks while it is not captured.
const SOON: Duration = Duration::from_secs(1);
/// Between two looks afterwards: nobody in the pod can take the rules away.
const LATER: Duration = Duration::from_secs(60);

/// What was seen last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Captured {
    /// It need not be: the policy captures by proxy variables.
    NotAsked,
    /// The rules are there.
    Yes,
    /// They are not, or it was not looked yet; the reason.
    No(String),
}

// === impl Captured ===

impl Captured {
    /// What stands before anything was looked at.
    pub(crate) fn at_start(asked: bool) -> Self {
        if asked { Self::No("not checked yet".into()) } else { Self::NotAsked }
    }

    /// Fails with what to do about it where the pod should be captured and is not.
    pub(crate) fn fine(&self) -> Result<(), String> {
        match self {
            Self::NotAsked | Self::Yes => Ok(()),
            Self::No(why) => Err(format!(
                "this pod is not captured: its network namespace lacks Sallyport's rules ({why}). With capture.mode CNI \
                 it started before the plugin was on its node, or the runtime passes no annotations: delete the pod, so \
                 that it is made anew, and see DaemonSet sallyport-cni; with Init see the container sallyport-capture"
            )),
        }
    }
}

/// Looks for ever, where it is asked.
pub(crate) async fn keep(state: watch::Sender<Captured>, metrics: Arc<Metrics>) {
    // Until it is known to be there, it is missing.
    metrics.capture_missing.set(i64::from(state.borrow().fine().is_err()));
    while *state.borrow() != Captured::NotAsked {
        let now = match look().await {
            Ok(()) => Captured::Yes,
            Err(error) => Captured::No(error.to_string()),
        };
        let captured = now == Captured::Yes;
        metrics.capture_missing.set(i64::from(!captured));
        state.send_if_modified(|was| {
            let turned = matches!(*was, Captured::Yes) != captured;
            if turned && captured {
                tracing::info!("the pod is captured");
            } else if let (true, Err(why)) = (turned, now.fine()) {
                tracing::error!("{why}");
            }
            std::mem::replace(was, now.clone()) != now
        });
        tokio::time::sleep(if captured { LATER } else { SOON }).await;
    }
    // Whoever waits for this to end takes it for a fault.
    std::future::pending::<()>().await;
}

/// Waits until the pod is captured, or need not be.
pub(crate) async fn wait(state: &mut watch::Receiver<Captured>) {
    // Whoever looks lives as long as the process.
    let _ = state.wait_for(|now| now.fine().is_ok()).await;
}

/// Either family will do: the rules of both are one transaction, and a pod may have only one of them.
async fn look() -> io::Result<()> {
    let [first, second] = CHECK_ADDRESSES;
    let (first, second) = tokio::join!(dial(first), dial(second));
    first.or_else(|error| second.map_err(|_| error))
}

async fn dial(address: IpAddr) -> io::Result<()> {
    let loopback = match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    let named = |e: io::Error, what: SocketAddr| io::Error::new(e.kind(), format!("{what}: {e}"));
    let here = SocketAddr::new(loopback, CHECK_PORT);
    let there = SocketAddr::new(address, CHECK_PORT);
    let silence = || io::Error::new(io::ErrorKind::TimedOut, format!("{there} does not lead back here"));
    let listener = TcpListener::bind(here).await.map_err(|e| named(e, here))?;
    let both = async {
        let stream = TcpStream::connect(there).await.map_err(|e| named(e, there))?;
        let ours = stream.local_addr()?;
        loop {
            // Others in the pod may connect to the loopback; nobody else has our port.
            let (_, from) = listener.accept().await?;
            if from == ours {
                return Ok(());
            }
        }
    };
    tokio::time::timeout(PATIENCE, both).await.unwrap_or_else(|_| Err(silence()))
}
