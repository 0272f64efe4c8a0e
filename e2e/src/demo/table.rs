//! The demo's table.

use super::rows::first_words;

/// One row, played.
pub(super) struct Line {
    pub(super) what: &'static str,
    pub(super) status: u16,
    pub(super) words: String,
    pub(super) decision: String,
    pub(super) rules: String,
    pub(super) latency: String,
    pub(super) problem: Option<String>,
}

/// Widths of the columns: 120 characters in all.
const WHAT: usize = 37;
const CAME_BACK: usize = 39;
const DECISION: usize = 25;

pub(super) fn print(lines: &[Line]) {
    println!("{:<WHAT$} {:<CAME_BACK$} {:<DECISION$} added latency", "sent", "came back", "decision, rule");
    println!("{}", "-".repeat(WHAT + CAME_BACK + DECISION + 19));
    for line in lines {
        let came_back = shorten(&format!("{} {}", line.status, first_words(&line.words)), CAME_BACK - 1);
        let decision = shorten(format!("{} {}", line.decision, line.rules).trim_end(), DECISION - 1);
        println!("{:<WHAT$} {came_back:<CAME_BACK$} {decision:<DECISION$} {}", line.what, line.latency);
        if let Some(problem) = &line.problem {
            println!("    NOT AS EXPECTED: {problem}");
        }
    }
}

fn shorten(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(most - 3).collect();
    short.push_str("...");
    short
}

#[cfg(test)]
mod tests {
    use super::shorten;

    #[test]
    fn long_texts_are_cut_at_characters() {
        assert_eq!(shorten("short", 5), "short");
        assert_eq!(shorten("ééééééé", 6), "ééé...");
    }
}
