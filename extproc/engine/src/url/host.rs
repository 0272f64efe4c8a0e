//! Host names that carry data, and host names made to be taken for others.

use unicode_normalization::UnicodeNormalization;

use super::payload::is_encoded_text;
use crate::text::normal;
use crate::validate::entropy;

/// Names that are imitated, without their endings.
const IMITATED: [&str; 40] = [
    "google",
    "github",
    "gitlab",
    "microsoft",
    "apple",
    "amazon",
    "paypal",
    "facebook",
    "instagram",
    "netflix",
    "linkedin",
    "twitter",
    "dropbox",
    "adobe",
    "office365",
    "outlook",
    "icloud",
    "whatsapp",
    "telegram",
    "discord",
    "slack",
    "stripe",
    "openai",
    "anthropic",
    "huggingface",
    "docker",
    "npmjs",
    "pypi",
    "bitbucket",
    "atlassian",
    "salesforce",
    "cloudflare",
    "coinbase",
    "binance",
    "chase",
    "wellsfargo",
    "hsbc",
    "okta",
    "zoom",
    "ebay",
];

/// Words that stand beside such a name in a host that asks for passwords.
const BAITS: [&str; 14] = [
    "login",
    "signin",
    "verify",
    "verification",
    "secure",
    "security",
    "account",
    "accounts",
    "update",
    "support",
    "auth",
    "billing",
    "wallet",
    "recovery",
];

/// Whether a host name is made to be taken for another.
pub(super) fn lookalike(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    if !host.is_ascii() {
        return host.split(['.', '\u{3002}', '\u{ff0e}', '\u{ff61}']).any(disguised)
            || host.contains([
                '\u{3002}', '\u{ff0e}', '\u{ff61}', '\u{2044}', '\u{2215}', '\u{ff0f}', '\u{29f8}',
            ]);
    }
    if host.split('.').any(|l| {
        l.len() > 4 && l[..4].eq_ignore_ascii_case("xn--") && punycode(&l[4..]).is_some_and(|u| disguised(&u))
    }) {
        return true;
    }
    // The label that is registered: the last but one, or before it where that is a country's (`co.uk`).
    let Some((rest, top)) = host.rsplit_once('.') else { return false };
    let (mut above, mut label) = rest.rsplit_once('.').unwrap_or(("", rest));
    if top.len() == 2
        && !above.is_empty()
        && matches!(label, "co" | "com" | "org" | "net" | "gov" | "ac" | "edu")
    {
        (above, label) = above.rsplit_once('.').unwrap_or(("", above));
    }
    if imitates(label) {
        return true;
    }
    // `github.com.login.example`: a whole name, endings and all, below another.
    let mut before = "";
    above.split('.').any(|l| {
        let whole = matches!(l, "com" | "org" | "net" | "io") && IMITATED.contains(&before);
        before = l;
        whole
    })
}

/// Whether a label holds anything that stands for a letter it looks like.
fn foldable(label: &str) -> bool {
    let bytes = label.as_bytes();
    bytes.iter().any(|b| matches!(b, b'0' | b'1' | b'3' | b'5'))
        || bytes.windows(2).any(|w| w == b"rn" || w == b"vv")
}

/// Whether a label is a known name with look-alike letters, or one beside a bait.
fn imitates(label: &str) -> bool {
    // Nothing of a name to fold, and no second word.
    if label.len() < 4 || !(foldable(label) || label.contains('-')) || IMITATED.contains(&label) {
        return false;
    }
    let plain = |s: &str| {
        s.replace("rn", "m")
            .replace("vv", "w")
            .replace(['0'], "o")
            .replace(['1'], "l")
            .replace('5', "s")
            .replace('3', "e")
    };
    let folded = plain(label);
    let known = |s: &str| IMITATED.iter().any(|b| *b == s || (foldable(b) && plain(b) == s));
    if folded != label && known(&folded) {
        return true;
    }
    if !label.contains('-') {
        return false;
    }
    let words: Vec<&str> = label.split('-').collect();
    words.len() > 1
        && words.iter().any(|w| {
            let f = plain(w);
            IMITATED.contains(w) || (f != **w && known(&f))
        })
        && words.iter().any(|w| BAITS.contains(w))
}

/// Whether a label mixes scripts that no word mixes, or reads as a Latin word without being one.
fn disguised(label: &str) -> bool {
    if label.is_ascii() {
        return false;
    }
    let latin = label.chars().any(|c| c.is_ascii_alphabetic() || matches!(c, '\u{c0}'..='\u{24f}'));
    let other = label.chars().any(|c| matches!(c, '\u{370}'..='\u{58f}' | '\u{13a0}'..='\u{13ff}'));
    if latin && other {
        return true;
    }
    // Every letter of another alphabet, and all of them look like Latin ones.
    let (folded, _) = normal::fold(label, normal::Invisible::Drop);
    let compat: String = label.nfkc().collect();
    (other && folded.is_ascii()) || (compat != label && compat.is_ascii())
        // A known name with an accent that nobody would notice.
        || {
            let bare: String = label.nfd().filter(char::is_ascii).collect();
            bare.len() == label.chars().count() && IMITATED.contains(&bare.as_str())
        }
}

/// A label's letters behind `xn--` (RFC 3492).
fn punycode(encoded: &str) -> Option<String> {
    let (basic, rest) = encoded.rsplit_once('-').unwrap_or(("", encoded));
    let mut out: Vec<char> = basic.chars().collect();
    let (mut n, mut i, mut bias) = (128u32, 0u32, 72u32);
    let mut bytes = rest.bytes();
    while bytes.len() > 0 {
        let (start, mut weight, mut k) = (i, 1u32, 36u32);
        loop {
            let digit = u32::from(match bytes.next()? {
                b @ b'a'..=b'z' => b - b'a',
                b @ b'A'..=b'Z' => b - b'A',
                b @ b'0'..=b'9' => b - b'0' + 26,
                _ => return None,
            });
            i = i.checked_add(digit.checked_mul(weight)?)?;
            let t = if k <= bias { 1 } else { (k - bias).min(26) };
            if digit < t {
                break;
            }
            weight = weight.checked_mul(36 - t)?;
            k += 36;
        }
        let len = out.len() as u32 + 1;
        let mut delta = if start == 0 { i / 700 } else { (i - start) / 2 };
        delta += delta / len;
        let mut step = 0;
        while delta > 455 {
            delta /= 35;
            step += 36;
        }
        bias = step + 36 * delta / (delta + 38);
        n = n.checked_add(i / len)?;
        i %= len;
        if out.len() > 63 {
            return None;
        }
        out.insert(i as usize, char::from_u32(n)?);
        i += 1;
    }
    Some(out.into_iter().collect())
}

/// Whether labels carry data: a text in an encoding, or more random letters than a name has use for.
pub(super) fn carries(host: &str) -> bool {
    if host.len() < 28 {
        return false;
    }
    let labels: Vec<&str> = host.split('.').collect();
    let Some(free) = labels.len().checked_sub(2).filter(|n| *n > 0) else { return false };
    let mut joined = String::new();
    let mut random = 0;
    for label in &labels[..free] {
        if is_encoded_text(label) {
            return true;
        }
        let digits = label.bytes().filter(u8::is_ascii_digit).count();
        if label.len() >= 16 && digits >= 2 && !label.contains('-') && entropy(label) >= 3.3 {
            random += label.len();
        }
        if label.len() >= 8 && label.bytes().all(|b| b.is_ascii_alphanumeric()) {
            joined.push_str(label);
        }
    }
    random >= 60 || is_encoded_text(&joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imitations_are_told_from_the_names_they_imitate() {
        for host in [
            "g00gle.com",
            "paypa1.com",
            "rnicrosoft.com",
            "github.com.account-check.top",
            "xn--80ak6aa92e.com",
            "p\u{430}ypal.com",
            "github\u{3002}com",
            "paypal-login.example",
            "g\u{f6}ogle.com",
        ] {
            assert!(lookalike(host), "{host}");
        }
        for host in [
            "google.com",
            "www.amazon.co.uk",
            "amazon.com.br",
            "github.io",
            "docs.github.com",
            "m\u{fc}nchen.de",
            "xn--mnchen-3ya.de",
            "\u{43c}\u{43e}\u{441}\u{43a}\u{432}\u{430}.\u{440}\u{444}",
            "login.microsoftonline.com",
            "3m.com",
            "office.com",
            "modern.io",
        ] {
            assert!(!lookalike(host), "{host}");
        }
    }

    #[test]
    fn punycode_is_read() {
        assert_eq!(punycode("mnchen-3ya").as_deref(), Some("münchen"));
        assert_eq!(punycode("80ak6aa92e").as_deref(), Some("\u{430}\u{440}\u{440}\u{4cf}\u{435}"));
        assert_eq!(punycode("99999999999999"), None);
    }

    #[test]
    fn labels_that_carry_data_are_told_from_names() {
        for host in [
            "546865206f72646572206973206c617465.x.example.net",
            "krugkidpojsgk4ranfzsa3dborssaylomqqg433cn5shsiddmfwgyzle.t.example.net",
        ] {
            assert!(carries(host), "{host}");
        }
        for host in [
            "d111111abcdef8.cloudfront.net",
            "my-long-service-name-in-production.eu-west-1.example.com",
            "4d0cf09b9b2d761a7d87be99d17507bce8b86f3b.example.cloud",
        ] {
            assert!(!carries(host), "{host}");
        }
    }
}
