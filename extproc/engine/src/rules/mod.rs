//! Packs: versioned files of rules, and what compiles them.
//!
//! The schema is described for users in `policies/packs/README.md`.

pub(crate) mod gate;
mod pack;
mod selftest;
pub(crate) mod set;

pub use pack::{Near, Pack, PackError, Rule, Scanner, TestCase, Tests, Validator, parse_pack, shipped};
pub use selftest::{TestReport, run_tests};
