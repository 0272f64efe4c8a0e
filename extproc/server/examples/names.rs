//! How long the resolver takes for a name that it knows, against asking the nameserver itself: for the record in
//! `docs/benchmarks`.
//!
//!     cargo run --release -p sallyport-extproc --example names
#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_sign_loss
)]

#[path = "../tests/names/nameserver.rs"]
mod nameserver;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, RecordType};
use nameserver::Nameserver;
use sallyport_engine::Engine;
use sallyport_extproc::dns::{Conf, Names};
use sallyport_extproc::{Config, LogObserver, Observer, Server};

const QUESTIONS: usize = 20_000;
const POLICY: &str = "
apiVersion: sallyport.dev/v1alpha1
kind: AgentPolicy
metadata: {name: bench}
spec: {egress: {rules: [{hosts: ['*.example.com'], action: Allow}]}}
";

/// Asks one question after the other; microseconds, sorted.
fn measure(server: SocketAddr) -> Vec<u128> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket.connect(server).unwrap();
    let mut message = Message::new(1, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(Name::from_ascii("api.example.com.").unwrap(), RecordType::A));
    let question = message.to_vec().unwrap();
    let mut times: Vec<_> = (0..QUESTIONS)
        .map(|_| {
            let start = Instant::now();
            socket.send(&question).unwrap();
            assert!(socket.recv(&mut [0; 512]).unwrap() > question.len(), "an answer with an address");
            start.elapsed().as_micros()
        })
        .collect();
    times.sort_unstable();
    times
}

fn main() {
    let (nameserver, address) = Nameserver::start();
    nameserver.give("api.example.com", RData::A(A([198, 51, 100, 1].into())));
    let spec = sallyport_api::load_policy(POLICY).unwrap().spec;
    let dir = std::env::temp_dir().join(format!("sallyport-names-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let observer = Arc::new(LogObserver) as Arc<dyn Observer>;
    let engine = Arc::new(Engine::new(&spec).unwrap());
    let server = Server::bind(Config::new(dir.join("s")), engine, Arc::clone(&observer)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let conf = Conf { nameservers: vec![address], ..Conf::default() };
    let names = Names::new(conf, &dir, server.policy(), server.stop(), observer, runtime.handle().clone());
    let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::thread::spawn(move || runtime.block_on(names.serve(port)));
    std::thread::sleep(Duration::from_secs(1));
    let resolver = SocketAddr::from(([127, 0, 0, 1], port));
    // Turns, so that both see the same machine.
    println!("microseconds from question to answer, {QUESTIONS} questions a row, one after the other");
    println!("{:28} {:>6} {:>6} {:>6} {:>6}", "", "p50", "p99", "p99.9", "most");
    for _ in 0..3 {
        for (what, server) in [("the nameserver itself", address), ("the resolver, from its cache", resolver)]
        {
            let times = measure(server);
            let at = |p: f64| times[((QUESTIONS - 1) as f64 * p) as usize];
            println!("{what:28} {:>6} {:>6} {:>6} {:>6}", at(0.5), at(0.99), at(0.999), at(1.0));
        }
    }
    assert!(nameserver.asked().len() <= 3 * QUESTIONS + 1, "the resolver asked once");
    let _ = std::fs::remove_dir_all(dir);
}
