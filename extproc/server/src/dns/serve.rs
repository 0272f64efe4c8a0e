//! UDP and TCP, on the loopback of both families.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Names;
use super::forward::{read_framed, write_framed};

/// Questions over UDP that are being answered; more are dropped, and the client asks again.
const MOST_QUESTIONS: usize = 512;
/// Connections; more wait.
const MOST_CONNECTIONS: usize = 64;
/// How long a client may take between two questions.
const IDLE: Duration = Duration::from_secs(10);
/// Between two attempts to listen.
const BIND_PAUSE: Duration = Duration::from_secs(1);

impl Names {
    /// Serves for ever. IPv6 is left out where the kernel has none: nothing can be asked over it.
    pub async fn serve(self: Arc<Self>, port: u16) {
        let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        let both = std::net::UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
        let second = async {
            if both {
                self.serve_at(v6).await;
            }
        };
        tokio::join!(self.serve_at(v4), second, self.keep());
    }

    async fn serve_at(self: &Arc<Self>, address: SocketAddr) {
        // An agent that sits on the port must not keep the process from running.
        let udp = until_free(address, || UdpSocket::bind(address)).await;
        let tcp = until_free(address, || TcpListener::bind(address)).await;
        tokio::join!(self.datagrams(Arc::new(udp)), self.connections(tcp));
    }

    async fn datagrams(self: &Arc<Self>, socket: Arc<UdpSocket>) {
        let places = Arc::new(Semaphore::new(MOST_QUESTIONS));
        let mut buffer = vec![0; 4_096];
        loop {
            let (length, client) = match socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                // Also what came back for an answer that nobody took.
                Err(e) => {
                    tracing::debug!(target: "sallyport::dns", "{e}");
                    continue;
                }
            };
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            let (names, socket, question) =
                (Arc::clone(self), Arc::clone(&socket), buffer[..length].to_vec());
            tokio::spawn(async move {
                if let Some(answer) = names.answer(&question, false).await {
                    let _ = socket.send_to(&answer, client).await;
                }
                drop(place);
            });
        }
    }

    async fn connections(self: &Arc<Self>, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        loop {
            // Nobody closes the semaphore.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) => {
                    tracing::warn!(target: "sallyport::dns", "{e}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let names = Arc::clone(self);
            tokio::spawn(async move {
                let _ = names.connection(stream).await;
                drop(place);
            });
        }
    }

    /// One question after the other.
    async fn connection(&self, mut stream: TcpStream) -> io::Result<()> {
        loop {
            let question = timeout(IDLE, read_framed(&mut stream)).await??;
            let Some(answer) = self.answer(&question, true).await else { return Ok(()) };
            timeout(IDLE, write_framed(&mut stream, &answer)).await??;
        }
    }
}

async fn until_free<T, F: Future<Output = io::Result<T>>>(address: SocketAddr, bind: impl Fn() -> F) -> T {
    let mut told = false;
    loop {
        match bind().await {
            Ok(bound) => return bound,
            Err(e) if !told => {
                tracing::error!(target: "sallyport::dns", "{address}: {e}; trying again until it is free");
            }
            Err(_) => {}
        }
        told = true;
        tokio::time::sleep(BIND_PAUSE).await;
    }
}
