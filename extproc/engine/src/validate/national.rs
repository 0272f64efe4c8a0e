//! Numbers that states give to persons, and the telephone's.

use super::digits::{Digits, Symbols, number, uniform, weighted};

/// A US social security number: no area, group or serial that the Social Security Administration leaves out (20 CFR
/// 422.103 and its notes on randomised numbers), and none of the numbers known from advertisements.
pub(super) fn ssn(text: &str) -> bool {
    Digits::exactly::<9>(text).is_some_and(|digits| {
        let (area, group, serial) = (number(&digits[..3]), number(&digits[3..5]), number(&digits[5..]));
        let printed = matches!(
            (area, group, serial),
            (78, 5, 1120) | (219, 9, 9999) | (457, 55, 5462) | (123, 45, 6789)
        );
        !matches!(area, 0 | 666 | 900..) && group != 0 && serial != 0 && !printed && !uniform(&digits)
    })
}

/// A UK NHS number: weights 10 to 2, modulo 11 (NHS Data Dictionary, "NHS NUMBER").
pub(super) fn nhs(text: &str) -> bool {
    Digits::exactly::<10>(text).is_some_and(|digits| {
        let check = 11 - weighted(&digits[..9], &[10, 9, 8, 7, 6, 5, 4, 3, 2]) % 11;
        check % 11 == u32::from(digits[9]) && check != 10 && !uniform(&digits)
    })
}

/// A Spanish DNI or NIE: the letter is the number modulo 23; X, Y, Z stand for 0, 1, 2 (Ministerio del Interior).
pub(super) fn dni(text: &str) -> bool {
    const LETTERS: &[u8; 23] = b"TRWAGMYFPDXBNJZSQVHLCKE";
    let Some(symbols) = Symbols::of(text) else { return false };
    let &[first, ref middle @ .., letter] = symbols.bytes() else { return false };
    let first = match first {
        b'0'..=b'9' => first - b'0',
        b'X'..=b'Z' => first - b'X',
        _ => return false,
    };
    if middle.len() != 7 || !middle.iter().all(u8::is_ascii_digit) {
        return false;
    }
    let value = middle.iter().fold(usize::from(first), |value, digit| value * 10 + usize::from(digit - b'0'));
    value != 0 && LETTERS[value % 23] == letter
}

/// An Italian codice fiscale: values of the characters in odd and even places, modulo 26 (Decreto Ministeriale 23
/// dicembre 1976, tables in article 6 and after). Digits may stand as letters where two persons would share a code.
pub(super) fn codice_fiscale(text: &str) -> bool {
    /// Values in odd places of 0 to 9 and A to J, which share them.
    const ODD: [u32; 10] = [1, 0, 5, 7, 9, 13, 15, 17, 19, 21];
    /// Values in odd places of K to Z.
    const ODD_FROM_K: [u32; 16] = [2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23];
    let Some(symbols) = Symbols::of(text) else { return false };
    let Ok(code) = <[u8; 16]>::try_from(symbols.bytes()) else { return false };
    let letters = [0, 1, 2, 3, 4, 5, 8, 11, 15];
    if !letters.iter().all(|&place| code[place].is_ascii_uppercase()) {
        return false;
    }
    let sum: u32 = code[..15]
        .iter()
        .enumerate()
        .map(|(place, &byte)| {
            let value = usize::from(if byte.is_ascii_digit() { byte - b'0' } else { byte - b'A' });
            match (place % 2, value) {
                (1, _) => value as u32,
                (_, 0..10) => ODD[value],
                _ => ODD_FROM_K[value - 10],
            }
        })
        .sum();
    sum % 26 == u32::from(code[15] - b'A')
}

/// A French NIR: the key is 97 minus the number modulo 97; departments 2A and 2B count as 19 and 18 (INSEE).
pub(super) fn nir(text: &str) -> bool {
    let Some(symbols) = Symbols::of(text) else { return false };
    let Ok(mut code) = <[u8; 15]>::try_from(symbols.bytes()) else { return false };
    match &code[5..7] {
        b"2A" => code[5..7].copy_from_slice(b"19"),
        b"2B" => code[5..7].copy_from_slice(b"18"),
        _ => {}
    }
    if !code.iter().all(u8::is_ascii_digit) {
        return false;
    }
    let digits = code.map(|byte| byte - b'0');
    // Months above 12 are given where the month of birth is not known.
    let month = matches!(number(&digits[3..5]), 1..=12 | 20 | 30..=42 | 50..=99);
    matches!(digits[0], 1..=4 | 7 | 8) && month && 97 - number(&digits[..13]) % 97 == number(&digits[13..])
}

/// A German tax identification number: MOD 11,10 of ISO/IEC 7064, and among the first ten digits exactly one that
/// occurs twice or three times (Bundeszentralamt für Steuern).
pub(super) fn de_tax_id(text: &str) -> bool {
    Digits::exactly::<11>(text).is_some_and(|digits| {
        let mut counts = [0_u8; 10];
        let mut product = 10_u32;
        for &digit in &digits[..10] {
            counts[usize::from(digit)] += 1;
            let sum = (u32::from(digit) + product) % 10;
            product = (if sum == 0 { 10 } else { sum }) * 2 % 11;
        }
        let repeated = counts.iter().filter(|&&count| count > 1).count();
        let most = counts.iter().max().copied().unwrap_or(0);
        digits[0] != 0 && repeated == 1 && most <= 3 && (11 - product) % 10 == u32::from(digits[10])
    })
}

/// A Dutch burgerservicenummer: weights 9 to 2 and -1, modulo 11 (the "elfproef" of the Rijksoverheid).
pub(super) fn bsn(text: &str) -> bool {
    Digits::exactly::<9>(text).is_some_and(|digits| {
        let sum = weighted(&digits[..8], &[9, 8, 7, 6, 5, 4, 3, 2]);
        !uniform(&digits) && sum % 11 == u32::from(digits[8])
    })
}

/// A Polish PESEL: weights 1, 3, 7, 9, and a date of birth whose month also tells the century (ustawa o ewidencji
/// ludności, article 15).
pub(super) fn pesel(text: &str) -> bool {
    Digits::exactly::<11>(text).is_some_and(|digits| {
        let sum = weighted(&digits[..10], &[1, 3, 7, 9, 1, 3, 7, 9, 1, 3]);
        let (month, day) = (number(&digits[2..4]) % 20, number(&digits[4..6]));
        matches!(month, 1..=12) && matches!(day, 1..=31) && (10 - sum % 10) % 10 == u32::from(digits[10])
    })
}

/// A Brazilian CPF: two check digits modulo 11 (Receita Federal).
pub(super) fn cpf(text: &str) -> bool {
    Digits::exactly::<11>(text).is_some_and(|digits| {
        let check = |length: usize| {
            let sum: u32 = digits[..length]
                .iter()
                .zip((2..=length as u32 + 1).rev())
                .map(|(&d, w)| u32::from(d) * w)
                .sum();
            sum * 10 % 11 % 10 == u32::from(digits[length])
        };
        !uniform(&digits) && check(9) && check(10)
    })
}

/// The check of J. Verhoeff, "Error Detecting Decimal Codes" (1969): the dihedral group of order ten. An Indian Aadhaar
/// number ends in it (UIDAI).
pub(super) fn verhoeff(text: &str) -> bool {
    /// The permutation by place; its eighth power is the identity.
    const PERMUTE: [u8; 10] = [1, 5, 7, 6, 2, 8, 3, 0, 9, 4];
    let Some(digits) = Digits::of(text) else { return false };
    let digits = digits.values();
    let check = digits.iter().rev().enumerate().fold(0_u8, |check, (place, &digit)| {
        let permuted = (0..place % 8).fold(digit, |digit, _| PERMUTE[usize::from(digit)]);
        dihedral(check, permuted)
    });
    digits.len() > 1 && !uniform(digits) && check == 0
}

/// Multiplication in the dihedral group of order ten: 0 to 4 are rotations, 5 to 9 reflections.
const fn dihedral(a: u8, b: u8) -> u8 {
    match (a < 5, b < 5) {
        (true, true) => (a + b) % 5,
        (true, false) => 5 + (a + b - 5) % 5,
        (false, true) => 5 + (a - b) % 5,
        (false, false) => (a + 5 - b) % 5,
    }
}

/// The second line of a passport's machine-readable zone: check digits with the weights 7, 3, 1 over number, date of
/// birth and date of expiry (ICAO Doc 9303, part 3, section 4.9).
pub(super) fn mrz(text: &str) -> bool {
    let Ok(line) = <[u8; 44]>::try_from(text.as_bytes()) else { return false };
    let check = |field: &[u8], digit: u8| {
        let mut sum = 0;
        for (&byte, weight) in field.iter().zip([7, 3, 1].into_iter().cycle()) {
            let value = match byte {
                b'0'..=b'9' => byte - b'0',
                b'A'..=b'Z' => byte - b'A' + 10,
                b'<' => 0,
                _ => return false,
            };
            sum += u32::from(value) * weight;
        }
        digit.is_ascii_digit() && sum % 10 == u32::from(digit - b'0')
    };
    check(&line[..9], line[9]) && check(&line[13..19], line[19]) && check(&line[21..27], line[27])
}

/// An international telephone number: up to 15 digits after a country code in use (ITU-T E.164).
pub(super) fn e164(text: &str) -> bool {
    let Some(digits) = Digits::of(text) else { return false };
    let digits = digits.values();
    if !(8..=15).contains(&digits.len()) {
        return false;
    }
    let subscriber = match (digits[0], number(&digits[..2])) {
        (1, _) if digits.len() != 11 || digits[1] < 2 || digits[4] < 2 => return false,
        (1 | 7, _) => &digits[1..],
        (
            _,
            20 | 27 | 30..=34 | 36 | 39..=41 | 43..=49 | 51..=58 | 60..=66 | 81 | 82 | 84 | 86 | 90..=95 | 98,
        ) => &digits[2..],
        (_, 21..=26 | 29 | 35 | 37 | 38 | 42 | 50 | 59 | 67..=69 | 80 | 85 | 87 | 88 | 96 | 97 | 99) => {
            &digits[3..]
        }
        _ => return false,
    };
    !uniform(subscriber)
}

/// A day a living person may have been born on: year, month and day, or day and month in either order before the year.
pub(super) fn date(text: &str) -> bool {
    let mut parts = [0_u32; 3];
    let mut count = 0;
    for part in text.split(['-', '/', '.', ' ']).filter(|part| !part.is_empty()) {
        let (Some(slot), Ok(value)) = (parts.get_mut(count), part.parse()) else { return false };
        *slot = value;
        count += 1;
    }
    let (year, a, b) =
        if parts[0] > 31 { (parts[0], parts[1], parts[2]) } else { (parts[2], parts[0], parts[1]) };
    let day = |day: u32, month: u32| (1..=31).contains(&day) && (1..=12).contains(&month);
    count == 3 && (1900..=2035).contains(&year) && (day(a, b) || day(b, a))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each check against numbers that are right and numbers that are not.
    fn tried(check: fn(&str) -> bool, valid: &[&str], invalid: &[&str]) {
        for text in valid {
            assert!(check(text), "refused {text}");
        }
        for text in invalid.iter().chain(&["", "é", "not a number", "0"]) {
            assert!(!check(text), "accepted {text}");
        }
    }

    #[test]
    fn united_states() {
        tried(
            ssn,
            &["536-22-8726", "001 01 0001"],
            &["000-22-8726", "666-22-8726", "900-22-8726", "536-00-8726"],
        );
        tried(ssn, &[], &["536-22-0000", "078-05-1120", "111-11-1111", "536-22-872"]);
    }

    #[test]
    fn united_kingdom() {
        tried(nhs, &["943 476 5919", "9434765919"], &["943 476 5918", "943 476 591", "0000000000"]);
    }

    #[test]
    fn spain() {
        tried(
            dni,
            &["12345678Z", "12345678-z", "X1234567L", "Z1234567R"],
            &["12345678A", "W1234567L", "1234567Z"],
        );
    }

    #[test]
    fn italy() {
        tried(
            codice_fiscale,
            &["RSSMRA85T10A562S", "rssmra85t10a562s"],
            &["RSSMRA85T10A562T", "RSSMRA85T10A562"],
        );
    }

    #[test]
    fn france() {
        tried(
            nir,
            &["2 55 08 14 168 025 38", "1 85 05 78 006 084 91"],
            &["2 55 08 14 168 025 39", "9550814168025 38"],
        );
        // The key of a Corsican number is that of 19 or 18 in the department's place.
        tried(nir, &["1 84 12 2A 451 089 33"], &["1 84 12 2B 451 089 33"]);
    }

    #[test]
    fn germany_and_the_netherlands() {
        tried(de_tax_id, &["86 095 742 719", "47036892816"], &["86095742718", "06095742719", "12345678901"]);
        tried(bsn, &["111222333", "123456782"], &["111222334", "111111111", "12345678"]);
    }

    #[test]
    fn poland_and_brazil() {
        tried(pesel, &["44051401359", "02070803628"], &["44051401358", "44991401359", "4405140135"]);
        tried(cpf, &["111.444.777-35", "52998224725"], &["111.444.777-34", "111.111.111-11"]);
    }

    #[test]
    fn verhoeff_numbers() {
        tried(verhoeff, &["2363", "123451"], &["2364", "132451", "0000"]);
        // The group's table, checked against its laws rather than copied.
        for a in 0..10 {
            assert_eq!((dihedral(a, 0), dihedral(0, a)), (a, a));
            let mut row: Vec<_> = (0..10).map(|b| dihedral(a, b)).collect();
            row.sort_unstable();
            assert_eq!(row, (0..10).collect::<Vec<_>>());
        }
    }

    #[test]
    fn passports() {
        tried(
            mrz,
            &["L898902C36UTO7408122F1204159ZE184226B<<<<<10"],
            &["L898902C46UTO7408122F1204159ZE184226B<<<<<10"],
        );
    }

    #[test]
    fn telephones_and_dates() {
        tried(
            e164,
            &["+1 212 555 0142", "+44 20 7946 0958", "+420 601 123 456"],
            &["+1 112 555 0142", "+28 123 45678"],
        );
        tried(e164, &[], &["+44 000000000", "+1 212 555", "+4420794609580000"]);
        tried(
            date,
            &["1985-11-18", "18/11/1985", "11/18/1985", "1.2.1990"],
            &["1985-13-41", "18/11/85", "1-2-3-1990"],
        );
    }
}
