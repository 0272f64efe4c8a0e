//! SQL in a text that should be data.
//!
//! The module `tokens` reads a text as SQL; what is here asks each token whether a shape of an injection begins there, and
//! the other modules know the shapes.

mod boolean;
mod calls;
mod statement;
mod tokens;

use super::{BREAK, DASH, DIGIT, SPACE, SQL, Signs};
use crate::rules::Scanner;
use tokens::{Kind, Token, tokens};

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
pub(crate) fn scan(text: &str, signs: Signs, mut found: impl FnMut(Scanner, usize, usize)) {
    if !worth(text, signs) {
        return;
    }
    // Most values have fewer tokens.
    let mut buffer = Vec::with_capacity(48);
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
fn worth(text: &str, signs: Signs) -> bool {
    signs.hold(SQL)
        || (signs.hold(DASH) && text.contains("--"))
        || (signs.hold(DIGIT) && signs.hold(SPACE | BREAK))
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

    /// Whether a shape of an injection can begin at the word `at`: it is called, has the sign that procedures
    /// have in their names, or is as long as one of a few words and begins like it. Words of prose are none.
    fn notable(&self, at: usize) -> bool {
        let word = self.word(at);
        self.kind(at + 1) == Some(Kind::Open)
            || matches!(
                (word.len(), word[0] | 32),
                // union, sleep, order, group, nchar; into, from, char; chr; waitfor; procedure
                (5, b'u' | b's' | b'o' | b'g' | b'n')
                    | (4, b'i' | b'f' | b'c')
                    | (3, b'c')
                    | (7, b'w')
                    | (9, b'p')
            )
            || (word.len() > 6 && memchr::memchr(b'_', word).is_some())
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
                Kind::Word if self.notable(at) => {
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
}
