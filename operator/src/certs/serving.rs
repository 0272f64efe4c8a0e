//! What TLS serves now, and what clients shall trust.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use jiff::Timestamp;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use super::mint::Leaf;
use crate::metrics::{Metrics, certificate};

/// The certificate in use and the trust bundle. Cheap to clone; every clone is the same.
#[derive(Clone, Debug)]
pub struct Certificates {
    leaf: Arc<ArcSwapOption<Leaf>>,
    bundle: watch::Sender<Option<Arc<str>>>,
    metrics: Metrics,
}

impl Certificates {
    /// Holds nothing yet: TLS handshakes fail.
    pub fn new(metrics: Metrics) -> Self {
        Self { leaf: Arc::default(), bundle: watch::Sender::new(None), metrics }
    }

    /// From now on this is served to new connections.
    pub fn serve(&self, leaf: Leaf) {
        tracing::info!(expires = %leaf.expires, "serving a new certificate");
        self.metrics.certificate_expires(certificate::SERVING, leaf.expires);
        if self.leaf.swap(Some(Arc::new(leaf))).is_some() {
            self.metrics.certificate_rotated(certificate::SERVING);
        }
    }

    /// From now on clients shall trust these authorities, PEM. `expires` is the signing one's end.
    pub fn trust(&self, bundle: &str, expires: Timestamp) {
        self.metrics.certificate_expires(certificate::CA, expires);
        let before = self.bundle.borrow().is_some();
        let changed = self.bundle.send_if_modified(|held| {
            let differs = held.as_deref() != Some(bundle);
            if differs {
                *held = Some(bundle.into());
            }
            differs
        });
        if changed {
            tracing::info!(
                certificates = bundle.matches("BEGIN CERTIFICATE").count(),
                "the trust bundle changed"
            );
            if before {
                self.metrics.certificate_rotated(certificate::CA);
            }
        }
    }

    /// The trust bundle as it changes, PEM; `None` until there is one.
    pub fn bundle(&self) -> watch::Receiver<Option<Arc<str>>> {
        self.bundle.subscribe()
    }

    /// What is served now.
    pub fn leaf(&self) -> Option<Arc<Leaf>> {
        self.leaf.load_full()
    }

    /// Whether there is a certificate to serve that is still valid, and a bundle.
    pub fn ready(&self, now: Timestamp) -> bool {
        self.leaf.load().as_ref().is_some_and(|l| now < l.expires) && self.bundle.borrow().is_some()
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.leaf.load().as_ref().map(|l| l.key.clone())
    }
}

/// TLS as the operator serves it: 1.2 and 1.3, HTTP/2 before HTTP/1.1, no client certificates.
pub fn server_config(certificates: &Certificates) -> Result<Arc<ServerConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(certificates.clone()));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // A resumed session would skip the certificate: a client would not notice that its trust has ended.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
