//! The parts of an HTTP exchange that decisions depend on.

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
