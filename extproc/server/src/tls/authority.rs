//! The authority that agents trust, and the certificates it signs.

use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use prost::Message as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use sallyport_proto::secrets::{DataSource, Secret, Specifier, TlsCertificate, Type};

/// How long a certificate of a server is valid. Short, because nothing revokes one.
const LEAF_LIFE: SignedDuration = SignedDuration::from_hours(24);
/// How long an authority that is made here is valid.
const LIFE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// An authority with less than this left is replaced when it is opened: whoever starts on it now may run
/// for that long.
const LEAST_LEFT: SignedDuration = SignedDuration::from_hours(30 * 24);
/// How much earlier than now a certificate says it begins, for clients whose clock is behind.
const BACKDATE: SignedDuration = SignedDuration::from_hours(1);
/// Names of an authority's files.
const CERTIFICATE: &str = "ca.pem";
const KEY: &str = "ca.key";

/// Why there is no authority or no certificate.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file can't be read or written.
    #[error("{path}: {error}", path = .path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// A certificate can't be made, or a file is none of an authority.
    #[error(transparent)]
    Certificate(#[from] rcgen::Error),
    /// The files of an authority that was made before can't be used.
    #[error("{dir}: no authority can be read from ca.pem and ca.key ({error}); remove both to have a new one made", dir = .dir.display())]
    Unusable {
        /// Where they stand.
        dir: PathBuf,
        /// Why not.
        error: String,
    },
}

/// Who signs the certificates that Envoy shows to agents.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    expires: Timestamp,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("expires", &self.expires).finish_non_exhaustive()
    }
}

// === impl Authority ===

impl Authority {
    /// Reads the authority that stands in this directory, or makes one and writes it there: `ca.pem`, and
    /// `ca.key` for its owner only. One that is about to expire is replaced.
    pub fn open(dir: &Path, now: Timestamp) -> Result<Self, AuthorityError> {
        let (certificate, key) = (dir.join(CERTIFICATE), dir.join(KEY));
        match (read(&certificate)?, read(&key)?) {
            (Some(certificate), Some(key)) => {
                let unusable = |error: String| AuthorityError::Unusable { dir: dir.to_owned(), error };
                let found = Self::from_pem(&certificate, &key).map_err(|e| unusable(e.to_string()))?;
                if found.expires.duration_since(now) > LEAST_LEFT {
                    return Ok(found);
                }
            }
            (None, None) => {}
            (some, _) => {
                let missing = if some.is_some() { KEY } else { CERTIFICATE };
                let error = format!("{missing} is missing");
                return Err(AuthorityError::Unusable { dir: dir.to_owned(), error });
            }
        }
        let (made, secret) = Self::make(now)?;
        let file = |path: &Path, error| AuthorityError::File { path: path.to_owned(), error };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| file(dir, e))?;
        // The key first: a certificate without its key would be an error at the next start, and so would the
        // other order, but nobody has trusted a certificate that was never written.
        write(&key, &secret, 0o600).map_err(|e| file(&key, e))?;
        write(&certificate, &made.certificate, 0o644).map_err(|e| file(&certificate, e))?;
        Ok(made)
    }

    /// Makes an authority, with its key as PEM.
    pub fn make(now: Timestamp) -> Result<(Self, String), AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        // Each has a name of its own, so that a verifier never tries one's key on another's work.
        params.distinguished_name = named(&format!("Sallyport on this machine, {now}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.not_before = date_time_ymd(1970, 1, 1) + seconds(later(now, -BACKDATE));
        params.not_after = date_time_ymd(1970, 1, 1) + seconds(later(now, LIFE));
        let certificate = params.self_signed(&key)?.pem();
        let secret = key.serialize_pem();
        let authority = Self { issuer: Issuer::new(params, key), certificate, expires: later(now, LIFE) };
        Ok((authority, secret))
    }

    /// Reads an authority from PEM.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, AuthorityError> {
        let key = KeyPair::from_pem(key)?;
        let expires = expiry(certificate, &key)?;
        let issuer = Issuer::from_ca_cert_pem(certificate, key)?;
        Ok(Self { issuer, certificate: certificate.to_owned(), expires })
    }

    /// The certificate that agents must trust, as PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// The instant from which it is valid no longer.
    pub fn expires(&self) -> Timestamp {
        self.expires
    }
}

/// Mints certificates. All share one key, so that minting is one signature.
pub struct Minter {
    authority: Authority,
    key: KeyPair,
    secret: Bytes,
}

/// A certificate with its key, as Envoy takes it.
#[derive(Clone, Debug)]
pub struct Minted {
    /// The encoded `Secret`.
    pub secret: Vec<u8>,
    /// The instant from which another one should be shown.
    pub renews: Timestamp,
}

impl std::fmt::Debug for Minter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Minter").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Minter {
    /// A minter with a fresh key (P-256).
    pub fn new(authority: Authority) -> Result<Self, AuthorityError> {
        let key = KeyPair::generate()?;
        let secret = Bytes::from(key.serialize_pem());
        Ok(Self { authority, key, secret })
    }

    /// Whose certificates these are.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Mints a certificate for a server of that name; `resource` is what Envoy calls it.
    pub fn mint(&self, name: &str, resource: &str, now: Timestamp) -> Result<Minted, AuthorityError> {
        let expires = later(now, LEAF_LIFE).min(self.authority.expires);
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        // The names stand in the extension; a subject would be truncated at 64 bytes.
        params.distinguished_name = DistinguishedName::new();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params.not_before = date_time_ymd(1970, 1, 1) + seconds(later(now, -BACKDATE));
        params.not_after = date_time_ymd(1970, 1, 1) + seconds(expires);
        let certificate = params.signed_by(&self.key, &self.authority.issuer)?;
        let source = |bytes: Vec<u8>| {
            Some(DataSource { specifier: Some(Specifier::InlineBytes(bytes)), ..DataSource::default() })
        };
        let secret = Secret {
            name: resource.to_owned(),
            r#type: Some(Type::TlsCertificate(TlsCertificate {
                certificate_chain: source(certificate.pem().into_bytes()),
                private_key: source(self.secret.to_vec()),
                ..TlsCertificate::default()
            })),
        };
        let renews = later(now, expires.duration_since(now) / 3 * 2);
        Ok(Minted { secret: secret.encode_to_vec(), renews })
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// `at + by`, held inside what a timestamp can say.
fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.saturating_add(by).unwrap_or(at)
}

/// Seconds since 1970, as rcgen's own type of time can be given them.
fn seconds(at: Timestamp) -> std::time::Duration {
    std::time::Duration::from_secs(u64::try_from(at.as_second()).unwrap_or(0))
}

/// When a certificate expires; an error where the key is not its own.
fn expiry(certificate: &str, key: &KeyPair) -> Result<Timestamp, AuthorityError> {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let bad = || AuthorityError::Certificate(rcgen::Error::CouldNotParseCertificate);
    let pem = pem::parse(certificate).map_err(|_| bad())?;
    let (_, parsed) = X509Certificate::from_der(pem.contents()).map_err(|_| bad())?;
    if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
        return Err(AuthorityError::Certificate(rcgen::Error::CouldNotParseKeyPair));
    }
    Timestamp::from_second(parsed.validity().not_after.timestamp()).map_err(|_| bad())
}

fn read(path: &Path) -> Result<Option<String>, AuthorityError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(AuthorityError::File { path: path.to_owned(), error }),
    }
}

/// Writes a file of that mode, whole or not at all.
fn write(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    let aside = path.with_extension("new");
    let _ = std::fs::remove_file(&aside);
    let mut file = std::fs::File::options().write(true).create_new(true).mode(mode).open(&aside)?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&aside, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn an_authority_is_made_once_and_its_key_is_its_owner_s() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("state/ca");
        let now = Timestamp::now();
        let made = Authority::open(&dir, now).unwrap();
        let again = Authority::open(&dir, now).unwrap();
        assert_eq!(made.certificate(), again.certificate());
        assert_eq!(made.expires().as_second(), again.expires().as_second());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir.join(KEY)), 0o600);
        assert_eq!(mode(&dir), 0o700);
        let near = later(made.expires(), -LEAST_LEFT);
        assert_ne!(Authority::open(&dir, near).unwrap().certificate(), made.certificate());
    }

    #[test]
    fn files_that_are_no_authority_are_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let now = Timestamp::now();
        let text = |dir: &Path| Authority::open(dir, now).unwrap_err().to_string();
        Authority::open(dir.path(), now).unwrap();
        let (_, other) = Authority::make(now).unwrap();
        std::fs::write(dir.path().join(KEY), other).unwrap();
        assert!(text(dir.path()).contains("remove both"), "{}", text(dir.path()));
        std::fs::write(dir.path().join(KEY), "no key").unwrap();
        assert!(text(dir.path()).contains("remove both"), "{}", text(dir.path()));
        std::fs::remove_file(dir.path().join(KEY)).unwrap();
        assert!(text(dir.path()).contains("ca.key is missing"), "{}", text(dir.path()));
        assert!(dir.path().join(CERTIFICATE).exists());
    }

    #[test]
    fn a_certificate_is_for_one_name_for_a_day_and_never_outlives_its_authority() {
        use x509_parser::prelude::{FromDer, X509Certificate};
        let now = Timestamp::now();
        let minter = Minter::new(Authority::make(now).unwrap().0).unwrap();
        let read = |at| {
            let secret = minter.mint("api.test", "API.test", at).unwrap().secret;
            let secret = Secret::decode(secret.as_slice()).unwrap();
            assert_eq!(secret.name, "API.test");
            let Some(Type::TlsCertificate(tls)) = secret.r#type else { panic!("no certificate") };
            let Some(Specifier::InlineBytes(chain)) = tls.certificate_chain.unwrap().specifier else {
                panic!("not inline")
            };
            pem::parse(chain).unwrap().into_contents()
        };
        let der = read(now);
        let (_, leaf) = X509Certificate::from_der(&der).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert_eq!(names.value.general_names.len(), 1);
        assert!(format!("{:?}", names.value.general_names).contains("api.test"));
        assert!(!leaf.is_ca());
        let ends = leaf.validity().not_after.timestamp();
        assert_eq!(ends, later(now, LEAF_LIFE).as_second());
        let last = later(minter.authority().expires(), -SignedDuration::from_hours(1));
        let der = read(last);
        let (_, leaf) = X509Certificate::from_der(&der).unwrap();
        assert_eq!(leaf.validity().not_after.timestamp(), minter.authority().expires().as_second());
    }
}
