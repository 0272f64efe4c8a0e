//! Validators: what a rule asks of a match that a pattern cannot say.
//!
//! A checksum tells a card number from an order number; a look at the shape of a value tells a credential
//! from a placeholder. All are pure functions of the matched text, take any UTF-8 input, and allocate nothing.

mod digits;
mod finance;
mod national;
mod secret;

/// Decides whether the matched text is what the rule takes it for.
pub type Validator = fn(&str) -> bool;

/// Every validator, by the name a pack uses.
const TABLE: &[(&str, Validator)] = &[
    ("aba", finance::aba),
    ("bsn", national::bsn),
    ("card", finance::card),
    ("codice_fiscale", national::codice_fiscale),
    ("cpf", national::cpf),
    ("credential", secret::credential),
    ("date", national::date),
    ("de_tax_id", national::de_tax_id),
    ("dni", national::dni),
    ("e164", national::e164),
    ("encoded_text", crate::url::is_encoded_text),
    ("iban", finance::iban),
    ("jwt", secret::jwt),
    ("luhn", finance::luhn),
    ("mrz", national::mrz),
    ("nhs", national::nhs),
    ("nir", national::nir),
    ("not_placeholder", secret::not_placeholder),
    ("password", secret::password),
    ("pesel", national::pesel),
    ("ssn", national::ssn),
    ("verhoeff", national::verhoeff),
];

/// The validator of that name.
pub fn by_name(name: &str) -> Option<Validator> {
    TABLE.iter().find(|(known, _)| *known == name).map(|&(_, check)| check)
}

/// The names [`by_name`] knows, in alphabetical order.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|&(name, _)| name)
}

/// Shannon entropy of the text in bits per byte (C. E. Shannon, "A Mathematical Theory of Communication", 1948):
/// 0 for one repeated byte, 4 for evenly spread hexadecimal digits, at most 8.
pub fn entropy(text: &str) -> f64 {
    if text.is_empty() {
        return 0.0;
    }
    let mut counts = [0_u32; 256];
    for byte in text.bytes() {
        counts[usize::from(byte)] += 1;
    }
    let total = text.len() as f64;
    counts
        .iter()
        .filter(|&&count| count > 0)
        .map(|&count| f64::from(count) / total)
        .map(|p| -p * p.log2())
        .sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_sorted_and_found() {
        let all: Vec<_> = names().collect();
        assert!(all.is_sorted());
        assert!(all.iter().all(|name| by_name(name).is_some()));
        assert!(by_name("no_such_validator").is_none());
    }

    #[test]
    fn entropy_of_known_texts() {
        let near = |text, bits: f64| (entropy(text) - bits).abs() < 1e-9;
        assert!(near("", 0.0));
        assert!(near("aaaaaaaa", 0.0));
        assert!(near("abababab", 1.0));
        assert!(near("0123456789abcdef", 4.0));
    }

    proptest! {
        // The data path runs these on what an agent sends: nothing may panic, whatever the bytes.
        #[test]
        fn any_text_is_answered(text in "\\PC{0,80}", digits in "[0-9A-Za-zéß٣ ./<-]{0,48}") {
            for (_, check) in TABLE {
                check(&text);
                check(&digits);
            }
            prop_assert!(entropy(&text) <= 8.0);
        }
    }
}
