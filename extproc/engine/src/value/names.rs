//! Which values should be data: what their names say.

use crate::body::extract::Extracted;
use crate::body::json::Doc;
use crate::body::segment::{PARAMETER, Place, Role, Segment};
use crate::finding::Surface;
use crate::value::suspicious;

/// A body of no known shape that is longer than this is a document, not a value.
pub(crate) const LONGEST_UNNAMED: usize = 16 << 10;

/// Last words of names whose values are there to be run, looked up or read: a statement, a command, a
/// program, a text. Whatever stands there may look like an attack and be what was asked for. Sorted, to be
/// looked up.
const NOT_DATA: [&str; 117] = [
    "aggregation",
    "answer",
    "args",
    "argv",
    "article",
    "bash",
    "body",
    "cell",
    "changelog",
    "chunk",
    "chunks",
    "cmd",
    "cmds",
    "code",
    "command",
    "commands",
    "comment",
    "comments",
    "condition",
    "conditions",
    "content",
    "contents",
    "css",
    "cypher",
    "description",
    "descriptions",
    "detail",
    "details",
    "diff",
    "document",
    "documents",
    "eval",
    "excerpt",
    "exec",
    "explanation",
    "expr",
    "expression",
    "feedback",
    "filter",
    "filters",
    "formula",
    "formulas",
    "function",
    "functions",
    "glob",
    "gql",
    "graphql",
    "html",
    "instructions",
    "jql",
    "js",
    "jsonpath",
    "kql",
    "lambda",
    "latex",
    "logql",
    "logs",
    "macro",
    "markdown",
    "md",
    "memory",
    "message",
    "messages",
    "note",
    "notebook",
    "notes",
    "observation",
    "output",
    "paragraph",
    "patch",
    "pattern",
    "patterns",
    "pipeline",
    "plan",
    "program",
    "prompt",
    "prompts",
    "promql",
    "queries",
    "query",
    "question",
    "readme",
    "reasoning",
    "regex",
    "regexp",
    "reply",
    "report",
    "review",
    "script",
    "scripts",
    "selector",
    "shell",
    "snippet",
    "soql",
    "source",
    "sql",
    "statement",
    "statements",
    "stderr",
    "stdin",
    "stdout",
    "str",
    "string",
    "summary",
    "svg",
    "template",
    "templates",
    "tex",
    "text",
    "texts",
    "thought",
    "thoughts",
    "todo",
    "transcript",
    "where",
    "xml",
    "xpath",
];

/// The longest of [`NOT_DATA`].
const LONGEST_WORD: usize = 12;

/// First and last letters of [`NOT_DATA`]: for each first one a set of last ones, both without their case.
const ENDS: [u32; 32] = ends();

const fn ends() -> [u32; 32] {
    let mut table = [0; 32];
    let mut at = 0;
    while at < NOT_DATA.len() {
        let word = NOT_DATA[at].as_bytes();
        table[(word[0] & 31) as usize] |= 1 << (word[word.len() - 1] & 31);
        at += 1;
    }
    table
}

/// Words before `code` that make it a number of something and no program.
const CODES: [&str; 14] = [
    "zip", "postal", "post", "country", "currency", "promo", "coupon", "area", "status", "error", "discount",
    "product", "region", "language",
];

/// Whether a name says that its value is no data.
pub(crate) fn says_no_data(name: &str) -> bool {
    let bytes = name.as_bytes();
    // The last word of `file_content`, `fileContent`, `file-content`; the whole of `SQL`.
    let mut start = bytes.len();
    while start > 0 {
        let b = bytes[start - 1];
        if !b.is_ascii_alphabetic() {
            break;
        }
        start -= 1;
        let lower_before = start > 0 && bytes[start - 1].is_ascii_lowercase();
        if b.is_ascii_uppercase() && lower_before {
            break;
        }
    }
    let last = &name[start..];
    if last.eq_ignore_ascii_case("code") {
        let before = &name[..start];
        return !CODES.iter().any(|c| {
            let trimmed = before.trim_end_matches(['_', '-', '.', ' ']);
            trimmed.len() >= c.len()
                && trimmed.is_char_boundary(trimmed.len() - c.len())
                && trimmed[trimmed.len() - c.len()..].eq_ignore_ascii_case(c)
        });
    }
    let ends = last.as_bytes();
    let (Some(a), Some(b)) = (ends.first(), ends.last()) else { return false };
    if ENDS[usize::from(a & 31)] >> (b & 31) & 1 == 0 {
        return false;
    }
    let mut lower = [0; LONGEST_WORD];
    let Some(lower) = lower.get_mut(..last.len()) else { return false };
    lower.copy_from_slice(last.as_bytes());
    lower.make_ascii_lowercase();
    NOT_DATA.binary_search_by(|w| w.as_bytes().cmp(lower)).is_ok()
}

/// Whether the node of a document is data by its name and by those above it.
pub(crate) fn node_is_data(doc: &Doc<'_>, node: usize) -> bool {
    std::iter::once(node)
        .chain(doc.ancestors(node))
        .all(|n| doc.name(n).is_none_or(|name| !says_no_data(&name)))
}

/// Whether a segment should be data, and holds anything that a rule about data looks for. The names are
/// asked last: that is the dearest of the questions.
pub(crate) fn is_data(ex: &Extracted<'_>, segment: &Segment<'_>) -> bool {
    let surface = segment.surface;
    if !matches!(surface, Surface::ToolCall | Surface::McpRequest | Surface::RequestBody | Surface::Url)
        || matches!(segment.role, Role::Key | Role::Credential)
        // Arguments as a string of JSON: their values are asked about one by one.
        || (surface == Surface::ToolCall && segment.text.starts_with('{'))
        || (matches!(segment.place, Place::Whole) && segment.text.len() > LONGEST_UNNAMED)
        || !suspicious(&segment.text)
    {
        return false;
    }
    match (surface, &segment.place) {
        (Surface::Url, Place::Name(name)) => name.strip_prefix(PARAMETER).is_some_and(|n| !says_no_data(n)),
        (Surface::Url, _) => false,
        (_, Place::Json { doc, node }) => node_is_data(&ex.docs[*doc], *node),
        (Surface::RequestBody, Place::Whole) => true,
        (Surface::RequestBody, Place::Name(name)) => !says_no_data(name.trim_start_matches('/')),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_WORD, NOT_DATA, says_no_data};

    #[test]
    fn the_words_can_be_looked_up() {
        assert!(NOT_DATA.is_sorted());
        assert_eq!(NOT_DATA.iter().map(|w| w.len()).max(), Some(LONGEST_WORD));
        assert!(NOT_DATA.iter().all(|w| says_no_data(w) && says_no_data(&w.to_uppercase())));
    }

    #[test]
    fn the_last_word_of_a_name_tells() {
        for name in [
            "sql",
            "SQL",
            "sqlQuery",
            "file_content",
            "search-query",
            "Body",
            "command",
            "source.code",
            "newText",
        ] {
            assert!(says_no_data(name), "{name}");
        }
        for name in [
            "id",
            "user_name",
            "message_id",
            "zip_code",
            "countryCode",
            "contentType",
            "path",
            "url",
            "q",
            "email",
            "",
        ] {
            assert!(!says_no_data(name), "{name}");
        }
    }
}
