//! Runs the tests that stand in a pack beside its rules.

use sallyport_api::Dns;

use super::pack::{Pack, Rule, TestCase};
use crate::body::extract::{Body, Direction, Extracted, extract};
use crate::body::head::{name_structure, parameter_segments, url_structure};
use crate::body::segment::{Origin, Place, Role, Segment};
use crate::detect::Detector;
use crate::finding::Surface;

/// How a pack's tests went.
#[derive(Clone, Debug, Default)]
pub struct TestReport {
    /// Tests that passed.
    pub passed: usize,
    /// The others, each with its place and what happened.
    pub failures: Vec<String>,
}

/// Runs every test of a pack, each rule alone.
pub fn run_tests(pack: &Pack) -> TestReport {
    let mut report = TestReport::default();
    for rule in &pack.rules {
        let detector = match Detector::of_rule(rule) {
            Ok(e) => e,
            Err(e) => {
                report.failures.push(format!("{}: {e}", rule.id));
                continue;
            }
        };
        run(&mut report, &detector, rule, "positive", &rule.tests.positive, true);
        run(&mut report, &detector, rule, "negative", &rule.tests.negative, false);
    }
    report
}

fn run(
    report: &mut TestReport,
    detector: &Detector,
    rule: &Rule,
    kind: &str,
    cases: &[TestCase],
    wanted: bool,
) {
    for (i, case) in cases.iter().enumerate() {
        let surface = case.surface.or_else(|| rule.surfaces.first().copied()).unwrap_or(Surface::Prompt);
        let found = finds(detector, surface, &case.text);
        if found == wanted {
            report.passed += 1;
        } else {
            let said = if found { "found, and must not be" } else { "not found" };
            report.failures.push(format!("{} {kind}[{i}] on {}: {said}", rule.id, surface.as_str()));
        }
    }
}

/// Whether the rule finds something: in the text as it stands, or in its shape.
fn finds(detector: &Detector, surface: Surface, text: &str) -> bool {
    let mut ex = Extracted::default();
    ex.segments.push(Segment {
        surface,
        role: Role::None,
        place: Place::Whole,
        text: text.into(),
        origin: Origin::Elsewhere,
    });
    if surface == Surface::Url {
        ex.structural.extend(url_structure(text));
        parameter_segments(&mut ex, text);
    } else if surface == Surface::Dns {
        ex.structural = name_structure(text, Dns::default().max_label_entropy);
    } else {
        let body = Body::new(text.as_bytes());
        ex.structural = extract(&body, Direction::Request, surface).structural;
    }
    !detector.find(&ex).is_empty()
}

#[cfg(test)]
mod tests {
    use super::super::shipped;
    use super::*;

    #[test]
    fn every_shipped_rule_passes_its_own_tests() {
        let mut failures = Vec::new();
        let mut rules = 0;
        for pack in shipped().unwrap() {
            let report = run_tests(pack);
            rules += pack.rules.len();
            failures.extend(report.failures.into_iter().map(|f| format!("{}: {f}", pack.pack)));
        }
        assert!(failures.is_empty(), "{} of {rules} rules:\n{}", failures.len(), failures.join("\n"));
    }
}
