//! The parts of an HTTP exchange, and of a question for a name, that decisions depend on.

use std::net::IpAddr;

/// Where the connection of a call leads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destination {
    /// Not known before the name is resolved: a call by way of the proxy or a base URL.
    #[default]
    Unknown,
    /// To an address of the host that the request names.
    Bound(Peer),
    /// To an address that the host does not have; the text says what was found out instead.
    Unbound(String),
    /// Whether it is one of the host's could not be found out; the sentence says why.
    Unresolved(String),
}

/// An address, and what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The address.
    pub address: IpAddr,
    /// Whether the name that leads to it is one of the cluster's own domain.
    pub of_cluster: bool,
    /// Whether it is the API server of the cluster.
    pub api_server: bool,
}

/// A name that is asked of the resolver.
#[derive(Clone, Copy, Debug)]
pub struct NameQuestion<'a> {
    /// The name that the policy is asked about: lower case, no dot at its end, no search domain.
    pub name: &'a str,
    /// The record type: `A`, `AAAA`, `TXT`, ...
    pub kind: &'a str,
    /// Whether the name is one of the cluster's own domain.
    pub of_cluster: bool,
    /// Whether names were asked faster than an agent needs them.
    pub too_fast: bool,
    /// Whether too many names below one domain were asked.
    pub too_many: bool,
    /// An address in the answer, once there is one.
    pub peer: Option<Peer>,
}

/// A request's head, as the client sent it and as it will be forwarded.
#[derive(Clone, Debug, Default)]
pub struct RequestHead {
    /// Method, in capitals.
    pub method: String,
    /// `http` or `https`: how the upstream is reached.
    pub scheme: String,
    /// Host without port, in lower case, without a trailing dot.
    pub host: String,
    /// Port of the upstream.
    pub port: u16,
    /// Path and query, as sent.
    pub path: String,
    /// Headers in order, names in lower case, without pseudo-headers.
    pub headers: Vec<(String, String)>,
    /// Where the connection leads.
    pub destination: Destination,
}

impl RequestHead {
    /// The first header of that name (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }
}

/// A response's head.
#[derive(Clone, Debug, Default)]
pub struct ResponseHead {
    /// HTTP status.
    pub status: u16,
    /// Headers in order, names in lower case, without pseudo-headers.
    pub headers: Vec<(String, String)>,
}

impl ResponseHead {
    /// The first header of that name (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
}
