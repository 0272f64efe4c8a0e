//! TLS for tests: an authority, servers' certificates, and the client's side of a handshake.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};

/// An authority of a test's own.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate.
    pub pem: String,
}

impl Default for Authority {
    fn default() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "an authority of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }
}

impl Authority {
    /// A server with a certificate for these names.
    pub fn server(&self, names: &[&str]) -> Arc<ServerConfig> {
        let key = KeyPair::generate().expect("a key");
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let params = CertificateParams::new(names).expect("names");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("protocols")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .expect("a certificate with its key");
        Arc::new(config)
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A client's connection.
pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Wire {
    /// Shakes hands with a server of that name, trusting these authorities and no others. An error is what the
    /// other side, or the check of its certificate, says.
    pub(crate) fn secure(self, name: &str, trust: &str, deadline: Duration) -> io::Result<Self> {
        let Self::Plain(mut tcp) = self else { return Err(io::Error::other("it is TLS already")) };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(trust.as_bytes()) {
            roots.add(certificate.map_err(io::Error::other)?).map_err(io::Error::other)?;
        }
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let mut connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
        tcp.set_read_timeout(Some(deadline))?;
        let end = Instant::now() + deadline;
        while connection.is_handshaking() {
            connection.complete_io(&mut tcp)?;
            if Instant::now() > end {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(Self::Tls(Box::new(StreamOwned::new(connection, tcp))))
    }

    pub(crate) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Plain(tcp) => tcp.set_read_timeout(timeout),
            Self::Tls(tls) => tls.sock.set_read_timeout(timeout),
        }
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.read(buffer),
            Self::Tls(tls) => tls.read(buffer),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(tcp) => tcp.write(bytes),
            Self::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(tcp) => tcp.flush(),
            Self::Tls(tls) => tls.flush(),
        }
    }
}
