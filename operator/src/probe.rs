//! `sallyport-operator probe URL...`: whether addresses answer. It is what `helm test` runs, in an image that
//! has no shell and no curl.
//!
//! `http://HOST:PORT/PATH` must answer 200; of `tcp://HOST:PORT` a connection is all that is asked, so it says
//! nothing about the certificate behind it.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How long one address may take, its retries included: a Service's endpoints follow its pods by seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between attempts.
const PAUSE: Duration = Duration::from_millis(500);
/// More of a head is not read.
const HEAD: u64 = 1 << 10;

/// Why an address counts as not answering.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is no address of ours.
    #[error("`{0}` is neither http://HOST:PORT/PATH nor tcp://HOST:PORT")]
    Address(String),
    /// No connection, or a broken one.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Something else than 200.
    #[error("answered `{0}`")]
    Status(String),
}

/// Asks every address in turn; success where all of them answer.
pub fn run(addresses: impl IntoIterator<Item = String>) -> ExitCode {
    let mut asked = 0_u32;
    let mut failed = 0_u32;
    for address in addresses {
        asked += 1;
        match patiently(&address, PATIENCE) {
            Ok(()) => eprintln!("ok      {address}"),
            Err(error) => {
                failed += 1;
                eprintln!("failed  {address}: {error}");
            }
        }
    }
    if asked == 0 {
        eprintln!("usage: sallyport-operator probe URL...");
        return ExitCode::from(2);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn patiently(address: &str, patience: Duration) -> Result<(), Error> {
    let began = Instant::now();
    loop {
        match once(address) {
            Err(Error::Io(_) | Error::Status(_)) if began.elapsed() + PAUSE < patience => {
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}

fn once(address: &str) -> Result<(), Error> {
    if let Some(host) = address.strip_prefix("tcp://") {
        return connect(host).map(drop).map_err(Error::from);
    }
    let wrong = || Error::Address(address.to_owned());
    let rest = address.strip_prefix("http://").ok_or_else(wrong)?;
    let (host, path) = rest.split_once('/').ok_or_else(wrong)?;
    let mut stream = connect(host)?;
    write!(stream, "GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")?;
    let mut head = Vec::new();
    stream.take(HEAD).read_to_end(&mut head)?;
    let head = String::from_utf8_lossy(&head);
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) == Some("200") { Ok(()) } else { Err(Error::Status(status.to_owned())) }
}

fn connect(host: &str) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
    for address in host.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(ATTEMPT))?;
                stream.set_write_timeout(Some(ATTEMPT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn serve(answer: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // To its end: who closes with bytes unread breaks the connection.
            let (mut request, mut byte) = (Vec::new(), [0]);
            while !request.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).unwrap();
                request.extend_from_slice(&byte);
            }
            stream.write_all(answer.as_bytes()).unwrap();
        });
        address
    }

    #[test]
    fn an_address_that_answers_200_is_well() {
        let host = serve("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        once(&format!("http://{host}/readyz")).unwrap();
    }

    #[test]
    fn an_address_that_answers_503_is_not() {
        let host = serve("HTTP/1.1 503 Service Unavailable\r\n\r\n");
        let error = once(&format!("http://{host}/readyz")).unwrap_err();
        assert!(matches!(error, Error::Status(s) if s.contains("503")));
    }

    #[test]
    fn a_port_that_is_open_is_enough_for_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        once(&format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
    }

    #[test]
    fn a_closed_port_is_given_up_in_the_end() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(matches!(patiently(&format!("tcp://{free}"), Duration::ZERO), Err(Error::Io(_))));
    }

    #[test]
    fn what_is_no_address_is_said_at_once() {
        assert!(matches!(patiently("https://x/", PATIENCE), Err(Error::Address(_))));
    }
}
