//! Credentials: telling a value somebody must not see from one somebody is meant to fill in.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::entropy;

/// Words of documentation: a value with one of them shows where a credential goes.
const PLACEHOLDER_WORDS: &[&str] = &[
    "example",
    "changeme",
    "change-me",
    "change_me",
    "placeholder",
    "your-",
    "your_",
    "yourapi",
    "yourtoken",
    "yourpass",
    "yoursecret",
    "xxxx",
    "****",
    "....",
    "dummy",
    "sample",
    "insert",
    "replace",
    "redacted",
    "masked",
    "todo",
    "fixme",
    "fake",
    "_here",
    "-here",
    "my-secret",
    "my_secret",
    "my-token",
    "my_token",
    "my-api",
    "my_api",
    "mypassword",
    "getenv",
    "environ",
    "process.env",
    "secrets.",
    "dotenv",
    "undefined",
    "not-a-",
    "not_a_",
];

/// Values that mean "nothing", or name what belongs there.
const PLACEHOLDER_VALUES: &[&str] = &[
    "null", "none", "nil", "true", "false", "empty", "string", "password", "passwd", "secret", "token",
    "apikey", "api_key", "api-key", "username", "default", "required", "optional", "unset", "foobar",
    "value",
];

/// The value is not a stand-in: no documentation word, no variable reference, no run or repetition.
pub(super) fn not_placeholder(text: &str) -> bool {
    let value = text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`'));
    !value.is_empty()
        && !is_reference(value)
        && !is_sequence(value.as_bytes())
        && !PLACEHOLDER_VALUES.iter().any(|known| value.eq_ignore_ascii_case(known))
        && !PLACEHOLDER_WORDS.iter().any(|word| contains(value, word))
}

/// A generated token beside a name such as `api_key`: long and varied enough, and not an identifier, a path or a
/// phrase of the code around it.
pub(super) fn credential(text: &str) -> bool {
    let bytes = text.as_bytes();
    let count = |class: fn(&u8) -> bool| bytes.iter().filter(|byte| class(byte)).count();
    let (digits, lower, upper) =
        (count(u8::is_ascii_digit), count(u8::is_ascii_lowercase), count(u8::is_ascii_uppercase));
    // Without a digit only a long value in mixed case is more likely a token than a name.
    let mixed = if digits == 0 { lower > 3 && upper > 3 && bytes.len() >= 24 } else { lower + upper > 0 };
    bytes.len() >= 10
        && mixed
        && entropy(text) >= 2.9
        && !is_identifier(text)
        && !is_type_name(text)
        && not_placeholder(text)
}

/// A password beside a name such as `password`: of two kinds of characters at least, and nothing that code or prose
/// puts there instead.
pub(super) fn password(text: &str) -> bool {
    let kind = |class: fn(&u8) -> bool| usize::from(text.bytes().any(|byte| class(&byte)));
    let kinds = kind(u8::is_ascii_digit)
        + kind(u8::is_ascii_lowercase)
        + kind(u8::is_ascii_uppercase)
        + kind(u8::is_ascii_punctuation);
    text.len() >= 6
        && kinds >= 2
        && !text.contains(char::is_whitespace)
        && !text.starts_with(':')
        && !text.ends_with(['(', ')', '[', ']', '<', ',', ';', ':'])
        && entropy(text) >= 2.2
        && !is_identifier(text)
        && not_placeholder(text)
}

/// A JSON Web Token in compact form (RFC 7519, RFC 7515): the first part is an object with an algorithm or a type, and
/// the second an object too. Encrypted tokens (RFC 7516) have no readable second part and are left alone.
pub(super) fn jwt(text: &str) -> bool {
    let mut parts = text.split('.');
    let (Some(header), Some(claims)) = (parts.next(), parts.next()) else { return false };
    is_object(header, |json| {
        ["\"alg\"", "\"typ\"", "\"enc\""].iter().any(|key| contains_bytes(json, key.as_bytes()))
    }) && is_object(claims, |_| true)
}

/// The part is the base64url of a JSON object whose first 768 bytes pass the test.
fn is_object(part: &str, test: impl Fn(&[u8]) -> bool) -> bool {
    let part = part.trim_end_matches('=').as_bytes();
    let part = &part[..part.len().min(1024)];
    // One character beyond a group of four carries no whole byte.
    let part = if part.len() % 4 == 1 { &part[..part.len() - 1] } else { part };
    let mut json = [0; 768];
    let Ok(length) = URL_SAFE_NO_PAD.decode_slice(part, &mut json) else { return false };
    json[..length].trim_ascii_start().starts_with(b"{") && test(&json[..length])
}

/// `$VAR`, `${VAR}`, `{{ var }}`, `%VAR%`, `<token>`, `[token]`.
fn is_reference(value: &str) -> bool {
    let name = |text: &str| {
        let text = text.trim();
        !text.is_empty()
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b' ' | b':'))
    };
    let within = |open: &str, close: &str| {
        value.strip_prefix(open).and_then(|rest| rest.strip_suffix(close)).is_some_and(name)
    };
    within("${", "}")
        || within("{{", "}}")
        || within("{", "}")
        || within("$(", ")")
        || within("%", "%")
        || within("<", ">")
        || within("[", "]")
        || value
            .strip_prefix('$')
            .is_some_and(|rest| name(rest) && !rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// One character repeated, or `abcdefgh`, `12345678`, `0123456789abcdef`: each byte follows from the one before, with
/// one break at most.
fn is_sequence(value: &[u8]) -> bool {
    let breaks = |step: u8| value.windows(2).filter(|pair| pair[1].wrapping_sub(pair[0]) != step).count();
    breaks(0) == 0 || (value.len() >= 4 && (breaks(1) <= 1 || breaks(u8::MAX) <= 1))
}

/// A name of code or of a model, or a path: parts of letters alone or digits alone. Parts of up to three characters
/// may mix them (`v2`, `4o`, `k8s`), and in a name of several parts a word may end in a number (`method2`).
fn is_identifier(value: &str) -> bool {
    if value.starts_with(['/', '.', '~']) || value.contains("://") {
        return true;
    }
    let parts = || value.split(['_', '-', '.', '/', ':']).filter(|part| !part.is_empty());
    let several = parts().nth(1).is_some();
    parts().next().is_some()
        && parts().all(|part| {
            let word = part.trim_end_matches(|c: char| c.is_ascii_digit());
            let ending = part.len() - word.len();
            // A camel-case name changes case at its words; a random run changes it all the time.
            let named = word.bytes().all(|b| b.is_ascii_alphabetic())
                && part.len() < 40
                && case_changes(word) * 3 <= word.len()
                && (ending == 0 || (several && word.len() >= 3 && ending <= 2));
            let number = word.is_empty() && ending < 12;
            let short = part.len() <= 3 && part.is_ascii();
            named || number || short
        })
}

/// A name with numbers inside it, `X25519PublicKey` or `ecdsa-sha2-nistp256`: up to five digits in one or two places,
/// between words of four letters and more on average, none longer than words get, and no more capitals than words
/// begin with.
fn is_type_name(value: &str) -> bool {
    let count = |class: fn(&u8) -> bool| value.bytes().filter(class).count();
    let runs = |class: fn(&u8) -> bool| {
        value.as_bytes().chunk_by(move |a, b| class(a) == class(b)).filter(move |run| class(&run[0]))
    };
    let words = runs(u8::is_ascii_alphabetic).count();
    // A name shows its words, by capitals or by what separates them.
    let shown = value.bytes().any(|byte| !byte.is_ascii_lowercase() && !byte.is_ascii_digit());
    shown
        && count(u8::is_ascii_digit) <= 5
        && runs(u8::is_ascii_digit).count() <= 2
        && words > 0
        && count(u8::is_ascii_alphabetic) >= 4 * words
        && runs(u8::is_ascii_lowercase).all(|run| run.len() <= 14)
        && case_changes(value) * 3 <= value.len()
}

fn case_changes(word: &str) -> usize {
    word.as_bytes()
        .windows(2)
        .filter(|pair| pair[0].is_ascii_uppercase() != pair[1].is_ascii_uppercase())
        .count()
}

fn contains(text: &str, word: &str) -> bool {
    contains_bytes(text.as_bytes(), word.as_bytes())
}

/// The needle occurs in the text, in any ASCII case.
fn contains_bytes(text: &[u8], needle: &[u8]) -> bool {
    text.windows(needle.len()).any(|window| window.eq_ignore_ascii_case(needle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders() {
        for text in [
            "xxxx",
            "your-api-key",
            "YOUR_TOKEN",
            "changeme",
            "<token>",
            "${VAR}",
            "$API_KEY",
            "{{ token }}",
            "%TOKEN%",
            "example",
            "aaaaaaaa",
            "12345678",
            "abcdefgh",
            "0123456789abcdef",
            "87654321",
            "null",
            "",
            "\"\"",
            "sk-xxxxxxxxxxxx",
            "INSERT_KEY_HERE",
        ] {
            assert!(!not_placeholder(text), "{text}");
        }
        for text in ["hunter2!", "q9Zt4mWx81Lb", "pa$$w0rd", "${not closed", "s3cr€t-ü"] {
            assert!(not_placeholder(text), "{text}");
        }
    }

    #[test]
    fn credentials() {
        for text in
            ["q9Zt4mWx81Lb", "b1946ac92492d2347c6235b4d2611184", "7f3c9a1e-52d4-4b8e-9c07-1d2e3f4a5b6c"]
        {
            assert!(credential(text), "{text}");
        }
        for text in [
            "short1",
            "self.api_key",
            "gpt-4o-2024-08-06",
            "text-embedding-3-small",
            "AccessTokenProvider",
            "/run/secrets/token1",
            "2024010112345678",
            "your-api-key-1234",
            "",
        ] {
            assert!(!credential(text), "{text}");
        }
    }

    #[test]
    fn passwords() {
        for text in ["Tr0ub4dor&3", "hunter2!x", "correct-h0rse!"] {
            assert!(password(text), "{text}");
        }
        for text in [
            "abc",
            "password",
            "get_password()",
            "enter your password",
            "user.password",
            "********",
            "${PW_1}",
        ] {
            assert!(!password(text), "{text}");
        }
    }

    #[test]
    fn json_web_tokens() {
        let encode = |json: &str| URL_SAFE_NO_PAD.encode(json);
        let header = encode(r#"{"alg":"HS256","typ":"JWT"}"#);
        let claims = encode(r#"{"sub":"agent-7","iat":1700000000}"#);
        assert!(jwt(&format!("{header}.{claims}.c2lnbmF0dXJl")));
        assert!(jwt(&format!("{header}.{claims}")));
        assert!(!jwt(&format!("{}.{claims}.c2ln", encode(r#"{"kid":"1"}"#))));
        assert!(!jwt(&format!("{header}.{}.c2ln", encode("plain text"))));
        assert!(!jwt("eyJ.eyJ.x"));
        assert!(!jwt("é.ß.ü"));
        let long = encode(&format!(r#"{{"alg":"RS256","x5c":["{}"]}}"#, "A".repeat(4000)));
        assert!(jwt(&format!("{long}.{claims}.c2lnbmF0dXJl")));
    }
}
