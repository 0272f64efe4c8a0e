//! Makes authorities and serving certificates.
//!
//! What is not guaranteed: nothing revokes a certificate. A key that leaked is trusted until its
//! authority is taken out of the bundle.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::authority::{Authority, BACKDATE, LIFE, Secretive, later};

/// How long a serving certificate is valid.
pub const LEAF_LIFE: SignedDuration = SignedDuration::from_hours(24);

/// Why no certificate could be made or read.
#[derive(Debug, thiserror::Error)]
pub enum MintError {
    /// The certificate could not be made.
    #[error("making a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The PEM text holds no certificate or no key.
    #[error("reading PEM: {0}")]
    Pem(#[from] rustls::pki_types::pem::Error),
    /// The key is of a kind that TLS can't use, or not the certificate's.
    #[error("loading the key: {0}")]
    Key(#[from] rustls::Error),
    /// The certificate can't be read.
    #[error("reading the certificate: {0}")]
    Certificate(String),
}

/// A certificate that is served, with its key.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// What TLS serves.
    pub key: Arc<CertifiedKey>,
    /// The instant from which it is valid no longer.
    pub expires: Timestamp,
    /// The instant from which another one should be served.
    pub renews: Timestamp,
    /// When the authority that signed it was made; `None` where the authority is not ours.
    pub authority: Option<Timestamp>,
}

/// Makes an authority.
pub fn authority(now: Timestamp) -> Result<Authority, MintError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    // Each authority has a name of its own, so that a verifier never tries one's key on another's work.
    params.distinguished_name = named(&format!("sallyport operator CA {now}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = date_time_ymd(1970, 1, 1) + seconds(later(now, -BACKDATE));
    params.not_after = date_time_ymd(1970, 1, 1) + seconds(later(now, LIFE));
    let cert = params.self_signed(&key)?;
    Ok(Authority { cert: cert.pem(), key: Secretive(key.serialize_pem()), created: now })
}

/// Makes a serving certificate for these names.
pub fn leaf(authority: &Authority, names: &[String], now: Timestamp) -> Result<Leaf, MintError> {
    let issuer = Issuer::from_ca_cert_pem(&authority.cert, KeyPair::from_pem(&authority.key.0)?)?;
    let key = KeyPair::generate()?;
    let expires = later(now, LEAF_LIFE).min(authority.expires());
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = named(names.first().map_or("sallyport", String::as_str));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    params.not_before = date_time_ymd(1970, 1, 1) + seconds(later(now, -BACKDATE));
    params.not_after = date_time_ymd(1970, 1, 1) + seconds(expires);
    let cert = params.signed_by(&key, &issuer)?;
    let der =
        PrivateKeyDer::try_from(key.serialize_der()).map_err(|e| MintError::Certificate(e.to_owned()))?;
    let certified = CertifiedKey::new(vec![cert.der().clone()], any_supported_type(&der)?);
    let renews = later(now, expires.duration_since(now) / 3 * 2);
    Ok(Leaf { key: Arc::new(certified), expires, renews, authority: Some(authority.created) })
}

/// A serving certificate from PEM files that something else renews.
pub fn read(chain: &[u8], key: &[u8]) -> Result<Leaf, MintError> {
    let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>()?;
    let Some(end) = chain.first() else {
        return Err(MintError::Certificate("there is none".into()));
    };
    let expires = expiry(end)?;
    let key = PrivateKeyDer::from_pem_slice(key)?;
    let certified = CertifiedKey::new(chain, any_supported_type(&key)?);
    certified.keys_match()?;
    Ok(Leaf { key: Arc::new(certified), expires, renews: expires, authority: None })
}

/// The instant from which the first certificate of a PEM text is valid no longer.
pub fn pem_expiry(pem: &[u8]) -> Result<Timestamp, MintError> {
    expiry(&CertificateDer::from_pem_slice(pem)?)
}

fn expiry(certificate: &CertificateDer<'_>) -> Result<Timestamp, MintError> {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let bad = |e: String| MintError::Certificate(e);
    let (_, cert) = X509Certificate::from_der(certificate).map_err(|e| bad(e.to_string()))?;
    Timestamp::from_second(cert.validity().not_after.timestamp()).map_err(|e| bad(e.to_string()))
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// Seconds since 1970, as rcgen's own type of time can be given them.
fn seconds(at: Timestamp) -> std::time::Duration {
    std::time::Duration::from_secs(u64::try_from(at.as_second()).unwrap_or(0))
}

/// Whether an authority can sign: its certificate and key can be read and belong together.
pub(super) fn usable(authority: &Authority) -> bool {
    read(authority.cert.as_bytes(), authority.key.0.as_bytes()).is_ok()
}
