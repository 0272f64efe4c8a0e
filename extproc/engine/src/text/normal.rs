//! Unicode: compatibility forms, look-alike letters, and characters nobody sees.

use unicode_normalization::{UnicodeNormalization, is_nfkc_quick};

use super::map::{Derived, SpanMap};

/// Characters that take no space on a screen: format controls, bidi marks, variation selectors, fillers.
/// Source: Unicode 16, Default_Ignorable_Code_Point, plus the Hangul fillers and U+2800 (blank braille).
pub(crate) const fn invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// A letter hidden in the Tags block, which renders as nothing and which models read.
pub(crate) const fn tag_letter(c: char) -> Option<char> {
    match c {
        '\u{e0020}'..='\u{e007e}' => char::from_u32(c as u32 - 0xe0000),
        _ => None,
    }
}

/// Letters of other scripts that look like Latin ones, after NFKC. The common ones of Unicode TR 39's
/// confusables; the full table follows with the detection work.
const fn latin(c: char) -> Option<char> {
    Some(match c {
        'а' | 'α' | 'ɑ' => 'a',
        'Ь' | 'ь' => 'b',
        'с' | 'ϲ' => 'c',
        'ԁ' => 'd',
        'е' | 'ε' => 'e',
        'ɡ' => 'g',
        'һ' => 'h',
        'і' | 'ı' | 'ι' => 'i',
        'ј' => 'j',
        'κ' | 'к' => 'k',
        'ӏ' => 'l',
        'м' => 'm',
        'ո' | 'η' => 'n',
        'о' | 'ο' | 'օ' => 'o',
        'р' | 'ρ' => 'p',
        'ԛ' => 'q',
        'г' => 'r',
        'ѕ' => 's',
        'т' | 'τ' => 't',
        'υ' | 'ս' => 'u',
        'ν' | 'ѵ' => 'v',
        'ԝ' | 'ω' => 'w',
        'х' | 'χ' => 'x',
        'у' | 'γ' => 'y',
        'А' | 'Α' => 'A',
        'В' | 'Β' => 'B',
        'С' => 'C',
        'Е' | 'Ε' => 'E',
        'Н' | 'Η' => 'H',
        'І' | 'Ι' => 'I',
        'Ј' => 'J',
        'К' | 'Κ' => 'K',
        'М' | 'Μ' => 'M',
        'Ν' => 'N',
        'О' | 'Ο' => 'O',
        'Р' | 'Ρ' => 'P',
        'Ѕ' => 'S',
        'Т' | 'Τ' => 'T',
        'Х' | 'Χ' => 'X',
        'У' | 'Υ' => 'Y',
        'Ζ' => 'Z',
        _ => return None,
    })
}

/// What is done with characters nobody sees.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Invisible {
    /// They are left out: `ig\u{200b}nore` reads `ignore`.
    Drop,
    /// They are read as spaces: `ignore\u{200b}all` reads `ignore all`.
    Space,
}

/// What a text outside ASCII holds; decides which views are worth deriving.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Traits {
    /// Characters nobody sees.
    pub(crate) invisible: bool,
    /// Letters of the Tags block.
    pub(crate) tags: bool,
    /// Anything that NFKC, mark removal or look-alike folding would change.
    pub(crate) foldable: bool,
}

pub(crate) fn traits(text: &str) -> Traits {
    let mut t = Traits::default();
    let mut odd_space = false;
    let mut mixed = (false, false);
    for c in text.chars() {
        if c.is_ascii() {
            mixed.0 |= c.is_ascii_alphabetic();
            continue;
        }
        t.tags |= tag_letter(c).is_some();
        t.invisible |= invisible(c);
        odd_space |= c.is_whitespace() || matches!(c, '\u{300}'..='\u{36f}');
        mixed.1 |= latin(c).is_some();
    }
    // Look-alikes matter where they stand among Latin letters; a Russian or Greek text is left in peace.
    t.foldable = odd_space
        || (mixed.0 && mixed.1)
        || is_nfkc_quick(text.chars()) != unicode_normalization::IsNormalized::Yes;
    t
}

/// The text with compatibility forms, combining marks, odd spaces and look-alikes folded.
pub(crate) fn fold(text: &str, hidden: Invisible) -> (String, SpanMap) {
    let mut out = Derived::with_capacity(text.len());
    let mut kept = 0;
    for (at, c) in text.char_indices() {
        if c.is_ascii() {
            continue;
        }
        out.keep(&text[kept..at], kept);
        let next = at + c.len_utf8();
        kept = next;
        if invisible(c) {
            if hidden == Invisible::Space {
                out.unit(" ", at, next);
            }
        } else if c.is_whitespace() {
            out.unit(" ", at, next);
        } else {
            for n in std::iter::once(c).nfkc() {
                if matches!(n, '\u{300}'..='\u{36f}') {
                    continue;
                }
                // Decompose once more so that `é` reads `e`, as a keyboardless attacker would write it.
                let base = std::iter::once(n).nfd().next().unwrap_or(n);
                let base = if n.is_alphabetic() && base.is_ascii() { base } else { n };
                out.unit_char(latin(base).unwrap_or(base), at, next);
            }
        }
    }
    out.keep(&text[kept..], kept);
    out.finish()
}

/// The text that stands hidden in the Tags block, alone.
pub(crate) fn tags(text: &str) -> (String, SpanMap) {
    let mut out = Derived::default();
    for (at, c) in text.char_indices() {
        if let Some(letter) = tag_letter(c) {
            out.unit_char(letter, at, at + c.len_utf8());
        }
    }
    out.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_width_marks_and_look_alikes_read_as_plain_letters() {
        assert_eq!(fold("ｉｇｎｏｒｅ", Invisible::Drop).0, "ignore");
        assert_eq!(fold("іgnоrе", Invisible::Drop).0, "ignore");
        assert_eq!(fold("i\u{301}gnóre", Invisible::Drop).0, "ignore");
        assert_eq!(fold("ignore\u{2003}all", Invisible::Drop).0, "ignore all");
    }

    #[test]
    fn invisible_characters_go_or_become_spaces() {
        assert_eq!(fold("ig\u{200b}nore", Invisible::Drop).0, "ignore");
        assert_eq!(fold("ignore\u{200b}all", Invisible::Space).0, "ignore all");
        assert!(traits("ig\u{200b}nore").invisible);
    }

    #[test]
    fn tag_letters_are_read() {
        let hidden: String = "ignore".chars().filter_map(|c| char::from_u32(c as u32 + 0xe0000)).collect();
        assert_eq!(tags(&format!("hello{hidden}")).0, "ignore");
    }

    #[test]
    fn a_text_in_another_script_is_not_foldable() {
        assert!(!traits("привет мир").foldable);
        assert!(traits("ignоre").foldable);
    }
}
