//! From what is known of a policy to its status. Pure: numbers in, conditions out.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use sallyport_api::AgentPolicyStatus;
use sallyport_api::names::{conditions, reasons};

use super::shard::Tally;
use crate::events::cut;
use crate::index::state::PolicyFacts;

/// Bytes of a condition's message that are written. Kubernetes takes 32 KiB; nobody reads more than this.
const LONGEST_MESSAGE: usize = 1_024;

const TRUE: &str = "True";
const FALSE: &str = "False";
const UNKNOWN: &str = "Unknown";

/// A condition before it has a time.
struct Said {
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn said(status: &'static str, reason: &'static str, message: impl Into<String>) -> Said {
    Said { status, reason, message: message.into() }
}

/// A policy's status, the times taken from the status it had where nothing turned.
pub(super) fn status(
    facts: &PolicyFacts,
    tally: &Tally,
    old: &AgentPolicyStatus,
    now: Timestamp,
) -> AgentPolicyStatus {
    let said = [
        (conditions::ACCEPTED, accepted(facts)),
        (
            conditions::RESOLVED_REFS,
            said(TRUE, reasons::VALID, "the policy refers to nothing outside itself"),
        ),
        (conditions::PROGRAMMED, programmed(facts)),
        (conditions::ENFORCED, enforced(facts, tally)),
        (conditions::ROLLOUT_REQUIRED, rollout(facts)),
    ];
    let conditions = said
        .into_iter()
        .map(|(kind, said)| {
            let since = old
                .conditions
                .iter()
                .find(|c| c.type_ == kind && c.status == said.status)
                .map_or(Time(now), |c| c.last_transition_time.clone());
            Condition {
                type_: kind.into(),
                status: said.status.into(),
                reason: said.reason.into(),
                message: shortened(said.message),
                observed_generation: Some(facts.generation),
                last_transition_time: since,
            }
        })
        .collect();
    let good = facts.good.as_ref();
    AgentPolicyStatus {
        observed_generation: facts.generation,
        conditions,
        enforced: format!("{}/{}", tally.enforcing(facts.pods), facts.pods),
        digest: good.map(|g| g.digest.clone()).unwrap_or_default(),
        rules: good.map_or(0, |g| g.rules),
        capacity: good.map(|g| g.capacity.clone()).unwrap_or_default(),
    }
}

fn accepted(facts: &PolicyFacts) -> Said {
    if let Some(error) = &facts.error {
        let kept = match &facts.good {
            Some(good) => {
                format!("; generation {} stays in force, digest {}", good.generation, short(&good.digest))
            }
            None => "; nothing is in force".into(),
        };
        return said(FALSE, reasons::INVALID, format!("{}{kept}", shortened(error.clone())));
    }
    if let Some(winner) = &facts.conflict {
        return said(
            FALSE,
            reasons::CONFLICTED,
            format!(
                "AgentPolicy {winner} has every pod that this one selects: it is older, comes first by name, or \
                 the pods' annotation sallyport.dev/policy names it"
            ),
        );
    }
    said(TRUE, reasons::VALID, "the policy is valid")
}

fn programmed(facts: &PolicyFacts) -> Said {
    match (&facts.error, &facts.good, &facts.conflict) {
        (Some(_), ..) | (None, None, _) => {
            said(FALSE, reasons::INVALID, "no bundle can be made of this generation")
        }
        (None, Some(_), Some(_)) => said(FALSE, reasons::CONFLICTED, "the bundle is offered to no pod"),
        (None, Some(good), None) => {
            said(TRUE, reasons::VALID, format!("bundle {} is offered", short(&good.digest)))
        }
    }
}

/// Whether what the policy says *now* holds in every pod. The order is that of what an operator has to know
/// first: nothing to enforce in, not the newest generation, a promise that can't be kept, who is missing.
fn enforced(facts: &PolicyFacts, tally: &Tally) -> Said {
    let (n, m) = (tally.enforcing(facts.pods), facts.pods);
    if m == 0 {
        return said(UNKNOWN, reasons::NO_PODS, "no guarded pod of this policy runs");
    }
    let Some(good) = &facts.good else {
        return said(FALSE, reasons::INVALID, "nothing is in force");
    };
    if facts.error.is_some() {
        let old = good.generation;
        return said(
            FALSE,
            reasons::INVALID,
            format!(
                "generation {} does not load; {n} of {m} pods enforce generation {old}",
                facts.generation
            ),
        );
    }
    if good.advisory {
        return said(
            FALSE,
            reasons::ADVISORY,
            format!("{n} of {m} pods have the bundle, but nothing makes an agent use an explicit proxy"),
        );
    }
    if n < m {
        if tally.nacked > 0 {
            let error = tally.error.as_deref().unwrap_or("no reason given");
            let text = format!("{n} of {m} pods enforce it; {} refused it: {error}", tally.nacked);
            return said(FALSE, reasons::NACKED, text);
        }
        if tally.too_old > 0 {
            let text = format!(
                "{n} of {m} pods enforce it; the sidecars of {} can't read it: restart these pods",
                tally.too_old
            );
            return said(FALSE, reasons::SIDECAR_TOO_OLD, text);
        }
        return said(FALSE, reasons::SOME_PODS, format!("{n} of {m} pods enforce it"));
    }
    match &facts.killed {
        Some(by) => said(
            TRUE,
            reasons::KILLED,
            format!("every call of {m} pods is blocked: sallyport.dev/kill on {by}"),
        ),
        None => said(TRUE, reasons::ALL_PODS, format!("{m} of {m} pods enforce it")),
    }
}

fn rollout(facts: &PolicyFacts) -> Said {
    if facts.stale == 0 {
        return said(FALSE, reasons::UP_TO_DATE, "no pod needs a restart");
    }
    said(
        TRUE,
        reasons::STALE_PODS,
        format!("{} of {} pods run with older fields; restart their workload", facts.stale, facts.pods),
    )
}

/// As much of a digest as people compare.
fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

fn shortened(mut message: String) -> String {
    if message.len() > LONGEST_MESSAGE {
        cut(&mut message, LONGEST_MESSAGE);
        message.push_str("...");
    }
    message
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

    use sallyport_api::CapacityStatus;

    use super::*;
    use crate::index::state::GoodFacts;

    fn facts(pods: u32) -> PolicyFacts {
        PolicyFacts {
            uid: "u".into(),
            generation: 4,
            error: None,
            good: Some(GoodFacts {
                generation: 4,
                digest: "0123456789abcdef".into(),
                rules: 612,
                advisory: false,
                capacity: CapacityStatus::default(),
            }),
            killed: None,
            pods,
            stale: 0,
            conflict: None,
            status: None,
        }
    }

    fn tally(acked: u32) -> Tally {
        Tally { acked, ..Tally::default() }
    }

    fn says(facts: &PolicyFacts, tally: &Tally) -> AgentPolicyStatus {
        status(facts, tally, &AgentPolicyStatus::default(), Timestamp::UNIX_EPOCH)
    }

    fn condition<'s>(status: &'s AgentPolicyStatus, kind: &str) -> (&'s str, &'s str) {
        let c = status.conditions.iter().find(|c| c.type_ == kind).unwrap();
        (&c.status, &c.reason)
    }

    #[test]
    fn enforced_says_what_holds_in_the_pods() {
        let change = |pods, change: fn(&mut PolicyFacts)| {
            let mut facts = facts(pods);
            change(&mut facts);
            facts
        };
        let nacked = Tally { acked: 7, nacked: 2, error: Some("bad".into()), too_old: 1, ..Tally::default() };
        let old = Tally { acked: 7, too_old: 2, ..Tally::default() };
        for (what, facts, tally, want, n) in [
            ("all", facts(9), tally(9), ("True", "AllPods"), "9/9"),
            ("some", facts(9), tally(7), ("False", "SomePods"), "7/9"),
            ("counted twice", facts(9), tally(11), ("True", "AllPods"), "9/9"),
            ("none", facts(0), tally(0), ("Unknown", "NoPods"), "0/0"),
            ("not yet running", facts(0), tally(2), ("Unknown", "NoPods"), "0/0"),
            ("refused", facts(9), nacked, ("False", "Nacked"), "7/9"),
            ("too old", facts(9), old, ("False", "SidecarTooOld"), "7/9"),
            (
                "advisory",
                change(9, |f| f.good.as_mut().unwrap().advisory = true),
                tally(9),
                ("False", "Advisory"),
                "9/9",
            ),
            (
                "killed",
                change(9, |f| f.killed = Some("namespace a".into())),
                tally(9),
                ("True", "Killed"),
                "9/9",
            ),
            (
                "killed, not all",
                change(9, |f| f.killed = Some("namespace a".into())),
                tally(8),
                ("False", "SomePods"),
                "8/9",
            ),
            (
                "invalid",
                change(9, |f| {
                    f.error = Some("x".into());
                    f.generation = 5;
                }),
                tally(9),
                ("False", "Invalid"),
                "9/9",
            ),
        ] {
            let status = says(&facts, &tally);
            assert_eq!(condition(&status, "Enforced"), want, "{what}");
            assert_eq!(status.enforced, n, "{what}");
        }
    }

    #[test]
    fn an_invalid_generation_says_what_stays_in_force() {
        let mut facts = facts(3);
        facts.generation = 5;
        facts.error = Some("cedar line 3 column 7: no".into());
        let status = says(&facts, &tally(3));
        assert_eq!(status.observed_generation, 5);
        assert_eq!(status.digest, "0123456789abcdef");
        assert_eq!(condition(&status, "Accepted"), ("False", "Invalid"));
        assert_eq!(condition(&status, "Programmed"), ("False", "Invalid"));
        let message = &status.conditions[0].message;
        assert!(message.contains("line 3 column 7"), "{message}");
        assert!(message.contains("generation 4 stays in force, digest 0123456789ab"), "{message}");
    }

    #[test]
    fn a_policy_that_never_loaded_has_nothing_in_force() {
        let mut facts = facts(0);
        facts.good = None;
        facts.error = Some("no".into());
        let status = says(&facts, &tally(0));
        assert!(status.conditions[0].message.contains("nothing is in force"));
        assert_eq!((status.rules, status.digest.as_str()), (0, ""));
        assert_eq!(condition(&status, "Enforced"), ("Unknown", "NoPods"));
    }

    #[test]
    fn stale_pods_are_counted() {
        let mut facts = facts(3);
        assert_eq!(condition(&says(&facts, &tally(3)), "RolloutRequired"), ("False", "UpToDate"));
        facts.stale = 2;
        let status = says(&facts, &tally(3));
        assert_eq!(condition(&status, "RolloutRequired"), ("True", "StalePods"));
        assert!(status.conditions[4].message.starts_with("2 of 3 pods"));
    }

    #[test]
    fn a_conflict_names_the_winner() {
        let mut facts = facts(0);
        facts.conflict = Some("older".into());
        let status = says(&facts, &tally(0));
        assert_eq!(condition(&status, "Accepted"), ("False", "Conflicted"));
        assert!(status.conditions[0].message.contains("AgentPolicy older"));
        assert_eq!(condition(&status, "Programmed"), ("False", "Conflicted"));
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_turns() {
        let facts = facts(2);
        let old = says(&facts, &tally(1));
        let later = Timestamp::from_second(100).unwrap();
        let time = |s: &AgentPolicyStatus, kind: &str| {
            s.conditions.iter().find(|c| c.type_ == kind).unwrap().last_transition_time.0
        };
        let now = status(&facts, &tally(2), &old, later);
        assert_eq!(time(&now, "Accepted"), Timestamp::UNIX_EPOCH);
        assert_eq!(time(&now, "Enforced"), later);
        let same = status(&facts, &tally(1), &old, later);
        assert_eq!(same, old);
    }

    #[test]
    fn a_long_error_is_cut_between_characters() {
        let mut facts = facts(0);
        facts.error = Some("ü".repeat(10_000));
        let status = says(&facts, &tally(0));
        assert!(status.conditions.iter().all(|c| c.message.len() <= LONGEST_MESSAGE + 3));
    }
}
