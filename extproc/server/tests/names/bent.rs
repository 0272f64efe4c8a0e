//! Bent messages on both sides of the resolver: what an agent asks, over UDP and TCP, and what a nameserver answers.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use hickory_proto::op::MessageType;
use hickory_proto::rr::DNSClass;
use hickory_proto::rr::rdata::svcb::SvcParamValue;
use sallyport_fuzz::{Rng, fuzz};

use super::*;

/// What the policy of these tests allows, as the tests see it: apart from the resolver's own reading.
const HOSTS: [&str; 4] = ["api.example.com", "big.example.com", "orders.shop.svc", "extra.example.com"];
const PATTERNS: [&str; 2] = [".pattern.example.com", ".data.svc"];
const SEARCH: [&str; 4] = ["", ".shop.svc.cluster.local", ".svc.cluster.local", ".cluster.local"];
/// Labels with dots in them: written out they look like names that are allowed.
const DOTTED: [&str; 5] = [
    "x.pattern example com",
    "_x.api example com",
    "api.example.com",
    "x.data svc cluster local",
    "x.cluster local",
];
/// The longest datagram that is sent.
const MOST_UDP: usize = 1_232;
/// The longest that is read.
const MOST_READ: usize = 4_096;

/// Without the pack `dns`: it would refuse most of what is asked here for its number.
fn policy() -> String {
    format!("{POLICY}detection: {{packs: [core]}}\n")
}

fn kinds() -> [RecordType; 8] {
    use RecordType::{A, AAAA, CNAME, HTTPS, PTR, SRV, SVCB, TXT};
    [A, AAAA, HTTPS, SVCB, TXT, SRV, CNAME, PTR]
}

fn ensure(ok: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if ok { Ok(()) } else { Err(why()) }
}

/// Whether the policy lets a name be resolved, label by label.
fn allowed(name: &Name) -> bool {
    let labels: Vec<Vec<u8>> = name.iter().map(<[u8]>::to_ascii_lowercase).collect();
    let parts = |text: &str| -> Vec<Vec<u8>> {
        text.split('.').filter(|l| !l.is_empty()).map(|l| l.as_bytes().to_vec()).collect()
    };
    SEARCH.iter().filter_map(|domain| labels.strip_suffix(parts(domain).as_slice())).any(|short| {
        let service = short.iter().take_while(|l| l.starts_with(b"_")).count();
        [short, &short[service..]].iter().any(|host| {
            HOSTS.iter().any(|h| *host == parts(h))
                || PATTERNS
                    .iter()
                    .any(|p| host.strip_suffix(parts(p).as_slice()).is_some_and(|h| !h.is_empty()))
        })
    })
}

/// Whether there is somebody to answer: the id can be read, and it is no answer itself.
fn wants_answer(question: &[u8]) -> bool {
    question.len() >= 12 && question[2] & 0x80 == 0
}

/// What holds for every answer, whatever was asked and whatever the nameserver said.
fn check_answer(question: &[u8], bytes: &[u8]) -> Result<Message, String> {
    let answer = Message::from_vec(bytes).map_err(|e| format!("the answer can't be read: {e}"))?;
    ensure(question.get(..2) == bytes.get(..2), || "another id".into())?;
    ensure(answer.metadata.message_type == MessageType::Response, || "not an answer".into())?;
    ensure(answer.authorities.iter().all(|r| r.record_type() == RecordType::SOA), || format!("{answer:?}"))?;
    ensure(answer.additionals.is_empty(), || format!("{answer:?}"))?;
    let silent = answer.answers.is_empty() && answer.metadata.response_code != ResponseCode::NoError;
    let Ok(question) = Message::from_vec(question) else {
        ensure(silent, || format!("to what can't be read: {answer:?}"))?;
        return Ok(answer);
    };
    let may = match question.queries.as_slice() {
        [query] => {
            ensure(answer.queries == question.queries, || format!("to another question: {answer:?}"))?;
            query.query_class == DNSClass::IN
                && question.metadata.op_code == OpCode::Query
                && kinds().contains(&query.query_type)
                && allowed(&query.name)
        }
        _ => false,
    };
    ensure(may || silent, || format!("{:?} is answered: {answer:?}", question.queries))?;
    Ok(answer)
}

fn labels(text: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in text.split(' ') {
        wire.push(label.len() as u8);
        wire.extend_from_slice(label.as_bytes());
    }
    wire.push(0);
    wire
}

fn questions() -> Vec<Vec<u8>> {
    let asked = [
        ("api.example.com", RecordType::A),
        ("API.eXample.com", RecordType::AAAA),
        ("x.pattern.example.com", RecordType::HTTPS),
        ("_https._tcp.api.example.com", RecordType::SRV),
        ("big.example.com", RecordType::A),
        ("orders.shop.svc.cluster.local", RecordType::A),
        ("api.example.com.shop.svc.cluster.local", RecordType::A),
        ("evil.example.org", RecordType::TXT),
        ("api.example.com", RecordType::ANY),
        ("api.example.com", RecordType::AXFR),
    ];
    let mut all: Vec<Message> = asked.iter().map(|(host, kind)| question(host, *kind)).collect();
    let mut bent = |bend: fn(&mut Message)| {
        let mut message = question("api.example.com", RecordType::A);
        bend(&mut message);
        all.push(message);
    };
    bent(|m| m.edns = None);
    bent(|m| m.metadata.message_type = MessageType::Response);
    bent(|m| m.metadata.op_code = OpCode::Update);
    bent(|m| m.queries[0].query_class = DNSClass::CH);
    bent(|m| m.queries = vec![m.queries[0].clone(); 2]);
    bent(|m| m.queries = vec![m.queries[0].clone(); 200]);
    bent(|m| m.queries.clear());
    bent(|m| m.edns.as_mut().unwrap().options_mut().insert(EdnsOption::Unknown(65_001, vec![7; 40])));
    let dotted = DOTTED.iter().map(|name| {
        let mut message = question("api.example.com", RecordType::A);
        message.queries[0].name = Name::from_labels(name.split(' ').map(str::as_bytes)).unwrap();
        message
    });
    all.extend(dotted);
    all.iter().map(|m| m.to_vec().unwrap()).collect()
}

fn words() -> Vec<Vec<u8>> {
    let names = [
        "api example com",
        "evil example org",
        "x pattern example com",
        "_x _y api example com",
        "x data svc cluster local",
    ];
    let mut words: Vec<_> = names.iter().chain(&DOTTED).map(|name| labels(name)).collect();
    let bytes: [&[u8]; 12] = [
        b"\xc0\x0c",
        b"\x04evil",
        b"\x05_evil",
        b"\x3f",
        b"\0\x01\0\x01",
        b"\0\xff\0\x01",
        b"\0\xfc\0\x01",
        b"\0\x10\0\x01",
        b"\0\x41\0\x01",
        b"\0\0\x29\x04\xd0\0\0\0\0\0\0",
        b"\0\x01\0\0\0\0\0\0",
        b"\x01\x20\0\x01\0\0\0\0\0\x01",
    ];
    words.extend(bytes.map(<[u8]>::to_vec));
    words
}

async fn asked_of() -> Bench {
    let bench = Bench::new(&policy()).await;
    for last in 0..120 {
        bench.nameserver.give("big.example.com", a(last));
    }
    bench.nameserver.give("api.example.com", a(1));
    bench.nameserver.give("x.pattern.example.com", a(2));
    bench.nameserver.give("orders.shop.svc.cluster.local", v4("10.96.0.7"));
    bench.nameserver.give("evil.example.org", a(3));
    bench
}

/// What was asked on is allowed, and of a type that is resolved.
fn check_asked(nameserver: &Nameserver) -> Result<(), String> {
    nameserver.asked_for().iter().try_for_each(|(name, kind)| {
        let lower = !name.iter().flatten().any(u8::is_ascii_uppercase);
        ensure(lower && kinds().contains(kind) && allowed(name), || {
            format!("a nameserver is asked for {name} {kind}")
        })
    })
}

fn ask(port: u16, question: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let said = |e: std::io::Error| e.to_string();
    // One of its own for each: an answer that comes late is not the next one's.
    let socket = UdpSocket::bind("127.0.0.1:0").map_err(said)?;
    socket.connect(("127.0.0.1", port)).map_err(said)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(said)?;
    // What is longer than a datagram can't be sent.
    socket.send(&question[..question.len().min(60_000)]).map_err(said)?;
    if !wants_answer(question) {
        return Ok(None);
    }
    let mut buffer = vec![0; 1 << 16];
    let length = socket.recv(&mut buffer).map_err(|e| format!("no answer: {e}"))?;
    ensure(length <= MOST_UDP, || format!("{length} bytes in a datagram"))?;
    Ok(Some(buffer[..length].to_vec()))
}

#[tokio::test]
async fn bent_questions_over_udp_are_answered_and_refused_names_stay_refused() {
    let bench = asked_of().await;
    let (port, nameserver) = (bench.port, Arc::clone(&bench.nameserver));
    let bent = tokio::task::spawn_blocking(move || {
        fuzz("dns-udp", &questions(), &words(), |bytes| {
            if let Some(answer) = ask(port, bytes)? {
                check_answer(&bytes[..bytes.len().min(MOST_READ)], &answer)?;
            }
            check_asked(&nameserver)
        });
    });
    bent.await.unwrap();
    assert_eq!(bench.ask("api.example.com", RecordType::A).await.answers.len(), 1);
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&u16::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat()
}

/// The whole frames at the beginning.
fn frames(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut frames = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<2>() {
        let length = usize::from(u16::from_be_bytes(*length));
        let Some((frame, rest)) = rest.split_at_checked(length) else { break };
        frames.push(frame);
        bytes = rest;
    }
    frames
}

#[tokio::test]
async fn bent_questions_over_tcp_are_answered_in_their_order_or_end_the_connection() {
    let bench = asked_of().await;
    let (port, nameserver) = (bench.port, Arc::clone(&bench.nameserver));
    let bent = tokio::task::spawn_blocking(move || {
        let questions = questions();
        let one = questions.iter().map(|q| framed(q));
        let two = questions.windows(2).map(|q| [framed(&q[0]), framed(&q[1])].concat());
        let seeds: Vec<_> = one.chain(two).collect();
        let mut words = words();
        words.extend([b"\0\0".to_vec(), b"\0\x0c".to_vec(), b"\xff\xff".to_vec()]);
        fuzz("dns-tcp", &seeds, &words, |bytes| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(|e| e.to_string())?;
            stream.set_read_timeout(Some(PATIENCE)).map_err(|e| e.to_string())?;
            // It may have closed by then.
            if stream.write_all(bytes).is_ok() {
                let _ = stream.shutdown(std::net::Shutdown::Write);
            }
            let mut got = Vec::new();
            let read = stream.read_to_end(&mut got);
            let silent = read.as_ref().is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
            ensure(!silent, || "it neither answers nor closes".into())?;
            let asked: Vec<_> = frames(bytes).into_iter().take_while(|q| wants_answer(q)).collect();
            let answers = frames(&got);
            ensure(answers.len() <= asked.len(), || format!("{} answers", answers.len()))?;
            // One that is no question ends the connection, and what is unread may take answers with it.
            if asked.len() == frames(bytes).len() {
                ensure(answers.len() == asked.len(), || format!("{} answers: {read:?}", answers.len()))?;
            }
            for (question, answer) in asked.iter().zip(&answers) {
                check_answer(question, answer)?;
            }
            check_asked(&nameserver)
        });
    });
    bent.await.unwrap();
    assert_eq!(code(&bench.ask_tcp("api.example.com", RecordType::A).await), ResponseCode::NoError);
}

// === The nameserver's side

/// Stands in the seeds where the label of the case is put: what is resolved twice comes from the cache.
const LABEL: &[u8; 8] = b"case0000";

/// Answers with what it is told to, and then with something that is right.
#[derive(Default)]
struct Liar {
    told: Mutex<Vec<u8>>,
}

impl Liar {
    fn start() -> (Arc<Self>, SocketAddr) {
        let this = Arc::new(Self::default());
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()) {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let one = Arc::clone(&this);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((length, client)) = udp.recv_from(&mut buffer) {
                let lie = one.lie(&buffer[..length]);
                // The client may be content with the first.
                let _ = udp.send_to(&lie[..lie.len().min(60_000)], client);
                let _ = udp.send_to(&truth(&buffer[..length]), client);
            }
        });
        let one = Arc::clone(&this);
        std::thread::spawn(move || {
            for mut stream in tcp.incoming().flatten() {
                let mut question = vec![0; 4096];
                let length = stream.read(&mut question).unwrap();
                let lie = one.lie(&question[2.min(length)..length]);
                // With its length before it, or with whatever stands there.
                let framed = if lie.len() % 2 == 0 && lie.len() < 1 << 16 { framed(&lie) } else { lie };
                let _ = stream.write_all(&framed);
            }
        });
        (this, address)
    }

    fn lie(&self, question: &[u8]) -> Vec<u8> {
        let mut lie = self.told.lock().unwrap().clone();
        if let (Some(place), Some(id)) = (lie.get_mut(..2), question.get(..2)) {
            place.copy_from_slice(id);
        }
        lie
    }
}

fn truth(question: &[u8]) -> Vec<u8> {
    let question = Message::from_vec(question).unwrap();
    let query = question.queries[0].clone();
    let mut answer = Message::new(question.metadata.id, MessageType::Response, OpCode::Query);
    let record = hickory_proto::rr::Record::from_rdata(query.name.clone(), 60, a(9));
    answer.add_query(query);
    answer.add_answers([record]);
    answer.to_vec().unwrap()
}

fn answers() -> Vec<Vec<u8>> {
    let owner = name("case0000.pattern.example.com");
    let other = name("edge.example.net");
    let https = |ech: bool| {
        let mut params = vec![
            (SvcParamKey::Alpn, SvcParamValue::Alpn(Alpn(vec!["h2".to_owned()]))),
            (SvcParamKey::Ipv4Hint, SvcParamValue::Ipv4Hint(IpHint(vec![A(Ipv4Addr::new(198, 51, 100, 4))]))),
        ];
        if ech {
            let config = EchConfigList(b"hidden".to_vec());
            params.push((SvcParamKey::EchConfigList, SvcParamValue::EchConfigList(config)));
        }
        RData::HTTPS(HTTPS(SVCB::new(1, name("edge.example.net"), params)))
    };
    let srv = RData::SRV(SRV::new(1, 1, 80, other.clone()));
    let text = RData::TXT(TXT::new(vec!["v=1".to_owned()]));
    let given: Vec<(RecordType, Vec<(&Name, RData)>)> = vec![
        (RecordType::A, vec![(&owner, a(1)), (&owner, a(2))]),
        (RecordType::A, vec![(&owner, RData::CNAME(CNAME(other.clone()))), (&other, a(1))]),
        (RecordType::A, vec![(&owner, v4("127.0.0.1"))]),
        (RecordType::A, vec![(&owner, a(1)), (&owner, v4("169.254.169.254"))]),
        (RecordType::A, vec![(&owner, v4("10.0.0.1"))]),
        (RecordType::AAAA, vec![(&owner, v6("2001:db8::1"))]),
        (RecordType::AAAA, vec![(&owner, v6("::ffff:127.0.0.1"))]),
        (RecordType::HTTPS, vec![(&owner, https(false))]),
        (RecordType::HTTPS, vec![(&owner, https(true))]),
        (RecordType::SRV, vec![(&owner, srv)]),
        (RecordType::TXT, vec![(&owner, text)]),
        (RecordType::A, vec![]),
    ];
    let mut all = Vec::new();
    for (kind, records) in given {
        let mut answer = Message::new(0, MessageType::Response, OpCode::Query);
        answer.add_query(Query::query(owner.clone(), kind));
        answer.add_answers(
            records.into_iter().map(|(o, d)| hickory_proto::rr::Record::from_rdata(o.clone(), 300, d)),
        );
        all.push(answer.to_vec().unwrap());
        answer.metadata.truncation = true;
        all.push(answer.to_vec().unwrap());
        answer.metadata.truncation = false;
        answer.metadata.response_code = ResponseCode::ServFail;
        all.push(answer.to_vec().unwrap());
    }
    all
}

/// Where no name of the internet may lead.
fn is_near(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(a) => {
            a.is_loopback() || a.is_link_local() || a.is_private() || a.is_unspecified() || a.is_multicast()
        }
        IpAddr::V6(a) => {
            a.is_loopback()
                || a.is_unspecified()
                || a.is_multicast()
                || a.is_unicast_link_local()
                || a.is_unique_local()
        }
    }
}

/// Every address that a client may take from an answer.
fn told(answer: &Message) -> Result<Vec<IpAddr>, String> {
    let mut all = Vec::new();
    for record in &answer.answers {
        let params = match &record.data {
            RData::A(a) => {
                all.push(a.0.into());
                continue;
            }
            RData::AAAA(a) => {
                all.push(a.0.into());
                continue;
            }
            RData::HTTPS(https) => &https.0.svc_params,
            RData::SVCB(svcb) => &svcb.svc_params,
            _ => continue,
        };
        for (key, value) in params {
            ensure(*key != SvcParamKey::EchConfigList, || format!("a hidden name: {answer:?}"))?;
            match value {
                SvcParamValue::Ipv4Hint(hint) => all.extend(hint.0.iter().map(|a| IpAddr::from(a.0))),
                SvcParamValue::Ipv6Hint(hint) => all.extend(hint.0.iter().map(|a| IpAddr::from(a.0))),
                _ => {}
            }
        }
    }
    Ok(all)
}

#[tokio::test]
async fn bent_answers_of_a_nameserver_lead_nowhere_that_is_refused() {
    let (liar, address) = Liar::start();
    let conf = Conf { nameservers: vec![address], ..Conf::parse("options ndots:1") };
    let (unasked, _) = Nameserver::start();
    let bench = Bench::with(&policy(), unasked, conf, tempfile::tempdir().unwrap()).await;
    let (port, names) = (bench.port, Arc::clone(&bench.names));
    let near: [&[u8]; 4] = [b"\x7f\0\0\x01", b"\xa9\xfe\xa9\xfe", b"\x0a\0\0\x01", b"\xc0\xa8\0\x01"];
    let record = |kind: &[u8], data: &[u8]| {
        [b"\xc0\x0c\0", kind, b"\0\x01\0\0\x01\x2c\0", &[data.len() as u8], data].concat()
    };
    let mut words = words();
    words.extend(near.map(<[u8]>::to_vec));
    words.extend(near.map(|a| record(b"\x01", a)));
    words.extend(near.map(|a| record(b"\x41", &[b"\0\x01\0\0\x04\0\x04", a].concat())));
    words.push(record(b"\x1c", &[&[0; 15][..], &[1]].concat()));
    words.push(record(b"\x05", b"\xc0\x0c"));
    words.push(b"\0\x05\0\x04\xca\xfe\xba\xbe".to_vec());
    let cases = AtomicU32::new(0);
    let bent = tokio::task::spawn_blocking(move || {
        fuzz("dns-answer", &answers(), &words, |bytes| {
            let mut bytes = bytes.to_vec();
            let case = format!("c{:07x}", cases.fetch_add(1, Ordering::Relaxed) & 0xfff_ffff);
            while let Some(at) = bytes.windows(LABEL.len()).position(|w| w == LABEL) {
                bytes[at..at + LABEL.len()].copy_from_slice(case.as_bytes());
            }
            let parsed = Message::from_vec(&bytes).ok();
            let kind = parsed.and_then(|m| m.queries.first().map(|q| q.query_type));
            let kind = kind.filter(|k| kinds().contains(k)).unwrap_or(RecordType::A);
            let host = format!("{case}.pattern.example.com");
            let any = Rng::of(&bytes).next();
            let mut question = question(&host, kind);
            question.metadata.id = any as u16;
            *liar.told.lock().unwrap() = bytes;
            let question = question.to_vec().unwrap();
            let Some(answer) = ask(port, &question)? else { return Err("not asked".into()) };
            let answer = check_answer(&question, &answer)?;
            for address in told(&answer)? {
                ensure(!is_near(address), || format!("{host} leads to {address}: {answer:?}"))?;
            }
            for address in ["127.0.0.1", "169.254.169.254", "10.0.0.1", "192.168.0.1", "::1"] {
                let address = address.parse().unwrap();
                let bound = matches!(names.look(&host, address), Some(Destination::Bound(_)));
                ensure(!bound, || format!("{host} is bound to {address}"))?;
            }
            Ok(())
        });
    });
    bent.await.unwrap();
}
