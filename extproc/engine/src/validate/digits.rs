//! Identifiers without their punctuation.

/// The longest identifier any validator reads (a passport's machine-readable line has 44 characters).
const MAX: usize = 48;

/// The letters and digits of an identifier, upper-cased; separators people write between them are dropped.
pub(super) struct Symbols {
    bytes: [u8; MAX],
    len: usize,
}

impl Symbols {
    /// `None` if the text holds anything but ASCII letters, digits and the separators, or is too long.
    pub(super) fn of(text: &str) -> Option<Self> {
        let mut symbols = Self { bytes: [0; MAX], len: 0 };
        for c in text.chars() {
            match c {
                ' ' | '\t' | '\u{a0}' | '-' | '.' | '/' | '(' | ')' | '+' => {}
                '0'..='9' | 'a'..='z' | 'A'..='Z' => {
                    *symbols.bytes.get_mut(symbols.len)? = (c as u8).to_ascii_uppercase();
                    symbols.len += 1;
                }
                _ => return None,
            }
        }
        Some(symbols)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The digits of a number written with or without separators; `None` if there is anything else in it.
pub(super) struct Digits(Symbols);

impl Digits {
    pub(super) fn of(text: &str) -> Option<Self> {
        let mut symbols = Symbols::of(text)?;
        for byte in &mut symbols.bytes[..symbols.len] {
            if !byte.is_ascii_digit() {
                return None;
            }
            *byte -= b'0';
        }
        Some(Self(symbols))
    }

    /// As [`Digits::of`], for exactly `N` digits.
    pub(super) fn exactly<const N: usize>(text: &str) -> Option<[u8; N]> {
        Self::of(text)?.values().try_into().ok()
    }

    /// The digits' values, 0 to 9.
    pub(super) fn values(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// The sum of each digit times its weight.
pub(super) fn weighted(digits: &[u8], weights: &[u32]) -> u32 {
    digits.iter().zip(weights).map(|(&digit, weight)| u32::from(digit) * weight).sum()
}

/// The number that the digits write.
pub(super) fn number(digits: &[u8]) -> u64 {
    digits.iter().fold(0, |number, &digit| number.wrapping_mul(10).wrapping_add(u64::from(digit)))
}

/// One digit over and over: what people type where a number is asked for, and it passes many a checksum.
pub(super) fn uniform(digits: &[u8]) -> bool {
    digits.windows(2).all(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_are_dropped_and_other_text_is_refused() {
        assert_eq!(Digits::exactly::<4>("1 2-3.4"), Some([1, 2, 3, 4]));
        assert_eq!(Digits::exactly::<4>("1234 5"), None);
        assert_eq!(Digits::exactly::<2>("1x2"), None);
        assert_eq!(Digits::exactly::<1>("\u{663}"), None);
        assert!(Symbols::of(&"1".repeat(MAX + 1)).is_none());
        assert!(Symbols::of("ab-1").is_some_and(|symbols| symbols.bytes() == b"AB1"));
    }

    #[test]
    fn sums_and_numbers() {
        assert_eq!(weighted(&[1, 2, 3], &[3, 2, 1]), 10);
        assert_eq!(number(&[1, 0, 9]), 109);
        assert!(uniform(&[7, 7, 7]));
        assert!(!uniform(&[7, 7, 8]));
    }
}
