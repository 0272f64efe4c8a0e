//! Asks the pod's nameservers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::cache::Answer;

/// How long a nameserver may take before the next one is asked.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often all of them are asked.
const ROUNDS: usize = 2;
/// What fits every path without fragments.
pub(crate) const UDP_BYTES: u16 = 1_232;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    #[error("the pod has no nameserver in /etc/resolv.conf")]
    NoNameserver,
    #[error("{0} gave no answer in time")]
    Silent(SocketAddr),
    #[error("{0}: {1}")]
    Io(SocketAddr, io::Error),
    #[error("{0} gave an answer that can't be read, or to another question")]
    Foreign(SocketAddr),
    #[error("{0} answered {1}")]
    Refused(SocketAddr, ResponseCode),
}

/// Asks one nameserver after the other.
pub(crate) async fn ask(servers: &[SocketAddr], name: &Name, kind: RecordType) -> Result<Answer, Failed> {
    let mut failed = Failed::NoNameserver;
    for server in servers.iter().cycle().take(servers.len() * ROUNDS) {
        match timeout(PATIENCE, ask_one(*server, name, kind)).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(e)) => failed = e,
            Err(_) => failed = Failed::Silent(*server),
        }
    }
    Err(failed)
}

async fn ask_one(server: SocketAddr, name: &Name, kind: RecordType) -> Result<Answer, Failed> {
    let io = |e: io::Error| Failed::Io(server, e);
    let (id, question) = question(name, kind).map_err(io)?;
    let mut answer = over_udp(server, &question, id, name, kind).await.map_err(io)?;
    if answer.metadata.truncation {
        let bytes = over_tcp(server, &question).await.map_err(io)?;
        answer = read(&bytes, id, name, kind).ok_or(Failed::Foreign(server))?;
    }
    match answer.metadata.response_code {
        code @ (ResponseCode::NoError | ResponseCode::NXDomain) => Ok(Answer {
            code,
            answers: answer.answers,
            authorities: answer
                .authorities
                .into_iter()
                .filter(|r| r.record_type() == RecordType::SOA)
                .collect(),
        }),
        code => Err(Failed::Refused(server, code)),
    }
}

fn question(name: &Name, kind: RecordType) -> io::Result<(u16, Vec<u8>)> {
    // With the kernel's choice of a port this is what keeps others from answering in the nameserver's place.
    let mut id = [0; 2];
    getrandom(&mut id, GetRandomFlags::empty())?;
    let id = u16::from_ne_bytes(id);
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name.clone(), kind));
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_BYTES);
    message.set_edns(edns);
    Ok((id, message.to_vec().map_err(io::Error::other)?))
}

async fn over_udp(
    server: SocketAddr,
    question: &[u8],
    id: u16,
    name: &Name,
    kind: RecordType,
) -> io::Result<Message> {
    let any: SocketAddr = if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).await?;
    // Connected: the kernel drops what others send.
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut buffer = [0; 4_096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        // What does not fit is not for us; the right one may still come.
        if let Some(message) = read(&buffer[..length], id, name, kind) {
            return Ok(message);
        }
    }
}

async fn over_tcp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    write_framed(&mut stream, question).await?;
    read_framed(&mut stream).await
}

/// A message as TCP carries it: its length before it.
pub(crate) async fn write_framed(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    let mut framed = Vec::with_capacity(message.len() + 2);
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(message);
    stream.write_all(&framed).await
}

pub(crate) async fn read_framed(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// An answer to this very question.
fn read(bytes: &[u8], id: u16, name: &Name, kind: RecordType) -> Option<Message> {
    let message = Message::from_vec(bytes).ok()?;
    let [query] = message.queries.as_slice() else { return None };
    let ours = message.metadata.message_type == MessageType::Response
        && message.metadata.id == id
        && query.name == *name
        && query.query_type == kind;
    ours.then_some(message)
}
