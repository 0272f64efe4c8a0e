//! Certificates over delta ADS, by a real gRPC client on a real socket.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;

use jiff::Timestamp;
use sallyport_api::Mode;
use sallyport_extproc::tls::{Authority, Minter, Tls};
use sallyport_proto::secrets::{
    AggregatedDiscoveryServiceClient, DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest,
    SECRET_TYPE,
};
use support::*;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

fn rig(mode: Mode, names: usize) -> Rig {
    let (authority, _) = Authority::make(Timestamp::now()).unwrap();
    let tls = Tls::new(Minter::new(authority).unwrap()).most_names(names);
    Rig::serving(Words::with(mode, 1 << 20), Arc::default(), |_| {}, |server| server.with_tls(tls))
}

/// Envoy's side of the stream.
struct Ads {
    send: mpsc::Sender<DeltaDiscoveryRequest>,
    answers: Streaming<DeltaDiscoveryResponse>,
}

impl Ads {
    async fn open(rig: &Rig) -> Result<Self, Status> {
        let mut client = AggregatedDiscoveryServiceClient::new(channel(&rig.dir.path().join("s")).await);
        let (send, messages) = mpsc::channel(16);
        let answers = client.delta_aggregated_resources(ReceiverStream::new(messages)).await?.into_inner();
        Ok(Self { send, answers })
    }

    async fn ask(&self, kind: &str, subscribe: &[&str], unsubscribe: &[&str]) {
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        let request = DeltaDiscoveryRequest {
            type_url: kind.to_owned(),
            resource_names_subscribe: names(subscribe),
            resource_names_unsubscribe: names(unsubscribe),
            ..DeltaDiscoveryRequest::default()
        };
        self.send.send(request).await.unwrap();
    }

    async fn answer(&mut self) -> Result<DeltaDiscoveryResponse, Status> {
        let answer = tokio::time::timeout(DEADLINE, self.answers.message()).await.expect("an answer in time");
        Ok(answer?.expect("the stream never ends well"))
    }

    /// Names that came and names that were taken away.
    async fn names(&mut self) -> (Vec<String>, Vec<String>) {
        let answer = self.answer().await.unwrap();
        assert_eq!(answer.type_url, SECRET_TYPE);
        (answer.resources.into_iter().map(|r| r.name).collect(), answer.removed_resources)
    }
}

fn list(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

#[tokio::test]
async fn a_name_gets_a_certificate_and_one_that_is_refused_is_taken_away_and_recorded() {
    let rig = rig(Mode::Enforce, 10);
    let mut ads = Ads::open(&rig).await.unwrap();
    ads.ask(SECRET_TYPE, &["a.test", "block.test", "-", "10.0.0.1"], &[]).await;
    assert_eq!(ads.names().await, (list(&["a.test"]), list(&["block.test", "-", "10.0.0.1"])));
    let lines = ["request block policy_denied", "request block bad_url", "request block bad_url"];
    assert_eq!(rig.memory.lines(), lines);
}

#[tokio::test]
async fn in_observe_a_name_that_would_be_refused_gets_one_too() {
    let rig = rig(Mode::Observe, 10);
    let mut ads = Ads::open(&rig).await.unwrap();
    ads.ask(SECRET_TYPE, &["block.test", "-"], &[]).await;
    assert_eq!(ads.names().await, (list(&["block.test"]), list(&["-"])));
}

#[tokio::test]
async fn a_judge_that_panics_mints_nothing() {
    let rig = rig(Mode::Enforce, 10);
    let mut ads = Ads::open(&rig).await.unwrap();
    ads.ask(SECRET_TYPE, &["panic.test"], &[]).await;
    assert_eq!(ads.names().await, (vec![], list(&["panic.test"])));
    ads.ask(SECRET_TYPE, &["a.test"], &[]).await;
    assert_eq!(ads.names().await.0, ["a.test"]);
}

#[tokio::test]
async fn the_oldest_name_goes_for_a_new_one_and_unsubscribed_ones_count_no_more() {
    let rig = rig(Mode::Enforce, 2);
    let mut ads = Ads::open(&rig).await.unwrap();
    ads.ask(SECRET_TYPE, &["a.test", "b.test"], &[]).await;
    assert_eq!(ads.names().await, (list(&["a.test", "b.test"]), vec![]));
    ads.ask(SECRET_TYPE, &["c.test"], &[]).await;
    assert_eq!(ads.names().await, (list(&["c.test"]), list(&["a.test"])));
    ads.ask(SECRET_TYPE, &["d.test"], &["b.test"]).await;
    assert_eq!(ads.names().await, (list(&["d.test"]), vec![]));
}

#[tokio::test]
async fn nothing_but_secrets_is_served_and_only_by_delta() {
    let rig = rig(Mode::Enforce, 10);
    let mut ads = Ads::open(&rig).await.unwrap();
    ads.ask("type.googleapis.com/envoy.config.cluster.v3.Cluster", &["x"], &[]).await;
    assert_eq!(ads.answer().await.unwrap_err().code(), Code::InvalidArgument);

    let mut client = AggregatedDiscoveryServiceClient::new(channel(&rig.dir.path().join("s")).await);
    let (_send, messages) = mpsc::channel::<DiscoveryRequest>(1);
    let whole = client.stream_aggregated_resources(ReceiverStream::new(messages)).await;
    assert_eq!(whole.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_server_without_an_authority_serves_none() {
    let rig = Rig::start(Words::with(Mode::Enforce, 1 << 20));
    let refused = Ads::open(&rig).await.err().unwrap();
    assert_eq!(refused.code(), Code::Unimplemented);
}

/// Its stream stays open for ever; a shutdown must not wait for it.
#[tokio::test]
async fn shutting_down_ends_the_stream_by_an_error_at_once() {
    let mut rig = rig(Mode::Enforce, 10);
    let mut ads = Ads::open(&rig).await.unwrap();
    ads.ask(SECRET_TYPE, &["a.test"], &[]).await;
    ads.names().await;
    rig.shut_down();
    assert_eq!(ads.answer().await.unwrap_err().code(), Code::Unavailable);
    tokio::time::timeout(DEADLINE, &mut rig.served).await.unwrap().unwrap().unwrap();
}
