//! A command chained to a value that should be data.
//!
//! A sign of the shell alone says nothing: people write `R&D; more below`. A sign with a command behind it,
//! placed and followed the way a shell would have it, does.

use super::{SHELL, Signs, of_shell};
use crate::rules::Scanner;

/// How a command must be followed to be taken for one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// Its name is no other word: anything may follow.
    Any,
    /// It says something by itself, but its name is a word too: the end, another sign, an option or a path.
    Alone,
    /// It needs something to work on: an option, a path, a name with a dot, a number, a variable, a quote.
    Argument,
}

/// Commands by how they are followed.
const COMMANDS: [(After, &[&str]); 3] = [
    (
        After::Any,
        &[
            "whoami",
            "ifconfig",
            "ipconfig",
            "netstat",
            "uname",
            "systeminfo",
            "tasklist",
            "printenv",
            "sysinfo",
            "nslookup",
            "wmic",
            "schtasks",
            "certutil",
            "bitsadmin",
            "mshta",
            "rundll32",
            "regsvr32",
            "cscript",
            "wscript",
            "netsh",
            "lsof",
            "ps aux",
            "phpinfo()",
            "crontab -l",
            "lsb_release",
            "dmesg",
            "xp_cmdshell",
            "net user",
            "net view",
            "net localgroup",
            "net start",
            "net share",
            "/bin/sh",
            "/bin/bash",
            "/bin/dash",
            "cmd.exe",
            "cmd /c",
            "powershell",
            "pwsh",
            "bash -i",
            "bash -c",
            "sh -i",
            "sh -c",
            "/usr/bin/id",
            "cat /etc/",
            "type c:",
            "type %systemroot%",
            "nc -e",
            "nc -l",
            "ncat -",
            "wget http",
            "curl http",
            "wget -",
            "curl -",
            "rm -rf",
            "rm -f",
            "id -u",
            "ls -la",
            "ls -l",
            "reg add",
            "reg query",
            "reg delete",
            "reg save",
            "usr/bin/",
        ],
    ),
    (After::Alone, &["id", "ls", "dir", "pwd", "env", "ps", "hostname", "arp", "df", "reboot"]),
    (
        After::Argument,
        &[
            "cat",
            "tac",
            "less",
            "more",
            "head",
            "tail",
            "nl",
            "od",
            "xxd",
            "strings",
            "sort",
            "rev",
            "base64",
            "curl",
            "wget",
            "nc",
            "ncat",
            "netcat",
            "telnet",
            "ssh",
            "scp",
            "ftp",
            "tftp",
            "ping",
            "ping6",
            "dig",
            "host",
            "sleep",
            "timeout",
            "echo",
            "printf",
            "bash",
            "sh",
            "zsh",
            "ksh",
            "dash",
            "python",
            "python2",
            "python3",
            "perl",
            "ruby",
            "php",
            "node",
            "lua",
            "awk",
            "sed",
            "grep",
            "find",
            "xargs",
            "tee",
            "rm",
            "cp",
            "mv",
            "ln",
            "chmod",
            "chown",
            "kill",
            "killall",
            "touch",
            "mkdir",
            "useradd",
            "adduser",
            "usermod",
            "passwd",
            "crontab",
            "at",
            "tar",
            "gzip",
            "zip",
            "unzip",
            "dd",
            "mkfifo",
            "eval",
            "exec",
            "system",
            "source",
            "type",
            "copy",
            "del",
            "ren",
            "attrib",
            "reg",
            "sc",
            "net",
            "start",
            "cmd",
            "call",
            "traceroute",
            "tracert",
            "nmap",
            "socat",
            "openssl",
            "sudo",
            "su",
            "export",
            "ls",
            "dir",
            "id",
            "kubectl",
            "docker",
            "aws",
            "gcc",
            "make",
            "apt",
            "apt-get",
            "yum",
            "pip",
            "npm",
            "git",
            "mysql",
            "psql",
            "sqlite3",
            "vi",
            "vim",
            "nano",
        ],
    ),
];

/// The first two letters of all commands: for each first byte a set of second ones, in lower case.
const STARTS: [u64; 128] = starts();

const fn starts() -> [u64; 128] {
    let mut table = [0; 128];
    let mut list = 0;
    while list < COMMANDS.len() {
        let names = COMMANDS[list].1;
        let mut at = 0;
        while at < names.len() {
            let name = names[at].as_bytes();
            table[(name[0] | 32) as usize & 127] |= 1 << ((name[1] | 32) & 63);
            at += 1;
        }
        list += 1;
    }
    table
}

/// Whether some command begins with these two letters.
const fn starts_one(a: u8, b: u8) -> bool {
    STARTS[(a | 32) as usize & 127] >> ((b | 32) & 63) & 1 != 0
}

/// Values longer than this with line breaks are scripts or prose; a line break there separates nothing.
const LONGEST_LINES: usize = 400;

/// Signs behind which a command is looked for; a value with more is made of them.
const MOST_SIGNS: usize = 512;

/// Calls `found` for each command that is chained to what stands before it.
pub(crate) fn scan(text: &str, signs: Signs, mut found: impl FnMut(Scanner, usize, usize)) {
    let bytes = text.as_bytes();
    if !signs.hold(SHELL) {
        return;
    }
    let table = memchr::memchr_iter(b'|', bytes).count() > 3 && memchr::memmem::find(bytes, b"||").is_none();
    let mut at = 0;
    let mut read = 0;
    while at < bytes.len() && read < MOST_SIGNS {
        if !of_shell(bytes[at]) {
            at += 1;
            continue;
        }
        let Some((sign, next)) = separator(bytes, at, table) else {
            at += 1;
            continue;
        };
        read += 1;
        if let Some(end) = command(bytes, next, sign) {
            found(Scanner::ShellChain, at, end);
        }
        at = next.max(at + 1);
    }
}

/// The sign at `at` behind which a shell reads a command, and where that begins.
fn separator(text: &[u8], at: usize, table: bool) -> Option<(u8, usize)> {
    let two = text.get(at + 1).copied().unwrap_or(0);
    let sign = text[at];
    let next = match sign {
        b';' | b'`' => at + 1,
        b'|' if table => return None,
        b'|' | b'&' => at + 1 + usize::from(two == sign),
        b'$' | b'<' | b'>' if two == b'(' => at + 2,
        b'\n' | b'\r' if text.len() <= LONGEST_LINES && lone_line(text, at) => at + 1,
        _ => return None,
    };
    // An entity's end, a parameter's start, a case's end are no separators.
    if sign == b';' && entity_ends(text, at) {
        return None;
    }
    let mut next = next;
    let line = matches!(sign, b'\n' | b'\r');
    while next < text.len()
        && (text[next].is_ascii_whitespace()
            || (!line && matches!(text[next], b'{' | b'@' | b'|' | b'\'' | b'"' | b'&' | b'`')))
    {
        next += 1;
    }
    Some((sign, next))
}

/// Whether the text before a line break is a single word or nothing: a value, and no line of prose.
fn lone_line(text: &[u8], at: usize) -> bool {
    !text[..at]
        .trim_ascii()
        .iter()
        .any(|b| b.is_ascii_whitespace() || matches!(b, b'{' | b'[' | b'(' | b'<' | b'#'))
}

/// Whether the `;` at `at` ends an HTML entity.
fn entity_ends(text: &[u8], at: usize) -> bool {
    let from = at.saturating_sub(9);
    text[from..at].iter().rposition(|b| *b == b'&').is_some_and(|n| {
        text[from + n + 1..at].iter().all(|b| b.is_ascii_alphanumeric() || *b == b'#') && from + n + 1 < at
    })
}

/// Where the command that starts at `at` ends, if one does.
fn command(text: &[u8], at: usize, sign: u8) -> Option<usize> {
    let rest = &text[at..];
    let [a, b, ..] = rest else { return None };
    if *a != b'/' && !starts_one(*a, *b) {
        return None;
    }
    for prefix in [&b"/bin/"[..], b"/usr/bin/", b"/sbin/", b"/usr/sbin/", b"/usr/local/bin/"] {
        if rest.len() > prefix.len() && rest.starts_with(prefix) && rest[prefix.len()].is_ascii_alphanumeric()
        {
            return Some(at + prefix.len() + 1);
        }
    }
    for (after, names) in COMMANDS {
        for name in names {
            let n = name.len();
            if rest.len() < n || !rest[..n].eq_ignore_ascii_case(name.as_bytes()) {
                continue;
            }
            let tail = &rest[n..];
            if followed(after, tail, sign, name) {
                return Some(at + n);
            }
        }
    }
    None
}

/// Whether `tail` follows a command.
fn followed(after: After, tail: &[u8], sign: u8, name: &str) -> bool {
    let Some(first) = tail.first() else { return after != After::Argument };
    let ends_word = !(first.is_ascii_alphanumeric() || matches!(first, b'_' | b'-' | b'.' | b'=' | b':'));
    let sigil = matches!(
        first,
        b';' | b'|'
            | b'&'
            | b'`'
            | b')'
            | b'\''
            | b'"'
            | b'}'
            | b'#'
            | b'\n'
            | b'\r'
            | b'>'
            | b'<'
            | b'\\'
            | b'$'
    );
    if after == After::Any {
        return ends_word || !name.ends_with(|c: char| c.is_ascii_alphabetic());
    }
    if !ends_word && *first != b'.' {
        return false;
    }
    if after == After::Alone {
        // `; id` at the end; `| id |` in a table is a column.
        let rest = tail.trim_ascii_start();
        if rest.is_empty() {
            return sign != b';' || name.len() < 4;
        }
        return (sigil && (*first != b')' || matches!(sign, b'$' | b'`')))
            || matches!(rest[0], b';' | b'&' | b'`' | b'>' | b'#')
            || (sign != b'|' && rest[0] == b'|');
    }
    if matches!(first, b'$' | b'<')
        || tail.starts_with(b"('")
        || tail.starts_with(b"(\"")
        || tail.starts_with(b"\t")
    {
        return true;
    }
    let argument = tail.trim_ascii_start();
    if argument.len() == tail.len() || argument.is_empty() {
        return false;
    }
    let word: &[u8] =
        &argument[..argument.iter().position(u8::is_ascii_whitespace).unwrap_or(argument.len())];
    let short = matches!(
        name,
        "at" | "more"
            | "less"
            | "find"
            | "sort"
            | "host"
            | "start"
            | "call"
            | "source"
            | "make"
            | "set"
            | "time"
            | "head"
            | "tail"
            | "strings"
            | "net"
            | "copy"
            | "type"
    );
    match word[0] {
        b'-' => word.len() > 1 && (word[1].is_ascii_alphanumeric() || word[1] == b'-') && word.len() > 1,
        b'/' | b'$' | b'~' | b'%' | b'\\' => word.len() > 1,
        b'\'' | b'"' | b'`' => !short,
        b'0'..=b'9' => {
            !short
                && matches!(
                    name,
                    "sleep"
                        | "ping"
                        | "ping6"
                        | "timeout"
                        | "kill"
                        | "nc"
                        | "telnet"
                        | "traceroute"
                        | "nmap"
                        | "chmod"
                )
        }
        _ => {
            let dotted = word[..word.len() - 1].iter().any(|b| matches!(b, b'.' | b'/' | b':' | b'*'))
                && !word.ends_with(b",")
                || word.starts_with(b"http");
            let redirected = !short && argument.iter().any(|b| matches!(b, b'>' | b'|' | b';'));
            dotted && (!short || word.contains(&b'/') || word.contains(&b'.')) || redirected
        }
    }
}
