//! The literal gate: what must stand in a text before a rule's pattern is worth running.
//!
//! For every pattern a set of literals is derived such that each match contains at least one of them.
//! All literals of all rules go into one Aho-Corasick automaton; a text is read once, and only rules
//! whose literal occurred run, and only around it where their width is bounded.

use regex_syntax::hir::{Class, Hir, HirKind, Repetition};

/// Literals shorter than this occur everywhere and gate nothing.
pub(crate) const LEAST_LITERAL: usize = 3;
/// More literals than this for one pattern mean that it is a word list better written as one.
const MOST_LITERALS: usize = 256;
/// How many strings an exact set may hold while a concatenation is multiplied out.
const MOST_EXACT: usize = 64;

/// A set of strings, in ASCII lower case.
type Set = Vec<Vec<u8>>;

/// What is known of a sub-pattern.
struct Known {
    /// Every string it matches, where that is a small finite set.
    exact: Option<Set>,
    /// Strings of which each match contains one.
    required: Option<Set>,
}

impl Known {
    const fn nothing() -> Self {
        Self { exact: None, required: None }
    }
    fn empty() -> Self {
        Self { exact: Some(vec![Vec::new()]), required: None }
    }
    /// The best required set: the exact strings themselves, or what was found inside.
    fn best(self) -> Option<Set> {
        better(self.exact.filter(usable), self.required)
    }
}

/// The literals one of which every match of `hir` contains, in ASCII lower case. `None` where the
/// pattern has no such set of literals of [`LEAST_LITERAL`] bytes or more.
pub(crate) fn required_literals(hir: &Hir) -> Option<Vec<Vec<u8>>> {
    let mut set = known(hir).best()?;
    set.sort();
    set.dedup();
    Some(set)
}

fn usable(set: &Set) -> bool {
    !set.is_empty() && set.len() <= MOST_LITERALS && set.iter().all(|l| l.len() >= LEAST_LITERAL)
}

/// How often a set is expected to occur per byte of ordinary text: the sum over its literals of the
/// product of the frequencies of their bytes. Frequencies are those of English prose and code, coarse
/// on purpose: they only have to rank `password` below `the`.
fn expected(set: &Set) -> f64 {
    let of = |b: u8| match b {
        b'e' | b' ' => 0.1,
        b't' | b'a' | b'o' | b'i' | b'n' | b's' | b'r' => 0.06,
        b'h' | b'l' | b'd' | b'c' | b'u' | b'm' | b'p' => 0.03,
        b'f' | b'g' | b'y' | b'b' | b'w' | b'v' | b'.' | b',' | b'_' | b'-' | b'/' | b'"' | b'=' => 0.015,
        b'0'..=b'9' => 0.008,
        b'k' | b'x' | b'q' | b'z' | b'j' => 0.003,
        _ => 0.002,
    };
    set.iter().map(|l| l.iter().map(|b| of(*b)).product::<f64>()).sum()
}

fn better(a: Option<Set>, b: Option<Set>) -> Option<Set> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if expected(&a) <= expected(&b) { a } else { b }),
        (a, b) => a.or(b),
    }
}

fn known(hir: &Hir) -> Known {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => Known::empty(),
        HirKind::Literal(lit) => Known { exact: Some(vec![lit.0.to_ascii_lowercase()]), required: None },
        HirKind::Class(class) => Known { exact: class_set(class), required: None },
        HirKind::Capture(c) => known(&c.sub),
        HirKind::Repetition(r) => repetition(r),
        HirKind::Concat(parts) => concat(parts),
        HirKind::Alternation(parts) => alternation(parts),
    }
}

/// The members of a small class, folded. Unicode's two letters that fold to ASCII (the Kelvin sign and
/// the long s, which `(?i)` drags in) are left out: a text that holds them has a `unicode` view.
fn class_set(class: &Class) -> Option<Set> {
    let mut set: Set = Vec::new();
    let mut add = |c: char| {
        let s = c.to_ascii_lowercase().encode_utf8(&mut [0; 4]).as_bytes().to_vec();
        if !set.contains(&s) {
            set.push(s);
        }
        set.len() <= 8
    };
    match class {
        Class::Unicode(u) => {
            for range in u.ranges() {
                for c in range.start()..=range.end() {
                    if !matches!(c, '\u{212a}' | '\u{17f}') && !add(c) {
                        return None;
                    }
                }
            }
        }
        Class::Bytes(b) => {
            for range in b.ranges() {
                for c in range.start()..=range.end() {
                    if !c.is_ascii() || !add(c as char) {
                        return None;
                    }
                }
            }
        }
    }
    Some(set)
}

fn repetition(r: &Repetition) -> Known {
    let sub = known(&r.sub);
    match (r.min, r.max) {
        (0, Some(1)) => Known {
            exact: sub.exact.map(|mut e| {
                e.push(Vec::new());
                e
            }),
            required: None,
        },
        (0, _) => Known::nothing(),
        (1, Some(1)) => sub,
        (min, max) => {
            let once = sub.exact.clone();
            let repeated = once.and_then(|e| {
                let mut all = vec![Vec::new()];
                for _ in 0..min.min(32) {
                    all = cross(&all, &e)?;
                }
                Some(all)
            });
            if max == Some(min) && min <= 32 {
                Known { exact: repeated, required: sub.required }
            } else {
                // At least `min` copies stand in every match.
                Known { exact: None, required: better(repeated.filter(usable), sub.best()) }
            }
        }
    }
}

fn cross(a: &Set, b: &Set) -> Option<Set> {
    (a.len() * b.len() <= MOST_EXACT)
        .then(|| a.iter().flat_map(|x| b.iter().map(|y| [x.as_slice(), y.as_slice()].concat())).collect())
}

fn concat(parts: &[Hir]) -> Known {
    let mut required: Option<Set> = None;
    // The strings that the parts since the last inexact one spell.
    let mut run: Set = vec![Vec::new()];
    let mut whole = true;
    for part in parts {
        let k = known(part);
        required = better(required, k.required);
        if let Some(e) = k.exact {
            if let Some(c) = cross(&run, &e) {
                run = c;
            } else {
                whole = false;
                required = better(required, Some(std::mem::take(&mut run)).filter(usable));
                run = e;
            }
        } else {
            whole = false;
            required = better(required, Some(std::mem::take(&mut run)).filter(usable));
            run = vec![Vec::new()];
        }
    }
    if whole {
        Known { exact: Some(run), required }
    } else {
        Known { exact: None, required: better(required, Some(run).filter(usable)) }
    }
}

fn alternation(parts: &[Hir]) -> Known {
    let mut exact: Option<Set> = Some(Vec::new());
    let mut required: Option<Set> = Some(Vec::new());
    for part in parts {
        let k = known(part);
        exact = match (exact, &k.exact) {
            (Some(mut all), Some(e)) if all.len() + e.len() <= MOST_LITERALS => {
                all.extend(e.iter().cloned());
                Some(all)
            }
            _ => None,
        };
        required = match (required, k.best()) {
            (Some(mut all), Some(r)) if all.len() + r.len() <= MOST_LITERALS => {
                all.extend(r);
                Some(all)
            }
            _ => None,
        };
    }
    Known { exact, required }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literals(pattern: &str) -> Option<Vec<String>> {
        let hir = regex_syntax::parse(pattern).unwrap();
        required_literals(&hir)
            .map(|s| s.into_iter().map(|l| String::from_utf8_lossy(&l).into_owned()).collect())
    }
    fn some(pattern: &str, wanted: &[&str]) {
        assert_eq!(literals(pattern), Some(wanted.iter().map(|s| (*s).to_owned()).collect()), "{pattern}");
    }

    #[test]
    fn literals_are_found_wherever_they_stand() {
        some(r"\bghp_[A-Za-z0-9]{36}\b", &["ghp_"]);
        some(r"[a-z]{20}-secret", &["-secret"]);
        some(r"(?i)ignore\s+(all|previous)", &["ignore"]);
        some(r"(?:AKIA|ASIA)[A-Z2-7]{16}", &["akia", "asia"]);
        some(r"(foo|bar)baz", &["barbaz", "foobaz"]);
        some(r"xox[abp]-\d+", &["xoxa-", "xoxb-", "xoxp-"]);
        some(r"colou?r_key", &["color_key", "colour_key"]);
        some(r"(?:password){1,3}=", &["password"]);
    }

    #[test]
    fn rarer_literals_win() {
        some(r"the\s+zqx_token", &["zqx_token"]);
    }

    #[test]
    fn a_pattern_without_a_literal_has_none() {
        for p in [r"\d{16}", r"[a-z]+@[a-z]+", r"(foo)?\d+", r"a|bcd", r"(?:abc|\d+)x"] {
            assert_eq!(literals(p), None, "{p}");
        }
    }
}
