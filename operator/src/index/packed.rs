//! A bundle together with the bytes that carry it, which every stream of a policy shares.
//!
//! A bundle takes some 25 KiB. Encoded for each stream, that was held once per stream for as long as the
//! stream rested: gRPC's encoder keeps the buffer of its last message. Here it is encoded once for each set of
//! parts that sidecars hold already, when the first of them asks.

use std::ops::Deref;
use std::sync::OnceLock;

use bytes::Bytes;
use sallyport_proto::discovery::{Bundle, Response, SubscribeResponse, framed};

/// See the module. Reads as the bundle.
#[derive(Debug)]
pub(crate) struct Packed {
    bundle: Bundle,
    /// By the set of parts that are left out, a bit for each.
    messages: Box<[OnceLock<Bytes>]>,
}

impl Packed {
    /// Of a bundle with few parts: there is a message for each set of them.
    pub(crate) fn new(bundle: Bundle) -> Self {
        debug_assert!(bundle.parts.len() <= 4, "a message for each set of {} parts", bundle.parts.len());
        let messages = (0..1_usize << bundle.parts.len()).map(|_| OnceLock::new()).collect();
        Self { bundle, messages }
    }

    /// The message to a sidecar, without the content of the parts that it holds.
    pub(crate) fn message(&self, holds: impl Fn(&str) -> bool) -> Bytes {
        let held = self.bundle.parts.iter().map(|part| holds(&part.digest));
        let set = held.enumerate().fold(0, |set, (i, held)| set | usize::from(held) << i);
        let encoded = self.messages[set].get_or_init(|| {
            let mut bundle = self.bundle.clone();
            for (i, part) in bundle.parts.iter_mut().enumerate() {
                if set & 1 << i != 0 {
                    part.content = None;
                }
            }
            framed(&SubscribeResponse { kind: Some(Response::Bundle(bundle)) })
        });
        encoded.clone()
    }
}

impl Deref for Packed {
    type Target = Bundle;

    fn deref(&self) -> &Bundle {
        &self.bundle
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

    use sallyport_proto::discovery::Part;

    use super::*;

    fn part(name: &str) -> Part {
        let content = Some(Bytes::from(format!("content of {name}")));
        Part { name: name.into(), digest: format!("digest-{name}"), content }
    }

    #[test]
    fn streams_that_hold_the_same_share_one_message() {
        let bundle = Bundle { digest: "d".into(), parts: vec![part("a"), part("b")], ..Bundle::default() };
        let packed = Packed::new(bundle);
        let contains =
            |message: &Bytes, text: &str| message.windows(text.len()).any(|window| window == text.as_bytes());
        for (held, a, b) in [
            (&[][..], true, true),
            (&["digest-a"], false, true),
            (&["digest-b"], true, false),
            (&["digest-b", "digest-a"], false, false),
        ] {
            let message = packed.message(|digest| held.contains(&digest));
            assert_eq!(contains(&message, "content of a"), a, "{held:?}");
            assert_eq!(contains(&message, "content of b"), b, "{held:?}");
            assert!(contains(&message, "digest-a") && contains(&message, "digest-b"), "{held:?}");
            let again = packed.message(|digest| held.contains(&digest));
            assert_eq!(message.as_ptr(), again.as_ptr(), "{held:?}: the same memory");
        }
    }
}
