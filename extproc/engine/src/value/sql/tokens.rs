//! SQL in a text that should be data: the tokens.
//!
//! A value can sit in a statement as it stands, or between quotes of either kind; an attack closes the quote
//! that it sits in. So a text is read up to three times, each time as if it began there. The idea is
//! libinjection's; the tokens and what is made of them (the modules beside this one) are our own.

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Number,
    /// A string; the last one may lack its end.
    Text,
    Word,
    /// `@name`, `@@name`
    Variable,
    /// `+ - * / % ^ ~ ! & |`
    Operator,
    /// `= < >` and their combinations, `like`, `in`, `is`, `between`, ...
    Compare,
    /// `or`, `and`, `xor`, `&&`; `||` too, which joins strings elsewhere.
    Logic,
    Open,
    Close,
    Comma,
    Semicolon,
    /// A comment that nothing follows.
    Comment,
    Other,
}

/// One token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Tokens of one reading that are looked at; an attack needs a few dozen.
const MOST_TOKENS: usize = 400;

/// Words that compare.
const COMPARING: [&str; 12] =
    ["like", "rlike", "regexp", "ilike", "glob", "between", "in", "is", "sounds", "similar", "div", "mod"];

/// Reads `text` as SQL. `inside` is the quote that the text begins in, if any.
pub(super) fn tokens(text: &[u8], inside: Option<u8>, out: &mut Vec<Token>) {
    out.clear();
    let mut at = 0;
    if let Some(quote) = inside {
        let end = string_end(text, 0, quote);
        out.push(Token { kind: Kind::Text, start: 0, end });
        at = end;
    }
    while at < text.len() && out.len() < MOST_TOKENS {
        let (kind, end) = next(text, at);
        if let Some(kind) = kind {
            out.push(Token { kind, start: at, end });
        }
        at = end.max(at + 1);
    }
}

/// One past the quote that ends a string whose contents start at `at`. A doubled or escaped quote does not.
fn string_end(text: &[u8], mut at: usize, quote: u8) -> usize {
    while at < text.len() {
        if text[at] == b'\\' {
            at += 2;
        } else if text[at] == quote {
            // In a doubled quote the second opens a string again where the first one closed ours; either
            // reading may be the server's. Closing at the first finds what follows.
            return at + 1;
        } else {
            at += 1;
        }
    }
    text.len()
}

/// The token at `at`, none for what separates tokens, and where it ends.
fn next(text: &[u8], at: usize) -> (Option<Kind>, usize) {
    let rest = &text[at..];
    let one = |kind| (Some(kind), at + 1);
    match rest[0] {
        b if b.is_ascii_whitespace() || b == 0 || b == 0x0b => (None, at + 1),
        // A no-break space.
        0xc2 if rest.get(1) == Some(&0xa0) => (None, at + 2),
        b'0'..=b'9' => number(text, at),
        b'.' if rest.get(1).is_some_and(u8::is_ascii_digit) => number(text, at),
        b'\'' | b'"' => (Some(Kind::Text), string_end(text, at + 1, rest[0])),
        b'`' => (Some(Kind::Word), string_end(text, at + 1, b'`')),
        b'@' => {
            let mut end = at + 1;
            while end < text.len() && (is_word(text[end]) || text[end] == b'@') {
                end += 1;
            }
            if text.get(end).is_some_and(|b| matches!(b, b'`' | b'\'' | b'"')) && end <= at + 2 {
                end = string_end(text, end + 1, text[end]);
            }
            (Some(Kind::Variable), end)
        }
        b'-' if rest.get(1) == Some(&b'-') => line_comment(text, at),
        b'#' => line_comment(text, at),
        b'/' if rest.get(1) == Some(&b'*') => {
            // MySQL runs what stands in `/*! */`.
            if rest.get(2) == Some(&b'!') {
                let digits = rest[3..].iter().take_while(|b| b.is_ascii_digit()).count();
                return (None, at + 3 + digits);
            }
            match memchr::memmem::find(&rest[2..], b"*/") {
                Some(n) => (None, at + n + 4),
                None => (Some(Kind::Comment), text.len()),
            }
        }
        b'*' if rest.get(1) == Some(&b'/') => (None, at + 2),
        // MySQL's null.
        b'\\' if rest.get(1) == Some(&b'N') => (Some(Kind::Number), at + 2),
        b'(' => one(Kind::Open),
        b')' => one(Kind::Close),
        b',' => one(Kind::Comma),
        b';' => one(Kind::Semicolon),
        b'|' if rest.get(1) == Some(&b'|') => (Some(Kind::Logic), at + 2),
        b'&' if rest.get(1) == Some(&b'&') => (Some(Kind::Logic), at + 2),
        b'=' | b'<' | b'>' => {
            let n = rest.iter().take_while(|b| matches!(b, b'=' | b'<' | b'>')).count();
            (Some(Kind::Compare), at + n)
        }
        b'!' | b':' if rest.get(1) == Some(&b'=') => (Some(Kind::Compare), at + 2),
        // A cast says nothing about the value.
        b':' if rest.get(1) == Some(&b':') => {
            let n = rest[2..].iter().take_while(|b| is_word(**b)).count();
            (None, at + 2 + n)
        }
        b'+' | b'-' | b'*' | b'/' | b'%' | b'^' | b'~' | b'!' | b'&' | b'|' => one(Kind::Operator),
        b if b.is_ascii_alphabetic() || b == b'_' || !b.is_ascii() => word(text, at),
        _ => one(Kind::Other),
    }
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$') || !b.is_ascii()
}

fn number(text: &[u8], at: usize) -> (Option<Kind>, usize) {
    let mut end = at;
    while end < text.len() && (text[end].is_ascii_alphanumeric() || matches!(text[end], b'.' | b'_')) {
        end += 1;
    }
    let digits = &text[at..end];
    let hex = digits.len() > 2 && digits[0] == b'0' && digits[1] | 32 == b'x';
    let plain = digits.iter().all(|b| b.is_ascii_digit() || *b == b'.' || *b | 32 == b'e');
    let kind =
        if hex && digits[2..].iter().all(u8::is_ascii_hexdigit) || plain { Kind::Number } else { Kind::Word };
    (Some(kind), end)
}

fn word(text: &[u8], at: usize) -> (Option<Kind>, usize) {
    let mut end = at;
    while end < text.len() && (is_word(text[end]) || text[end] == b'.') {
        end += 1;
    }
    let word = &text[at..end];
    let is = |w: &str| word.eq_ignore_ascii_case(w.as_bytes());
    if matches!(text.get(end), Some(b'\'' | b'"')) {
        // `N'text'`, `x'00'`, `_utf8'text'`: one string.
        if ["n", "x", "b", "e", "q"].iter().any(|p| is(p)) || word[0] == b'_' {
            return (Some(Kind::Text), string_end(text, end + 1, text[end]));
        }
    } else if is("u") && text[end..].starts_with(b"&'") {
        return (Some(Kind::Text), string_end(text, end + 2, b'\''));
    }
    let kind = match word[0] | 32 {
        b'o' | b'a' | b'x' | b'h' if is("or") || is("and") || is("xor") || is("having") => Kind::Logic,
        b'l' | b'r' | b'i' | b'g' | b'b' | b's' | b'd' | b'm' if COMPARING.iter().any(|c| is(c)) => {
            Kind::Compare
        }
        _ => Kind::Word,
    };
    (Some(kind), end)
}

/// A comment to the end of its line: a token only where it is the end of everything.
fn line_comment(text: &[u8], at: usize) -> (Option<Kind>, usize) {
    match memchr::memchr2(b'\n', b'\r', &text[at..]) {
        Some(n) if text[at + n..].iter().any(|b| !b.is_ascii_whitespace()) => (None, at + n),
        _ => (Some(Kind::Comment), text.len()),
    }
}
