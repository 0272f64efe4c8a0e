//! Bundles as they come: checked against their digests and completed with what is held, or refused.

use std::collections::HashMap;

use bytes::Bytes;
use sallyport_proto::discovery::{
    Bundle, ENVOY_PART, Kill, POLICY_PART, Part, PolicyRef, SCHEMA, bundle_digest, part_digest,
};

/// The oldest bundle schema that this build reads.
pub(crate) const SCHEMA_LEAST: u32 = 1;
/// Bytes of parts that are remembered beyond those in force. A part is some kilobytes; what is forgotten is
/// asked for again.
const MOST_HELD_BYTES: usize = 16 << 20;

/// Why a bundle is not used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refused {
    /// Older or newer than what is understood.
    #[error("schema {found} is outside {SCHEMA_LEAST} to {SCHEMA}, which this sidecar reads")]
    Schema {
        /// The bundle's.
        found: u32,
    },
    /// A part that nobody here knows what to do with; to enforce the rest would be to guess.
    #[error("there is no use for a part `{0}`")]
    UnknownPart(String),
    /// Two parts of one name.
    #[error("the part `{0}` is there twice")]
    RepeatedPart(String),
    /// A part that must be there is not.
    #[error("the part `{0}` is missing")]
    MissingPart(&'static str),
    /// The operator takes us to hold what we don't.
    #[error("the part `{name}` came without content, and {digest} is not held")]
    NotHeld {
        /// The part.
        name: String,
        /// What it should have been.
        digest: String,
    },
    /// A part's content is not what its digest says.
    #[error("the content of the part `{0}` has another digest")]
    PartDigest(String),
    /// The bundle is not what its digest says.
    #[error("the bundle has another digest")]
    BundleDigest,
}

/// A bundle that is complete and is what its digest says. Whether it can be loaded is not known yet.
#[derive(Clone, Debug)]
pub struct Verified {
    bundle: Bundle,
    policy: Bytes,
    policy_digest: String,
    envoy: Bytes,
}

impl Verified {
    /// Checks a bundle, and fills in what came without content.
    pub fn new(mut bundle: Bundle, held: &Held) -> Result<Self, Refused> {
        if !(SCHEMA_LEAST..=SCHEMA).contains(&bundle.schema) {
            return Err(Refused::Schema { found: bundle.schema });
        }
        let (mut policy, mut envoy) = (None, None);
        for part in &mut bundle.parts {
            let slot = match part.name.as_str() {
                POLICY_PART => &mut policy,
                ENVOY_PART => &mut envoy,
                _ => return Err(Refused::UnknownPart(part.name.clone())),
            };
            if slot.is_some() {
                return Err(Refused::RepeatedPart(part.name.clone()));
            }
            let content = match &part.content {
                Some(content) if part_digest(content) == part.digest => content.clone(),
                Some(_) => return Err(Refused::PartDigest(part.name.clone())),
                None => held.get(&part.digest).ok_or_else(|| Refused::NotHeld {
                    name: part.name.clone(),
                    digest: part.digest.clone(),
                })?,
            };
            part.content = Some(content.clone());
            *slot = Some((content, part.digest.clone()));
        }
        if bundle_digest(&bundle) != bundle.digest {
            return Err(Refused::BundleDigest);
        }
        let (policy, policy_digest) = policy.ok_or(Refused::MissingPart(POLICY_PART))?;
        let (envoy, _) = envoy.ok_or(Refused::MissingPart(ENVOY_PART))?;
        Ok(Self { bundle, policy, policy_digest, envoy })
    }

    /// The same, with the kill switch on.
    #[must_use]
    pub(crate) fn killed(mut self, kill: Kill) -> Self {
        self.bundle.kill = Some(kill);
        self.bundle.digest = bundle_digest(&self.bundle);
        self
    }

    /// The bundle with the content of each part.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Its digest.
    pub fn digest(&self) -> &str {
        &self.bundle.digest
    }

    /// The kill switch, if it is on.
    pub fn kill(&self) -> Option<&Kill> {
        self.bundle.kill.as_ref()
    }

    /// Where it came from.
    pub fn source(&self) -> PolicyRef {
        self.bundle.policy.clone().unwrap_or_default()
    }

    /// The policy's spec as JSON, and its digest.
    pub(crate) fn policy(&self) -> (&Bytes, &str) {
        (&self.policy, &self.policy_digest)
    }

    /// Envoy's configuration as JSON.
    pub(crate) fn envoy(&self) -> &Bytes {
        &self.envoy
    }
}

/// The parts that are held, by digest.
#[derive(Debug, Default)]
pub struct Held {
    parts: HashMap<String, Bytes>,
    bytes: usize,
}

impl Held {
    /// Remembers a bundle's parts. Where that were too much, everything before is forgotten first.
    pub fn remember(&mut self, parts: &[Part]) {
        let size = |p: &Part| p.content.as_ref().map_or(0, Bytes::len);
        if self.bytes + parts.iter().map(size).sum::<usize>() > MOST_HELD_BYTES {
            *self = Self::default();
        }
        for part in parts {
            if let Some(content) = &part.content
                && self.parts.insert(part.digest.clone(), content.clone()).is_none()
            {
                self.bytes += content.len();
            }
        }
    }

    /// The digests, for Hello.
    pub fn digests(&self) -> Vec<String> {
        self.parts.keys().cloned().collect()
    }

    fn get(&self, digest: &str) -> Option<Bytes> {
        self.parts.get(digest).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, content: &'static [u8]) -> Part {
        Part { name: name.into(), digest: part_digest(content), content: Some(content.into()) }
    }

    fn bundle(parts: Vec<Part>) -> Bundle {
        let mut bundle = Bundle { schema: SCHEMA, parts, ..Bundle::default() };
        bundle.digest = bundle_digest(&bundle);
        bundle
    }

    fn whole() -> Bundle {
        bundle(vec![part(POLICY_PART, b"{}"), part(ENVOY_PART, b"{\"a\":1}")])
    }

    #[test]
    fn only_what_its_digests_say_is_used() {
        let held = Held::default();
        assert!(Verified::new(whole(), &held).is_ok());
        let mut other = whole();
        other.parts[0].content = Some("{ }".into());
        assert_eq!(Verified::new(other, &held).unwrap_err(), Refused::PartDigest("policy".into()));
        let mut other = whole();
        other.kill = Some(Kill { by: "x".into() });
        assert_eq!(Verified::new(other, &held).unwrap_err(), Refused::BundleDigest);
        let mut other = whole();
        other.schema = SCHEMA + 1;
        assert_eq!(Verified::new(other, &held).unwrap_err(), Refused::Schema { found: SCHEMA + 1 });
    }

    #[test]
    fn exactly_the_known_parts_must_be_there() {
        let held = Held::default();
        let more = bundle(vec![part(POLICY_PART, b"{}"), part(ENVOY_PART, b"1"), part("dns", b"2")]);
        assert_eq!(Verified::new(more, &held).unwrap_err(), Refused::UnknownPart("dns".into()));
        let fewer = bundle(vec![part(POLICY_PART, b"{}")]);
        assert_eq!(Verified::new(fewer, &held).unwrap_err(), Refused::MissingPart(ENVOY_PART));
        let twice = bundle(vec![part(POLICY_PART, b"{}"), part(POLICY_PART, b"1")]);
        assert_eq!(Verified::new(twice, &held).unwrap_err(), Refused::RepeatedPart("policy".into()));
    }

    #[test]
    fn what_is_held_need_not_come_again_and_what_is_not_is_named() {
        let mut held = Held::default();
        let mut thin = whole();
        for part in &mut thin.parts {
            part.content = None;
        }
        assert!(matches!(Verified::new(thin.clone(), &held), Err(Refused::NotHeld { .. })));
        held.remember(&whole().parts);
        assert_eq!(held.digests().len(), 2);
        let verified = Verified::new(thin, &held).unwrap();
        assert_eq!(verified.policy().0.as_ref(), b"{}");
        assert_eq!(verified.bundle(), &whole(), "complete, so that it can be kept");
    }

    #[test]
    fn bent_bundles_are_what_their_digests_say_or_refused() {
        use prost::Message as _;
        let mut held = Held::default();
        held.remember(&whole().parts);
        let mut thin = whole();
        for part in &mut thin.parts {
            part.content = None;
        }
        let mut killed = whole();
        killed.kill = Some(Kill { by: "namespace a".into() });
        killed.digest = bundle_digest(&killed);
        let seeds: Vec<_> = [whole(), thin, killed].iter().map(Bundle::encode_to_vec).collect();
        let words = [whole().digest.into_bytes(), b"policy".to_vec(), b"envoy".to_vec()];
        sallyport_fuzz::fuzz("bundle", &seeds, &words, |bytes| {
            let Ok(bundle) = Bundle::decode(bytes) else { return Ok(()) };
            let Ok(verified) = Verified::new(bundle, &held) else { return Ok(()) };
            let bundle = verified.bundle();
            let is_its = |p: &Part| p.content.as_ref().is_some_and(|c| part_digest(c) == p.digest);
            let sound = bundle.parts.len() == 2
                && bundle.parts.iter().all(is_its)
                && bundle_digest(bundle) == bundle.digest
                && part_digest(verified.policy().0) == verified.policy().1;
            // What is kept must come back the same.
            let again = Bundle::decode(bundle.encode_to_vec().as_slice()).ok();
            if sound && again.as_ref() == Some(bundle) { Ok(()) } else { Err(format!("{bundle:?}")) }
        });
    }
}
