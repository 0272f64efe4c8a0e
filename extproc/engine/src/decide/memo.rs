//! Remembers what Cedar said.
//!
//! Cedar is a function of its inputs, and asking it costs twenty times what looking at a short clean
//! message does. Most policies read few attributes; messages that agree in those get the same answer. So
//! the attributes that the loaded policies read are found out once, from their syntax trees, and answers
//! are kept under the values of just these. A policy that uses `context` as a whole makes every attribute
//! count; nothing is ever guessed.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, RwLock};

use cedar_policy::PolicySet;
use serde_json::Value;

/// Answers that are kept. Shipped policies need a few dozen; policies that read paths need more.
const MOST: usize = 4096;

/// Longer keys (policies that read paths, and long paths) are not kept: that bounds the memo to a few MiB.
const LONGEST_KEY: usize = 512;

/// Which attributes policies read.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    /// Attributes of the context.
    context: BTreeSet<String>,
    /// Attributes of the context's finding.
    finding: BTreeSet<String>,
    /// A policy uses the context, or the finding, as a whole.
    everything: bool,
    /// A policy looks at the resource.
    resource: bool,
}

impl Reads {
    pub(crate) fn context(&self, attribute: &str) -> bool {
        self.everything || self.context.contains(attribute)
    }

    pub(crate) fn finding(&self, attribute: &str) -> bool {
        self.everything || self.finding.contains(attribute)
    }

    pub(crate) fn resource(&self) -> bool {
        self.everything || self.resource
    }

    /// Adds what the policies of a set read.
    pub(crate) fn add(&mut self, policies: &PolicySet) -> Result<(), String> {
        for policy in policies.policies() {
            let json = policy.to_json().map_err(|e| e.to_string())?;
            if json.get("resource").and_then(|r| r.get("op")).is_some_and(|op| op != "All") {
                self.resource = true;
            }
            for condition in json.get("conditions").and_then(Value::as_array).into_iter().flatten() {
                self.walk(condition.get("body").unwrap_or(&Value::Null));
            }
        }
        Ok(())
    }

    /// Walks an expression of Cedar's JSON policy format.
    fn walk(&mut self, expr: &Value) {
        match expr {
            Value::Object(members) => {
                for (op, args) in members {
                    if op == "." || op == "has" {
                        if self.access(op, args) {
                            continue;
                        }
                    } else if op == "Var" {
                        match args.as_str() {
                            Some("principal" | "action") => {}
                            Some("resource") => self.resource = true,
                            // `context` by itself, or a variable this code does not know.
                            _ => self.everything = true,
                        }
                        continue;
                    } else if op == "Value" {
                        continue;
                    }
                    self.walk(args);
                }
            }
            Value::Array(items) => items.iter().for_each(|i| self.walk(i)),
            _ => {}
        }
    }

    /// Notes an attribute of the context or its finding; false where the access is of something else.
    fn access(&mut self, op: &str, args: &Value) -> bool {
        let Some(attribute) = args.get("attr").and_then(Value::as_str) else {
            // `has` of several attributes in a row, in forms newer than this code.
            self.everything = true;
            return false;
        };
        let is_context = |v: &Value| v.get("Var").and_then(Value::as_str) == Some("context");
        let Some(left) = args.get("left") else { return false };
        if is_context(left) {
            // The finding as a value, not one of its attributes: all of them count.
            self.everything |= op == "." && attribute == "finding";
            self.context.insert(attribute.to_owned());
            return true;
        }
        let of_finding = left.get(".").is_some_and(|inner| {
            inner.get("attr").and_then(Value::as_str) == Some("finding")
                && inner.get("left").is_some_and(is_context)
        });
        if of_finding {
            self.finding.insert(attribute.to_owned());
        }
        of_finding
    }
}

/// Answers under the values they depend on.
#[derive(Debug)]
pub(crate) struct Memo<T> {
    answers: RwLock<HashMap<Box<[u8]>, Arc<T>>>,
}

impl<T> Memo<T> {
    pub(crate) fn new() -> Self {
        Self { answers: RwLock::new(HashMap::new()) }
    }

    /// The answer under `key`, asked for if it is not known.
    pub(crate) fn get(&self, key: &[u8], ask: impl FnOnce() -> T) -> Arc<T> {
        // A thread that panicked while it held the lock left whole entries only.
        let known = self.answers.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(key).cloned();
        known.unwrap_or_else(|| {
            let answer = Arc::new(ask());
            if key.len() > LONGEST_KEY {
                return answer;
            }
            let mut answers = self.answers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            // An agent can make keys up; to forget everything now and then is cheaper than to keep order.
            if answers.len() >= MOST {
                answers.clear();
            }
            answers.insert(key.into(), Arc::clone(&answer));
            answer
        })
    }
}

/// Builds a key of values, each with its length, so that no two lists of values give one key.
#[derive(Debug, Default)]
pub(crate) struct Key(pub(crate) Vec<u8>);

impl Key {
    pub(crate) fn text(&mut self, value: &str) {
        self.0.extend_from_slice(&(value.len() as u32).to_le_bytes());
        self.0.extend_from_slice(value.as_bytes());
    }

    pub(crate) fn number(&mut self, value: i64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn texts<'a>(&mut self, values: impl IntoIterator<Item = &'a str>) {
        let at = self.0.len();
        self.number(0);
        let mut count = 0i64;
        for v in values {
            self.text(v);
            count += 1;
        }
        self.0[at..at + 8].copy_from_slice(&count.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(policy: &str) -> Reads {
        let mut r = Reads::default();
        r.add(&policy.parse().unwrap()).unwrap();
        r
    }

    #[test]
    fn attributes_are_found_wherever_they_stand() {
        let r = reads(
            "forbid (principal, action, resource) when { context.egress == \"deny\" && context has finding && \
             [context.finding.rule].contains(\"x\") } unless { context.exceptions.contains(context.finding.category) };",
        );
        for a in ["egress", "finding", "exceptions"] {
            assert!(r.context(a), "{a}");
        }
        assert!(r.finding("rule") && r.finding("category"));
        assert!(!r.context("path") && !r.finding("path") && !r.resource());
    }

    #[test]
    fn the_context_as_a_whole_makes_everything_count() {
        assert!(reads("forbid (principal, action, resource) when { context == {} };").context("path"));
        assert!(
            reads("forbid (principal, action, resource) when { context.finding == context.finding };")
                .context("finding")
        );
    }

    #[test]
    fn a_finding_as_a_whole_makes_all_of_it_count() {
        let r = reads("forbid (principal, action, resource) when { [context.finding].isEmpty() };");
        assert!(r.finding("path"));
    }

    #[test]
    fn the_resource_counts_where_it_is_named() {
        assert!(reads("forbid (principal, action, resource == Sallyport::Host::\"a\");").resource());
        assert!(
            reads("forbid (principal, action, resource) when { resource == Sallyport::Host::\"a\" };")
                .resource()
        );
    }

    #[test]
    fn keys_of_different_lists_differ() {
        let key = |v: &[&str]| {
            let mut k = Key::default();
            k.texts(v.iter().copied());
            k.0
        };
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_ne!(key(&[]), key(&[""]));
    }
}
