//! The discovery service behind the operator's own listener: gRPC over HTTP/2 over TLS.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::FakeApi;
use jiff::Timestamp;
use sallyport_operator::certs::authority::bundle;
use sallyport_operator::certs::{Certificates, mint, own, server_config};
use sallyport_operator::metrics::Metrics;
use sallyport_operator::serve::{Listener, bind, serve};
use sallyport_operator::{discovery, index};
use sallyport_plan::inject::{Images, InjectSettings};
use sallyport_proto::discovery::DiscoveryClient;
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
    let service = discovery::service(client, index.clone(), metrics.registry());
    let router = tonic::service::Routes::new(service).into_axum_router();

    let certificates = Certificates::new(metrics.clone());
    let now = Timestamp::now();
    let authority = mint::authority(now).unwrap();
    certificates.serve(mint::leaf(&authority, &own::service_names("op", "ns"), now).unwrap());
    let tls = TlsAcceptor::from(server_config(&certificates).unwrap());
    let socket = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = socket.local_addr().unwrap();
    let listener = Listener { name: "discovery", connections: 8, streams: 8, drain: Duration::from_secs(1) };
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
