//! Functions and procedures of a server, and questions about its tables.

use super::Reading;
use super::tokens::Kind;

/// Functions that nobody calls in a value by accident.
const TELLING: [&str; 38] = [
    "pg_sleep",
    "benchmark",
    "dbms_pipe.receive_message",
    "dbms_lock.sleep",
    "dbms_session.sleep",
    "dbms_ldap.init",
    "utl_inaddr.get_host_address",
    "utl_inaddr.get_host_name",
    "utl_http.request",
    "utl_smtp.open_connection",
    "utl_file.fopen",
    "httpuritype",
    "extractvalue",
    "updatexml",
    "xmltype",
    "load_file",
    "load_extension",
    "lo_import",
    "lo_export",
    "lo_get",
    "pg_read_file",
    "pg_ls_dir",
    "pg_read_binary_file",
    "openrowset",
    "opendatasource",
    "openquery",
    "fn_xe_file_target_read_file",
    "randomblob",
    "sqlite_version",
    "json_keys",
    "gtid_subset",
    "database_to_xml",
    "query_to_xml",
    "ctxsys.drithsx.sn",
    "ordsys.ord_dicom.getmappingxpath",
    "current_setting",
    "make_set",
    "unistr",
];

/// Procedures that are called without brackets.
const PROCEDURES: [&str; 15] = [
    "xp_cmdshell",
    "xp_dirtree",
    "xp_fileexist",
    "xp_regread",
    "xp_regwrite",
    "xp_subdirs",
    "xp_availablemedia",
    "sp_executesql",
    "sp_oacreate",
    "sp_oamethod",
    "sp_addextendedproc",
    "sp_addlogin",
    "sp_add_job",
    "sp_makewebtask",
    "sp_addsrvrolemember",
];

impl Reading<'_> {
    /// A call that only an attack makes in a value.
    pub(super) fn function(&self, at: usize) -> bool {
        let called = self.kind(at + 1) == Some(Kind::Open);
        if called && TELLING.iter().any(|f| self.is(at, f)) {
            return true;
        }
        let procedure = memchr::memchr(b'_', self.word(at)).is_some();
        if procedure
            && PROCEDURES.iter().any(|p| {
                let word = self.word(at);
                word.len() >= p.len() && word[word.len() - p.len()..].eq_ignore_ascii_case(p.as_bytes())
            })
        {
            // The name alone is what a question about it holds too.
            return (at > 0
                && (self.any(at - 1, &["exec", "execute", "call"])
                    || self.kind(at - 1) == Some(Kind::Semicolon)))
                || matches!(self.kind(at + 1), Some(Kind::Text | Kind::Variable));
        }
        if self.is(at, "waitfor") {
            return self.any(at + 1, &["delay", "time"])
                && matches!(self.kind(at + 2), Some(Kind::Text | Kind::Variable));
        }
        if self.is(at, "into") {
            return self.any(at + 1, &["outfile", "dumpfile"])
                && matches!(self.kind(at + 2), Some(Kind::Text | Kind::Open | Kind::Number) | None)
                || self.is(at + 1, "outfile") && self.is(at + 2, "substring");
        }
        if self.is(at, "procedure") {
            return self.is(at + 1, "analyse");
        }
        let char_call = |n: usize| {
            self.any(n, &["char", "chr", "nchar"])
                && self.kind(n + 1) == Some(Kind::Open)
                && matches!(self.kind(n + 2), Some(Kind::Number))
        };
        if char_call(at) {
            let next = self.closing(at + 1);
            let joins = matches!(self.kind(next), Some(Kind::Operator | Kind::Logic | Kind::Comma));
            return joins && (char_call(next + 1) || self.is(next + 1, "user"));
        }
        if self.is(at, "sleep") && called && matches!(self.kind(at + 2), Some(Kind::Number | Kind::Text)) {
            let placed = match at.checked_sub(1).and_then(|n| self.kind(n)) {
                None => self.closing(at + 1) + 1 >= self.tokens.len(),
                Some(Kind::Semicolon) => memchr::memchr(b'\n', self.text).is_none(),
                Some(Kind::Word) => self.is(at - 1, "select"),
                Some(Kind::Other) => false,
                Some(_) => true,
            };
            return placed;
        }
        // Names of the catalogue, where a statement asks for them.
        if self.is(at, "from") {
            let table = self.word(at + 1).to_ascii_lowercase();
            return [
                &b"information_schema."[..],
                b"sys.",
                b"pg_catalog.",
                b"mysql.user",
                b"sysobjects",
                b"sqlite_master",
                b"all_tables",
                b"dba_",
                b"master..",
                b"syscolumns",
            ]
            .iter()
            .any(|t| table.starts_with(t))
                && self.tokens[..at].iter().enumerate().any(|(i, _)| self.is(i, "select"));
        }
        false
    }

    /// Counting columns, and the like.
    pub(super) fn probe(&self, at: usize) -> bool {
        let placed = self.quoted || self.ends_in_comment();
        if self.is(at, "order") || self.is(at, "group") {
            if !self.is(at + 1, "by") {
                return false;
            }
            let numbered = self.kind(at + 2) == Some(Kind::Number)
                && matches!(self.kind(at + 3), None | Some(Kind::Comment | Kind::Comma));
            let having = (at + 3..self.tokens.len().min(at + 10)).any(|n| self.is(n, "having"));
            return placed
                && (numbered && (self.broke_out(at) || self.ends_in_comment())
                    || having && self.broke_out(at))
                || having && self.boolean_after(at);
        }
        false
    }

    fn boolean_after(&self, at: usize) -> bool {
        (at..self.tokens.len()).any(|n| self.is(n, "having") && self.boolean(n).is_some())
    }
}
