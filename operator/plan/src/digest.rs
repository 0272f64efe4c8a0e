//! Digests of what was rendered.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// SHA-256 of a text, in hex.
pub(crate) fn sha256_hex(text: &str) -> String {
    Sha256::digest(text).iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
