//! Values that should be data, and what has no business in one.

pub(crate) mod names;
mod shell;
mod sql;

pub(crate) use shell::scan as scan_shell;
pub(crate) use sql::scan as scan_sql;

/// Whether a text holds a byte that an attack needs. Names, numbers and words of prose hold none, and are
/// asked nothing further.
pub(crate) fn suspicious(text: &str) -> bool {
    let mut digit = false;
    let mut space = false;
    for b in text.bytes() {
        match b {
            b'\'' | b'"' | b'(' | b'<' | b'>' | b'{' | b'}' | b';' | b'|' | b'&' | b'$' | b'`' | b'\\'
            | b'%' | b'=' | b'@' | b'#' | b'*' | b'/' | b'[' | b'!' | b'\n' => return true,
            b'0'..=b'9' => digit = true,
            b' ' | b'+' => space = true,
            _ => {}
        }
    }
    (digit && space) || text.contains("..") || text.contains("--")
}
