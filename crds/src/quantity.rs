//! Sizes in bytes, written as Kubernetes writes quantities.

/// The bytes that a size such as `8192`, `8k`, `8Ki`, `1M`, `1Mi` or `1Gi` stands for.
///
/// A part of Kubernetes' syntax on purpose: no fractions, no exponents, nothing below one byte.
pub fn bytes(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if !(1..=10).contains(&digits) {
        return None;
    }
    let unit = match unit {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_kubernetes_reads_them() {
        for (text, value) in
            [("0", 0), ("512", 512), ("8k", 8_000), ("8Ki", 8 << 10), ("3M", 3_000_000), ("1Mi", 1 << 20)]
        {
            assert_eq!(bytes(text), Some(value), "{text}");
        }
        // The largest that the syntax allows.
        assert_eq!(bytes("9999999999Gi"), Some(9_999_999_999 << 30));
    }

    #[test]
    fn what_is_no_size_is_none() {
        for text in
            ["", "Ki", "-1", "+1", "1.5Ki", "1e3", "1 Ki", "1ki", "1K", "1m", "1Ti", "99999999999", "１"]
        {
            assert_eq!(bytes(text), None, "{text}");
        }
    }
}
