//! A nameserver for tests: answers what it was given, over UDP and TCP, and remembers what it was asked.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, MessageType, ResponseCode};
use hickory_proto::rr::rdata::SOA;
use hickory_proto::rr::{Name, RData, Record, RecordType};

type Zone = HashMap<(String, RecordType), Vec<Record>>;

#[derive(Default)]
pub struct Nameserver {
    zone: Mutex<Zone>,
    asked: Mutex<Vec<(Name, RecordType)>>,
}

pub fn name(text: &str) -> Name {
    Name::from_ascii(format!("{text}.")).unwrap()
}

impl Nameserver {
    pub fn start() -> (Arc<Self>, SocketAddr) {
        let this = Arc::new(Self::default());
        // TCP must have the port of UDP.
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
                let answer = one.answer(&buffer[..length]);
                let bytes = answer.to_vec().unwrap();
                let bytes = if bytes.len() > 1232 { answer.truncate().to_vec().unwrap() } else { bytes };
                udp.send_to(&bytes, client).unwrap();
            }
        });
        let one = Arc::clone(&this);
        std::thread::spawn(move || {
            for mut stream in tcp.incoming().flatten() {
                let mut length = [0; 2];
                stream.read_exact(&mut length).unwrap();
                let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
                stream.read_exact(&mut question).unwrap();
                let answer = one.answer(&question).to_vec().unwrap();
                stream.write_all(&u16::try_from(answer.len()).unwrap().to_be_bytes()).unwrap();
                stream.write_all(&answer).unwrap();
            }
        });
        (this, address)
    }

    pub fn give(&self, owner: &str, data: RData) {
        self.give_for(owner, 300, data);
    }

    pub fn give_for(&self, owner: &str, ttl: u32, data: RData) {
        let record = Record::from_rdata(name(owner), ttl, data);
        let key = (owner.to_owned(), record.record_type());
        self.zone.lock().unwrap().entry(key).or_default().push(record);
    }

    pub fn forget(&self, owner: &str) {
        self.zone.lock().unwrap().retain(|(o, _), _| o != owner);
    }

    /// What was asked since the last time.
    pub fn asked(&self) -> Vec<String> {
        let line = |(name, kind): (Name, _)| format!("{} {kind}", name.to_ascii().trim_end_matches('.'));
        self.asked_for().into_iter().map(line).collect()
    }

    /// The same, with names as they came.
    pub fn asked_for(&self) -> Vec<(Name, RecordType)> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn answer(&self, bytes: &[u8]) -> Message {
        let question = Message::from_vec(bytes).unwrap();
        let query = question.queries[0].clone();
        let mut owner = query.name.to_ascii().trim_end_matches('.').to_owned();
        self.asked.lock().unwrap().push((query.name.clone(), query.query_type));
        let mut answer = Message::new(question.metadata.id, MessageType::Response, question.metadata.op_code);
        answer.add_query(query.clone());
        let zone = self.zone.lock().unwrap();
        let exists = |owner: &str| zone.keys().any(|(o, _)| o == owner);
        while let Some(records) = zone.get(&(owner.clone(), RecordType::CNAME)) {
            answer.add_answers(records.iter().cloned());
            let RData::CNAME(target) = &records[0].data else { unreachable!() };
            target.0.to_ascii().trim_end_matches('.').clone_into(&mut owner);
        }
        if let Some(records) = zone.get(&(owner.clone(), query.query_type)) {
            answer.add_answers(records.iter().cloned());
        } else {
            let soa = SOA::new(name("ns.test"), name("root.test"), 1, 2, 3, 4, 60);
            answer.add_authorities([Record::from_rdata(name("test"), 60, RData::SOA(soa))]);
            if !exists(&owner) {
                answer.metadata.response_code = ResponseCode::NXDomain;
            }
        }
        answer
    }
}
