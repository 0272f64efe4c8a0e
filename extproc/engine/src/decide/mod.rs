//! From findings to a decision.

pub(crate) mod cedar;
pub(crate) mod egress;
mod memo;
pub(crate) mod reach;
