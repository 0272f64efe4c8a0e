//! Certificates over a real TLS connection, through every phase of an authority's life, and the Secret's
//! keeper against a fake API server.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, RootCertStore};
use sallyport_operator::certs::authority::{ACTIVATION, Authority, LIFE, OVERLAP, bundle, next, signer};
use sallyport_operator::certs::{Certificates, mint, own, server_config};
use sallyport_operator::metrics::Metrics;
use sallyport_operator::serve::{Listener, bind, serve};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsConnector};

const NAME: &str = "op.ns.svc";
const SECOND: Duration = Duration::from_secs(1);

struct Server {
    address: SocketAddr,
    certificates: Certificates,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

async fn server(connections: usize) -> Server {
    let metrics = Metrics::new().unwrap();
    let certificates = Certificates::new(metrics.clone());
    let tls = TlsAcceptor::from(server_config(&certificates).unwrap());
    let socket = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = socket.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let router = Router::new().route("/", get(async || "ok"));
    let listener = Listener { name: "test", connections, streams: 8, idle: SECOND, drain: SECOND };
    let task = tokio::spawn(serve(socket, Some(tls), router, listener, metrics, stopped));
    Server { address, certificates, stop, task }
}

/// A client's clock.
#[derive(Debug)]
struct At(Timestamp);

impl rustls::time_provider::TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.as_second().try_into().unwrap())))
    }
}

/// Connects as a client that trusts this bundle, at this time.
async fn connect(address: SocketAddr, trusts: &str, name: &str, now: Timestamp) -> Result<(), String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(trusts.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_details(provider, Arc::new(At(now)))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.map(|_| ()).map_err(|e| e.to_string())
}

/// What a replica does at each look.
fn look(server: &Server, list: &[Authority], now: Timestamp) {
    let signs = signer(list, now).unwrap();
    let held = server.certificates.leaf();
    if held.is_none_or(|l| l.authority != Some(signs.created) || l.renews <= now) {
        let names = own::service_names("op", "ns");
        server.certificates.serve(mint::leaf(signs, &names, now).unwrap());
    }
}

fn make(now: Timestamp) -> Result<Authority, mint::MintError> {
    mint::authority(now)
}

#[tokio::test]
async fn a_client_that_reads_the_bundle_within_the_delay_connects_in_every_phase() {
    let server = server(64).await;
    let start: Timestamp = "2030-01-01T00:00:00Z".parse().unwrap();
    let mut now = start;
    let mut list = next(&[], now, false, make).unwrap().unwrap();
    look(&server, &list, now);
    // A client whose bundle is as old as the delay allows.
    let mut lagging = bundle(&list);
    let due = list[0].renews();
    let mut phases =
        vec![start, start + SignedDuration::from_hours(17), start + SignedDuration::from_hours(40)];
    let minute = SignedDuration::from_mins(1);
    phases.extend([due, due + minute, due + ACTIVATION - minute]);
    for phase in phases.drain(..) {
        now = phase;
        if let Some(changed) = next(&list, now, false, make).unwrap() {
            list = changed;
        }
        look(&server, &list, now);
        connect(server.address, &lagging, NAME, now).await.unwrap();
        connect(server.address, &bundle(&list), NAME, now).await.unwrap();
    }
    let old = lagging;
    lagging = bundle(&list);
    assert_eq!(list.len(), 2);
    for phase in [ACTIVATION, ACTIVATION + minute, ACTIVATION + OVERLAP, SignedDuration::from_hours(200)] {
        now = due + phase;
        if let Some(changed) = next(&list, now, false, make).unwrap() {
            list = changed;
        }
        look(&server, &list, now);
        connect(server.address, &lagging, NAME, now).await.unwrap();
        connect(server.address, &bundle(&list), NAME, now).await.unwrap();
        assert!(connect(server.address, &old, NAME, now).await.is_err(), "the successor signs");
    }
    assert_eq!(list.len(), 1);
    // After a whole life nothing of the first is needed.
    assert!(list[0].expires() > start + LIFE);
}

#[tokio::test]
async fn every_name_of_the_service_is_in_the_certificate_and_no_other() {
    let server = server(64).await;
    let now = Timestamp::now();
    let list = [make(now).unwrap()];
    look(&server, &list, now);
    for name in ["op.ns.svc", "op.ns.svc.cluster.local", "op.ns"] {
        connect(server.address, &bundle(&list), name, now).await.unwrap();
    }
    assert!(connect(server.address, &bundle(&list), "op.other.svc", now).await.is_err());
    let day = SignedDuration::from_hours(25);
    assert!(connect(server.address, &bundle(&list), NAME, now + day).await.is_err(), "a leaf lives a day");
}

#[tokio::test]
async fn without_a_certificate_handshakes_fail_and_the_listener_lives() {
    let server = server(64).await;
    let now = Timestamp::now();
    let list = [make(now).unwrap()];
    assert!(connect(server.address, &bundle(&list), NAME, now).await.is_err());
    assert!(!server.certificates.ready(now));
    look(&server, &list, now);
    connect(server.address, &bundle(&list), NAME, now).await.unwrap();
}

#[tokio::test]
async fn connections_above_the_cap_are_turned_away_and_the_stop_ends_the_listener() {
    let server = server(2).await;
    let now = Timestamp::now();
    let list = [make(now).unwrap()];
    look(&server, &list, now);
    let idle = [
        TcpStream::connect(server.address).await.unwrap(),
        TcpStream::connect(server.address).await.unwrap(),
    ];
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(connect(server.address, &bundle(&list), NAME, now).await.is_err());
    drop(idle);
    tokio::time::sleep(Duration::from_millis(100)).await;
    connect(server.address, &bundle(&list), NAME, now).await.unwrap();
    server.stop.send(true).unwrap();
    server.task.await.unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}
