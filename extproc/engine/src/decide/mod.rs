//! From findings to a decision.

pub(crate) mod cedar;
pub(crate) mod egress;
pub(crate) mod reach;
mod memo;
