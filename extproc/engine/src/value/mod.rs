//! Values that should be data, and what has no business in one.

pub(crate) mod names;
mod shell;
mod sql;

pub(crate) use shell::scan as scan_shell;
pub(crate) use sql::scan as scan_sql;

/// Signs of SQL.
const SQL: u8 = 1;
/// Signs behind which a shell reads a command.
const SHELL: u8 = 1 << 1;
/// Signs that some attack needs, these two kinds among them.
const ANY: u8 = 1 << 2;
const DIGIT: u8 = 1 << 3;
/// A space, or what stands for one in a form.
const SPACE: u8 = 1 << 4;
const BREAK: u8 = 1 << 5;
const DOT: u8 = 1 << 6;
const DASH: u8 = 1 << 7;

const KINDS: [u8; 256] = kinds();

const fn kinds() -> [u8; 256] {
    let mut table = [0; 256];
    let sets: [(&[u8], u8); 8] = [
        (b"'\"(=<>;#@*|&", SQL),
        (b";|&`$\n\r<>", SHELL),
        (b"'\"(<>{};|&$`\\%=@#*/[!\n", ANY),
        (b"0123456789", DIGIT),
        (b" +", SPACE),
        (b"\t\n", BREAK),
        (b".", DOT),
        (b"-", DASH),
    ];
    let mut set = 0;
    while set < sets.len() {
        let (bytes, kind) = sets[set];
        let mut at = 0;
        while at < bytes.len() {
            table[bytes[at] as usize] |= kind;
            at += 1;
        }
        set += 1;
    }
    table
}

/// The kinds of bytes that a text holds.
#[derive(Clone, Copy)]
pub(crate) struct Signs(u8);

impl Signs {
    pub(crate) fn of(text: &str) -> Self {
        Self(text.bytes().fold(0, |held, b| held | KINDS[usize::from(b)]))
    }

    const fn hold(self, kind: u8) -> bool {
        self.0 & kind != 0
    }
}

/// Whether a byte is a sign of the shell.
const fn of_shell(b: u8) -> bool {
    KINDS[b as usize] & SHELL != 0
}

/// Whether a text holds a byte that an attack needs. Names, numbers and words of prose hold none, and are
/// asked nothing further.
pub(crate) fn suspicious(text: &str) -> bool {
    let signs = Signs::of(text);
    signs.hold(ANY)
        || (signs.hold(DIGIT) && signs.hold(SPACE))
        || (signs.hold(DOT) && text.contains(".."))
        || (signs.hold(DASH) && text.contains("--"))
}
