//! The names of servers: which one a connection was opened to, and which ones can have a certificate.

use sallyport_engine::RequestHead;
use sallyport_proto::ext_proc::ProcessingRequest;

use crate::head::{attribute, authority_parts};

/// What Envoy's listener asks for where the client named no server. Envoy's configuration says the same.
const NO_SERVER_NAME: &str = "-";
/// The attribute with the name from the client's first message; Envoy writes it in lower case.
const SNI: &str = "connection.requested_server_name";
/// The attribute with the destination of the CONNECT that a connection came through.
const CONNECT: &str = "filter_state['sallyport.connect']";

/// What a listener's requests come through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inside {
    /// Nothing: clear HTTP. CONNECT would take its bytes out of our sight.
    #[default]
    Clear,
    /// Nothing: clear HTTP. CONNECT leads into [`Inside::Tunnel`].
    Proxy,
    /// TLS, inside a tunnel that was opened by CONNECT.
    Tunnel,
}

impl Inside {
    /// Reads what the listener says of itself.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "connect" => Some(Self::Proxy),
            "tunnel" => Some(Self::Tunnel),
            _ => None,
        }
    }

    /// Whether it was TLS.
    pub(crate) const fn is_tls(self) -> bool {
        matches!(self, Self::Tunnel)
    }
}

/// The servers that a request's connection was opened to, as Envoy saw it; nothing the request itself says.
#[derive(Debug, Default)]
pub struct OpenedTo {
    /// The name in the TLS handshake; `None` where the connection is none of TLS.
    server_name: Option<String>,
    /// Host and port of CONNECT, as they came; `None` where no tunnel was opened.
    connect: Option<String>,
}

impl OpenedTo {
    /// Reads the first message of an exchange. What is missing there agrees with no request.
    pub(crate) fn read(message: &ProcessingRequest, inside: Inside) -> Self {
        let text = |name| Some(attribute(message, name).unwrap_or_default().to_owned());
        match inside {
            Inside::Clear | Inside::Proxy => Self::default(),
            Inside::Tunnel => Self { server_name: text(SNI), connect: text(CONNECT) },
        }
    }

    /// Whether the request is for the server that its connection was opened to.
    pub(crate) fn agree(&self, request: &RequestHead) -> bool {
        let name = self.server_name.as_ref().is_none_or(|n| n.eq_ignore_ascii_case(&request.host));
        let tunnel = self.connect.as_ref().is_none_or(|to| {
            authority_parts(to).is_some_and(|(host, port)| host == request.host && port == Some(request.port))
        });
        name && tunnel
    }
}

/// The name as policies and certificates have it, or `None` where no server is called so. Addresses are no
/// names (RFC 6066).
pub(crate) fn server_name(name: &str) -> Option<String> {
    let (host, port) = authority_parts(name)?;
    let honest = port.is_none()
        && name != NO_SERVER_NAME
        && !name.starts_with('[')
        && host.parse::<std::net::Ipv4Addr>().is_err()
        && host.len() == name.len();
    honest.then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(host: &str, port: u16) -> RequestHead {
        RequestHead { host: host.into(), port, ..RequestHead::default() }
    }

    #[test]
    fn all_names_of_a_request_s_server_must_agree() {
        let opened = |sni: &str, connect: &str| OpenedTo {
            server_name: Some(sni.into()),
            connect: Some(connect.into()),
        };
        assert!(OpenedTo::default().agree(&request("a.test", 80)));
        assert!(opened("a.test", "A.test:443").agree(&request("a.test", 443)));
        assert!(opened("A.test", "a.test.:8443").agree(&request("a.test", 8443)));
        for (sni, connect) in [
            ("b.test", "a.test:443"),
            ("a.test", "b.test:443"),
            ("a.test", "a.test:80"),
            ("a.test", "a.test"),
            ("a.test", ""),
            ("", "a.test:443"),
        ] {
            assert!(!opened(sni, connect).agree(&request("a.test", 443)), "{sni} {connect}");
        }
    }

    #[test]
    fn what_envoy_does_not_tell_agrees_with_no_request() {
        let silent = OpenedTo::read(&ProcessingRequest::default(), Inside::Tunnel);
        assert!(!silent.agree(&request("a.test", 443)));
        let clear = OpenedTo::read(&ProcessingRequest::default(), Inside::Proxy);
        assert!(clear.agree(&request("a.test", 443)));
    }

    #[test]
    fn only_names_of_servers_are_names() {
        assert_eq!(server_name("API.example.com").as_deref(), Some("api.example.com"));
        assert_eq!(server_name("my_svc").as_deref(), Some("my_svc"));
        for name in [
            "-",
            "",
            ".",
            "a.test.",
            "a.test:443",
            "10.0.0.1",
            "[::1]",
            "127.1",
            "a b",
            "*.a",
            "a/b",
            "ä.test",
        ] {
            assert_eq!(server_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_listener_of_another_version_is_not_understood() {
        assert_eq!(Inside::parse("connect"), Some(Inside::Proxy));
        assert_eq!(Inside::parse("tunnel"), Some(Inside::Tunnel));
        assert_eq!(Inside::parse("captured, perhaps"), None);
    }
}
