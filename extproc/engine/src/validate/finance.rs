//! Cards and bank accounts.

use super::digits::{Digits, Symbols, number, uniform, weighted};

/// The Luhn check of ISO/IEC 7812-1, annex B.
pub(super) fn luhn(text: &str) -> bool {
    Digits::of(text).is_some_and(|digits| luhn_digits(digits.values()))
}

fn luhn_digits(digits: &[u8]) -> bool {
    let sum: u32 = digits
        .iter()
        .rev()
        .enumerate()
        .map(|(place, &digit)| {
            let digit = u32::from(digit);
            if place % 2 == 0 { digit } else { digit * 2 / 10 + digit * 2 % 10 }
        })
        .sum();
    digits.len() > 1 && !uniform(digits) && sum.is_multiple_of(10)
}

/// A payment card: the Luhn check, and a length that the issuer of that prefix gives out (ISO/IEC 7812; the networks'
/// published ranges). Without the ranges one in ten order numbers would pass.
pub(super) fn card(text: &str) -> bool {
    let Some(digits) = Digits::of(text) else { return false };
    let digits = digits.values();
    if digits.len() < 12 || !luhn_digits(digits) {
        return false;
    }
    let length = digits.len();
    match number(&digits[..4]) {
        4000..=4999 => matches!(length, 13 | 16 | 19), // Visa
        5100..=5599 | 2221..=2720 => length == 16,     // Mastercard
        // American Express; JCB's older range
        3400..=3499 | 3700..=3799 | 1800 | 2131 => length == 15,
        3000..=3059 | 3095 | 3600..=3699 | 3800..=3999 => matches!(length, 14 | 16), // Diners Club
        // Discover; JCB; UnionPay
        6011 | 6440..=6599 | 3528..=3589 | 6200..=6299 | 8100..=8171 => matches!(length, 16 | 19),
        5018 | 5020 | 5038 | 5893 | 6304 | 6759 | 6761..=6763 => length <= 19, // Maestro
        _ => false,
    }
}

/// Lengths of the SWIFT IBAN registry.
const IBAN_LENGTHS: &[(&[u8; 2], usize)] = &[
    (b"AD", 24),
    (b"AE", 23),
    (b"AL", 28),
    (b"AT", 20),
    (b"AZ", 28),
    (b"BA", 20),
    (b"BE", 16),
    (b"BG", 22),
    (b"BH", 22),
    (b"BI", 27),
    (b"BR", 29),
    (b"BY", 28),
    (b"CH", 21),
    (b"CR", 22),
    (b"CY", 28),
    (b"CZ", 24),
    (b"DE", 22),
    (b"DJ", 27),
    (b"DK", 18),
    (b"DO", 28),
    (b"EE", 20),
    (b"EG", 29),
    (b"ES", 24),
    (b"FI", 18),
    (b"FK", 18),
    (b"FO", 18),
    (b"FR", 27),
    (b"GB", 22),
    (b"GE", 22),
    (b"GI", 23),
    (b"GL", 18),
    (b"GR", 27),
    (b"GT", 28),
    (b"HN", 28),
    (b"HR", 21),
    (b"HU", 28),
    (b"IE", 22),
    (b"IL", 23),
    (b"IQ", 23),
    (b"IS", 26),
    (b"IT", 27),
    (b"JO", 30),
    (b"KW", 30),
    (b"KZ", 20),
    (b"LB", 28),
    (b"LC", 32),
    (b"LI", 21),
    (b"LT", 20),
    (b"LU", 20),
    (b"LV", 21),
    (b"LY", 25),
    (b"MC", 27),
    (b"MD", 24),
    (b"ME", 22),
    (b"MK", 19),
    (b"MN", 20),
    (b"MR", 27),
    (b"MT", 31),
    (b"MU", 30),
    (b"NI", 28),
    (b"NL", 18),
    (b"NO", 15),
    (b"OM", 23),
    (b"PK", 24),
    (b"PL", 28),
    (b"PS", 29),
    (b"PT", 25),
    (b"QA", 29),
    (b"RO", 24),
    (b"RS", 22),
    (b"RU", 33),
    (b"SA", 24),
    (b"SC", 31),
    (b"SD", 18),
    (b"SE", 24),
    (b"SI", 19),
    (b"SK", 24),
    (b"SM", 27),
    (b"SO", 23),
    (b"ST", 25),
    (b"SV", 28),
    (b"TL", 23),
    (b"TN", 24),
    (b"TR", 26),
    (b"UA", 29),
    (b"VA", 22),
    (b"VG", 24),
    (b"XK", 20),
    (b"YE", 30),
];

/// An international bank account number: the country's length and the remainder 1 modulo 97 (ISO 13616-1, which takes
/// MOD 97-10 of ISO/IEC 7064).
pub(super) fn iban(text: &str) -> bool {
    let Some(symbols) = Symbols::of(text) else { return false };
    let bytes = symbols.bytes();
    if bytes.len() < 15 || !bytes[2..4].iter().all(u8::is_ascii_digit) {
        return false;
    }
    let (head, account) = bytes.split_at(4);
    let known =
        IBAN_LENGTHS.iter().any(|&(country, length)| head.starts_with(country) && bytes.len() == length);
    let remainder = account.iter().chain(head).fold(0_u32, |remainder, &byte| {
        if byte.is_ascii_digit() {
            (remainder * 10 + u32::from(byte - b'0')) % 97
        } else {
            (remainder * 100 + u32::from(byte - b'A') + 10) % 97
        }
    });
    known && remainder == 1 && !uniform(account)
}

/// A routing number of the American Bankers Association: the weights 3, 7, 1 and a prefix that the Federal Reserve has
/// given out.
pub(super) fn aba(text: &str) -> bool {
    Digits::exactly::<9>(text).is_some_and(|digits| {
        let issued = matches!(number(&digits[..2]), 1..=12 | 21..=32 | 61..=72 | 80);
        issued && weighted(&digits, &[3, 7, 1, 3, 7, 1, 3, 7, 1]).is_multiple_of(10)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn luhn_numbers() {
        assert!(luhn("79927398713"));
        assert!(luhn("046 454 286"));
        assert!(!luhn("79927398710"));
        assert!(!luhn("0000000000"));
        assert!(!luhn(""));
        assert!(!luhn("7992739871x"));
    }

    #[test]
    fn cards_of_known_issuers() {
        for number in [
            "4111 1111 1111 1111",
            "4222222222222",
            "5555-5555-5555-4444",
            "2223003122003222",
            "378282246310005",
            "3782 822463 10005",
            "6011111111111117",
            "30569309025904",
            "3530111333300000",
            "6200000000000005",
        ] {
            assert!(card(number), "{number}");
        }
        assert!(!card("4111 1111 1111 1112"), "checksum");
        assert!(!card("7000000000000005"), "issuer");
        assert!(!card("411111111111116"), "length");
        assert!(!card("0000000000000000"), "uniform");
    }

    #[test]
    fn ibans() {
        assert!(iban("GB82 WEST 1234 5698 7654 32"));
        assert!(iban("DE89370400440532013000"));
        assert!(iban("NO9386011117947"));
        assert!(iban("fr1420041010050500013m02606"));
        assert!(!iban("GB82 WEST 1234 5698 7654 33"), "checksum");
        assert!(!iban("DE8937040044053201300"), "length");
        assert!(!iban("ZZ89370400440532013000"), "country");
        assert!(!iban("éé89370400440532013000"));
    }

    #[test]
    fn routing_numbers() {
        assert!(aba("021000021"));
        assert!(aba("122105155"));
        assert!(!aba("021000022"));
        assert!(!aba("991000027"), "prefix");
        assert!(!aba("000000000"));
    }
}
