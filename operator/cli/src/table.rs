//! Tables that line up.

use std::fmt;

/// Rows under a heading; columns are flush right, or left where the heading starts with `<`.
#[derive(Debug)]
pub(crate) struct Table {
    title: String,
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, head: &[&'static str]) -> Self {
        Self { title: title.into(), head: head.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; it has as many cells as the heading.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.title.is_empty() {
            writeln!(f, "{}", self.title)?;
        }
        let head: Vec<String> = self.head.iter().map(|h| h.trim_start_matches('<').to_owned()).collect();
        let mut widths = vec![0; head.len()];
        for row in std::iter::once(&head).chain(&self.rows) {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        for row in std::iter::once(&head).chain(&self.rows) {
            let cells = row.iter().zip(&widths).zip(&self.head);
            let line: Vec<_> = cells
                .map(|((cell, &width), head)| {
                    if head.starts_with('<') { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                })
                .collect();
            writeln!(f, "  {}", line.join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn columns_line_up_and_nothing_trails() {
        let mut table = Table::new("title", &["<name", "rows", "<note"]);
        table.row(["a".into(), "1000".into(), "x".into()]);
        table.row(["longer".into(), "7".into(), String::new()]);
        assert_eq!(table.to_string(), "title\n  name    rows  note\n  a       1000  x\n  longer     7\n");
    }
}
