//! The command line. Every flag can be given by environment too.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;

/// The Sallyport operator: injects sidecars, hands them their policy, and reports what is enforced.
#[derive(Clone, Debug, Parser)]
#[command(name = "sallyport-operator", version)]
pub struct Args {
    /// The namespace the operator runs in.
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: String,
    /// The name of this replica's pod.
    #[arg(long, env = "POD_NAME")]
    pub pod_name: String,
    /// The Service by which the API server and the sidecars call.
    #[arg(long, env = "SALLYPORT_SERVICE", default_value = "sallyport-operator")]
    pub service: String,
    /// The name of both webhook configurations; the operator keeps their caBundle.
    #[arg(long, env = "SALLYPORT_WEBHOOK_CONFIG", default_value = "sallyport")]
    pub webhook_config: String,
    /// The file with the settings of injection, YAML.
    #[arg(long, env = "SALLYPORT_CONFIG", default_value = "/etc/sallyport/config.yaml")]
    pub config: PathBuf,
    /// Where admission is served, TLS.
    #[arg(long, env = "SALLYPORT_WEBHOOK_ADDR", default_value = "[::]:9443")]
    pub webhook_addr: SocketAddr,
    /// Where sidecars subscribe, TLS.
    #[arg(long, env = "SALLYPORT_DISCOVERY_ADDR", default_value = "[::]:8443")]
    pub discovery_addr: SocketAddr,
    /// Where metrics and probes are served, plain HTTP.
    #[arg(long, env = "SALLYPORT_METRICS_ADDR", default_value = "[::]:8080")]
    pub metrics_addr: SocketAddr,
    /// Serve tls.crt and tls.key of this directory and have clients trust its ca.crt; left out, the
    /// operator is its own authority.
    #[arg(long, env = "SALLYPORT_TLS_DIR")]
    pub tls_dir: Option<PathBuf>,
    /// What is logged: a level, or directives such as `info,kube=debug`.
    #[arg(long, env = "SALLYPORT_LOG_LEVEL", default_value = "info")]
    pub log_level: String,
}
