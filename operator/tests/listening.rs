//! The operator's own listener: the discovery service behind it, gRPC over HTTP/2 over TLS; and connections that
//! rest.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use common::FakeApi;
use jiff::Timestamp;
use sallyport_operator::certs::authority::bundle;
use sallyport_operator::certs::{Certificates, mint, own, server_config};
use sallyport_operator::metrics::Metrics;
use sallyport_operator::serve::{Listener, bind, serve};
use sallyport_operator::{discovery, index};
use sallyport_plan::inject::{Images, InjectSettings};
use sallyport_proto::discovery::DiscoveryClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

#[tokio::test]
async fn a_sidecar_reaches_discovery_through_the_listener_and_needs_a_token() {
    let metrics = Metrics::new().unwrap();
    let images = Images { extproc: "e".into(), envoy: "v".into(), capture: "c".into() };
    let settings = InjectSettings {
        images,
        image_pull_policy: None,
        image_pull_secrets: Vec::new(),
        cni: true,
        discovery: "https://op.ns.svc:8443".into(),
    };
    let client = FakeApi::default().client();
    let (index, _) = index::start(client.clone(), settings);
    let router = discovery::router(client, index.clone(), metrics.registry());

    let certificates = Certificates::new(metrics.clone());
    let now = Timestamp::now();
    let authority = mint::authority(now).unwrap();
    certificates.serve(mint::leaf(&authority, &own::service_names("op", "ns"), now).unwrap());
    let tls = TlsAcceptor::from(server_config(&certificates).unwrap());
    let socket = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = socket.local_addr().unwrap();
    let listener = Listener {
        name: "discovery",
        connections: 8,
        streams: 8,
        idle: Duration::from_secs(5),
        drain: Duration::from_secs(1),
    };
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(serve(socket, Some(tls), router, listener, metrics, stopped));

    let trust = Certificate::from_pem(bundle(&[authority]));
    let tls = ClientTlsConfig::new().ca_certificate(trust).domain_name("op.ns.svc");
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let refused = DiscoveryClient::new(channel).subscribe(tokio_stream::pending()).await.unwrap_err();
    assert!(matches!(refused.code(), Code::Unauthenticated | Code::Unavailable), "{refused:?}");

    index.shut_down();
    stop.send(true).unwrap();
    tokio::time::timeout(Duration::from_secs(5), serving).await.unwrap().unwrap().unwrap();
}

/// A listener without TLS whose HTTP/1.1 connections may rest for so long. It serves until the sender is gone.
async fn resting(idle: Duration) -> (SocketAddr, watch::Sender<bool>) {
    let socket = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = socket.local_addr().unwrap();
    let listener =
        Listener { name: "test", connections: 8, streams: 8, idle, drain: Duration::from_millis(100) };
    let (stop, stopped) = watch::channel(false);
    let router = Router::new().route("/", get(async || "ok"));
    tokio::spawn(serve(socket, None, router, listener, Metrics::new().unwrap(), stopped));
    (address, stop)
}

async fn ask(connection: &mut TcpStream) -> String {
    connection.write_all(b"GET / HTTP/1.1\r\nhost: op\r\n\r\n").await.unwrap();
    let mut answer = [0; 1024];
    let read = connection.read(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

/// The API server keeps its connections to a webhook for 90 s after the last review. One that is closed before
/// that, in the moment it is used again, fails the review with `broken pipe`.
#[tokio::test]
async fn a_connection_that_rests_is_closed_after_the_listeners_time_and_no_sooner() {
    let (address, _stop) = resting(Duration::from_secs(120)).await;
    let mut connection = TcpStream::connect(address).await.unwrap();
    assert!(ask(&mut connection).await.starts_with("HTTP/1.1 200"));
    // Longer than a handshake may take: that bound once closed resting connections, too.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(ask(&mut connection).await.starts_with("HTTP/1.1 200"));

    let (address, _stop) = resting(Duration::from_millis(100)).await;
    let mut connection = TcpStream::connect(address).await.unwrap();
    assert!(ask(&mut connection).await.starts_with("HTTP/1.1 200"));
    let end = tokio::time::timeout(Duration::from_secs(5), connection.read(&mut [0; 8])).await;
    assert_eq!(end.expect("closed").unwrap(), 0);
}
