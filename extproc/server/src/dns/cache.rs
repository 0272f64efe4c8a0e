//! Answers of nameservers, for as long as they allow.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{RData, Record, RecordType};

/// Answers that are kept: some kilobytes each at most.
const MOST: usize = 1_024;
/// The longest time that an answer is kept.
const LONGEST: Duration = Duration::from_secs(3_600);
/// The same for one that says that there is nothing. Short: services come up.
const LONGEST_NEGATIVE: Duration = Duration::from_secs(30);

/// What a nameserver said.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) code: ResponseCode,
    pub(crate) answers: Vec<Record>,
    /// The SOA that says how long a negative answer counts.
    pub(crate) authorities: Vec<Record>,
}

impl Answer {
    /// For how long it may be kept; none for errors.
    fn lifetime(&self) -> Option<Duration> {
        let (records, longest) = match (self.code, self.answers.is_empty()) {
            (ResponseCode::NoError, false) => (&self.answers, LONGEST),
            (ResponseCode::NoError | ResponseCode::NXDomain, _) => (&self.authorities, LONGEST_NEGATIVE),
            _ => return None,
        };
        let ttl = |r: &Record| match &r.data {
            RData::SOA(soa) => r.ttl.min(soa.minimum),
            _ => r.ttl,
        };
        let least = records.iter().map(ttl).min()?;
        Some(Duration::from_secs(u64::from(least)).min(longest)).filter(|d| !d.is_zero())
    }

    fn aged(&self, age: Duration) -> Self {
        let age = u32::try_from(age.as_secs()).unwrap_or(u32::MAX);
        let mut answer = self.clone();
        for record in answer.answers.iter_mut().chain(&mut answer.authorities) {
            record.ttl = record.ttl.saturating_sub(age);
        }
        answer
    }
}

#[derive(Debug)]
struct Entry {
    answer: Answer,
    since: Instant,
    until: Instant,
}

/// The cache.
#[derive(Debug, Default)]
pub(crate) struct Cache(HashMap<(String, RecordType), Entry>);

impl Cache {
    /// What is known, its times counted down.
    pub(crate) fn get(&self, name: &str, kind: RecordType, now: Instant) -> Option<Answer> {
        // A key of borrowed parts would need a trait of its own; a name is short.
        let entry = self.0.get(&(name.to_owned(), kind))?;
        (entry.until > now).then(|| entry.answer.aged(now.saturating_duration_since(entry.since)))
    }

    pub(crate) fn put(&mut self, name: &str, kind: RecordType, answer: &Answer, now: Instant) {
        let Some(lifetime) = answer.lifetime() else { return };
        if self.0.len() >= MOST {
            self.0.retain(|_, e| e.until > now);
        }
        if self.0.len() >= MOST {
            // To forget everything now and then is cheaper than to keep order.
            self.0.clear();
        }
        let entry = Entry { answer: answer.clone(), since: now, until: now + lifetime };
        self.0.insert((name.to_owned(), kind), entry);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hickory_proto::rr::Name;
    use hickory_proto::rr::rdata::{A, SOA};

    use super::*;

    fn name() -> Name {
        Name::from_ascii("a.test.").unwrap()
    }

    fn address(ttl: u32) -> Record {
        Record::from_rdata(name(), ttl, RData::A(A(Ipv4Addr::new(192, 0, 2, 1))))
    }

    fn answer(code: ResponseCode, answers: Vec<Record>, authorities: Vec<Record>) -> Answer {
        Answer { code, answers, authorities }
    }

    #[test]
    fn an_answer_is_kept_for_its_shortest_time_and_counted_down() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        let two = answer(ResponseCode::NoError, vec![address(100), address(10)], vec![]);
        cache.put("a.test", RecordType::A, &two, start);
        let later = |s| start + Duration::from_secs(s);
        let found = cache.get("a.test", RecordType::A, later(9)).unwrap();
        assert_eq!(found.answers.iter().map(|r| r.ttl).collect::<Vec<_>>(), [91, 1]);
        assert!(cache.get("a.test", RecordType::A, later(10)).is_none());
        assert!(cache.get("a.test", RecordType::AAAA, start).is_none());
        cache.put("b.test", RecordType::A, &answer(ResponseCode::NoError, vec![address(0)], vec![]), start);
        assert!(cache.get("b.test", RecordType::A, start).is_none(), "no time is not to be kept");
    }

    #[test]
    fn nothing_is_kept_for_as_long_as_the_soa_says_and_an_error_never() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        let soa = |ttl| Record::from_rdata(name(), ttl, RData::SOA(SOA::new(name(), name(), 1, 2, 3, 4, 5)));
        cache.put("a.test", RecordType::A, &answer(ResponseCode::NXDomain, vec![], vec![soa(100)]), start);
        let after = |s| start + Duration::from_secs(s);
        assert!(cache.get("a.test", RecordType::A, after(4)).is_some());
        assert!(cache.get("a.test", RecordType::A, after(5)).is_none());
        for (code, soas) in [(ResponseCode::NXDomain, vec![]), (ResponseCode::ServFail, vec![soa(9)])] {
            cache.put("b.test", RecordType::A, &answer(code, vec![], soas), start);
            assert!(cache.get("b.test", RecordType::A, start).is_none(), "{code}");
        }
    }

    #[test]
    fn there_is_an_end_to_what_is_kept() {
        let (mut cache, start) = (Cache::default(), Instant::now());
        for i in 0..3 * MOST {
            let answer = answer(ResponseCode::NoError, vec![address(9)], vec![]);
            cache.put(&format!("{i}.test"), RecordType::A, &answer, start);
            assert!(cache.0.len() <= MOST);
        }
    }
}
