//! Conditions: always true, or behind a closed quote.

use super::tokens::Kind;
use super::{LONGEST_VALUE, Reading};

impl Reading<'_> {
    /// `or 1=1` and its kin at the logic word `at`.
    pub(super) fn boolean(&self, at: usize) -> Option<usize> {
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

    /// `admin'--`: a quote closed, and the rest of the statement cut off.
    pub(super) fn cut_off(&self) -> bool {
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
    pub(super) fn continued(&self) -> bool {
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
    pub(super) fn joined(&self) -> bool {
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
