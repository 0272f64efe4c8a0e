//! Which values should be data: what their names say.

use crate::body::extract::Extracted;
use crate::body::json::Doc;
use crate::body::segment::{PARAMETER, Place, Role, Segment};
use crate::finding::Surface;
use crate::value::suspicious;

/// A body of no known shape that is longer than this is a document, not a value.
pub(crate) const LONGEST_UNNAMED: usize = 16 << 10;

/// Last words of names whose values are there to be run, looked up or read: a statement, a command, a
/// program, a text. Whatever stands there may look like an attack and be what was asked for.
const NOT_DATA: &[&str] = &[
    // Statements and filters
    "sql",
    "query",
    "queries",
    "statement",
    "statements",
    "filter",
    "filters",
    "where",
    "condition",
    "conditions",
    "expression",
    "expr",
    "formula",
    "formulas",
    "pipeline",
    "aggregation",
    "cypher",
    "graphql",
    "gql",
    "kql",
    "promql",
    "logql",
    "jql",
    "soql",
    "regex",
    "regexp",
    "pattern",
    "patterns",
    "selector",
    "xpath",
    "jsonpath",
    "glob",
    // Commands and programs
    "command",
    "commands",
    "cmd",
    "cmds",
    "code",
    "script",
    "scripts",
    "source",
    "snippet",
    "program",
    "shell",
    "bash",
    "exec",
    "argv",
    "args",
    "stdin",
    "macro",
    "notebook",
    "cell",
    "function",
    "functions",
    "lambda",
    "eval",
    "js",
    // Documents
    "content",
    "contents",
    "text",
    "texts",
    "body",
    "html",
    "markdown",
    "md",
    "message",
    "messages",
    "description",
    "descriptions",
    "prompt",
    "prompts",
    "instructions",
    "comment",
    "comments",
    "note",
    "notes",
    "summary",
    "document",
    "documents",
    "patch",
    "diff",
    "template",
    "templates",
    "str",
    "string",
    "xml",
    "css",
    "svg",
    "latex",
    "tex",
    "thought",
    "thoughts",
    "reasoning",
    "explanation",
    "answer",
    "article",
    "reply",
    "transcript",
    "logs",
    "details",
    "detail",
    "review",
    "feedback",
    "chunk",
    "chunks",
    "output",
    "stdout",
    "stderr",
    "readme",
    "changelog",
    "report",
    "question",
    "excerpt",
    "paragraph",
    "plan",
    "todo",
    "memory",
    "observation",
];

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
    let is = |w: &&str| last.eq_ignore_ascii_case(w);
    if last.eq_ignore_ascii_case("code") {
        let before = &name[..start];
        return !CODES.iter().any(|c| {
            let trimmed = before.trim_end_matches(['_', '-', '.', ' ']);
            trimmed.len() >= c.len()
                && trimmed.is_char_boundary(trimmed.len() - c.len())
                && trimmed[trimmed.len() - c.len()..].eq_ignore_ascii_case(c)
        });
    }
    NOT_DATA.iter().any(is)
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
    use super::says_no_data;

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
