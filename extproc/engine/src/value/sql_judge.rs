//! SQL in a text that should be data: the shapes that give it away.

use super::sql::{Kind, Token, tokens};
use crate::rules::Scanner;

/// Functions that nobody calls in a value by accident.
const TELLING: [&str; 38] = [
    "pg_sleep",
    "benchmark",
    "dbms_pipe.receive_message",
    "dbms_lock.sleep",
    "dbms_session.sleep",
    "dbms_ldap.init",
    "utl_inaddr.get_host_address",
    "utl_inaddr.get_host_name",
    "utl_http.request",
    "utl_smtp.open_connection",
    "utl_file.fopen",
    "httpuritype",
    "extractvalue",
    "updatexml",
    "xmltype",
    "load_file",
    "load_extension",
    "lo_import",
    "lo_export",
    "lo_get",
    "pg_read_file",
    "pg_ls_dir",
    "pg_read_binary_file",
    "openrowset",
    "opendatasource",
    "openquery",
    "fn_xe_file_target_read_file",
    "randomblob",
    "sqlite_version",
    "json_keys",
    "gtid_subset",
    "database_to_xml",
    "query_to_xml",
    "ctxsys.drithsx.sn",
    "ordsys.ord_dicom.getmappingxpath",
    "current_setting",
    "make_set",
    "unistr",
];

/// Procedures that are called without brackets.
const PROCEDURES: [&str; 15] = [
    "xp_cmdshell",
    "xp_dirtree",
    "xp_fileexist",
    "xp_regread",
    "xp_regwrite",
    "xp_subdirs",
    "xp_availablemedia",
    "sp_executesql",
    "sp_oacreate",
    "sp_oamethod",
    "sp_addextendedproc",
    "sp_addlogin",
    "sp_add_job",
    "sp_makewebtask",
    "sp_addsrvrolemember",
];

/// What stands before a closed quote is no longer than this, and so is a value with signs in place of words.
const LONGEST_VALUE: usize = 256;

/// One reading of a text.
struct Reading<'a> {
    text: &'a [u8],
    tokens: &'a [Token],
    /// The text was read as if it began inside quotes, and it closes them.
    quoted: bool,
}

/// Calls `found` for each shape of an injection in `text`, with its span.
pub(crate) fn scan(text: &str, mut found: impl FnMut(Scanner, usize, usize)) {
    if !worth(text.as_bytes()) {
        return;
    }
    let mut buffer = Vec::new();
    read(text.as_bytes(), &mut buffer, &mut found);
    // A form's value whose spaces are signs.
    if text.contains('+') && !text.contains(' ') {
        let spaced = text.replace('+', " ");
        read(spaced.as_bytes(), &mut buffer, &mut found);
    }
}

fn read(text: &[u8], buffer: &mut Vec<Token>, found: &mut impl FnMut(Scanner, usize, usize)) {
    for quote in [None, Some(b'\''), Some(b'"')] {
        if quote.is_some_and(|q| memchr::memchr(q, text).is_none()) {
            continue;
        }
        tokens(text, quote, buffer);
        Reading { text, tokens: buffer, quoted: quote.is_some() }.judge(found);
    }
}

/// Whether a text can be SQL at all: it holds a sign of the language, or numbers beside words.
fn worth(text: &[u8]) -> bool {
    text.iter().any(|b| {
        matches!(b, b'\'' | b'"' | b'(' | b'=' | b'<' | b'>' | b';' | b'#' | b'@' | b'*' | b'|' | b'&')
    }) || memchr::memmem::find(text, b"--").is_some()
        || (text.iter().any(u8::is_ascii_digit)
            && text.iter().any(|b| matches!(b, b' ' | b'\t' | b'\n' | b'+')))
}

impl Reading<'_> {
    fn kind(&self, at: usize) -> Option<Kind> {
        self.tokens.get(at).map(|t| t.kind)
    }
    fn word(&self, at: usize) -> &[u8] {
        self.tokens.get(at).map_or(b"", |t| &self.text[t.start..t.end])
    }
    fn is(&self, at: usize, word: &str) -> bool {
        self.word(at).eq_ignore_ascii_case(word.as_bytes())
    }
    fn any(&self, at: usize, words: &[&str]) -> bool {
        words.iter().any(|w| self.is(at, w))
    }
    fn literal(&self, at: usize) -> bool {
        self.any(at, &["true", "false", "null"])
    }
    fn over(&self, at: usize) -> bool {
        at >= self.tokens.len() || self.kind(at) == Some(Kind::Comment)
    }

    fn judge(&self, found: &mut impl FnMut(Scanner, usize, usize)) {
        let mut hit = |scanner, from: usize, to: usize| {
            let start = self.tokens.get(from).map_or(0, |t| t.start);
            let end = self
                .tokens
                .get(to.min(self.tokens.len().saturating_sub(1)))
                .map_or(self.text.len(), |t| t.end);
            found(scanner, start, end.max(start + 1));
        };
        for at in 0..self.tokens.len() {
            match self.tokens[at].kind {
                Kind::Logic => {
                    if let Some(end) = self.boolean(at) {
                        hit(Scanner::SqlBoolean, at, end);
                    }
                }
                Kind::Semicolon
                    if self.statement(at + 1, false)
                        || (self.broke_out(at)
                            && self.ends_in_comment()
                            && self.kind(at + 1) == Some(Kind::Word)) =>
                {
                    hit(Scanner::SqlStacked, at, at + 3);
                }
                Kind::Open if self.is(at + 1, "select") && self.list(at + 2, false) => {
                    hit(Scanner::SqlStatement, at, at + 3);
                }
                Kind::Word => {
                    if self.is(at, "union") && self.union(at) {
                        hit(Scanner::SqlUnion, at, at + 2);
                    } else if self.function(at) {
                        hit(Scanner::SqlFunction, at, at + 2);
                    } else if self.probe(at) {
                        hit(Scanner::SqlProbe, at, at + 2);
                    }
                }
                _ => {}
            }
        }
        if self.broke_out(1) && self.statement(1, false) {
            hit(Scanner::SqlStacked, 1, 3);
        }
        if !self.quoted && self.statement(0, true) {
            hit(Scanner::SqlStatement, 0, 3);
        }
        if self.cut_off() {
            hit(Scanner::SqlComment, 0, self.tokens.len());
        }
        if self.joined() || self.continued() {
            hit(Scanner::SqlBoolean, 0, self.tokens.len());
        }
    }

    /// One past the operand at `at`, with what it is: plain (number, string, literal, call) or a name.
    fn operand(&self, mut at: usize) -> Option<(usize, bool)> {
        let mut open = 0;
        loop {
            match self.kind(at)? {
                Kind::Open if self.is(at + 1, "select") => return Some((self.closing(at), true)),
                Kind::Open => open += 1,
                Kind::Operator => {}
                Kind::Word
                    if self.any(at, &["not", "binary", "distinct", "all", "any", "some", "exists"]) => {}
                _ => break,
            }
            at += 1;
        }
        let (mut end, plain) = match self.kind(at)? {
            Kind::Number | Kind::Text | Kind::Variable => (at + 1, true),
            Kind::Word if self.literal(at) => (at + 1, true),
            Kind::Word if self.kind(at + 1) == Some(Kind::Open) => (self.closing(at + 1), true),
            Kind::Word => (at + 1, false),
            _ => return None,
        };
        while open > 0 && self.kind(end) == Some(Kind::Close) {
            end += 1;
            open -= 1;
        }
        Some((end, plain))
    }

    /// One past the bracket that closes the one at `at`, or past everything.
    fn closing(&self, at: usize) -> usize {
        let mut depth = 0usize;
        for i in at..self.tokens.len() {
            match self.tokens[i].kind {
                Kind::Open => depth += 1,
                Kind::Close => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return i + 1;
                    }
                }
                _ => {}
            }
        }
        self.tokens.len()
    }

    /// An operand and what is added to it, multiplied with it or joined to it.
    fn sum(&self, at: usize) -> Option<(usize, bool)> {
        let (mut end, mut plain) = self.operand(at)?;
        loop {
            while self.kind(end) == Some(Kind::Close) {
                end += 1;
            }
            if self.kind(end) != Some(Kind::Operator) {
                return Some((end, plain));
            }
            let Some((next, p)) = self.operand(end + 1) else { return Some((end, plain)) };
            (end, plain) = (next, plain && p);
        }
    }

    /// Whether a quote was closed right before `at`, brackets aside.
    fn broke_out(&self, at: usize) -> bool {
        // What stands before the quote is a value too: short, of one line, and no program.
        self.quoted
            && at > 0
            && self.tokens[0].end <= LONGEST_VALUE
            && !self.text[..self.tokens[0].end].iter().any(|b| matches!(b, b'\n' | b'{' | b'}'))
            && self.tokens[1..at].iter().all(|t| matches!(t.kind, Kind::Close | Kind::Semicolon))
    }

    /// Whether the statement behind the value is cut off by a comment of no words.
    fn ends_in_comment(&self) -> bool {
        self.tokens.last().is_some_and(|t| {
            t.kind == Kind::Comment && {
                let rest = &self.text[t.start..t.end];
                rest.len() <= 6 || !rest.iter().any(u8::is_ascii_alphanumeric)
            }
        })
    }

    /// `or 1=1` and its kin at the logic word `at`.
    fn boolean(&self, at: usize) -> Option<usize> {
        let out = self.broke_out(at);
        // Programs are full of signs for `or`; a value that is none has them behind a quote, or stands alone.
        if !self.word(at)[0].is_ascii_alphabetic()
            && !out
            && (self.word(at) == b"||"
                || self.text.len() > LONGEST_VALUE
                || memchr::memchr2(b'\n', b'{', self.text).is_some())
        {
            return None;
        }
        let (end, plain) = self.sum(at + 1)?;
        if end == at + 1 {
            return None;
        }
        let first = self.tokens[at + 1].kind;
        if self.kind(end) == Some(Kind::Compare)
            || (self.is(end, "not") && self.kind(end + 1) == Some(Kind::Compare))
        {
            let mut cmp = end;
            while matches!(self.kind(cmp), Some(Kind::Compare)) || self.any(cmp, &["not", "null", "unknown"])
            {
                cmp += 1;
            }
            let symbol = matches!(self.word(end).first(), Some(b'=' | b'<' | b'>' | b'!'));
            // Words of prose compare nothing: `and 5 in stock`.
            return match self.sum(cmp) {
                Some((to, other)) if plain && other && (symbol || out || self.quoted) => Some(to),
                Some((to, _))
                    if plain && symbol && first != Kind::Variable && (out || first != Kind::Text) =>
                {
                    Some(to)
                }
                Some((to, other)) if (out && other) || (self.ends_in_comment() && symbol) => Some(to),
                Some((to, _)) if out && symbol => Some(to),
                Some((to, true)) if plain && self.over(to) => Some(to),
                None if plain && out => Some(cmp),
                None if self.ends_in_comment() && cmp > end + 1 => Some(cmp),
                None if out && self.any(cmp - 1, &["null", "unknown"]) => Some(cmp),
                _ => None,
            };
        }
        let word = self.word(at);
        if word == b"||" {
            // `'||call()||'`
            return (self.kind(at + 1) == Some(Kind::Word) && self.kind(at + 2) == Some(Kind::Open))
                .then_some(end);
        }
        let call = first == Kind::Word && self.kind(at + 2) == Some(Kind::Open);
        let subselect = first == Kind::Open && self.is(at + 2, "select");
        let starts_empty = self.quoted && self.tokens[0].end == 1;
        let ended = self.over(end);
        let select = self.is(at + 1, "select") && self.list(at + 2, false);
        let sure = select
            || (out && ended && (self.literal(at + 1) || call))
            || (out && subselect)
            || (out && ended && plain && first == Kind::Number && (self.ends_in_comment() || starts_empty))
            || (plain && (self.literal(at + 1) || first == Kind::Number) && ended && self.ends_in_comment())
            || (out && plain && first == Kind::Open && self.ends_in_comment());
        sure.then_some(end)
    }

    fn union(&self, at: usize) -> bool {
        let mut next = at + 1;
        while self.kind(next) == Some(Kind::Open)
            || self.any(next, &["all", "distinct", "distinctrow"])
            || (self.kind(next) == Some(Kind::Operator) && self.word(next) != b"/")
        {
            next += 1;
        }
        if self.over(next) {
            // The beginning of one, hidden behind comments or behind a number that is in no table.
            let hidden = memchr::memmem::find(self.text, b"/*").is_some()
                || (memchr::memchr(b'\n', self.text).is_some()
                    && memchr::memchr2(b'#', b'-', self.text).is_some());
            let number = at == 2 && self.kind(1) == Some(Kind::Number) && self.word(0) == b"-";
            return at > 0 && (hidden || number || self.broke_out(at));
        }
        (self.is(next, "select") || self.is(next, "values")) && self.list(next + 1, true)
    }

    /// Whether what follows a `select` is a list of expressions and not a sentence.
    fn list(&self, mut at: usize, after_union: bool) -> bool {
        let mut sure = after_union;
        let mut names = 0;
        while self.any(at, &["all", "distinct", "distinctrow", "top", "sql_no_cache"]) {
            sure |= !self.any(at, &["all", "top"]);
            if self.is(at, "top") && self.kind(at + 1) == Some(Kind::Number) {
                sure = true;
                at += 1;
            }
            at += 1;
        }
        if self.tokens.is_empty() || self.over(at) {
            return after_union && at > 2;
        }
        for _ in 0..64 {
            if self.word(at) == b"*" {
                return true;
            }
            if self.is(at, "case") || self.is(at, "if") {
                return true;
            }
            let Some((end, plain)) = self.operand(at) else { return false };
            let plain =
                plain || self.any(at, &["session_user", "current_user", "system_user", "current_database"]);
            let bare = matches!(self.kind(at), Some(Kind::Word)) && !plain;
            names += usize::from(bare);
            let mut next = end;
            while self.kind(next) == Some(Kind::Close) {
                next += 1;
            }
            if self.is(next, "as") {
                next += 2;
            }
            match self.kind(next) {
                None | Some(Kind::Comment | Kind::Semicolon) => {
                    return sure && (after_union || names == 0)
                        || (plain && names == 0)
                        || next > end && plain;
                }
                Some(Kind::Comma | Kind::Operator | Kind::Compare | Kind::Logic) => {
                    sure |= plain || self.kind(next) != Some(Kind::Comma);
                    at = next + 1;
                }
                _ if self.is(next, "from") => {
                    let table = next + 1;
                    if self.is(table, "dual")
                        || self.kind(table) == Some(Kind::Open)
                        || self.is(table, "select")
                    {
                        return true;
                    }
                    if !matches!(self.kind(table), Some(Kind::Word | Kind::Variable)) {
                        return sure || plain;
                    }
                    let end = [
                        "where", "limit", "order", "group", "join", "inner", "left", "union", "having", "as",
                        "for",
                    ];
                    let closed =
                        self.kind(table + 1).is_none_or(|k| k != Kind::Word) || self.any(table + 1, &end);
                    let dotted = self.word(table).contains(&b'.') && !self.word(table).ends_with(b".");
                    return closed && (sure || plain || dotted || self.tail(table + 1));
                }
                _ if self.is(next, "into") => return sure || plain,
                _ => return after_union && plain && self.kind(next) != Some(Kind::Word),
            }
        }
        sure
    }

    /// What follows a table's name in a statement, and hardly in a sentence.
    fn tail(&self, at: usize) -> bool {
        (self.any(at, &["where", "limit", "order", "group", "having", "union"]))
            || matches!(self.kind(at), Some(Kind::Semicolon | Kind::Close))
            || (self.kind(at) == Some(Kind::Comment) && self.ends_in_comment())
    }

    /// Whether a statement starts at `at`. A whole value that is one needs more than words to be SQL.
    fn statement(&self, mut at: usize, whole: bool) -> bool {
        while self.kind(at) == Some(Kind::Open) && (!whole || self.is(at + 1, "select")) {
            at += 1;
        }
        if self.kind(at) != Some(Kind::Word) {
            return false;
        }
        let object = |n: usize| {
            self.any(
                n,
                &[
                    "table",
                    "database",
                    "schema",
                    "view",
                    "user",
                    "login",
                    "function",
                    "procedure",
                    "index",
                    "column",
                    "role",
                    "trigger",
                    "or",
                    "temporary",
                    "assembly",
                ],
            )
        };
        let ended = |n: usize| {
            self.over(n) || matches!(self.kind(n), Some(Kind::Semicolon | Kind::Open | Kind::Comma))
        };
        let called = |n: usize| {
            let name = self.word(n).to_ascii_lowercase();
            name.starts_with(b"xp_")
                || name.starts_with(b"sp_")
                || name.starts_with(b"master.")
                || name.starts_with(b"dbms_")
        };
        match () {
            () if self.is(at, "select") => self.list(at + 1, false),
            () if self.is(at, "insert") => {
                self.is(at + 1, "into") && self.kind(at + 3).is_some_and(|k| k == Kind::Open)
                    || self.is(at + 1, "into") && self.any(at + 3, &["values", "select"])
            }
            () if self.is(at, "update") => self.is(at + 2, "set") && self.word(at + 4) == b"=",
            () if self.is(at, "delete") => {
                self.any(at + 1, &["from", "ignore"])
                    && (self.tail(at + 3) || !whole && ended(at + 3) || self.is(at + 1, "ignore"))
            }
            () if self.any(at, &["drop", "create", "alter", "truncate"]) => {
                object(at + 1)
                    && (self.is(at + 2, "if")
                        || self.kind(at + 3) == Some(Kind::Semicolon)
                        || self.any(at + 3, &["identified", "cascade", "as", "add", "modify", "with"])
                        || self.kind(at + 3) == Some(Kind::Open)
                        || (self.ends_in_comment() && self.over(at + 3))
                        || (!whole && self.kind(at + 2).is_some()))
            }
            () if self.any(at, &["exec", "execute"]) => {
                called(at + 1)
                    || matches!(self.kind(at + 1), Some(Kind::Variable))
                    || (self.kind(at + 1) == Some(Kind::Open)
                        && matches!(self.kind(at + 2), Some(Kind::Text | Kind::Variable)))
                    || self.is(at + 1, "immediate")
            }
            () if self.is(at, "declare") => matches!(self.kind(at + 1), Some(Kind::Variable)),
            () if self.is(at, "waitfor") => self.any(at + 1, &["delay", "time"]),
            () if self.is(at, "shutdown") => !whole && (self.over(at + 1) || self.is(at + 1, "with")),
            () if self.is(at, "set") => {
                self.kind(at + 1) == Some(Kind::Variable) && self.kind(at + 2) == Some(Kind::Compare)
            }
            () if self.is(at, "if") => {
                self.is(at + 1, "exists") && self.kind(at + 2) == Some(Kind::Open)
                    || (self.kind(at + 1) == Some(Kind::Open)
                        && self.operand(at + 2).is_some_and(|(n, plain)| {
                            plain
                                && self.kind(n) == Some(Kind::Compare)
                                && matches!(self.word(n), b"=" | b"!=" | b"<>")
                        })
                        && (self.quoted
                            || self.ends_in_comment()
                            || self
                                .tokens
                                .iter()
                                .enumerate()
                                .any(|(i, _)| self.any(i, &["select", "waitfor", "drop"]))))
            }
            () if self.is(at, "begin") => self.is(at + 1, "declare"),
            () if self.is(at, "use") => self.kind(at + 2) == Some(Kind::Semicolon) && self.is(at + 3, "exec"),
            () if self.is(at, "grant") => self.any(at + 2, &["on", "to"]),
            () if self.is(at, "merge") => self.is(at + 1, "into") && self.is(at + 3, "using"),
            () if self.is(at, "copy") => self.any(at + 2, &["from", "to"]) && self.is(at + 3, "program"),
            () if self.is(at, "prepare") => self.is(at + 2, "from"),
            () if self.is(at, "attach") => self.is(at + 1, "database"),
            () if self.is(at, "load") => self.is(at + 1, "data") && self.any(at + 2, &["infile", "local"]),
            () if self.is(at, "case") => {
                let when =
                    if self.is(at + 1, "when") { Some(at + 1) } else { self.operand(at + 1).map(|(n, _)| n) };
                when.is_some_and(|w| {
                    self.is(w, "when")
                        && (w + 2..self.tokens.len().min(w + 12)).any(|i| self.is(i, "then"))
                        && (w + 4..self.tokens.len().min(w + 30)).any(|i| self.is(i, "end"))
                })
            }
            () => false,
        }
    }

    /// A call that only an attack makes in a value.
    fn function(&self, at: usize) -> bool {
        let called = self.kind(at + 1) == Some(Kind::Open);
        if called && TELLING.iter().any(|f| self.is(at, f)) {
            return true;
        }
        if PROCEDURES.iter().any(|p| {
            let word = self.word(at);
            word.len() >= p.len() && word[word.len() - p.len()..].eq_ignore_ascii_case(p.as_bytes())
        }) {
            // The name alone is what a question about it holds too.
            return (at > 0
                && (self.any(at - 1, &["exec", "execute", "call"])
                    || self.kind(at - 1) == Some(Kind::Semicolon)))
                || matches!(self.kind(at + 1), Some(Kind::Text | Kind::Variable));
        }
        if self.is(at, "waitfor") {
            return self.any(at + 1, &["delay", "time"])
                && matches!(self.kind(at + 2), Some(Kind::Text | Kind::Variable));
        }
        if self.is(at, "into") {
            return self.any(at + 1, &["outfile", "dumpfile"])
                && matches!(self.kind(at + 2), Some(Kind::Text | Kind::Open | Kind::Number) | None)
                || self.is(at + 1, "outfile") && self.is(at + 2, "substring");
        }
        if self.is(at, "procedure") {
            return self.is(at + 1, "analyse");
        }
        let char_call = |n: usize| {
            self.any(n, &["char", "chr", "nchar"])
                && self.kind(n + 1) == Some(Kind::Open)
                && matches!(self.kind(n + 2), Some(Kind::Number))
        };
        if char_call(at) {
            let next = self.closing(at + 1);
            let joins = matches!(self.kind(next), Some(Kind::Operator | Kind::Logic | Kind::Comma));
            return joins && (char_call(next + 1) || self.is(next + 1, "user"));
        }
        if self.is(at, "sleep") && called && matches!(self.kind(at + 2), Some(Kind::Number | Kind::Text)) {
            let placed = match at.checked_sub(1).and_then(|n| self.kind(n)) {
                None => self.closing(at + 1) + 1 >= self.tokens.len(),
                Some(Kind::Semicolon) => memchr::memchr(b'\n', self.text).is_none(),
                Some(Kind::Word) => self.is(at - 1, "select"),
                Some(Kind::Other) => false,
                Some(_) => true,
            };
            return placed;
        }
        // Names of the catalogue, where a statement asks for them.
        if self.is(at, "from") {
            let table = self.word(at + 1).to_ascii_lowercase();
            return [
                &b"information_schema."[..],
                b"sys.",
                b"pg_catalog.",
                b"mysql.user",
                b"sysobjects",
                b"sqlite_master",
                b"all_tables",
                b"dba_",
                b"master..",
                b"syscolumns",
            ]
            .iter()
            .any(|t| table.starts_with(t))
                && self.tokens[..at].iter().enumerate().any(|(i, _)| self.is(i, "select"));
        }
        false
    }

    /// Counting columns, and the like.
    fn probe(&self, at: usize) -> bool {
        let placed = self.quoted || self.ends_in_comment();
        if self.is(at, "order") || self.is(at, "group") {
            if !self.is(at + 1, "by") {
                return false;
            }
            let numbered = self.kind(at + 2) == Some(Kind::Number)
                && matches!(self.kind(at + 3), None | Some(Kind::Comment | Kind::Comma));
            let having = (at + 3..self.tokens.len().min(at + 10)).any(|n| self.is(n, "having"));
            return placed
                && (numbered && (self.broke_out(at) || self.ends_in_comment())
                    || having && self.broke_out(at))
                || having && self.boolean_after(at);
        }
        false
    }

    fn boolean_after(&self, at: usize) -> bool {
        (at..self.tokens.len()).any(|n| self.is(n, "having") && self.boolean(n).is_some())
    }

    /// `admin'--`: a quote closed, and the rest of the statement cut off.
    fn cut_off(&self) -> bool {
        let n = self.tokens.len();
        // `admin';`: the statement ends where ours would go on.
        if self.quoted
            && n >= 2
            && self.kind(n - 1) == Some(Kind::Semicolon)
            && self.tokens[0].end > 1
            && self.broke_out(n)
        {
            return !self.text[..self.tokens[0].end].iter().any(|b| matches!(b, b' ' | b'(' | b'=' | b','));
        }
        if n < 2 || !self.ends_in_comment() {
            return false;
        }
        let comment = self.tokens[n - 1];
        let rest = &self.text[comment.start..comment.end];
        let bare = !rest.iter().any(u8::is_ascii_alphanumeric);
        if self.quoted {
            return bare && self.broke_out(n - 1);
        }
        // `@version --`, `1 * 1 --`: nothing but variables, numbers and their sums before it.
        let inner = &self.tokens[..n - 1];
        bare && inner.iter().all(|t| {
            matches!(t.kind, Kind::Number | Kind::Variable | Kind::Operator | Kind::Open | Kind::Close)
        }) && (inner.iter().any(|t| t.kind == Kind::Variable)
            || (inner.len() >= 3
                && inner[1].kind == Kind::Operator
                && inner[0].kind == Kind::Number
                && inner[2].kind == Kind::Number))
    }

    /// `a'-0`, `a'=b()--`: behind a closed quote nothing but operators and operands, to the end.
    fn continued(&self) -> bool {
        if !self.broke_out(1) {
            return false;
        }
        let mut at = 1;
        while self.kind(at) == Some(Kind::Close) {
            at += 1;
        }
        let (mut signs, mut plain, mut number, mut last) = (0, false, false, 0);
        let sign = |n: usize| matches!(self.kind(n), Some(Kind::Logic | Kind::Operator | Kind::Compare));
        // No value is such a word in quotes by accident: `' RLIKE '`, `' <=> '`.
        let rare = self.any(at, &["not", "rlike", "regexp", "sounds"])
            || (self.kind(at) == Some(Kind::Compare)
                && !self.word(at)[0].is_ascii_alphabetic()
                && self.word(at).len() > 1);
        while sign(at) || (self.is(at, "not") && sign(at + 1)) {
            let logic = self.kind(at) == Some(Kind::Logic) && self.word(at)[0].is_ascii_alphabetic();
            while sign(at) || self.is(at, "not") {
                at += 1;
            }
            let Some((end, p)) = self.operand(at) else { break };
            signs += 1 + usize::from(logic && p);
            plain |= p;
            number |= p && self.kind(end - 1) != Some(Kind::Text);
            last = at;
            at = end;
            while self.kind(at) == Some(Kind::Close) {
                at += 1;
            }
        }
        if signs == 0 || !self.over(at) {
            return false;
        }
        let comment = self.ends_in_comment();
        let first = &self.text[..self.tokens[0].end - 1];
        let tail = self.tokens[last];
        let quote_again = tail.kind == Kind::Text && tail.end == self.text.len();
        // `5'-6"`, `12" x 14"` are lengths; `"-1"` is a number in quotes; `boys' and girls` are children.
        let length = first.last().is_some_and(u8::is_ascii_digit);
        let in_quotes = !rare && first.is_empty() && quote_again && tail.end - tail.start <= 1;
        // Searches join quoted words with signs: `oak" + "sign"`.
        let letters = first.iter().filter(|b| b.is_ascii_alphabetic()).count();
        let words = !number && letters > 5 && first.iter().any(|b| matches!(b, b' ' | b'?'));
        plain
            && !words
            && (comment
                || (!length && !in_quotes && (rare || signs > 1 || !first.is_empty() || !quote_again)))
    }

    /// `1'||'asd'||'`, `' or ''-'`: strings and signs to the end, the last string left open.
    fn joined(&self) -> bool {
        let n = self.tokens.len();
        if !self.quoted || n < 3 || self.kind(n - 1) != Some(Kind::Text) {
            return false;
        }
        let strings = self.tokens.iter().step_by(2).all(|t| t.kind == Kind::Text);
        let signs = self
            .tokens
            .iter()
            .skip(1)
            .step_by(2)
            .all(|t| matches!(t.kind, Kind::Logic | Kind::Operator | Kind::Compare));
        let logic = self.tokens.iter().any(|t| t.kind == Kind::Logic);
        let last = self.tokens[n - 1];
        let open = last.end == self.text.len() && last.end - last.start <= 2;
        let empty = self.tokens[2..].iter().filter(|t| t.kind == Kind::Text).all(|t| t.end - t.start <= 2);
        strings && signs && n % 2 == 1 && open && logic && (n >= 5 || empty)
            || (strings && signs && n == 3 && self.word(1) == b"||" && open)
            || (open
                && logic
                && empty
                && n >= 3
                && self.kind(1) == Some(Kind::Logic)
                && self.tokens[2..]
                    .iter()
                    .all(|t| matches!(t.kind, Kind::Text | Kind::Operator | Kind::Compare)))
    }
}
