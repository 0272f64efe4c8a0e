#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use sallyport_proto::discovery::{
    Ack, Bundle, DiscoveryClient, Hello, Nack, Request, Response, SCHEMA, SubscribeRequest, SubscribeResponse,
};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::{Limits, PodIdentity, ReviewError, Reviewer, Verdict, served, subscribers};
use crate::index::tests::{Cluster, selecting};
use crate::metrics::Metrics;
use crate::serve::{Listener, serve};

/// Takes `NAME/UID` for the token of pod NAME in namespace `agents`.
#[derive(Clone, Default)]
struct Fake {
    asked: Arc<AtomicUsize>,
}

impl Reviewer for Fake {
    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Verdict, ReviewError>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        async move {
            Ok(match token.split_once('/') {
                _ if token == "down" => return Err(ReviewError::Timeout),
                Some((name, uid)) => Verdict::Pod(PodIdentity {
                    namespace: "agents".into(),
                    name: name.into(),
                    uid: uid.into(),
                }),
                None => Verdict::Rejected("not known"),
            })
        }
        .boxed()
    }
}

struct Operator {
    cluster: Cluster,
    fake: Fake,
    url: String,
    /// The server stops with it.
    _running: watch::Sender<bool>,
}

impl Operator {
    async fn start(limits: Limits) -> Self {
        let (cluster, fake) = (Cluster::new(), Fake::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = served(Box::new(fake.clone()), cluster.index.clone(), limits);
        let long = Duration::from_secs(60);
        let settings = Listener { name: "test", connections: 1_000, streams: 1_000, idle: long, drain: long };
        let (running, stopped) = watch::channel(false);
        tokio::spawn(serve(listener, None, router, settings, Metrics::new().unwrap(), stopped));
        Self { cluster, fake, url, _running: running }
    }

    async fn channel(&self) -> Channel {
        self.endpoint().connect().await.unwrap()
    }

    /// A connection from one of the loopback's other addresses.
    async fn channel_from(&self, address: &str) -> Channel {
        self.endpoint().local_address(Some(address.parse().unwrap())).connect().await.unwrap()
    }

    fn endpoint(&self) -> Endpoint {
        Channel::from_shared(self.url.clone()).unwrap()
    }

    async fn subscribe(&self, token: &str, hello: Hello) -> Result<Sidecar, Status> {
        Sidecar::subscribe(self.channel().await, token, hello).await
    }

    /// What the only subscriber looks like, once it looks as wanted.
    async fn sees(&self, wanted: impl Fn(&super::SubscriberView) -> bool) -> super::SubscriberView {
        let look = async {
            loop {
                match subscribers(&self.cluster.index).first() {
                    Some(one) if wanted(one) => return one.clone(),
                    _ => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), look).await.unwrap()
    }
}

#[derive(Debug)]
struct Sidecar {
    say: mpsc::Sender<SubscribeRequest>,
    hear: Streaming<SubscribeResponse>,
}

impl Sidecar {
    async fn subscribe(channel: Channel, token: &str, hello: Hello) -> Result<Self, Status> {
        let (say, said) = mpsc::channel(4);
        say.send(SubscribeRequest { kind: Some(Request::Hello(hello)) }).await.unwrap();
        let mut request = tonic::Request::new(ReceiverStream::new(said));
        if !token.is_empty() {
            request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let hear = DiscoveryClient::new(channel).subscribe(request).await?.into_inner();
        Ok(Self { say, hear })
    }

    async fn say(&self, kind: Request) {
        self.say.send(SubscribeRequest { kind: Some(kind) }).await.unwrap();
    }

    async fn ack(&self, bundle: &Bundle) {
        self.say(Request::Ack(Ack { digest: bundle.digest.clone() })).await;
    }

    async fn bundle(&mut self) -> Bundle {
        match self.next().await.unwrap().unwrap().kind.unwrap() {
            Response::Bundle(bundle) => bundle,
        }
    }

    async fn next(&mut self) -> Result<Option<SubscribeResponse>, Status> {
        tokio::time::timeout(Duration::from_secs(5), self.hear.message()).await.expect("nothing came")
    }

    async fn nothing_comes(&mut self) {
        let came = tokio::time::timeout(Duration::from_millis(150), self.hear.message()).await;
        assert!(came.is_err(), "{came:?}");
    }
}

fn hello() -> Hello {
    Hello { version: "0.1.0".into(), schema_least: 1, schema_most: SCHEMA, ..Hello::default() }
}

fn quick() -> Limits {
    Limits { pod: Duration::from_millis(100), hello: Duration::from_millis(200), ..Limits::default() }
}

/// An operator with one policy and one pod, `bot/1`.
async fn with_a_pod(limits: Limits) -> Operator {
    let operator = Operator::start(limits).await;
    operator.cluster.policy("p", 1, 1, &selecting("bot"));
    operator.cluster.pod("bot", "1", &json!({"app": "bot"}));
    operator
}

#[tokio::test]
async fn a_bundle_comes_whole_and_its_ack_is_recorded() {
    let operator = with_a_pod(quick()).await;
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    let bundle = sidecar.bundle().await;
    assert!(bundle.parts.iter().all(|p| p.content.is_some()));
    assert!(!operator.sees(|s| s.digest == bundle.digest).await.acked);
    sidecar.ack(&bundle).await;
    let seen = operator.sees(|s| s.acked).await;
    assert_eq!(
        (seen.pod.as_str(), seen.policy.as_deref(), seen.version.as_str()),
        ("bot", Some("p"), "0.1.0")
    );
    drop(sidecar);
    while !subscribers(&operator.cluster.index).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn only_parts_that_are_missing_are_sent() {
    let operator = with_a_pod(quick()).await;
    let mut first = operator.subscribe("bot/1", hello()).await.unwrap();
    let bundle = first.bundle().await;
    let held = vec![bundle.parts[0].digest.clone()];
    let mut second = operator.subscribe("bot/1", Hello { held, ..hello() }).await.unwrap();
    let again = second.bundle().await;
    assert_eq!(again.digest, bundle.digest);
    assert_eq!(again.parts[0].content, None);
    assert!(again.parts[1].content.is_some());
    // What this stream carried is not carried again: the kill switch is a message without a part.
    operator.cluster.namespace(&json!({"sallyport.dev/kill": "true"}));
    let killed = second.bundle().await;
    assert_eq!(killed.kill.unwrap().by, "namespace agents");
    assert!(killed.parts.iter().all(|p| p.content.is_none()));
}

#[tokio::test]
async fn what_is_in_force_already_is_not_sent_and_counts_as_acked() {
    let operator = with_a_pod(quick()).await;
    let digest = operator.subscribe("bot/1", hello()).await.unwrap().bundle().await.digest;
    let again = Hello { in_force: digest.clone(), ..hello() };
    let mut sidecar = operator.subscribe("bot/1", again).await.unwrap();
    sidecar.nothing_comes().await;
    assert_eq!(operator.sees(|s| s.acked).await.digest, digest);
}

#[tokio::test]
async fn a_nack_is_recorded_without_control_characters_and_the_next_bundle_is_whole() {
    let operator = with_a_pod(quick()).await;
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    let bundle = sidecar.bundle().await;
    let error = format!("\u{1b}[31mbad\n{}", "x".repeat(1_000));
    sidecar.say(Request::Nack(Nack { digest: bundle.digest.clone(), error })).await;
    let seen = operator.sees(|s| s.nack_error.is_some()).await;
    let error = seen.nack_error.unwrap();
    assert!(error.len() < 400 && !error.chars().any(char::is_control), "{error:?}");
    assert!(!seen.acked);
    operator.cluster.policy("p", 1, 2, &json!({"mode": "Observe"}));
    let next = sidecar.bundle().await;
    assert!(next.parts.iter().all(|p| p.content.is_some()));
    assert_eq!(operator.sees(|s| s.digest == next.digest).await.nack_error, None);
}

#[tokio::test]
async fn a_slow_sidecar_gets_the_newest_bundle_only() {
    let operator = with_a_pod(quick()).await;
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    sidecar.bundle().await;
    for generation in 2..6 {
        let body = 1 << (12 + generation);
        operator.cluster.policy("p", 1, generation, &json!({"limits": {"maxBodyBytes": body}}));
    }
    let mut generation = 0;
    while generation != 5 {
        generation = sidecar.bundle().await.policy.unwrap().generation;
    }
    sidecar.nothing_comes().await;
}

#[tokio::test]
async fn whoever_does_not_prove_itself_is_refused() {
    let operator = with_a_pod(quick()).await;
    for (token, code) in [
        ("", Code::Unauthenticated),
        ("nonsense", Code::Unauthenticated),
        ("down", Code::Unavailable),
        ("unknown/9", Code::PermissionDenied),
        ("bot/2", Code::PermissionDenied),
    ] {
        assert_eq!(operator.subscribe(token, hello()).await.unwrap_err().code(), code, "{token}");
    }
    assert!(subscribers(&operator.cluster.index).is_empty());
}

#[tokio::test]
async fn a_pod_that_the_watch_has_not_shown_yet_is_waited_for() {
    let operator = with_a_pod(Limits { pod: Duration::from_secs(5), ..quick() }).await;
    let early = operator.subscribe("late/2", hello());
    let pod = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        operator.cluster.pod("late", "2", &json!({"app": "bot"}));
    };
    let (sidecar, ()) = tokio::join!(early, pod);
    sidecar.unwrap().bundle().await;
}

#[tokio::test]
async fn a_storm_is_told_when_to_come_again_and_known_tokens_are_not_asked_about_twice() {
    let operator = with_a_pod(Limits { reviews_per_second: 2, ..quick() }).await;
    let mut refused = Vec::new();
    for i in 0..6 {
        let status = operator.subscribe(&format!("pod-{i}/9"), hello()).await.unwrap_err();
        if status.code() == Code::ResourceExhausted {
            refused.push(
                status.metadata().get("retry-after").unwrap().to_str().unwrap().parse::<u64>().unwrap(),
            );
        }
    }
    assert!(!refused.is_empty());
    assert!(refused.iter().all(|s| (1..=61).contains(s)), "{refused:?}");
    assert!(operator.fake.asked.load(Ordering::Relaxed) <= 4);
}

#[tokio::test]
async fn a_bad_token_is_asked_about_once() {
    let operator = with_a_pod(quick()).await;
    for _ in 0..5 {
        operator.subscribe("nonsense", hello()).await.unwrap_err();
    }
    assert_eq!(operator.fake.asked.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn made_up_tokens_use_up_the_reviews_of_the_address_they_come_from_alone() {
    const REVIEWS: u32 = 100;
    let operator = with_a_pod(Limits { reviews_per_second: REVIEWS, ..quick() }).await;
    let flood = operator.channel_from("127.0.0.2").await;
    let mut refused = Vec::new();
    for i in 0..300 {
        let status = Sidecar::subscribe(flood.clone(), &format!("made-up-{i}"), hello()).await.unwrap_err();
        match status.code() {
            Code::Unauthenticated => {}
            Code::ResourceExhausted => refused.push(status),
            other => panic!("{other:?}: {status:?}"),
        }
    }
    assert!(refused.len() > 200, "{}", refused.len());
    assert!(refused.iter().all(|s| s.message().contains("this address")), "{:?}", refused[0]);
    assert!(refused[0].metadata().get("retry-after").is_some());
    assert!(operator.fake.asked.load(Ordering::Relaxed) < REVIEWS as usize);
    // Its neighbours are let in at once.
    operator.subscribe("bot/1", hello()).await.unwrap().bundle().await;
}

#[tokio::test]
async fn a_stream_ends_when_it_is_old_with_its_pod_and_with_the_replica() {
    let operator = with_a_pod(Limits { life: Duration::from_millis(50), ..quick() }).await;
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    sidecar.bundle().await;
    assert_eq!(sidecar.next().await.unwrap_err().code(), Code::Unavailable);

    let operator = with_a_pod(quick()).await;
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    sidecar.bundle().await;
    operator.cluster.index.delete_pod("agents", "bot");
    assert_eq!(sidecar.next().await.unwrap_err().code(), Code::NotFound);

    let operator = with_a_pod(quick()).await;
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    sidecar.bundle().await;
    operator.cluster.index.shut_down();
    assert_eq!(sidecar.next().await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(operator.subscribe("bot/1", hello()).await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn a_stream_without_a_hello_ends() {
    let operator = with_a_pod(quick()).await;
    let (say, said) = mpsc::channel::<SubscribeRequest>(1);
    let mut request = tonic::Request::new(ReceiverStream::new(said));
    request.metadata_mut().insert("authorization", "Bearer bot/1".parse().unwrap());
    let mut hear =
        DiscoveryClient::new(operator.channel().await).subscribe(request).await.unwrap().into_inner();
    assert_eq!(hear.message().await.unwrap_err().code(), Code::DeadlineExceeded);
    drop(say);
}

#[tokio::test]
async fn what_breaks_the_protocol_ends_the_stream() {
    let operator = with_a_pod(quick()).await;
    for bad in [
        Request::Hello(hello()),
        Request::Ack(Ack { digest: "x".repeat(65) }),
        Request::Nack(Nack { digest: "\n".into(), error: String::new() }),
    ] {
        let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
        sidecar.bundle().await;
        sidecar.say(bad).await;
        assert_eq!(sidecar.next().await.unwrap_err().code(), Code::InvalidArgument);
    }
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    sidecar.bundle().await;
    let large = "x".repeat(super::LARGEST_MESSAGE + 1);
    sidecar.say(Request::Nack(Nack { digest: String::new(), error: large })).await;
    assert!(!matches!(sidecar.next().await, Ok(Some(_))));
}

#[tokio::test]
async fn a_sidecar_that_is_too_old_gets_nothing_and_is_known_for_it() {
    let operator = with_a_pod(quick()).await;
    let old = Hello { schema_least: SCHEMA + 1, schema_most: SCHEMA + 1, ..hello() };
    let mut sidecar = operator.subscribe("bot/1", old).await.unwrap();
    sidecar.nothing_comes().await;
    assert!(operator.sees(|s| s.too_old).await.policy.is_some());
}

#[tokio::test]
async fn a_pod_without_a_policy_stays_connected_and_gets_one_when_there_is_one() {
    let operator = Operator::start(quick()).await;
    operator.cluster.pod("bot", "1", &json!({"app": "bot"}));
    let mut sidecar = operator.subscribe("bot/1", hello()).await.unwrap();
    sidecar.nothing_comes().await;
    operator.cluster.policy("p", 1, 1, &selecting("bot"));
    assert_eq!(sidecar.bundle().await.policy.unwrap().name, "p");
}

/// The targets are for 1,000 and 5,000 pods on machines of their own; this shows that nothing is serial.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_sidecars_acknowledge_a_change_within_seconds() {
    const SIDECARS: usize = 200;
    let operator = Operator::start(Limits { reviews_per_second: 1_000, ..Limits::default() }).await;
    operator.cluster.policy("p", 1, 1, &selecting("bot"));
    let channel = operator.channel().await;
    for i in 0..SIDECARS {
        operator.cluster.pod(&format!("bot-{i}"), &i.to_string(), &json!({"app": "bot"}));
    }
    let begin = |i: usize| {
        let channel = channel.clone();
        async move {
            let mut sidecar = Sidecar::subscribe(channel, &format!("bot-{i}/{i}"), hello()).await.unwrap();
            let bundle = sidecar.bundle().await;
            sidecar.ack(&bundle).await;
            sidecar
        }
    };
    let sidecars = join_all((0..SIDECARS).map(begin)).await;
    for mut sidecar in sidecars {
        tokio::spawn(async move {
            while let Ok(Some(SubscribeResponse { kind: Some(Response::Bundle(bundle)) })) =
                sidecar.hear.message().await
            {
                sidecar.ack(&bundle).await;
            }
        });
    }
    operator.cluster.namespace(&json!({"sallyport.dev/kill": "true"}));
    let all = async {
        while subscribers(&operator.cluster.index).iter().filter(|s| s.acked).count() < SIDECARS {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), all).await.expect("all acknowledge");
}
