//! From a body to its segments: what each text is, whose words, and where it stands.
//!
//! The declared content type never decides whether a text is looked at: the bytes are tried as JSON, as
//! JSON lines, as a form, and else are one text. Whatever the shape, every byte of the body stands in a
//! segment or is punctuation of a shape that parsed.

use std::borrow::Cow;

use super::json::{Doc, JsonError, Kind};
use super::segment::{Origin, Place, Role, Segment, as_text, is_wide};
use crate::finding::Surface;
use crate::rules::Scanner;
use crate::text::map::SpanMap;
use crate::verdict::Protocol;

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Request,
    Response,
}

/// Something the shape of a message itself gave away.
#[derive(Clone, Debug)]
pub(crate) struct Structural {
    pub(crate) scanner: Scanner,
    pub(crate) surface: Surface,
    pub(crate) path: String,
}

/// A body taken apart.
#[derive(Debug, Default)]
pub(crate) struct Extracted<'a> {
    pub(crate) segments: Vec<Segment<'a>>,
    pub(crate) docs: Vec<Doc<'a>>,
    pub(crate) protocol: Protocol,
    pub(crate) structural: Vec<Structural>,
    /// Names of the tools that are called.
    pub(crate) tools: Vec<String>,
    /// The JSON-RPC method, for MCP.
    pub(crate) mcp_method: String,
}

impl Extracted<'_> {
    /// The path of a segment, as findings give it.
    pub(crate) fn path(&self, place: &Place) -> String {
        match place {
            Place::Whole => String::new(),
            Place::Name(n) => n.clone(),
            Place::Json { doc, node } => {
                let pointer = self.docs[*doc].pointer(*node);
                if self.docs.len() > 1 { format!("/{doc}{pointer}") } else { pointer }
            }
        }
    }
}

impl<'a> Extracted<'a> {
    /// The name that a segment's value has in its message.
    pub(crate) fn name<'s>(&'s self, segment: &'s Segment<'a>) -> Option<Cow<'s, str>> {
        match (&segment.place, segment.role) {
            (_, Role::Key | Role::Credential) | (Place::Whole, _) => None,
            (Place::Name(n), _) => Some(Cow::Borrowed(n.trim_start_matches('/'))),
            (Place::Json { doc, node }, _) => self.docs[*doc].name(*node),
        }
    }
}

/// What a subtree of a document is.
struct Mark {
    nodes: std::ops::Range<usize>,
    surface: Surface,
    role: Role,
}

/// A body as text; keeps what [`extract`] borrows.
pub(crate) struct Body<'a> {
    text: Cow<'a, str>,
    map: Option<SpanMap>,
    /// The bytes as they would be read if they are not the UTF-16 or UTF-32 that they look like: what begins
    /// with a few zeros may be anything.
    narrow: Option<String>,
}

impl<'a> Body<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        let (text, map) = as_text(bytes);
        let narrow = is_wide(bytes).then(|| String::from_utf8_lossy(bytes).into_owned());
        Self { text, map, narrow }
    }
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// Takes a body apart. `default` is the surface of texts that no protocol gives a better one.
pub(crate) fn extract<'a>(body: &'a Body<'_>, direction: Direction, default: Surface) -> Extracted<'a> {
    let mut out = read(body, direction, default);
    if let Some(text) = &body.narrow {
        out.segments.push(Segment {
            surface: default,
            role: Role::None,
            place: Place::Whole,
            text: Cow::Borrowed(text),
            origin: Origin::Elsewhere,
        });
    }
    out
}

fn read<'a>(body: &'a Body<'_>, direction: Direction, default: Surface) -> Extracted<'a> {
    let mut out = Extracted::default();
    let text = body.text();
    let trimmed = text.trim_start_matches('\u{feff}').trim_start();
    if trimmed.is_empty() {
        return out;
    }
    let lead = text.len() - trimmed.len();
    let first = trimmed.as_bytes()[0];
    if matches!(first, b'"' | b'-' | b'0'..=b'9')
        && let Ok(doc) = Doc::parse(&text[lead..])
    {
        // A string or a number alone is a document too, and has to stay one when something is cut out.
        json(&mut out, body, vec![(lead, doc)], direction, default);
        return out;
    }
    if matches!(first, b'{' | b'[') {
        match Doc::parse(&text[lead..]) {
            Ok(doc) => {
                json(&mut out, body, vec![(lead, doc)], direction, default);
                return out;
            }
            Err(JsonError::Limits) => out.structural.push(Structural {
                scanner: Scanner::JsonLimits,
                surface: default,
                path: String::new(),
            }),
            Err(JsonError::Syntax(_)) => {
                if let Some(docs) = lines(text) {
                    json(&mut out, body, docs, direction, default);
                    return out;
                }
            }
        }
    } else if is_form(trimmed) {
        form(&mut out, body, lead, default);
        return out;
    }
    out.segments.push(Segment {
        surface: default,
        role: Role::None,
        place: Place::Whole,
        text: Cow::Borrowed(text),
        origin: if body.narrow.is_some() {
            Origin::Elsewhere
        } else {
            Origin::Body { at: 0, map: body.map.clone(), bare: false }
        },
    });
    out
}

/// A text of JSON documents, one a line.
fn lines(text: &str) -> Option<Vec<(usize, Doc<'_>)>> {
    let mut docs = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if !line.trim().is_empty() {
            docs.push((at, Doc::parse(line).ok()?));
        }
        at += line.len();
    }
    (docs.len() > 1).then_some(docs)
}

fn is_form(text: &str) -> bool {
    let first = &text[..text.find('&').unwrap_or(text.len())];
    first.contains('=')
        && text.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'"' | b'<' | b'>' | b'{' | b'}'))
        && text.split('&').all(|pair| pair.is_empty() || pair.find('=').is_some_and(|n| n > 0))
}

fn form<'a>(out: &mut Extracted<'a>, body: &'a Body<'_>, lead: usize, surface: Surface) {
    let mut at = lead;
    for pair in body.text()[lead..].split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let mut add = |text: &'a str, from: usize, role: Role| {
            let mut push = |text: Cow<'a, str>| {
                out.segments.push(Segment {
                    surface,
                    role,
                    place: Place::Name(format!("/{name}")),
                    text,
                    origin: origin(body, from, None, false),
                });
            };
            // `+` is a space to who reads the form, and itself to who takes it for something else.
            if text.contains('+') {
                push(Cow::Owned(text.replace('+', " ")));
            }
            if !text.is_empty() {
                push(Cow::Borrowed(text));
            }
        };
        add(name, at, Role::Key);
        add(value, at + name.len() + 1, Role::None);
        at += pair.len() + 1;
    }
}

/// The origin of a text that starts at `at` of the body's text. Where the body's text is itself derived
/// (UTF-16, broken UTF-8), its map is moved along.
fn origin(body: &Body<'_>, at: usize, map: Option<SpanMap>, bare: bool) -> Origin {
    match (&body.map, map) {
        (None, map) => Origin::Body { at, map, bare },
        // Two maps would have to be chained; a redaction that needs it is carried out as a block.
        (Some(_), _) => Origin::Elsewhere,
    }
}

/// Numbers shorter than this hold no identifier worth a rule.
const LEAST_NUMBER: usize = 9;
/// Names shorter than this hold nothing a rule could find.
const LEAST_NAME: usize = 6;

fn json<'a>(
    out: &mut Extracted<'a>,
    body: &'a Body<'_>,
    docs: Vec<(usize, Doc<'a>)>,
    direction: Direction,
    default: Surface,
) {
    for (index, (lead, doc)) in docs.iter().enumerate() {
        let mut marks = Vec::new();
        classify(doc, direction, &mut marks, out);
        let mut painted: Vec<u16> = Vec::new();
        if !marks.is_empty() {
            painted = vec![0; doc.len()];
            for (i, m) in marks.iter().enumerate().take(u16::MAX as usize - 1) {
                painted[m.nodes.clone()].fill(i as u16 + 1);
            }
        }
        let of = |node: usize| match painted.get(node).copied().unwrap_or(0) {
            0 => (default, Role::None),
            i => (marks[i as usize - 1].surface, marks[i as usize - 1].role),
        };
        for id in 0..doc.len() {
            let node = doc.node(id);
            let (surface, role) = of(id);
            let place = Place::Json { doc: index, node: id };
            if let Some(span) = node.name_span().filter(|s| s.len() >= LEAST_NAME)
                && let Some(text) = doc.name(id)
            {
                let map = matches!(text, Cow::Owned(_));
                // A name with escapes is matched, but not cut: its map is not kept.
                let origin =
                    if map { Origin::Elsewhere } else { origin(body, lead + span.start, None, false) };
                out.segments.push(Segment { surface, role: Role::Key, place: place.clone(), text, origin });
            }
            match node.kind {
                Kind::String => {
                    if let Some((text, map)) = doc.string(id).filter(|(t, _)| t.len() >= 3) {
                        let origin = origin(body, lead + node.span().start + 1, map, false);
                        out.segments.push(Segment { surface, role, place, text, origin });
                    }
                }
                Kind::Number if node.span().len() >= LEAST_NUMBER => {
                    let origin = origin(body, lead + node.span().start, None, true);
                    out.segments.push(Segment {
                        surface,
                        role,
                        place,
                        text: Cow::Borrowed(doc.raw(id)),
                        origin,
                    });
                }
                _ => {}
            }
        }
        if let Some(id) = doc.duplicate {
            let surface = of(id).0;
            out.structural.push(Structural {
                scanner: Scanner::DuplicateKeys,
                surface,
                path: doc.pointer(id),
            });
        }
    }
    out.docs = docs.into_iter().map(|(_, d)| d).collect();
}

/// Finds out what a document is, and which parts of it are whose words.
fn classify(doc: &Doc<'_>, direction: Direction, marks: &mut Vec<Mark>, out: &mut Extracted<'_>) {
    let root = Doc::ROOT;
    match doc.node(root).kind {
        Kind::Array => {
            for item in doc.children(root) {
                if is_rpc(doc, item) {
                    rpc(doc, item, direction, marks, out);
                }
            }
        }
        Kind::Object if is_rpc(doc, root) => rpc(doc, root, direction, marks, out),
        Kind::Object => chat(doc, root, marks, out),
        _ => {}
    }
}

fn is_rpc(doc: &Doc<'_>, node: usize) -> bool {
    doc.get(node, "jsonrpc").is_some()
}

fn rpc(doc: &Doc<'_>, node: usize, direction: Direction, marks: &mut Vec<Mark>, out: &mut Extracted<'_>) {
    let surface = match direction {
        Direction::Request => Surface::McpRequest,
        Direction::Response => Surface::McpResponse,
    };
    marks.push(Mark { nodes: doc.subtree(node), surface, role: Role::None });
    let method = doc.get(node, "method").and_then(|m| doc.str(m)).unwrap_or_default();
    // The id is answered only to a call; a response's id belongs to its sender.
    let id = doc
        .get(node, "id")
        .filter(|_| !method.is_empty())
        .filter(|i| matches!(doc.node(*i).kind, Kind::String | Kind::Number))
        .map(|i| doc.raw(i).to_owned());
    match &mut out.protocol {
        Protocol::Mcp { id: first } if first.is_none() => *first = id,
        Protocol::Mcp { .. } => {}
        other => *other = Protocol::Mcp { id },
    }
    if method == "tools/call"
        && direction == Direction::Request
        && let Some(params) = doc.get(node, "params")
    {
        if let Some(arguments) = doc.get(params, "arguments") {
            marks.push(Mark { nodes: doc.subtree(arguments), surface: Surface::ToolCall, role: Role::None });
        }
        out.tools.extend(doc.get(params, "name").and_then(|n| doc.str(n)).map(Cow::into_owned));
    }
    if out.mcp_method.is_empty() {
        out.mcp_method = method.into_owned();
    }
}

/// LLM APIs: OpenAI chat completions and responses, Anthropic messages and their relatives.
fn chat(doc: &Doc<'_>, root: usize, marks: &mut Vec<Mark>, out: &mut Extracted<'_>) {
    let get = |n: &str| doc.get(root, n);
    let array = |n: Option<usize>| n.filter(|n| doc.node(*n).kind == Kind::Array);
    let mut known = false;
    if let Some(messages) = array(get("messages")).or_else(|| array(get("contents"))) {
        known = true;
        for m in doc.children(messages) {
            message(doc, m, Surface::Prompt, marks, out);
        }
    }
    if get("model").is_some() {
        for name in ["system", "instructions", "system_instruction"] {
            if let Some(n) = get(name) {
                marks.push(Mark { nodes: doc.subtree(n), surface: Surface::Prompt, role: Role::System });
            }
        }
        for name in ["prompt", "input"] {
            if let Some(n) = get(name) {
                known = true;
                marks.push(Mark { nodes: doc.subtree(n), surface: Surface::Prompt, role: Role::User });
                if doc.node(n).kind == Kind::Array {
                    for item in doc.children(n) {
                        message(doc, item, Surface::Prompt, marks, out);
                    }
                }
            }
        }
    }
    for name in ["choices", "candidates", "output"] {
        if let Some(choices) = array(get(name)) {
            for choice in doc.children(choices) {
                known = true;
                let inner =
                    ["message", "delta", "content"].iter().find_map(|n| doc.get(choice, n)).unwrap_or(choice);
                message(doc, inner, Surface::ResponseBody, marks, out);
            }
        }
    }
    if get("content").is_some() && get("role").is_some() {
        known = true;
        message(doc, root, Surface::ResponseBody, marks, out);
    }
    if known && out.protocol == Protocol::Unknown {
        out.protocol = Protocol::Chat;
    }
}

/// One message of a conversation, whatever API's.
fn message(doc: &Doc<'_>, node: usize, surface: Surface, marks: &mut Vec<Mark>, out: &mut Extracted<'_>) {
    if doc.node(node).kind != Kind::Object {
        return;
    }
    let role = doc.get(node, "role").and_then(|r| doc.str(r)).map_or(Role::None, |r| Role::of(&r));
    let surface = if role == Role::Tool { Surface::ToolResult } else { surface };
    // Only a message that says whose words it holds repaints: an unknown object keeps its surface.
    if role != Role::None {
        marks.push(Mark { nodes: doc.subtree(node), surface, role });
    }
    part(doc, node, marks, out);
    for name in ["content", "parts"] {
        let Some(list) = doc.get(node, name).filter(|n| doc.node(*n).kind == Kind::Array) else { continue };
        for p in doc.children(list) {
            part(doc, p, marks, out);
        }
    }
    if let Some(calls) = doc.get(node, "tool_calls") {
        marks.push(Mark { nodes: doc.subtree(calls), surface: Surface::ToolCall, role: Role::Assistant });
        for call in doc.children(calls) {
            let function = doc.get(call, "function").unwrap_or(call);
            out.tools.extend(doc.get(function, "name").and_then(|n| doc.str(n)).map(Cow::into_owned));
        }
    }
}

/// A part of a message that is a tool's: its call or its result.
fn part(doc: &Doc<'_>, node: usize, marks: &mut Vec<Mark>, out: &mut Extracted<'_>) {
    let kind = doc.get(node, "type").and_then(|t| doc.str(t)).unwrap_or_default();
    let call = matches!(&*kind, "tool_use" | "function_call" | "server_tool_use" | "mcp_tool_use");
    let result = matches!(&*kind, "tool_result" | "function_call_output" | "mcp_tool_result");
    if call {
        marks.push(Mark { nodes: doc.subtree(node), surface: Surface::ToolCall, role: Role::Assistant });
        out.tools.extend(doc.get(node, "name").and_then(|n| doc.str(n)).map(Cow::into_owned));
    } else if result {
        marks.push(Mark { nodes: doc.subtree(node), surface: Surface::ToolResult, role: Role::Tool });
    }
    for (name, surface) in [("functionCall", Surface::ToolCall), ("functionResponse", Surface::ToolResult)] {
        if let Some(n) = doc.get(node, name) {
            marks.push(Mark { nodes: doc.subtree(n), surface, role: Role::Assistant });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(direction: Direction, text: &str) -> Vec<(String, Surface, Role, String)> {
        let body = Body::new(text.as_bytes());
        let default =
            if direction == Direction::Request { Surface::RequestBody } else { Surface::ResponseBody };
        let out = extract(&body, direction, default);
        out.segments
            .iter()
            .filter(|s| s.role != Role::Key)
            .map(|s| (out.path(&s.place), s.surface, s.role, s.text.to_string()))
            .collect()
    }

    fn surface_of(direction: Direction, text: &str, leaf: &str) -> (Surface, Role) {
        let all = segments(direction, text);
        all.iter().find(|s| s.3 == leaf).map_or_else(|| panic!("{leaf} not in {all:?}"), |s| (s.1, s.2))
    }

    #[test]
    fn a_chat_request_has_roles() {
        let text = r#"{"model":"m","messages":[{"role":"system","content":"sys"},
            {"role":"user","content":[{"type":"text","text":"question"}]},
            {"role":"assistant","content":null,"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"x\":1}"}}]},
            {"role":"tool","content":"answer"},
            {"role":"user","content":[{"type":"tool_result","content":"claude answer"}]}]}"#;
        let of = |leaf| surface_of(Direction::Request, text, leaf);
        assert_eq!(of("sys"), (Surface::Prompt, Role::System));
        assert_eq!(of("question"), (Surface::Prompt, Role::User));
        assert_eq!(of("{\"x\":1}"), (Surface::ToolCall, Role::Assistant));
        assert_eq!(of("answer"), (Surface::ToolResult, Role::Tool));
        assert_eq!(of("claude answer"), (Surface::ToolResult, Role::Tool));
    }

    #[test]
    fn a_chat_response_has_its_tool_calls() {
        let text = r#"{"choices":[{"message":{"role":"assistant","content":"words","tool_calls":[{"function":{"name":"sql","arguments":"drop"}}]}}]}"#;
        assert_eq!(surface_of(Direction::Response, text, "words"), (Surface::ResponseBody, Role::Assistant));
        assert_eq!(surface_of(Direction::Response, text, "drop"), (Surface::ToolCall, Role::Assistant));
    }

    #[test]
    fn mcp_calls_and_results_are_told_apart() {
        let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"run","arguments":{"q":"query"}}}"#;
        assert_eq!(surface_of(Direction::Request, call, "query").0, Surface::ToolCall);
        assert_eq!(surface_of(Direction::Request, call, "run").0, Surface::McpRequest);
        let body = Body::new(call.as_bytes());
        let out = extract(&body, Direction::Request, Surface::RequestBody);
        assert_eq!(out.protocol, Protocol::Mcp { id: Some("7".into()) });
        assert_eq!(out.tools, ["run"]);
        let result = r#"{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"page"}]}}"#;
        assert_eq!(surface_of(Direction::Response, result, "page").0, Surface::McpResponse);
    }

    #[test]
    fn forms_lines_and_texts_are_told_apart() {
        let s = segments(Direction::Request, "name=alice&note=hello%20there");
        assert_eq!(s[1].0, "/note");
        assert_eq!(s[1].3, "hello%20there");
        let s = segments(Direction::Response, "{\"a\":\"one\"}\n{\"a\":\"two\"}\n");
        assert_eq!(s[1], ("/1/a".into(), Surface::ResponseBody, Role::None, "two".into()));
        let s = segments(Direction::Response, "{\"a\":\"one\"} trailing");
        assert_eq!(s.len(), 1, "{s:?}");
        let s = segments(Direction::Request, "a=b c=d");
        assert_eq!(s[0].0, "");
    }

    #[test]
    fn duplicate_keys_are_reported_with_their_place() {
        let body = Body::new(br#"{"jsonrpc":"2.0","method":"a","method":"b"}"#);
        let out = extract(&body, Direction::Request, Surface::RequestBody);
        assert_eq!(out.structural[0].scanner, Scanner::DuplicateKeys);
        assert_eq!(out.structural[0].path, "/method");
    }
}
