//! Corpora: directories of labelled rows, one JSON object a line, plain or gzipped.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail, ensure};
use flate2::read::MultiGzDecoder;
use sallyport_engine::Surface;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::score::Detector;

/// The longest row that is read. The longest of the corpora so far is below 200 KB; a gzip that unpacks
/// to endless lines ends here.
const MAX_ROW: u64 = 64 << 20;

/// One labelled example.
#[derive(Debug, Deserialize)]
pub(super) struct Row {
    pub(super) id: String,
    pub(super) surface: Surface,
    #[serde(default)]
    pub(super) text: Option<String>,
    #[serde(default)]
    pub(super) json: Option<Box<RawValue>>,
    pub(super) label: Label,
    pub(super) category: String,
    #[serde(default)]
    pub(super) difficulty: Option<String>,
    #[serde(default)]
    pub(super) paranoia: Option<u8>,
    #[serde(default)]
    pub(super) spans: Vec<Span>,
    #[serde(default)]
    pub(super) benign_for: Vec<Detector>,
    #[serde(default)]
    pub(super) imperative: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Label {
    Attack,
    Benign,
}

/// A labelled part of `text`, in characters (Unicode scalar values), end exclusive.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Span {
    /// The same part in UTF-8 bytes, as findings count; nothing where it lies outside of the text.
    pub(super) fn bytes(self, text: &str) -> Option<std::ops::Range<usize>> {
        // The end of the text is a position too, one past its last character.
        let mut at = text.char_indices().map(|(i, _)| i).chain([text.len()]);
        let length = self.end.checked_sub(self.start)?;
        let start = at.nth(self.start)?;
        let end = if length == 0 { start } else { at.nth(length - 1)? };
        Some(start..end)
    }
}

impl Row {
    fn check(self) -> anyhow::Result<Self> {
        ensure!(
            self.text.is_some() != self.json.is_some(),
            "`{}` needs exactly one of `text` and `json`",
            self.id
        );
        for (i, span) in self.spans.iter().enumerate() {
            let Some(text) = &self.text else { bail!("`{}` has spans but no text", self.id) };
            ensure!(span.bytes(text).is_some(), "`{}`: spans[{i}] lies outside of the text", self.id);
        }
        Ok(self)
    }
}

/// The files of a directory, by name.
pub(super) fn files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("{}: can't be read", dir.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("{}: can't be read", dir.display()))?.path();
        if name(&path).is_some() {
            files.push(path);
        }
    }
    files.sort();
    ensure!(!files.is_empty(), "{}: holds no *.jsonl and no *.jsonl.gz", dir.display());
    let mut names: Vec<_> = files.iter().filter_map(|f| name(f)).collect();
    names.dedup();
    ensure!(
        names.len() == files.len(),
        "{}: holds a corpus twice, plain and gzipped; remove one of them",
        dir.display()
    );
    Ok(files)
}

/// The corpus' name: the file's without its endings. Nothing for files that are no corpus.
pub(super) fn name(path: &Path) -> Option<&str> {
    let file = path.file_name()?.to_str()?;
    file.strip_suffix(".jsonl.gz").or_else(|| file.strip_suffix(".jsonl")).filter(|n| !n.is_empty())
}

/// The rows of a file. An error names the file and the line; a corpus with a bad row is not scored,
/// because a row left out would change every number.
pub(super) fn rows(path: &Path) -> anyhow::Result<Vec<Row>> {
    let place = path.display();
    let file = File::open(path).with_context(|| format!("{place}: can't be read"))?;
    let plain: Box<dyn Read> = if path.extension().is_some_and(|e| e == "gz") {
        Box::new(MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let mut input = BufReader::new(plain);
    let (mut rows, mut line) = (Vec::new(), String::new());
    for number in 1_u64.. {
        line.clear();
        let read = input.by_ref().take(MAX_ROW).read_line(&mut line);
        let read = read.with_context(|| format!("{place}: line {number}: can't be read"))?;
        if read == 0 {
            break;
        }
        ensure!((read as u64) < MAX_ROW, "{place}: line {number}: longer than {MAX_ROW} bytes");
        if line.trim().is_empty() {
            continue;
        }
        let row = serde_json::from_str::<Row>(&line).map_err(|e| anyhow!("{e}")).and_then(Row::check);
        rows.push(row.map_err(|e| anyhow!("{place}: line {number}: {e}"))?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_count_characters_and_findings_bytes() {
        let text = "aé漢😀z";
        let bytes = |start, end| Span { start, end }.bytes(text);
        assert_eq!(bytes(0, 1), Some(0..1));
        assert_eq!(bytes(1, 2), Some(1..3));
        assert_eq!(bytes(2, 4), Some(3..10));
        assert_eq!(bytes(4, 5), Some(10..11));
        assert_eq!(bytes(0, 5), Some(0..11));
        assert_eq!(bytes(5, 5), Some(11..11));
        assert_eq!(bytes(0, 6), None);
        assert_eq!(bytes(6, 7), None);
        assert_eq!(bytes(3, 2), None);
    }

    #[test]
    fn a_bad_row_is_named_with_file_and_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        for (row, error) in [
            ("{", "EOF"),
            (r#"{"id":"a","surface":"text","label":"attack","category":"pii"}"#, "exactly one"),
            (r#"{"id":"a","surface":"mail","text":"","label":"attack","category":"pii"}"#, "mail"),
            (
                r#"{"id":"a","surface":"text","text":"x","label":"attack","category":"pii","spans":[{"start":0,"end":2}]}"#,
                "spans[0] lies outside",
            ),
            (
                r#"{"id":"a","surface":"text","text":"x","label":"benign","category":"x","benign_for":["all"]}"#,
                "unknown variant `all`",
            ),
        ] {
            std::fs::write(&path, format!("\n{row}\n")).unwrap();
            let e = rows(&path).unwrap_err().to_string();
            assert!(e.contains("x.jsonl: line 2: ") && e.contains(error), "{e}");
        }
    }
}
