//! Answers to the agent.

use std::net::IpAddr;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::rdata::svcb::{SVCB, SvcParamKey, SvcParamValue};
use hickory_proto::rr::{Name, RData, Record};

use super::cache::Answer;
use super::forward::UDP_BYTES;

/// Extended DNS errors (RFC 8914).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Extended {
    /// The answer leads where no call may go.
    Filtered = 17,
    /// The policy does not allow the question.
    Prohibited = 18,
    /// We can't answer yet, or everything is blocked.
    NotReady = 14,
    /// No nameserver answered.
    NoReachableAuthority = 22,
}

/// The option of an extended error.
const EXTENDED_ERROR: u16 = 15;
/// Longer texts would make the answer longer than a datagram may be.
const MOST_TEXT: usize = 300;

/// An answer with nothing in it but its code.
pub(crate) fn plain(question: &Message, code: ResponseCode) -> Message {
    let mut message = Message::new(question.metadata.id, MessageType::Response, question.metadata.op_code);
    message.metadata.recursion_desired = question.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    message.metadata.response_code = code;
    // As it was asked, capitals included: some clients compare them. Nobody asks two, and hundreds would be longer
    // than a datagram may be.
    if let [query] = question.queries.as_slice() {
        message.add_query(query.clone());
    }
    if question.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_BYTES);
        message.set_edns(edns);
    }
    message
}

/// Says why not, where the client can read it.
pub(crate) fn refusal(question: &Message, code: ResponseCode, extended: Extended, why: &str) -> Message {
    let mut message = plain(question, code);
    if let Some(edns) = &mut message.edns {
        let mut data = (extended as u16).to_be_bytes().to_vec();
        let end = (0..=MOST_TEXT.min(why.len())).rev().find(|e| why.is_char_boundary(*e)).unwrap_or(0);
        data.extend_from_slice(&why.as_bytes()[..end]);
        edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, data));
    }
    message
}

/// What a nameserver said.
pub(crate) fn answer(question: &Message, answer: Answer) -> Message {
    let mut message = plain(question, answer.code);
    message.authorities = answer.authorities;
    message.answers = answer.answers;
    message
}

/// The bytes, cut off where they don't fit into a datagram of the client's.
pub(crate) fn bytes(question: &Message, message: &Message, tcp: bool) -> Option<Vec<u8>> {
    let bytes = message.to_vec().ok()?;
    let most = question.edns.as_ref().map_or(512, |e| e.max_payload().clamp(512, UDP_BYTES));
    if tcp || bytes.len() <= usize::from(most) {
        return Some(bytes);
    }
    message.truncate().to_vec().ok()
}

/// The answer to a message that can't be read, if its id can.
pub(crate) fn malformed(bytes: &[u8]) -> Option<Vec<u8>> {
    let [high, low, flags, ..] = bytes else { return None };
    // An answer is not answered.
    if bytes.len() < 12 || flags & 0x80 != 0 {
        return None;
    }
    let id = u16::from_be_bytes([*high, *low]);
    Message::error_msg(id, OpCode::Query, ResponseCode::FormErr).to_vec().ok()
}

/// Takes out of an answer what would hide the name of a later call, and what the question did not ask for.
pub(crate) fn without_ech(records: &mut [Record]) {
    for record in records {
        if let RData::HTTPS(https) = &mut record.data {
            strip(&mut https.0);
        } else if let RData::SVCB(svcb) = &mut record.data {
            strip(svcb);
        }
    }
}

fn strip(svcb: &mut SVCB) {
    svcb.svc_params.retain(|(key, _)| *key != SvcParamKey::EchConfigList);
    for (_, value) in &mut svcb.svc_params {
        if let SvcParamValue::Mandatory(mandatory) = value {
            mandatory.0.retain(|key| *key != SvcParamKey::EchConfigList);
        }
    }
    svcb.svc_params.retain(|(_, v)| !matches!(v, SvcParamValue::Mandatory(m) if m.0.is_empty()));
}

/// The addresses in an answer, each with the name it stands at and its time.
pub(crate) fn addresses(records: &[Record]) -> Vec<(&Name, IpAddr, u32)> {
    let mut found = Vec::new();
    for record in records {
        let svcb = match &record.data {
            RData::A(a) => {
                found.push((&record.name, IpAddr::V4(a.0), record.ttl));
                continue;
            }
            RData::AAAA(a) => {
                found.push((&record.name, IpAddr::V6(a.0), record.ttl));
                continue;
            }
            RData::HTTPS(https) => &https.0,
            RData::SVCB(svcb) => svcb,
            _ => continue,
        };
        // A target of `.` means the record's own name.
        let name = if svcb.target_name.is_root() { &record.name } else { &svcb.target_name };
        for (_, value) in &svcb.svc_params {
            match value {
                SvcParamValue::Ipv4Hint(hint) => {
                    found.extend(hint.0.iter().map(|a| (name, IpAddr::V4(a.0), record.ttl)));
                }
                SvcParamValue::Ipv6Hint(hint) => {
                    found.extend(hint.0.iter().map(|a| (name, IpAddr::V6(a.0), record.ttl)));
                }
                _ => {}
            }
        }
    }
    found
}
