//! The resolver on real sockets, with a real engine, before a nameserver of the test's own.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)]

mod bent;
mod nameserver;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
use hickory_proto::rr::rdata::svcb::{Alpn, EchConfigList, IpHint, SVCB, SvcParamKey, SvcParamValue};
use hickory_proto::rr::rdata::{A, AAAA, CNAME, HTTPS, SRV, TXT};
use hickory_proto::rr::{Name, RData, RecordType};
use nameserver::{Nameserver, name};
use sallyport_engine::{Destination, Engine};
use sallyport_extproc::Why;
use sallyport_extproc::dns::{Conf, Names};
use sallyport_extproc::exchange::{Context, Exchange, Step};
use sallyport_extproc::tls::Inside;
use sallyport_extproc::{
    Budget, Config, DESTINATION, METADATA_NAMESPACE, NameRecord, Observer, Record, Server,
};
use sallyport_proto::ext_proc::{
    HeaderMap, HeaderValue, HttpHeaders, Message as Part, ProcessingRequest, ProcessingResponse, Reply,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

const PATIENCE: Duration = Duration::from_secs(20);

/// What was recorded: name, decision, code, rules, source.
#[derive(Default)]
struct Book(Mutex<Vec<String>>);

impl Observer for Book {
    fn record(&self, _: &Record<'_>) {}

    fn resolved(&self, r: &NameRecord<'_>) {
        let rules: Vec<_> = r.verdict.findings.iter().map(|f| f.rule.as_str()).collect();
        let code = r.verdict.code.map_or("", sallyport_engine::Code::as_str);
        let line = format!(
            "{} {} {} {code} {} {}",
            r.name,
            r.kind,
            r.verdict.decision.as_str(),
            rules.join(","),
            r.source.as_str()
        );
        self.0.lock().unwrap().push(line);
    }
}

struct Bench {
    names: Arc<Names>,
    nameserver: Arc<Nameserver>,
    book: Arc<Book>,
    server: Server,
    port: u16,
    dir: tempfile::TempDir,
    conf: Conf,
}

const POLICY: &str = "
egress:
  rules:
    - {hosts: [api.example.com, gone.example.com, rebind.example.com, big.example.com], action: Allow}
    - {hosts: ['*.pattern.example.com'], action: Allow}
    - {hosts: [orders.shop.svc, '*.data.svc'], action: Allow}
dns: {allow: [extra.example.com]}
";

/// A port for UDP and TCP of both families, below those that the kernel hands out to clients.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let at = std::process::id() * 64 + u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 16_000 + (at % 16_000) as u16;
        let free = |ip: std::net::IpAddr| {
            std::net::UdpSocket::bind((ip, port)).is_ok() && std::net::TcpListener::bind((ip, port)).is_ok()
        };
        if free(std::net::Ipv4Addr::UNSPECIFIED.into()) {
            return port;
        }
    }
}

impl Bench {
    async fn new(policy: &str) -> Self {
        let (nameserver, address) = Nameserver::start();
        let search = "search shop.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5";
        let conf = Conf { nameservers: vec![address], ..Conf::parse(search) };
        Self::with(policy, nameserver, conf, tempfile::tempdir().unwrap()).await
    }

    async fn with(policy: &str, nameserver: Arc<Nameserver>, conf: Conf, dir: tempfile::TempDir) -> Self {
        let text = format!(
            "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {{name: x}}\nspec:\n  {}\n",
            policy.trim().replace('\n', "\n  ")
        );
        let spec = sallyport_api::load_policy(&text).unwrap().spec;
        let engine = Arc::new(Engine::new(&spec).unwrap());
        let book = Arc::new(Book::default());
        let observer = Arc::clone(&book) as Arc<dyn Observer>;
        let server = Server::bind(Config::new(dir.path().join("s")), engine, Arc::clone(&observer)).unwrap();
        let names = Names::new(
            conf.clone(),
            dir.path(),
            server.policy(),
            server.stop(),
            observer,
            tokio::runtime::Handle::current(),
        );
        let port = free_port();
        tokio::spawn(Arc::clone(&names).serve(port));
        let bench = Self { names, nameserver, book, server, port, dir, conf };
        let end = std::time::Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            assert!(std::time::Instant::now() < end, "the resolver does not listen");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bench
    }

    async fn ask(&self, host: &str, kind: RecordType) -> Message {
        self.exchange(&question(host, kind)).await
    }

    async fn exchange(&self, question: &Message) -> Message {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(("127.0.0.1", self.port)).await.unwrap();
        socket.send(&question.to_vec().unwrap()).await.unwrap();
        let mut buffer = [0; 4096];
        let length = tokio::time::timeout(PATIENCE, socket.recv(&mut buffer)).await.unwrap().unwrap();
        let answer = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(answer.metadata.id, question.metadata.id);
        assert_eq!(answer.metadata.message_type, MessageType::Response);
        // Of several questions none is repeated.
        let asked = if question.queries.len() == 1 { question.queries.as_slice() } else { &[] };
        assert_eq!(answer.queries, asked);
        answer
    }

    async fn ask_tcp(&self, host: &str, kind: RecordType) -> Message {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let bytes = question(host, kind).to_vec().unwrap();
        stream.write_u16(u16::try_from(bytes.len()).unwrap()).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        let mut answer = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut answer).await.unwrap();
        Message::from_vec(&answer).unwrap()
    }

    /// Where a call to `host` at `address` leads.
    async fn lead(&self, host: &str, address: &str) -> Destination {
        let address: IpAddr = address.parse().unwrap();
        match self.names.look(host, address) {
            Some(destination) => destination,
            None => Arc::clone(&self.names).find(host.to_owned(), address).await,
        }
    }

    fn records(&self) -> Vec<String> {
        std::mem::take(&mut self.book.0.lock().unwrap())
    }
}

fn question(host: &str, kind: RecordType) -> Message {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(format!("{host}.")).unwrap(), kind));
    let mut edns = Edns::new();
    edns.set_max_payload(1232);
    message.set_edns(edns);
    message
}

fn a(last: u8) -> RData {
    RData::A(A(Ipv4Addr::new(198, 51, 100, last)))
}

fn v4(text: &str) -> RData {
    RData::A(A(text.parse().unwrap()))
}

fn v6(text: &str) -> RData {
    RData::AAAA(AAAA(text.parse().unwrap()))
}

/// The extended error: its number and its text.
fn extended(message: &Message) -> (u16, String) {
    let edns = message.edns.as_ref().unwrap();
    let Some(EdnsOption::Unknown(_, data)) = edns.option(EdnsCode::Unknown(15)) else {
        return (0, String::new());
    };
    (u16::from_be_bytes([data[0], data[1]]), String::from_utf8(data[2..].to_vec()).unwrap())
}

fn code(message: &Message) -> ResponseCode {
    message.metadata.response_code
}

#[tokio::test]
async fn what_the_policy_allows_is_resolved_and_the_rest_does_not_exist() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("api.example.com", a(1));
    bench.nameserver.give("extra.example.com", a(2));
    bench.nameserver.give("evil.example.org", a(3));
    let answer = bench.ask("API.example.COM", RecordType::A).await;
    assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NoError, 1));
    assert_eq!(answer.queries[0].name.to_ascii(), "API.example.COM.", "its capitals are kept");
    assert_eq!(bench.nameserver.asked(), ["api.example.com A"], "and not told to anybody");
    // Nothing of this type, but the name exists.
    let answer = bench.ask("api.example.com", RecordType::AAAA).await;
    assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NoError, 0));
    assert_eq!(answer.authorities.len(), 1, "so that it may be kept");
    assert_eq!(code(&bench.ask("gone.example.com", RecordType::A).await), ResponseCode::NXDomain);
    assert_eq!(code(&bench.ask_tcp("extra.example.com", RecordType::A).await), ResponseCode::NoError);
    bench.nameserver.asked();
    bench.records();
    for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT] {
        let answer = bench.ask("evil.example.org", kind).await;
        assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NXDomain, 0));
        let (number, text) = extended(&answer);
        assert!(number == 18 && text.contains("spec.egress.rules or spec.dns.allow"), "{number} {text}");
    }
    let answer = bench.ask("9.100.51.198.in-addr.arpa", RecordType::PTR).await;
    assert_eq!(code(&answer), ResponseCode::NXDomain, "names of addresses too");
    assert!(bench.nameserver.asked().is_empty(), "nobody was asked");
    assert_eq!(bench.records()[0], "evil.example.org A block egress_denied  none");
    let answer = bench.ask("api.example.com", RecordType::NULL).await;
    assert_eq!(code(&answer), ResponseCode::Refused);
}

#[tokio::test]
async fn the_policy_is_asked_before_the_cache_and_the_cache_before_the_nameserver() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("api.example.com", a(1));
    for _ in 0..3 {
        assert_eq!(bench.ask("api.example.com", RecordType::A).await.answers.len(), 1);
    }
    assert_eq!(bench.nameserver.asked().len(), 1);
    let sources: Vec<_> = bench.records().iter().map(|r| r.rsplit(' ').next().unwrap().to_owned()).collect();
    assert_eq!(sources, ["nameserver", "cache", "cache"]);
    let spec = sallyport_api::AgentPolicySpec::default();
    bench.server.policy().swap(Arc::new(Engine::new(&spec).unwrap()));
    assert_eq!(code(&bench.ask("api.example.com", RecordType::A).await), ResponseCode::NXDomain);
}

#[tokio::test]
async fn search_domains_and_the_clusters_names_work_as_everywhere() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("orders.shop.svc.cluster.local", v4("10.96.1.2"));
    bench.nameserver.give("pod-0.db.data.svc.cluster.local", v4("10.244.0.9"));
    bench.nameserver.give("other.shop.svc.cluster.local", v4("10.96.1.3"));
    bench.nameserver.give("api.example.com", a(1));
    // What a stub resolver asks for `api.example.com` with ndots:5.
    for search in ["shop.svc.cluster.local", "svc.cluster.local", "cluster.local"] {
        let answer = bench.ask(&format!("api.example.com.{search}"), RecordType::A).await;
        assert_eq!(code(&answer), ResponseCode::NXDomain);
        assert_eq!(extended(&answer).0, 0, "the nameserver says so, not the policy");
    }
    for (host, codes) in [
        ("orders.shop.svc.cluster.local", ResponseCode::NoError),
        ("pod-0.db.data.svc.cluster.local", ResponseCode::NoError),
        ("other.shop.svc.cluster.local", ResponseCode::NXDomain),
    ] {
        assert_eq!(code(&bench.ask(host, RecordType::A).await), codes, "{host}");
    }
    for (host, address) in [
        ("orders.shop.svc", "10.96.1.2"),
        ("orders.shop.svc.cluster.local", "10.96.1.2"),
        ("pod-0.db.data.svc", "10.244.0.9"),
    ] {
        let bound = bench.names.look(host, address.parse().unwrap());
        assert!(matches!(bound, Some(Destination::Bound(p)) if p.of_cluster), "{host}: {bound:?}");
    }
}

#[tokio::test]
async fn chains_services_and_hints_are_followed_and_hidden_names_are_not_handed_out() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("api.example.com", RData::CNAME(CNAME(name("edge.cdn.test"))));
    bench.nameserver.give("edge.cdn.test", a(7));
    let answer = bench.ask("api.example.com", RecordType::A).await;
    assert_eq!(answer.answers.len(), 2, "the whole chain");
    assert!(matches!(bench.lead("api.example.com", "198.51.100.7").await, Destination::Bound(_)));
    // The alias alone was allowed; its target is a name like every other.
    assert!(matches!(bench.lead("edge.cdn.test", "198.51.100.7").await, Destination::Unbound(_)));
    let svcb = SVCB::new(
        1,
        Name::root(),
        vec![
            (SvcParamKey::Alpn, SvcParamValue::Alpn(Alpn(vec!["h2".into()]))),
            (SvcParamKey::Ipv4Hint, SvcParamValue::Ipv4Hint(IpHint(vec![A(Ipv4Addr::new(198, 51, 100, 8))]))),
            (SvcParamKey::EchConfigList, SvcParamValue::EchConfigList(EchConfigList(vec![0, 4, 1, 2, 3, 4]))),
        ],
    );
    bench.nameserver.give("x.pattern.example.com", RData::HTTPS(HTTPS(svcb)));
    let answer = bench.ask("x.pattern.example.com", RecordType::HTTPS).await;
    let RData::HTTPS(https) = &answer.answers[0].data else { panic!("{answer:?}") };
    let keys: Vec<_> = https.0.svc_params.iter().map(|(k, _)| *k).collect();
    assert_eq!(keys, [SvcParamKey::Alpn, SvcParamKey::Ipv4Hint]);
    assert!(matches!(bench.lead("x.pattern.example.com", "198.51.100.8").await, Destination::Bound(_)));
    let srv = RData::SRV(SRV::new(1, 1, 8080, name("api.example.com")));
    bench.nameserver.give("_http._tcp.api.example.com", srv);
    assert_eq!(bench.ask("_http._tcp.api.example.com", RecordType::SRV).await.answers.len(), 1);
}

#[tokio::test]
async fn an_answer_that_does_not_fit_is_asked_for_again_over_tcp_by_both_sides() {
    let bench = Bench::new(POLICY).await;
    for i in 0..30 {
        bench.nameserver.give("big.example.com", RData::TXT(TXT::new(vec![format!("{i:0100}")])));
    }
    let answer = bench.ask("big.example.com", RecordType::TXT).await;
    assert!(answer.metadata.truncation && answer.answers.is_empty());
    let answer = bench.ask_tcp("big.example.com", RecordType::TXT).await;
    assert_eq!((answer.metadata.truncation, answer.answers.len()), (false, 30));
}

#[tokio::test]
async fn a_name_that_leads_into_the_pod_the_node_or_the_platform_is_refused() {
    let bench = Bench::new(POLICY).await;
    for (data, kind, part) in [
        (v4("127.0.0.1"), RecordType::A, "the loopback"),
        (v4("169.254.169.254"), RecordType::A, "spec.egress.platform.metadata"),
        (v4("169.254.170.23"), RecordType::A, "spec.egress.platform.podIdentity"),
        (v4("10.0.0.1"), RecordType::A, "spec.egress.privateCIDRs"),
        (v4("0.0.0.0"), RecordType::A, "this machine"),
        (v6("::1"), RecordType::AAAA, "the loopback"),
        (v6("::ffff:127.0.0.1"), RecordType::AAAA, "the loopback"),
        (v6("fe80::1"), RecordType::AAAA, "link-local"),
    ] {
        bench.nameserver.forget("rebind.example.com");
        bench.nameserver.give_for("rebind.example.com", 0, a(1));
        bench.nameserver.give_for("rebind.example.com", 0, v6("2001:db8::1"));
        bench.nameserver.give_for("rebind.example.com", 0, data.clone());
        let answer = bench.ask("rebind.example.com", kind).await;
        assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NXDomain, 0), "{data}");
        let (number, text) = extended(&answer);
        assert!(number == 17 && text.contains(part), "{data}: {number} {text}");
    }
    let bound = bench.lead("rebind.example.com", "127.0.0.1").await;
    assert!(matches!(bound, Destination::Unbound(_)), "{bound:?}");
    assert!(bench.records().iter().any(|r| r.contains("block destination_denied")));
    // A cluster's name that leads out of the cluster is no cluster's address.
    bench.nameserver.give("ext.data.svc.cluster.local", RData::CNAME(CNAME(name("inner.corp.test"))));
    bench.nameserver.give("inner.corp.test", v4("10.1.1.1"));
    assert_eq!(code(&bench.ask("ext.data.svc.cluster.local", RecordType::A).await), ResponseCode::NXDomain);
    // Nor is an address the cluster's because an answer from outside says that a cluster's name has it.
    bench.nameserver.forget("rebind.example.com");
    bench.nameserver.give("rebind.example.com", RData::CNAME(CNAME(name("orders.shop.svc.cluster.local"))));
    bench.nameserver.give("orders.shop.svc.cluster.local", v4("10.1.1.1"));
    assert_eq!(code(&bench.ask("rebind.example.com", RecordType::A).await), ResponseCode::NXDomain);
}

#[tokio::test]
async fn an_answer_says_nothing_of_other_names_than_the_one_that_was_asked_for() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("gone.example.com", RData::CNAME(CNAME(name("api.example.com"))));
    bench.nameserver.give("api.example.com", v4("198.51.100.66"));
    assert_eq!(bench.ask("gone.example.com", RecordType::A).await.answers.len(), 2);
    assert!(matches!(bench.lead("gone.example.com", "198.51.100.66").await, Destination::Bound(_)));
    // Who answers for the one name must not say where the other is; its own nameserver is asked.
    bench.nameserver.forget("api.example.com");
    bench.nameserver.give("api.example.com", v4("198.51.100.1"));
    assert!(matches!(bench.lead("api.example.com", "198.51.100.66").await, Destination::Unbound(_)));
    assert!(matches!(bench.lead("api.example.com", "198.51.100.1").await, Destination::Bound(_)));
}

#[tokio::test]
async fn a_call_goes_to_an_address_of_the_name_it_claims() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("api.example.com", a(1));
    bench.nameserver.give("orders.shop.svc.cluster.local", v4("10.96.1.2"));
    bench.ask("api.example.com", RecordType::A).await;
    bench.nameserver.asked();
    assert!(matches!(bench.lead("api.example.com", "198.51.100.1").await, Destination::Bound(_)));
    assert!(matches!(bench.lead("api.example.com", "::ffff:198.51.100.1").await, Destination::Bound(_)));
    assert!(bench.nameserver.asked().is_empty(), "it was known");
    // Another address: resolved now, from the cache where there is something, and not in the answer.
    let Destination::Unbound(why) = bench.lead("api.example.com", "203.0.113.5").await else { panic!() };
    assert!(why.contains("api.example.com has no address 203.0.113.5"), "{why}");
    // A name that was never asked: resolved now, as the agent's stub resolver would.
    assert!(matches!(bench.lead("orders.shop.svc", "10.96.1.2").await, Destination::Bound(_)));
    let asked = bench.nameserver.asked();
    assert!(asked.contains(&"orders.shop.svc.cluster.local A".to_owned()), "{asked:?}");
    // Also by a name that the policy does not speak of: whether it may be called is another question.
    assert!(matches!(bench.lead("orders.shop", "10.96.1.2").await, Destination::Bound(_)));
    // Addresses as hosts are themselves.
    assert!(matches!(bench.lead("203.0.113.5", "203.0.113.5").await, Destination::Bound(_)));
    assert!(matches!(bench.lead("[2001:db8::1]", "2001:db8::1").await, Destination::Bound(_)));
    assert!(matches!(bench.lead("203.0.113.5", "203.0.113.6").await, Destination::Unbound(_)));
    // A name that the policy does not allow is asked of nobody.
    assert!(matches!(bench.lead("evil.example.org", "198.51.100.1").await, Destination::Unbound(_)));
    assert!(!bench.nameserver.asked().iter().any(|n| n.starts_with("evil.example.org ")));
}

#[tokio::test]
async fn bindings_outlive_the_process() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give_for("api.example.com", 1, a(1));
    bench.ask("api.example.com", RecordType::A).await;
    let file = bench.dir.path().join("bindings.json");
    let end = std::time::Instant::now() + 2 * PATIENCE;
    while !file.exists() {
        assert!(std::time::Instant::now() < end, "nothing was kept");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let Bench { nameserver, conf, dir, server, .. } = bench;
    drop(server);
    nameserver.forget("api.example.com");
    nameserver.asked();
    let again = Bench::with(POLICY, nameserver, conf, dir).await;
    assert!(matches!(again.lead("api.example.com", "198.51.100.1").await, Destination::Bound(_)));
    assert!(again.nameserver.asked().is_empty());
}

#[tokio::test]
async fn names_that_carry_data_are_refused_by_their_shape_and_their_number() {
    let bench = Bench::new(POLICY).await;
    let base = "pattern.example.com";
    let long = "a-word-".repeat(8);
    for (host, rule) in [
        (format!("nbswy3dpeb3w64tmmqqhi2djomqgs4zamrqxiyi.{base}"), "SLP-DNS-0001"),
        (format!("{long}x.{base}"), "SLP-DNS-0002"),
        (format!("{}{base}", "word.".repeat(30)), "SLP-DNS-0002"),
    ] {
        let answer = bench.ask(&host, RecordType::A).await;
        assert_eq!((code(&answer), extended(&answer).0), (ResponseCode::NXDomain, 18), "{host}");
        assert!(extended(&answer).1.contains(rule), "{}", extended(&answer).1);
    }
    assert!(bench.nameserver.asked().is_empty(), "nothing of it left");
    // Counted anew.
    let bench = Bench::new(POLICY).await;
    for i in 0..80 {
        bench.ask(&format!("w{i}.{base}"), RecordType::A).await;
    }
    assert_eq!(bench.nameserver.asked().len(), 60, "names below one domain in a minute");
    assert!(bench.records().iter().any(|r| r.contains("block policy_denied SLP-DNS-0004")));
    // The names of the policy itself and the cluster's are not held back by it.
    bench.nameserver.give("api.example.com", a(1));
    assert_eq!(code(&bench.ask("api.example.com", RecordType::A).await), ResponseCode::NoError);
    for i in 0..80 {
        bench.ask(&format!("w{i}.data.svc.cluster.local"), RecordType::A).await;
    }
    assert_eq!(bench.nameserver.asked().len(), 81);
}

#[tokio::test]
async fn observe_resolves_everything_and_says_what_it_would_have_refused() {
    let bench = Bench::new(&format!("mode: Observe\n{POLICY}")).await;
    bench.nameserver.give("evil.example.org", v4("127.0.0.1"));
    let answer = bench.ask("evil.example.org", RecordType::A).await;
    assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NoError, 1));
    let records = bench.records();
    assert!(records[0].starts_with("evil.example.org A block "), "{records:?}");
}

#[tokio::test]
async fn what_can_t_be_answered_is_an_error_and_not_a_name_that_is_gone() {
    // Nobody listens there.
    let dead: SocketAddr = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let conf = Conf { nameservers: vec![dead], ..Conf::default() };
    let (nameserver, _) = Nameserver::start();
    let bench = Bench::with(POLICY, nameserver, conf, tempfile::tempdir().unwrap()).await;
    let answer = bench.ask("api.example.com", RecordType::A).await;
    assert_eq!((code(&answer), extended(&answer).0), (ResponseCode::ServFail, 22));
    // A call there may be tried again: nothing is known against it.
    let lead = bench.lead("api.example.com", "198.51.100.1").await;
    assert!(matches!(&lead, Destination::Unresolved(why) if why.ends_with("; try again")), "{lead:?}");
    bench.server.stop().set(Some(Why::NoBundle));
    let answer = bench.ask("api.example.com", RecordType::A).await;
    assert_eq!((code(&answer), extended(&answer).0), (ResponseCode::ServFail, 14));
}

#[tokio::test]
async fn with_the_kill_switch_on_nobody_is_asked_and_what_is_known_is_told() {
    let bench = Bench::new(POLICY).await;
    bench.nameserver.give("api.example.com", a(1));
    bench.nameserver.give("gone.example.com", a(2));
    bench.ask("api.example.com", RecordType::A).await;
    bench.nameserver.asked();
    bench.server.stop().set(Some(Why::Killed("namespace a".into())));
    let answer = bench.ask("API.example.com", RecordType::A).await;
    assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NoError, 1));
    let answer = bench.ask("api.example.com", RecordType::AAAA).await;
    assert_eq!((code(&answer), answer.answers.len()), (ResponseCode::NoError, 0));
    let answer = bench.ask("gone.example.com", RecordType::A).await;
    assert_eq!((code(&answer), extended(&answer).0), (ResponseCode::NXDomain, 14));
    assert!(extended(&answer).1.contains("kill switch"));
    assert!(bench.nameserver.asked().is_empty());
    bench.server.stop().set(None);
    assert_eq!(bench.ask("gone.example.com", RecordType::A).await.answers.len(), 1);
}

#[tokio::test]
async fn what_is_no_question_is_answered_as_such_or_not_at_all() {
    let bench = Bench::new(POLICY).await;
    let mut update = question("api.example.com", RecordType::A);
    update.metadata.op_code = OpCode::Update;
    assert_eq!(code(&bench.exchange(&update).await), ResponseCode::NotImp);
    let mut two = question("api.example.com", RecordType::A);
    two.add_query(two.queries[0].clone());
    assert_eq!(code(&bench.exchange(&two).await), ResponseCode::FormErr);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.connect(("127.0.0.1", bench.port)).await.unwrap();
    // Shorter than a header, an answer, noise.
    let mut answer = question("api.example.com", RecordType::A);
    answer.metadata.message_type = MessageType::Response;
    for bytes in [vec![1, 2, 3], answer.to_vec().unwrap()] {
        socket.send(&bytes).await.unwrap();
    }
    socket.send(&[&[0x12, 0x34, 1, 0, 0, 9, 0, 0, 0, 0, 0, 0][..], &[0xff; 40]].concat()).await.unwrap();
    let mut buffer = [0; 512];
    let length = tokio::time::timeout(PATIENCE, socket.recv(&mut buffer)).await.unwrap().unwrap();
    let answer = Message::from_vec(&buffer[..length]).unwrap();
    assert_eq!((answer.metadata.id, code(&answer)), (0x1234, ResponseCode::FormErr));
}

/// The head of a captured call, as Envoy tells it.
fn call(host: &str, destination: Option<&str>) -> ProcessingRequest {
    use prost_types::{Struct, Value, value::Kind};
    let header = |(key, value): (&str, &str)| HeaderValue {
        key: key.to_owned(),
        raw_value: value.to_owned().into(),
        ..HeaderValue::default()
    };
    let headers = [(":method", "GET"), (":scheme", "http"), (":authority", host), (":path", "/x")];
    let headers = Some(HeaderMap { headers: headers.map(header).to_vec() });
    let value = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let fields = destination.map(|d| ("destination.address".to_owned(), value(d)));
    let attributes = Struct { fields: fields.into_iter().collect() };
    ProcessingRequest {
        request: Some(Part::RequestHeaders(HttpHeaders {
            headers,
            end_of_stream: true,
            ..HttpHeaders::default()
        })),
        attributes: [("envoy.filters.http.ext_proc".to_owned(), attributes)].into(),
        ..ProcessingRequest::default()
    }
}

/// Where Envoy is told to dial, or why it is not.
fn told(answer: &ProcessingResponse) -> String {
    use prost_types::value::Kind;
    if let Some(Reply::ImmediateResponse(refusal)) = &answer.response {
        let body = String::from_utf8_lossy(&refusal.body).into_owned();
        let (_, code) = body.split_once("\"code\":\"").unwrap();
        return code.split('"').next().unwrap().to_owned();
    }
    let ours = answer.dynamic_metadata.as_ref().and_then(|m| m.fields.get(METADATA_NAMESPACE)).unwrap();
    let Some(Kind::StructValue(ours)) = &ours.kind else { panic!("{ours:?}") };
    let Some(Kind::StringValue(address)) = &ours.fields[DESTINATION].kind else { panic!("{ours:?}") };
    address.clone()
}

#[tokio::test]
async fn a_captured_call_is_dialled_where_it_was_judged_and_nowhere_else() {
    let mut rules = POLICY.replace("egress:\n", "egress:\n  platform: {podIdentity: Allow}\n");
    rules = rules.replace(
        "rules:\n",
        "rules:\n    - {hosts: [198.51.100.9, 10.1.2.3, 169.254.170.23], action: Allow}\n",
    );
    for mode in ["Enforce", "Observe"] {
        let bench = Bench::new(&format!("mode: {mode}\n{rules}")).await;
        bench.nameserver.give("api.example.com", a(1));
        bench.nameserver.give("orders.shop.svc.cluster.local", v4("10.96.1.2"));
        for (host, destination, enforced) in [
            ("api.example.com", "198.51.100.1:80", "198.51.100.1:80"),
            // The port that was judged is the port that is dialled.
            ("api.example.com", "198.51.100.1:8080", "198.51.100.1:80"),
            ("api.example.com:81", "[::ffff:198.51.100.1]:81", "198.51.100.1:81"),
            ("orders.shop.svc", "10.96.1.2:80", "10.96.1.2:80"),
            ("198.51.100.9", "198.51.100.9:80", "198.51.100.9:80"),
            ("10.1.2.3", "10.1.2.3:80", "10.1.2.3:80"),
            ("api.example.com", "203.0.113.5:80", "destination_not_bound"),
            ("198.51.100.9", "203.0.113.5:80", "destination_not_bound"),
            ("api.example.com", "169.254.169.254:80", "destination_not_bound"),
            ("169.254.170.23", "169.254.170.23:80", "destination_denied"),
            ("169.254.169.254", "169.254.169.254:80", "egress_denied"),
            ("evil.example.org", "198.51.100.1:80", "egress_denied"),
        ] {
            let context = Context {
                judge: bench.server.policy().judge(),
                observer: Arc::clone(&bench.book) as Arc<dyn Observer>,
                budget: Budget::new(1 << 20),
                upstream: None,
                inside: Inside::Clear,
                captured: true,
                names: Some(Arc::clone(&bench.names)),
                stop: Arc::default(),
            };
            let mut exchange = Exchange::new(context);
            let mut step = exchange.take(call(host, Some(destination)));
            if let Step::Resolve(lookup) = step {
                step = exchange.resolved(lookup.run(PATIENCE).await);
            }
            let Step::Answer(answer) = step else { panic!("{host} at {destination}: {step:?}") };
            let original: SocketAddr = destination.parse().unwrap();
            let original = SocketAddr::new(original.ip().to_canonical(), original.port()).to_string();
            let wanted = if mode == "Observe" { &original } else { enforced };
            assert_eq!(told(&answer), *wanted, "{mode}: {host} at {destination}");
        }
    }
}

#[tokio::test]
async fn a_call_whose_host_could_not_be_resolved_is_refused_as_one_to_try_again() {
    let bench = Bench::new(POLICY).await;
    let context = Context {
        judge: bench.server.policy().judge(),
        observer: Arc::clone(&bench.book) as Arc<dyn Observer>,
        budget: Budget::new(1 << 20),
        upstream: None,
        inside: Inside::Clear,
        captured: true,
        names: Some(Arc::clone(&bench.names)),
        stop: Arc::default(),
    };
    let mut exchange = Exchange::new(context);
    let Step::Resolve(lookup) = exchange.take(call("api.example.com", Some("198.51.100.1:80"))) else {
        panic!("known already")
    };
    let late = lookup.run(Duration::ZERO).await;
    assert!(matches!(&late, Destination::Unresolved(why) if why.ends_with("in time; try again")), "{late:?}");
    let Step::Answer(answer) = exchange.resolved(late) else { panic!("not refused") };
    assert_eq!(told(&answer), "destination_unresolved");
    let Some(Reply::ImmediateResponse(refusal)) = &answer.response else { panic!("{answer:?}") };
    assert_eq!(refusal.status.as_ref().unwrap().code, 503);
}

#[tokio::test]
async fn a_captured_call_without_an_address_or_a_resolver_is_refused() {
    let bench = Bench::new(POLICY).await;
    for (destination, names) in [(None, true), (Some("nonsense"), true), (Some("198.51.100.1:80"), false)] {
        let context = Context {
            judge: bench.server.policy().judge(),
            observer: Arc::clone(&bench.book) as Arc<dyn Observer>,
            budget: Budget::new(1 << 20),
            upstream: None,
            inside: Inside::Clear,
            captured: true,
            names: names.then(|| Arc::clone(&bench.names)),
            stop: Arc::default(),
        };
        let step = Exchange::new(context).take(call("api.example.com", destination));
        let Step::Fail(code) = step else { panic!("{destination:?}: {step:?}") };
        assert_eq!(code.as_str(), "protocol_error");
    }
}
