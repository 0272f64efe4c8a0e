//! An upstream that is no honest one: it answers every call with the bytes it was given, whatever they are,
//! and keeps what it was sent.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A running scripted upstream; it ends with the process.
#[derive(Debug)]
pub struct Scripted {
    /// Where it listens.
    pub address: SocketAddr,
    got: Arc<Mutex<Vec<u8>>>,
    answer: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Scripted {
    /// Starts one on a free port of the loopback; until it is told otherwise it answers `204`.
    pub fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let address = listener.local_addr()?;
        let got = Arc::new(Mutex::new(Vec::new()));
        let answer = Arc::new(Mutex::new(vec![b"HTTP/1.1 204 No Content\r\n\r\n".to_vec()]));
        let (kept, said) = (Arc::clone(&got), Arc::clone(&answer));
        std::thread::Builder::new().name("scripted".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let (kept, said) = (Arc::clone(&kept), Arc::clone(&said));
                std::thread::spawn(move || serve(stream, &kept, &said));
            }
        })?;
        Ok(Self { address, got, answer })
    }

    /// What every call is answered with from now on, piece by piece; the connection ends after it.
    pub fn answer(&self, pieces: Vec<Vec<u8>>) {
        *self.answer.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = pieces;
    }

    /// `http://127.0.0.1:port` and the path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Everything that was sent to it, over all connections.
    pub fn got(&self) -> Vec<u8> {
        self.got.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

fn serve(mut stream: TcpStream, got: &Mutex<Vec<u8>>, answer: &Mutex<Vec<Vec<u8>>>) {
    let _ = stream.set_nodelay(true);
    let keep = |bytes: &[u8]| {
        got.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend_from_slice(bytes);
    };
    let mut buffer = [0; 16 << 10];
    let mut head = Vec::new();
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => {
                keep(&buffer[..n]);
                head.extend_from_slice(&buffer[..n]);
            }
            _ => return,
        }
    }
    // The body may be behind the head.
    let _ = stream.set_read_timeout(Some(Duration::from_millis(30)));
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        keep(&buffer[..n]);
    }
    let pieces = answer.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    for piece in pieces {
        if stream.write_all(&piece).is_err() {
            return;
        }
    }
    // What comes after the answer is kept too; it should be nothing.
    let _ = stream.shutdown(std::net::Shutdown::Write);
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        keep(&buffer[..n]);
    }
}
