//! The engine itself: a compiled policy, and the questions it answers.

use std::sync::Arc;

use jiff::Timestamp;
use sallyport_api::{AgentPolicySpec, Listed};

use crate::body::extract::{Body, Direction, Extracted, Structural, extract};
use crate::body::head::{
    LONGEST_URL, header_segments, name_structure, parameter_segments, url_of, url_structure,
};
use crate::body::json::{Doc, Kind};
use crate::body::redact::{self, Edit};
use crate::body::segment::{Origin, Place, Role, Segment};
use crate::body::sse;
use crate::body::stream::StreamScanner;
use crate::decide::cedar::{Ask, Found, Policies};
use crate::decide::egress::{self, Listing};
use crate::decide::reach::{self, Reach};
use crate::detect::{Detector, Item};
use crate::finding::{Category, Finding, Surface};
use crate::message::{NameQuestion, RequestHead, ResponseHead};
use crate::rules::set::RuleSet;
use crate::rules::{Pack, Scanner, shipped};
use crate::verdict::{BodyVerdict, Code, Decision, Protocol, Verdict};

/// How often a body is looked at again after something was cut out of it. Two tokens in one word need one
/// look more; a text that needs many was made to.
const MOST_CUTS: usize = 4;

/// Why a policy could not be compiled.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct LoadError(pub String);

/// A compiled policy. Immutable; share it by `Arc`.
#[derive(Debug)]
pub struct Engine {
    spec: AgentPolicySpec,
    detector: Detector,
    policies: Policies,
}

/// Texts in pieces that a body of several documents is read for.
const MOST_TEXTS: usize = 64;

/// What a message is besides its texts.
struct Frame<'a> {
    direction: Direction,
    head: &'a RequestHead,
    status: u16,
    egress: Listing,
    tunnel: bool,
    /// A name is asked of the resolver.
    resolve: bool,
    reach: Reach,
    /// Why the destination can't be reached, where it can't.
    unreachable: String,
    now: Timestamp,
}

impl<'a> Frame<'a> {
    /// A message of which nothing more is known than its head.
    fn new(direction: Direction, head: &'a RequestHead, now: Timestamp) -> Self {
        Self {
            direction,
            head,
            status: 0,
            egress: Listing::Allowed,
            tunnel: false,
            resolve: false,
            reach: Reach::Unknown,
            unreachable: String::new(),
            now,
        }
    }
}

impl Engine {
    /// Compiles a policy: packs, overrides and Cedar, each error with its place.
    pub fn new(spec: &AgentPolicySpec) -> Result<Self, LoadError> {
        let packs = shipped().map_err(|e| LoadError(e.to_string()))?;
        if let Some(wanted) = &spec.detection.packs {
            for (i, name) in wanted.iter().enumerate() {
                if !packs.iter().any(|p| p.pack == *name) {
                    let names: Vec<&str> = packs.iter().map(|p| p.pack.as_str()).collect();
                    return Err(LoadError(format!(
                        "spec.detection.packs[{i}]: no pack is called `{name}`; there are {}",
                        names.join(", ")
                    )));
                }
            }
        }
        let on = |name: &str| {
            name == "core" || spec.detection.packs.as_ref().is_none_or(|w| w.iter().any(|p| p == name))
        };
        let chosen: Vec<&'static Pack> = packs.iter().filter(|p| on(&p.pack)).collect();
        let rules = RuleSet::of_packs(&chosen).map_err(LoadError)?;
        let detector = Detector::new(spec, rules).map_err(LoadError)?;
        let policies = Policies::new(spec).map_err(LoadError)?;
        Ok(Self { spec: spec.clone(), detector, policies })
    }

    /// The policy this engine was compiled from.
    pub fn spec(&self) -> &AgentPolicySpec {
        &self.spec
    }

    /// How many rules are on.
    pub fn rule_count(&self) -> usize {
        self.detector.rules.rules.len()
    }

    /// Bytes that the literal gate holds.
    pub fn gate_bytes(&self) -> usize {
        self.detector.rules.gate_bytes()
    }

    /// Compiles every rule's pattern now. Otherwise a pattern is compiled when its first candidate comes,
    /// which costs that message up to two milliseconds. For a thread of its own, off the hot path.
    pub fn warm(&self) {
        self.detector.rules.warm();
    }

    /// Decides on a request's head: URL, headers, destination.
    pub fn request_head(&self, head: &RequestHead, now: Timestamp) -> Verdict {
        let tunnel = head.method == "CONNECT" || head.header("upgrade").is_some();
        self.head(head, egress::listing(&self.spec.egress, head), tunnel, now)
    }

    /// Decides on a CONNECT whose bytes will be inspected: on its headers, and on whether any request to
    /// that host and port might be allowed. Those that come through it are judged themselves.
    pub fn request_tunnel(&self, head: &RequestHead, now: Timestamp) -> Verdict {
        let listed = self.spec.egress.may_allow_on(&head.host, Some(head.port));
        self.head(head, Listing::of_name(listed), false, now)
    }

    /// Decides on a TLS connection to a server of that name (lower case), whatever its port.
    pub fn server_name(&self, name: &str, now: Timestamp) -> Verdict {
        let head = RequestHead {
            method: "CONNECT".into(),
            scheme: "https".into(),
            host: name.into(),
            port: 443,
            ..RequestHead::default()
        };
        self.head(&head, Listing::of_name(self.spec.egress.may_allow(name)), false, now)
    }

    fn head(&self, head: &RequestHead, egress: Listing, tunnel: bool, now: Timestamp) -> Verdict {
        let url = url_of(head);
        let mut ex = Extracted::default();
        ex.structural.extend(url_structure(&url));
        // A URL that is too long is refused for its length; reading it would be the attacker's gain.
        if url.len() <= LONGEST_URL {
            ex.segments.push(Segment::elsewhere(Surface::Url, Role::None, "url", &url));
            // `+` is a space in a query.
            if let Some((_, query)) = head.path.split_once('?').filter(|(_, q)| q.contains('+')) {
                let mut spaced = Segment::elsewhere(Surface::Url, Role::None, "url", "");
                spaced.text = query.replace('+', " ").into();
                ex.segments.push(spaced);
            }
            parameter_segments(&mut ex, &url);
        }
        header_segments(&mut ex, &head.headers);
        let (reach, unreachable) = reach::of_call(&self.spec, head);
        let frame = Frame { egress, tunnel, reach, unreachable, ..Frame::new(Direction::Request, head, now) };
        self.judge(&frame, &ex).0
    }

    /// How the policy speaks of a name.
    pub fn names(&self, name: &str) -> Listed {
        self.spec.names(name)
    }

    /// Decides on a name that is asked of the resolver, and, where `peer` is given, on an address in the
    /// answer.
    pub fn name(&self, question: &NameQuestion<'_>, now: Timestamp) -> Verdict {
        let name = question.name;
        let listed = self.names(name);
        let mut ex = Extracted::default();
        // A name that the policy holds as a whole leaves the agent nothing to choose.
        if listed != Listed::ByName && question.peer.is_none() {
            ex.segments.push(Segment::elsewhere(Surface::Dns, Role::None, "", name));
            // The cluster's names go no further than the cluster.
            if !question.of_cluster {
                ex.structural = name_structure(name, self.spec.dns.max_label_entropy);
            }
        }
        let too = [(question.too_fast, Scanner::DnsRate), (question.too_many, Scanner::DnsSpread)];
        for (_, scanner) in too.into_iter().filter(|(too, _)| *too) {
            ex.structural.push(Structural { scanner, surface: Surface::Dns, path: String::new() });
        }
        let head = RequestHead {
            method: question.kind.to_owned(),
            scheme: "dns".to_owned(),
            host: name.to_owned(),
            port: 53,
            ..RequestHead::default()
        };
        let (reach, unreachable) = match question.peer {
            Some(peer) => reach::of_peer(&self.spec, name, peer, None),
            None => (Reach::Unknown, String::new()),
        };
        let frame = Frame {
            egress: Listing::of_name(listed),
            resolve: true,
            reach,
            unreachable,
            ..Frame::new(Direction::Request, &head, now)
        };
        self.judge(&frame, &ex).0
    }

    /// Decides on a whole request body (decoded).
    pub fn request_body(&self, head: &RequestHead, body: &[u8], now: Timestamp) -> BodyVerdict {
        let frame = Frame::new(Direction::Request, head, now);
        self.body(&frame, Surface::RequestBody, body)
    }

    /// Decides on a response's head.
    pub fn response_head(&self, request: &RequestHead, response: &ResponseHead, now: Timestamp) -> Verdict {
        let mut ex = Extracted::default();
        header_segments(&mut ex, &response.headers);
        self.judge(&Self::response_frame(request, response, now), &ex).0
    }

    /// Decides on a whole response body (decoded).
    pub fn response_body(
        &self,
        request: &RequestHead,
        response: &ResponseHead,
        body: &[u8],
        now: Timestamp,
    ) -> BodyVerdict {
        if sse::is_stream(sse::declared(response), body) {
            return self.events(request, response, body, now);
        }
        let frame = Self::response_frame(request, response, now);
        let judged = self.body(&frame, Surface::ResponseBody, body);
        if judged.verdict.decision.refuses() {
            return judged;
        }
        // As it came, and as it would leave: a cut lays bare what stands beside it here too.
        let forms = [Some(body), judged.rewritten.as_deref()];
        let refused = forms.into_iter().flatten().find_map(|form| self.pieces(&frame, form));
        match refused {
            Some(verdict) => BodyVerdict { verdict, rewritten: None, ..judged },
            None => judged,
        }
    }

    /// Events that came as one body: read as the stream they are, or texts split over them would be missed.
    fn events(
        &self,
        request: &RequestHead,
        response: &ResponseHead,
        body: &[u8],
        now: Timestamp,
    ) -> BodyVerdict {
        let read = |bytes: &[u8]| {
            let mut scanner = StreamScanner::of_events(self, request.clone(), response.clone());
            let step = scanner.push(bytes, true, now);
            (step.verdict.unwrap_or_default(), step.emit)
        };
        let (verdict, mut rewritten) = read(body);
        if verdict.decision != Decision::Redact {
            return BodyVerdict { verdict, rewritten: None, protocol: Protocol::Unknown };
        }
        // As in `settled`.
        for _ in 0..MOST_CUTS {
            let (again, bytes) = read(&rewritten);
            match again.decision {
                Decision::Allow | Decision::Flag => {
                    return BodyVerdict { verdict, rewritten: Some(rewritten), protocol: Protocol::Unknown };
                }
                Decision::Redact => rewritten = bytes,
                Decision::Hold | Decision::Block => break,
            }
        }
        BodyVerdict { verdict: verdict.unredactable(), rewritten: None, protocol: Protocol::Unknown }
    }

    /// Documents that follow each other (lines, an array) may hold a text in pieces, as events do. What is
    /// found only where the pieces are put together stands in no one place, so it is refused.
    fn pieces(&self, frame: &Frame<'_>, bytes: &[u8]) -> Option<Verdict> {
        let body = Body::new(bytes);
        let ex = extract(&body, frame.direction, Surface::ResponseBody);
        let lines = ex.docs.len() > 1;
        let mut texts: Vec<(String, Surface, String, usize)> = Vec::new();
        for doc in ex.docs.iter().filter(|d| lines || d.node(Doc::ROOT).kind == Kind::Array) {
            // Gemini streams an array. The elements of others are texts of their own.
            for delta in sse::deltas(doc).into_iter().filter(|d| lines || d.channel.contains("/candidates/"))
            {
                let channel = delta.channel.trim_start_matches(|c: char| c == '/' || c.is_ascii_digit());
                if let Some((_, _, text, count)) = texts.iter_mut().find(|(c, ..)| c == channel) {
                    text.push_str(&delta.text);
                    *count += 1;
                } else if texts.len() < MOST_TEXTS {
                    // An honest answer has a handful; more would cost the square of their number.
                    texts.push((channel.to_owned(), delta.surface, delta.text, 1));
                }
            }
        }
        let mut joined = Extracted::default();
        for (_, surface, text, _) in texts.iter().filter(|(.., count)| *count > 1) {
            joined.segments.push(Segment::elsewhere(*surface, Role::Assistant, "pieces", text));
        }
        if joined.segments.is_empty() {
            return None;
        }
        // What stands whole in one piece was found, and dealt with, there.
        let mut items = self.detector.find(&joined);
        let known: Vec<String> = self.detector.find(&ex).into_iter().map(|i| i.finding.evidence).collect();
        items.retain(|i| !known.contains(&i.finding.evidence));
        let verdict = self.decide(frame, &joined, &items);
        (verdict.decision >= Decision::Redact).then(|| verdict.unredactable())
    }

    /// Decides on a part of a streamed response, without the JSON strings whose bytes start at `skip`, which
    /// is in order.
    pub(crate) fn response_part(
        &self,
        request: &RequestHead,
        response: &ResponseHead,
        bytes: &[u8],
        skip: &[usize],
        now: Timestamp,
    ) -> (Verdict, Vec<Edit>) {
        let body = Body::new(bytes);
        let mut ex = extract(&body, Direction::Response, Surface::ResponseBody);
        ex.segments.retain(|s| match &s.origin {
            Origin::Body { at, .. } => skip.binary_search(at).is_err(),
            Origin::Elsewhere => true,
        });
        self.judge(&Self::response_frame(request, response, now), &ex)
    }

    fn response_frame<'a>(head: &'a RequestHead, response: &ResponseHead, now: Timestamp) -> Frame<'a> {
        Frame { status: response.status, ..Frame::new(Direction::Response, head, now) }
    }

    /// Opens a scanner for a response that is forwarded while it arrives. `answers` is what the request's
    /// body turned out to be; it shapes the error that ends a stream.
    pub fn response_stream(
        self: &Arc<Self>,
        request: &RequestHead,
        response: &ResponseHead,
        answers: &Protocol,
    ) -> StreamScanner {
        StreamScanner::new(Arc::clone(self), request.clone(), response.clone(), answers.clone())
    }

    /// Looks at one text, as `sallyport scan` does. Offsets of findings are offsets into `text`.
    pub fn scan_text(&self, surface: Surface, text: &str, now: Timestamp) -> Verdict {
        let head = RequestHead::default();
        let mut ex = Extracted::default();
        if surface == Surface::Url {
            ex.structural.extend(url_structure(text));
        } else if surface == Surface::Dns {
            ex.structural = name_structure(text, self.spec.dns.max_label_entropy);
        }
        ex.segments.push(Segment {
            surface,
            role: Role::None,
            place: Place::Whole,
            text: text.into(),
            origin: Origin::Body { at: 0, map: None, bare: false },
        });
        if surface == Surface::Url && text.len() <= LONGEST_URL {
            parameter_segments(&mut ex, text);
        }
        self.judge(&scan_frame(&head, surface, now), &ex).0
    }

    /// Looks at one JSON document, as `sallyport scan` does.
    pub fn scan_json(&self, surface: Surface, json: &[u8], now: Timestamp) -> Verdict {
        let head = RequestHead::default();
        self.body(&scan_frame(&head, surface, now), surface, json).verdict
    }

    fn body(&self, frame: &Frame<'_>, default: Surface, bytes: &[u8]) -> BodyVerdict {
        let body = Body::new(bytes);
        let ex = extract(&body, frame.direction, default);
        let (verdict, edits) = self.judge(frame, &ex);
        let protocol = ex.protocol;
        if verdict.decision != Decision::Redact {
            return BodyVerdict { verdict, rewritten: None, protocol };
        }
        match self.settled(frame, default, redact::apply(bytes, edits)) {
            Some(rewritten) => BodyVerdict { verdict, rewritten: Some(rewritten), protocol },
            None => BodyVerdict { verdict: verdict.unredactable(), rewritten: None, protocol },
        }
    }

    /// A body out of which something was cut, with nothing left to cut: what stood beside a finding may be
    /// one itself now that it stands alone (two tokens in one word). `None` where it must not pass at all,
    /// or where there is no end to it.
    fn settled(&self, frame: &Frame<'_>, default: Surface, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
        for _ in 0..MOST_CUTS {
            let body = Body::new(&bytes);
            let (verdict, edits) = self.judge(frame, &extract(&body, frame.direction, default));
            match verdict.decision {
                Decision::Allow | Decision::Flag => return Some(bytes),
                Decision::Redact => bytes = redact::apply(&bytes, edits),
                Decision::Hold | Decision::Block => return None,
            }
        }
        None
    }

    /// Looks at texts without a body to rewrite: what a stream has shown so far. Returns the verdict and,
    /// for each segment, the ranges that a redaction cuts.
    pub(crate) fn judge_texts(
        &self,
        request: &RequestHead,
        response: &ResponseHead,
        texts: &[(Surface, &str)],
        now: Timestamp,
    ) -> (Verdict, Vec<(usize, usize, usize, Category)>) {
        let mut ex = Extracted::default();
        for (surface, text) in texts {
            ex.segments.push(Segment {
                surface: *surface,
                role: Role::Assistant,
                place: Place::Whole,
                text: (*text).into(),
                origin: Origin::Body { at: 0, map: None, bare: false },
            });
        }
        let items = self.detector.find(&ex);
        let verdict = self.decide(&Self::response_frame(request, response, now), &ex, &items);
        let cuts = items
            .iter()
            .zip(&verdict.findings)
            .filter(|(_, f)| f.decision == Decision::Redact)
            .filter_map(|(i, f)| Some((i.segment?, f.start, f.end, f.category)))
            .collect();
        (verdict, cuts)
    }

    /// Finds, decides, and says what a redaction cuts out of the body.
    fn judge(&self, frame: &Frame<'_>, ex: &Extracted<'_>) -> (Verdict, Vec<Edit>) {
        let items = self.detector.find(ex);
        let verdict = self.decide(frame, ex, &items);
        let mut edits = Vec::new();
        if verdict.decision == Decision::Redact {
            let cut = items.iter().zip(&verdict.findings).filter(|(_, f)| f.decision == Decision::Redact);
            edits.extend(cut.filter_map(|(i, f)| {
                redact::edit(&ex.segments[i.segment?], f.start, f.end, f.category.as_str())
            }));
        }
        (verdict, edits)
    }

    fn decide(&self, frame: &Frame<'_>, ex: &Extracted<'_>, items: &[Item]) -> Verdict {
        let exceptions: Vec<&str> =
            self.spec.exceptions.iter().filter(|e| e.until > frame.now).map(|e| e.id.as_str()).collect();
        let found: Vec<Found<'_>> = items
            .iter()
            .map(|i| Found {
                finding: &i.finding,
                pack: i.pack,
                role: i.role.as_str(),
                over: i.over,
                redactable: i.segment.is_some_and(|s| matches!(ex.segments[s].origin, Origin::Body { .. })),
            })
            .collect();
        let ask = Ask {
            direction: frame.direction,
            head: frame.head,
            status: frame.status,
            protocol: &ex.protocol,
            mcp_method: &ex.mcp_method,
            tools: &ex.tools,
            egress: frame.egress,
            tunnel: frame.tunnel,
            resolve: frame.resolve,
            reach: frame.reach,
            exceptions: &exceptions,
        };
        let outcome = self.policies.decide(&ask, &found);
        let mut findings: Vec<Finding> = items.iter().map(|i| i.finding.clone()).collect();
        for (f, d) in findings.iter_mut().zip(&outcome.findings) {
            f.decision = *d;
        }
        let message = self.sentence(frame, outcome.decision, outcome.code, &findings);
        Verdict {
            decision: outcome.decision,
            code: outcome.code,
            message,
            reasons: outcome.reasons,
            score: findings.iter().map(|f| f.score).max().unwrap_or(0),
            findings,
        }
    }

    /// One sentence for the human who reads the error.
    fn sentence(
        &self,
        frame: &Frame<'_>,
        decision: Decision,
        code: Option<Code>,
        findings: &[Finding],
    ) -> String {
        if decision == Decision::Allow {
            return String::new();
        }
        match code {
            Some(Code::EgressDenied) if frame.resolve => {
                return format!(
                    "{} is not allowed by spec.egress.rules or spec.dns.allow of the AgentPolicy",
                    frame.head.host
                );
            }
            Some(Code::DestinationNotBound | Code::DestinationUnresolved | Code::DestinationDenied) => {
                return frame.unreachable.clone();
            }
            Some(Code::EgressDenied) => {
                return format!(
                    "{} {}:{} is not allowed by spec.egress of the AgentPolicy",
                    frame.head.method, frame.head.host, frame.head.port
                );
            }
            Some(Code::TunnelDenied) => {
                return "a tunnel (CONNECT or an upgrade) carries bytes that can't be inspected; call the server without one, or through a base URL".into();
            }
            Some(Code::PolicyError) => {
                return "a Cedar policy could not be evaluated; see `policies`".into();
            }
            _ => {}
        }
        let Some(f) =
            findings.iter().filter(|f| f.decision == decision).max_by_key(|f| (f.severity, f.score))
        else {
            return "a policy decided on the message as a whole; see `policies`".into();
        };
        let title = self
            .detector
            .rules
            .rules
            .iter()
            .find(|r| r.rule.id == f.rule)
            .map_or("", |r| r.rule.title.as_str());
        let place = if f.path.is_empty() { String::new() } else { format!(" at {}", known_path(&f.path)) };
        let more = match findings.iter().filter(|g| g.decision == decision).count() {
            0 | 1 => String::new(),
            n => format!(", and {} more", n - 1),
        };
        format!("{title} ({}) in {}{place}{more}", f.rule, f.surface.as_str())
    }
}

/// A place in a message without the names that its sender chose: they may hold what the message is refused
/// for, and the agent reads our sentence. Receipts have the whole path.
fn known_path(path: &str) -> String {
    const KNOWN: [&str; 34] = [
        "url",
        "arguments",
        "candidates",
        "choices",
        "content",
        "contents",
        "data",
        "delta",
        "description",
        "error",
        "function",
        "id",
        "input",
        "instructions",
        "messages",
        "message",
        "method",
        "model",
        "name",
        "output",
        "params",
        "parts",
        "prompt",
        "query",
        "result",
        "role",
        "system",
        "text",
        "tool_calls",
        "tools",
        "type",
        "user",
        "user-agent",
        "referer",
    ];
    let known =
        |step: &str| KNOWN.contains(&step) || (step.len() < 8 && step.bytes().all(|b| b.is_ascii_digit()));
    let steps: Vec<&str> = path.split('/').map(|s| if known(s) { s } else { "*" }).take(16).collect();
    steps.join("/")
}

fn scan_frame(head: &RequestHead, surface: Surface, now: Timestamp) -> Frame<'_> {
    let direction = match surface {
        Surface::ToolResult | Surface::McpResponse | Surface::ResponseBody => Direction::Response,
        _ => Direction::Request,
    };
    Frame::new(direction, head, now)
}
