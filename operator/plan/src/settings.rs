//! What the rendering needs to know besides the policy.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

/// Where Envoy listens, what it writes, and how much it may hold.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory of both unix sockets. Its path plus the socket's name must fit the kernel's 107 bytes.
    pub run_dir: PathBuf,
    /// The node's id in Envoy's logs.
    pub node_id: String,
    /// The explicit HTTP proxy; none if every caller uses a base URL.
    pub proxy: Option<ProxyListener>,
    /// Listeners that each stand for one upstream.
    pub base_urls: Vec<BaseUrl>,
    /// Ports on the loopback that are the sidecar's too, so that no call may lead to them.
    pub own_ports: Vec<u16>,
    /// How long Envoy waits for each answer of the filter; raised to [`Settings::LEAST_MESSAGE_TIMEOUT`].
    pub message_timeout: Duration,
    /// Where the access log goes.
    pub access_log: AccessLog,
    /// What Envoy's buffers hold above `limits.maxBodyBytes`.
    pub buffer_headroom_bytes: u32,
    /// Connections from agents, over all listeners.
    pub max_connections: u32,
    /// Calls in flight; each holds one gRPC stream to the filter for its whole life.
    pub max_calls: u32,
    /// Whether TLS that comes through the proxy is opened for inspection. The filter's process must have an
    /// authority to mint certificates by; without it every handshake fails.
    pub intercept_tls: bool,
    /// PEM file with the authorities that upstream certificates are checked against.
    pub ca_bundle: PathBuf,
}

impl Settings {
    /// The least [`Settings::message_timeout`]. Envoy's own default, and the point below which a worker
    /// that the scheduler kept waiting is taken for a filter that hangs.
    pub const LEAST_MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);
    /// The default of [`Settings::message_timeout`]: several times the slowest scan of a body of 1 MiB.
    pub const DEFAULT_MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

    /// Settings with the defaults of a laptop: no listener yet, the access log on standard output.
    pub fn new(run_dir: impl Into<PathBuf>) -> Self {
        Self {
            run_dir: run_dir.into(),
            node_id: "sallyport".into(),
            proxy: None,
            base_urls: Vec::new(),
            own_ports: Vec::new(),
            message_timeout: Self::DEFAULT_MESSAGE_TIMEOUT,
            access_log: AccessLog::Stdout,
            // One read of Envoy's (16 KiB) can overshoot; four are generous and still cheap.
            buffer_headroom_bytes: 64 << 10,
            // One agent's connections. A hundred times what an agent with its tools opens.
            max_connections: 5_000,
            // More than the connections, since one HTTP/2 connection carries many calls.
            max_calls: 20_000,
            intercept_tls: false,
            ca_bundle: PathBuf::from("/etc/ssl/certs/ca-certificates.crt"),
        }
    }

    /// The socket on which the filter's process serves ext_proc.
    pub fn extproc_socket(&self) -> PathBuf {
        self.run_dir.join("extproc.sock")
    }

    /// The socket on which Envoy's admin interface listens.
    pub fn admin_socket(&self) -> PathBuf {
        self.run_dir.join("admin.sock")
    }
}

/// The explicit HTTP proxy, for clients that know `http_proxy`.
#[derive(Clone, Debug)]
pub struct ProxyListener {
    /// Address to listen on.
    pub address: IpAddr,
    /// Port to listen on.
    pub port: u16,
}

impl ProxyListener {
    /// A proxy on the loopback.
    pub const fn loopback(port: u16) -> Self {
        Self { address: IpAddr::V4(Ipv4Addr::LOCALHOST), port }
    }
}

/// A listener that stands for one upstream: the agent is given its URL as the API's base URL.
#[derive(Clone, Debug)]
pub struct BaseUrl {
    /// Port to listen on, on the loopback.
    pub port: u16,
    /// Where the calls go.
    pub upstream: Upstream,
}

/// An upstream, as a URL without a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// How it is reached.
    pub scheme: Scheme,
    /// Name or address, in lower case, IPv6 without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

/// How an upstream is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// In clear.
    Http,
    /// Over TLS, its certificate checked against the CA bundle and the host name.
    Https,
}

impl Scheme {
    /// The scheme as it stands in a URL.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    /// The port that a URL of this scheme means without naming one.
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

impl Upstream {
    /// `https://host:port`, the port always named.
    pub fn url(&self) -> String {
        format!("{}://{}:{}", self.scheme.as_str(), self.bracketed(), self.port)
    }

    /// The authority as a client would send it: the port only where it is not the scheme's own.
    pub(crate) fn authority(&self) -> String {
        if self.port == self.scheme.default_port() {
            self.bracketed()
        } else {
            format!("{}:{}", self.bracketed(), self.port)
        }
    }

    fn bracketed(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() }
    }
}

impl std::str::FromStr for Upstream {
    type Err = String;

    /// Reads `http://host[:port]` or `https://host[:port]`; a path, a user or a query is an error, because
    /// it would be dropped silently.
    fn from_str(url: &str) -> Result<Self, String> {
        let (scheme, rest) = if let Some(rest) = url.strip_prefix("https://") {
            (Scheme::Https, rest)
        } else if let Some(rest) = url.strip_prefix("http://") {
            (Scheme::Http, rest)
        } else {
            return Err(format!("`{url}` does not start with http:// or https://"));
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#', '@']) {
            return Err(format!("`{url}` holds more than scheme, host and port"));
        }
        let (host, port) = match rest.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => {
                (host, port.parse().map_err(|_| format!("`{port}` in `{url}` is not a port"))?)
            }
            _ => (rest, scheme.default_port()),
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || port == 0 {
            return Err(format!("`{url}` names no host or port"));
        }
        Ok(Self { scheme, host: host.to_ascii_lowercase(), port })
    }
}

/// Where the access log goes.
#[derive(Clone, Debug, Default)]
pub enum AccessLog {
    /// Standard output.
    #[default]
    Stdout,
    /// A file, appended to.
    File(PathBuf),
    /// Nowhere.
    Off,
}
