//! Whom upstreams' certificates, and agents, may be checked against.

use pem::{EncodeConfig, LineEnding, Pem, encode_config};

/// Mozilla's authorities, as PEM: what this build ships, whatever the machine has.
pub fn mozilla_roots() -> String {
    let lines = EncodeConfig::new().set_line_ending(LineEnding::LF);
    let roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter();
    roots.map(|der| encode_config(&Pem::new("CERTIFICATE", der.as_ref()), lines)).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_roots_are_certificates_each() {
        let roots = super::mozilla_roots();
        let parsed = pem::parse_many(&roots).unwrap();
        assert!(parsed.len() > 50, "{}", parsed.len());
        assert!(parsed.iter().all(|p| p.tag() == "CERTIFICATE"));
        assert_eq!(roots.matches("-----BEGIN CERTIFICATE-----\n").count(), parsed.len(), "each on a line");
    }
}
