//! TLS that Envoy opens for inspection: the certificates it shows, and the servers it was opened to.
//!
//! Envoy asks for a certificate by the name that a client's first message gives (SNI). It gets one where the
//! policy might allow a request to that server, signed by an [`Authority`] that agents are told to trust, and
//! otherwise the handshake ends. Keys stay in this process and in Envoy's.
//!
//! What is not guaranteed: that a client trusts the authority. One that ships its own roots, or pins its
//! server's key, refuses the certificate, and can't be inspected.

mod authority;
mod names;
mod secrets;
mod trust;

pub use authority::{Authority, AuthorityError, Minted, Minter};
pub use names::{Inside, OpenedTo};
pub(crate) use secrets::Secrets;
pub use secrets::Tls;
pub use trust::mozilla_roots;
