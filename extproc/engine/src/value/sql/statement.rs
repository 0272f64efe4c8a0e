//! Statements: a second one, a whole one, a union's other half.

use super::Reading;
use super::tokens::Kind;

/// Whether a word is as long as one that starts a statement, and begins like it.
fn starts(word: &[u8]) -> bool {
    match word.len() {
        2 => word[0] | 32 == b'i',                              // if
        3 => matches!(word[0] | 32, b's' | b'u'),               // set, use
        4 => matches!(word[0] | 32, b'd' | b'e' | b'c' | b'l'), // drop, exec, copy, case, load
        5 => matches!(word[0] | 32, b'a' | b'b' | b'g' | b'm'), // alter, begin, grant, merge
        // select, insert, update, delete, create, attach
        6 => matches!(word[0] | 32, b's' | b'i' | b'u' | b'd' | b'c' | b'a'),
        7 => matches!(word[0] | 32, b'e' | b'd' | b'w' | b'p'), // execute, declare, waitfor, prepare
        8 => matches!(word[0] | 32, b't' | b's'),               // truncate, shutdown
        _ => false,
    }
}

impl Reading<'_> {
    pub(super) fn union(&self, at: usize) -> bool {
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
    pub(super) fn list(&self, mut at: usize, after_union: bool) -> bool {
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
    pub(super) fn tail(&self, at: usize) -> bool {
        (self.any(at, &["where", "limit", "order", "group", "having", "union"]))
            || matches!(self.kind(at), Some(Kind::Semicolon | Kind::Close))
            || (self.kind(at) == Some(Kind::Comment) && self.ends_in_comment())
    }

    /// Whether a statement starts at `at`. A whole value that is one needs more than words to be SQL.
    pub(super) fn statement(&self, mut at: usize, whole: bool) -> bool {
        while self.kind(at) == Some(Kind::Open) && (!whole || self.is(at + 1, "select")) {
            at += 1;
        }
        if self.kind(at) != Some(Kind::Word) || !starts(self.word(at)) {
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
}
