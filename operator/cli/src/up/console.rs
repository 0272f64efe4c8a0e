//! What a person sees of the traffic: one line per message that was decided above `allow`.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use sallyport_engine::{Code, Decision};
use sallyport_extproc::{Observer, Record};
use serde_json::json;

/// Lines that may wait for a slow terminal. The filter never waits for one: beyond this, lines are
/// counted instead of shown.
const WAITING: usize = 1024;

/// How decisions are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Log {
    /// A line per message, for people.
    Text,
    /// A JSON object per message on standard output, everything else on standard error.
    Json,
    /// Nothing.
    Quiet,
}

/// Turns records into lines, on the filter's thread; a thread of its own prints them.
#[derive(Debug)]
pub(crate) struct Console {
    log: Log,
    lines: SyncSender<String>,
    lost: Arc<AtomicU64>,
}

impl Console {
    pub(crate) fn start(log: Log) -> std::io::Result<Self> {
        let (lines, waiting) = sync_channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        std::thread::Builder::new().name("console".into()).spawn(move || print(&waiting, &counted))?;
        Ok(Self { log, lines, lost })
    }
}

fn print(lines: &Receiver<String>, lost: &AtomicU64) {
    for line in lines {
        // Nobody reads: nothing is left to do here, and the traffic goes on.
        if writeln!(std::io::stdout(), "{line}").is_err() {
            return;
        }
        let missing = lost.swap(0, Ordering::Relaxed);
        if missing > 0 {
            crate::note(&format!("({missing} lines left out: they came faster than they could be printed)"));
        }
    }
}

impl Observer for Console {
    fn record(&self, record: &Record<'_>) {
        if record.verdict.decision == Decision::Allow || self.log == Log::Quiet {
            return;
        }
        let line = match self.log {
            Log::Json => json(record),
            _ => {
                text(record, &Timestamp::now().to_zoned(TimeZone::system()).strftime("%H:%M:%S").to_string())
            }
        };
        if let Err(TrySendError::Full(_)) = self.lines.try_send(line) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// `14:02:11 block   SLP-SEC-0001  POST api.openai.com/v1/chat/completions request (policy_denied, 412 us)`
fn text(record: &Record<'_>, time: &str) -> String {
    let decision = record.verdict.decision.as_str();
    let decision = if record.enforced { decision.to_owned() } else { format!("would {decision}") };
    // A host or a URL is refused by a policy and not by a rule.
    let rules = Some(record.rules()).filter(|r| !r.is_empty()).unwrap_or_else(|| record.policies());
    let rules = if rules.is_empty() { "-".to_owned() } else { rules.join(",") };
    let code = record.code().map(|c| format!("{}, ", c.as_str())).unwrap_or_default();
    printable(&format!(
        "{time} {decision:<6} {rules}  {} {}{} {} ({code}{} us)",
        record.method,
        record.host,
        record.path,
        record.direction.as_str(),
        record.micros,
    ))
}

fn json(record: &Record<'_>) -> String {
    json!({
        "time": Timestamp::now(),
        "decision": record.verdict.decision.as_str(),
        "enforced": record.enforced,
        "direction": record.direction.as_str(),
        "method": record.method,
        "host": record.host,
        "path": record.path,
        "rules": record.rules(),
        "policies": record.policies(),
        "code": record.code().map(Code::as_str),
        "score": record.verdict.score,
        "protocol": record.protocol_name(),
        "bytes": record.bytes,
        "micros": record.micros,
        "request_id": record.request_id,
    })
    .to_string()
}

/// Host and path come from the agent: control characters in them would command the terminal, and
/// invisible ones make a line lie.
fn printable(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    for c in line.chars() {
        if c.is_ascii_graphic() || c == ' ' || c.is_alphanumeric() {
            out.push(c);
        } else {
            out.extend(c.escape_unicode());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use sallyport_engine::{Protocol, Reason, Verdict};
    use sallyport_extproc::Direction;

    fn record<'a>(verdict: &'a Verdict, path: &'a str, enforced: bool) -> Record<'a> {
        Record {
            request_id: "r",
            direction: Direction::Request,
            method: "GET",
            host: "example.com",
            path,
            verdict,
            enforced,
            complete: true,
            protocol: &Protocol::Unknown,
            bytes: 0,
            held: 0,
            micros: 12,
        }
    }

    #[test]
    fn a_line_says_what_why_and_where() {
        let reason = Reason { policy: "sallyport.egress".into(), decision: Decision::Block };
        let verdict = Verdict {
            decision: Decision::Block,
            code: Some(Code::EgressDenied),
            reasons: vec![reason],
            ..Verdict::default()
        };
        assert_eq!(
            text(&record(&verdict, "/x", true), "14:02:11"),
            "14:02:11 block  sallyport.egress  GET example.com/x request (egress_denied, 12 us)"
        );
        assert!(text(&record(&verdict, "/x", false), "t").starts_with("t would block "));
        let line: serde_json::Value = serde_json::from_str(&json(&record(&verdict, "/x", true))).unwrap();
        assert_eq!(line["code"], "egress_denied");
        assert_eq!(line["policies"][0], "sallyport.egress");
    }

    #[test]
    fn an_agent_can_not_write_to_the_terminal() {
        let verdict = Verdict { decision: Decision::Flag, ..Verdict::default() };
        let line = text(&record(&verdict, "/\x1b[2J\n\u{202e}x", true), "t");
        assert!(line.contains("/\\u{1b}[2J\\u{a}\\u{202e}x"), "{line}");
    }
}
