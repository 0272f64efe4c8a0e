//! A tiny HTTP/1.1 client over a plain TCP connection, or over TLS on one.
//!
//! A library client hides what these tests are about: where chunks end and when they came, whether a
//! chunked body ended with its last chunk or with a cut, and what happens to requests that no library
//! would send. One call, one connection.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::tls::Wire;

/// How long a call may take before the client gives up: far above anything a test waits for.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// What a request carries.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub enum Body {
    /// Nothing, and no header that says so.
    #[default]
    None,
    /// Bytes, with their length.
    Sized(Vec<u8>),
    /// Chunks, each written on its own, without a length.
    Chunked(Vec<Vec<u8>>),
}

/// A call to make.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Call {
    method: String,
    url: String,
    headers: Vec<(String, String)>,
    body: Body,
    body_after: Duration,
    proxy: Option<SocketAddr>,
    connect_to: Option<SocketAddr>,
    deadline: Duration,
    give_up_after: Option<usize>,
    said: Box<Said>,
}

/// What a call says otherwise than its URL does.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Said {
    trust: Option<String>,
    server_name: Option<String>,
    tunnel_to: Option<String>,
    host: Option<String>,
    target: Option<String>,
}

/// How a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum End {
    /// As its framing announced.
    Clean,
    /// The connection ended before the framing said so.
    Cut,
    /// The deadline passed.
    TimedOut,
    /// The caller had enough.
    GaveUp,
}

/// What came back.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Answer {
    /// Status; 0 if none came.
    pub status: u16,
    /// Headers, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, without its framing.
    pub body: Vec<u8>,
    /// When each piece of the body came, counted from the start of the call, and its length.
    pub pieces: Vec<(Duration, usize)>,
    /// Trailers, names in lower case.
    pub trailers: Vec<(String, String)>,
    /// How it ended.
    pub end: End,
    /// From the start of the call to its end.
    pub took: Duration,
}

impl Call {
    /// A GET.
    pub fn get(url: impl Into<String>) -> Self {
        Self::new("GET", url)
    }

    /// A POST of JSON.
    pub fn post_json(url: impl Into<String>, json: &serde_json::Value) -> Self {
        Self::new("POST", url)
            .header("content-type", "application/json")
            .body(Body::Sized(json.to_string().into()))
    }

    /// Any method. The URL is `http://host:port/path`; with `https://` a proxy is asked for a tunnel.
    pub fn new(method: &str, url: impl Into<String>) -> Self {
        Self {
            method: method.into(),
            url: url.into(),
            headers: Vec::new(),
            body: Body::None,
            body_after: Duration::ZERO,
            proxy: None,
            connect_to: None,
            deadline: DEADLINE,
            give_up_after: None,
            said: Box::default(),
        }
    }

    /// Trusts the authorities in this PEM text, for `https://`.
    #[must_use]
    pub fn trusting(mut self, pem: impl Into<String>) -> Self {
        self.said.trust = Some(pem.into());
        self
    }

    /// Names another server in the TLS handshake than the URL does.
    #[must_use]
    pub fn server_name(mut self, name: &str) -> Self {
        self.said.server_name = Some(name.into());
        self
    }

    /// Names another destination in CONNECT than the URL does.
    #[must_use]
    pub fn tunnel_to(mut self, authority: &str) -> Self {
        self.said.tunnel_to = Some(authority.into());
        self
    }

    /// Writes this into the request line instead of what the URL says.
    #[must_use]
    pub fn target(mut self, target: impl Into<String>) -> Self {
        self.said.target = Some(target.into());
        self
    }

    /// Says another `Host` than the URL does.
    #[must_use]
    pub fn host(mut self, host: &str) -> Self {
        self.said.host = Some(host.into());
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: Body) -> Self {
        self.body = body;
        self
    }

    /// Waits so long between the head and the body.
    #[must_use]
    pub fn body_after(mut self, pause: Duration) -> Self {
        self.body_after = pause;
        self
    }

    /// Sends the call to a proxy, its URL in absolute form.
    #[must_use]
    pub fn via(mut self, proxy: SocketAddr) -> Self {
        self.proxy = Some(proxy);
        self
    }

    /// Connects to this address, whatever the URL names.
    #[must_use]
    pub fn connect_to(mut self, address: SocketAddr) -> Self {
        self.connect_to = Some(address);
        self
    }

    /// Gives up after this long.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long it waits before it gives up.
    pub fn given(&self) -> Duration {
        self.deadline
    }

    /// Closes the connection once this many bytes of body came.
    #[must_use]
    pub fn give_up_after(mut self, bytes: usize) -> Self {
        self.give_up_after = Some(bytes);
        self
    }

    /// Makes the call. An error means that no connection could be made or nothing be written.
    pub fn send(&self) -> io::Result<Answer> {
        match self.open()? {
            Opened::Refused(answer) => Ok(answer),
            Opened::Ready(mut reader) => self.exchange(&mut reader),
        }
    }

    /// Makes the call again and again on one connection: how long each took. All must be answered with 200.
    pub fn repeat(&self, times: usize) -> io::Result<Vec<Duration>> {
        let Opened::Ready(mut reader) = self.open()? else {
            return Err(io::Error::other("no tunnel was opened"));
        };
        (0..times)
            .map(|_| {
                reader.start = Instant::now();
                let answer = self.exchange(&mut reader)?;
                if answer.status != 200 {
                    return Err(io::Error::other(format!("status {}: {}", answer.status, answer.text())));
                }
                Ok(answer.took)
            })
            .collect()
    }

    /// Only connects, and shakes hands where it is TLS: how long that took.
    pub fn connect(&self) -> io::Result<Duration> {
        match self.open()? {
            Opened::Refused(answer) => Err(io::Error::other(format!("status {}", answer.status))),
            Opened::Ready(reader) => Ok(reader.start.elapsed()),
        }
    }

    /// Scheme, authority and path of the URL.
    fn parts(&self) -> io::Result<(&str, &str, &str)> {
        let (scheme, rest) =
            self.url.split_once("://").ok_or_else(|| io::Error::other("a URL has a scheme"))?;
        if !["http", "https"].contains(&scheme) {
            return Err(io::Error::other("only http:// and https:// URLs"));
        }
        let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        Ok((scheme, authority, path))
    }

    fn open(&self) -> io::Result<Opened> {
        let (scheme, authority, _) = self.parts()?;
        let address = match self.proxy {
            Some(proxy) => proxy,
            None => self.connect_to.map_or_else(|| resolve(authority), Ok)?,
        };
        let start = Instant::now();
        let tcp = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        tcp.set_nodelay(true)?;
        let mut stream = Wire::Plain(tcp);
        if scheme == "https" {
            if self.proxy.is_some() {
                let named = authority.contains(':');
                let to = if named { authority.to_owned() } else { format!("{authority}:443") };
                let to = self.said.tunnel_to.as_ref().unwrap_or(&to);
                write!(stream, "CONNECT {to} HTTP/1.1\r\nhost: {to}\r\n\r\n")?;
                let mut reader = self.reader(stream, start);
                if let Some(refusal) = reader.tunnel() {
                    return Ok(Opened::Refused(refusal));
                }
                stream = reader.stream;
            }
            let name = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
            let name = self.said.server_name.as_deref().unwrap_or(name);
            stream = stream.secure(name, self.said.trust.as_deref().unwrap_or_default(), self.deadline)?;
        }
        Ok(Opened::Ready(self.reader(stream, start)))
    }

    fn exchange(&self, reader: &mut Reader) -> io::Result<Answer> {
        let (scheme, authority, path) = self.parts()?;
        let target = match self.proxy {
            Some(_) if self.method == "CONNECT" => authority,
            Some(_) if scheme == "http" => &self.url,
            _ => path,
        };
        let target = self.said.target.as_deref().unwrap_or(target);
        let host = self.said.host.as_deref().unwrap_or(authority);
        let mut head = format!("{} {target} HTTP/1.1\r\nhost: {host}\r\n", self.method);
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        match &self.body {
            Body::None => head.push_str("\r\n"),
            Body::Sized(bytes) => {
                let _ = write!(head, "content-length: {}\r\n\r\n", bytes.len());
            }
            Body::Chunked(_) => head.push_str("transfer-encoding: chunked\r\n\r\n"),
        }
        reader.stream.write_all(head.as_bytes())?;
        if !self.body_after.is_zero() {
            std::thread::sleep(self.body_after);
        }
        // A refusal may come, and the connection end, before all is written. That is an answer, not an error.
        let _ = self.write_body(&mut reader.stream);
        Ok(reader.answer(self.method == "HEAD"))
    }

    fn reader(&self, stream: Wire, start: Instant) -> Reader {
        Reader {
            stream,
            buffer: Vec::new(),
            start,
            deadline: self.deadline,
            give_up_after: self.give_up_after.unwrap_or(usize::MAX),
        }
    }

    fn write_body(&self, stream: &mut Wire) -> io::Result<()> {
        match &self.body {
            Body::None => Ok(()),
            Body::Sized(bytes) => stream.write_all(bytes),
            Body::Chunked(chunks) => {
                for chunk in chunks {
                    let mut framed = format!("{:x}\r\n", chunk.len()).into_bytes();
                    framed.extend_from_slice(chunk);
                    framed.extend_from_slice(b"\r\n");
                    stream.write_all(&framed)?;
                }
                stream.write_all(b"0\r\n\r\n")
            }
        }
    }
}

/// What came of a connection.
enum Opened {
    Ready(Reader),
    /// The proxy's answer to CONNECT.
    Refused(Answer),
}

/// The first IPv4 address of a name or literal, with port 80 where none is given.
fn resolve(authority: &str) -> io::Result<SocketAddr> {
    let with_port = if authority.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok()) {
        authority.to_owned()
    } else {
        format!("{authority}:80")
    };
    let mut addresses = with_port.to_socket_addrs()?.filter(SocketAddr::is_ipv4);
    addresses.next().ok_or_else(|| io::Error::other(format!("{authority} has no IPv4 address")))
}

impl Answer {
    /// Nothing came back.
    fn none() -> Self {
        Self {
            status: 0,
            headers: Vec::new(),
            body: Vec::new(),
            pieces: Vec::new(),
            trailers: Vec::new(),
            end: End::Cut,
            took: Duration::ZERO,
        }
    }

    /// The first header of that name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; null if it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// `error.code` of a refusal.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    /// Fails unless the status is this one, showing the body.
    #[must_use]
    pub fn expect_status(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{:?} {:?}\n{}", self.end, self.headers, self.text());
        self
    }

    /// Fails unless this is a refusal in our shape with this status and code.
    #[must_use]
    pub fn expect_refusal(self, status: u16, code: &str) -> Self {
        let answer = self.expect_status(status);
        let error = &answer.json()["error"];
        assert_eq!(error["code"], code, "{}", answer.text());
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{}", answer.text());
        for field in ["decision", "rules", "policies", "reason", "request_id"] {
            assert!(error.get(field).is_some(), "no {field}: {}", answer.text());
        }
        assert_eq!(answer.end, End::Clean);
        answer
    }
}

/// Writes bytes as they are, and returns what came back until the other side closed, with the time it took.
/// None for the time means that the deadline passed with the connection still open.
pub fn raw(address: SocketAddr, bytes: &[u8], deadline: Duration) -> io::Result<(Vec<u8>, Option<Duration>)> {
    let start = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.write_all(bytes)?;
    let mut got = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let Some(left) = deadline.checked_sub(start.elapsed()).filter(|d| !d.is_zero()) else {
            return Ok((got, None));
        };
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(n) if n > 0 => got.extend_from_slice(&buffer[..n]),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            // A reset is a close too: the other side wants no more of this.
            Ok(_) | Err(_) => return Ok((got, Some(start.elapsed()))),
        }
    }
}

struct Reader {
    stream: Wire,
    buffer: Vec<u8>,
    start: Instant,
    deadline: Duration,
    give_up_after: usize,
}

impl Reader {
    /// Reads the answer to CONNECT; what is not a tunnel comes back.
    fn tunnel(&mut self) -> Option<Answer> {
        let mut answer = Answer::none();
        if self.head(&mut answer).is_ok() && answer.status == 200 {
            return None;
        }
        // The head is read already: what is left is a body with a length.
        let length = answer.header("content-length").and_then(|l| l.parse().ok()).unwrap_or(0);
        answer.end = self.body(&mut answer, length).map_or_else(|end| end, |()| End::Clean);
        answer.took = self.start.elapsed();
        Some(answer)
    }

    fn answer(&mut self, head_only: bool) -> Answer {
        let mut answer = Answer::none();
        answer.end = match self.read_into(&mut answer, head_only) {
            Ok(()) => End::Clean,
            Err(end) => end,
        };
        answer.took = self.start.elapsed();
        answer
    }

    /// Reads status and headers.
    fn head(&mut self, answer: &mut Answer) -> Result<(), End> {
        loop {
            let line = self.line()?;
            let mut words = line.splitn(3, ' ');
            let status = words.nth(1).and_then(|s| s.parse().ok()).ok_or(End::Cut)?;
            answer.headers = self.headers()?;
            // 100 Continue and its like announce another head; 101 does not.
            if !(100..200).contains(&status) || status == 101 {
                answer.status = status;
                return Ok(());
            }
        }
    }

    fn read_into(&mut self, answer: &mut Answer, head_only: bool) -> Result<(), End> {
        self.head(answer)?;
        if head_only || matches!(answer.status, 101 | 204 | 304) {
            return Ok(());
        }
        if answer.header("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
            loop {
                let line = self.line()?;
                let size = usize::from_str_radix(line.split(';').next().unwrap_or("").trim(), 16)
                    .map_err(|_| End::Cut)?;
                if size == 0 {
                    answer.trailers = self.headers()?;
                    return Ok(());
                }
                self.body(answer, size)?;
                self.line()?;
            }
        }
        if let Some(length) = answer.header("content-length").and_then(|v| v.parse().ok()) {
            return self.body(answer, length);
        }
        // No framing: the end of the connection is the end of the body.
        loop {
            match self.body(answer, 1) {
                Err(End::Cut) => return Ok(()),
                other => other?,
            }
        }
    }

    fn headers(&mut self) -> Result<Vec<(String, String)>, End> {
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(headers);
            }
            let (name, value) = line.split_once(':').ok_or(End::Cut)?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn line(&mut self) -> Result<String, End> {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let line = String::from_utf8_lossy(&self.buffer[..at]).into_owned();
                self.buffer.drain(..at + 2);
                return Ok(line);
            }
            self.fill()?;
        }
    }

    fn body(&mut self, answer: &mut Answer, mut size: usize) -> Result<(), End> {
        while size > 0 {
            if self.buffer.is_empty() {
                self.fill()?;
            }
            let take = size.min(self.buffer.len());
            answer.body.extend(self.buffer.drain(..take));
            answer.pieces.push((self.start.elapsed(), take));
            size -= take;
            if answer.body.len() >= self.give_up_after {
                return Err(End::GaveUp);
            }
        }
        Ok(())
    }

    fn fill(&mut self) -> Result<(), End> {
        let left = self.deadline.checked_sub(self.start.elapsed()).filter(|d| !d.is_zero());
        self.stream.set_read_timeout(Some(left.ok_or(End::TimedOut)?)).map_err(|_| End::Cut)?;
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(n) if n > 0 => {
                self.buffer.extend_from_slice(&buffer[..n]);
                Ok(())
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Err(End::TimedOut)
            }
            Ok(_) | Err(_) => Err(End::Cut),
        }
    }
}
