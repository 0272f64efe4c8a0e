//! How fast names are asked, and how many below one domain.
//!
//! Counted are questions that go to a nameserver outside of the cluster's own domain: what comes from the cache
//! tells nobody anything.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

/// The time over which is counted.
const WINDOW: Duration = Duration::from_secs(60);
/// Questions in one window: ten a second is more than any agent's clients need, since answers are cached.
const MOST_QUESTIONS: u32 = 600;
/// Names below one domain in one window.
const MOST_NAMES: usize = 60;
/// Domains that are told apart in one window; more are counted as one.
const MOST_DOMAINS: usize = 256;

/// Counters of the window that runs.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    since: Option<Instant>,
    questions: u32,
    domains: HashMap<String, HashSet<u64>>,
    hasher: RandomState,
}

/// What was too much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Excess {
    pub(crate) too_fast: bool,
    pub(crate) too_many: bool,
}

impl Pace {
    /// Counts a question. `counted` is false for names that the policy holds as a whole: there are only so
    /// many of them.
    pub(crate) fn question(&mut self, name: &str, counted: bool, now: Instant) -> Excess {
        if self.since.is_none_or(|s| now.saturating_duration_since(s) >= WINDOW) {
            self.since = Some(now);
            self.questions = 0;
            self.domains.clear();
        }
        self.questions = self.questions.saturating_add(1);
        let too_fast = self.questions > MOST_QUESTIONS;
        if !counted {
            return Excess { too_fast, too_many: false };
        }
        let mut domain = domain(name);
        if !self.domains.contains_key(domain) && self.domains.len() >= MOST_DOMAINS {
            domain = "";
        }
        let hash = self.hasher.hash_one(name);
        let names = self.domains.entry(domain.to_owned()).or_default();
        let too_many = names.len() >= MOST_NAMES && !names.contains(&hash);
        if !too_many {
            names.insert(hash);
        }
        Excess { too_fast, too_many }
    }
}

/// The part of a name that somebody registered: its last two labels, or three where the second is as short as
/// `co.uk`'s. A guess, in place of a list that would have to be kept.
fn domain(name: &str) -> &str {
    let mut dots = name.rmatch_indices('.').map(|(at, _)| at);
    let (_, second, third) = (dots.next(), dots.next(), dots.next());
    let Some(second) = second else { return name };
    let two = &name[second + 1..];
    let short = two.split('.').next().is_some_and(|l| l.len() <= 3);
    match (short, third) {
        (true, Some(third)) => &name[third + 1..],
        (true, None) => name,
        (false, _) => two,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_domain_is_what_somebody_registered() {
        for (name, wanted) in [
            ("a.b.example.com", "example.com"),
            ("example.com", "example.com"),
            ("a.b.example.co.uk", "example.co.uk"),
            ("co.uk", "co.uk"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(domain(name), wanted, "{name}");
        }
    }

    #[test]
    fn many_names_below_one_domain_are_too_many_until_the_window_ends() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        for i in 0..MOST_NAMES {
            assert_eq!(pace.question(&format!("{i}.example.com"), true, start), Excess::default());
        }
        assert!(pace.question("new.example.com", true, start).too_many);
        assert!(!pace.question("0.example.com", true, start).too_many, "it was counted already");
        assert!(!pace.question("new.example.org", true, start).too_many, "another domain");
        assert!(!pace.question("new2.example.com", false, start).too_many, "the policy holds it");
        assert!(!pace.question("new.example.com", true, start + WINDOW).too_many);
    }

    #[test]
    fn questions_have_a_rate_and_domains_a_bound() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let fast: Vec<_> =
            (0..=MOST_QUESTIONS).map(|_| pace.question("a.test", false, start).too_fast).collect();
        assert_eq!(fast.iter().filter(|f| **f).count(), 1);
        let spread = (0..1_000).filter(|i| pace.question(&format!("x.{i}name.com"), true, start).too_many);
        assert!(spread.count() > 600, "domains beyond the bound count as one");
        assert!(pace.domains.len() <= MOST_DOMAINS + 1);
    }
}
