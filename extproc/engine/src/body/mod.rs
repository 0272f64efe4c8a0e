//! From the bytes of a message to the texts that rules look at.

pub(crate) mod extract;
pub(crate) mod head;
pub(crate) mod json;
pub(crate) mod redact;
pub(crate) mod segment;
pub(crate) mod sse;
pub(crate) mod stream;
