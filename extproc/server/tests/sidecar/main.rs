//! The sidecar as it runs in a pod, against an operator that is small and honest: what is in force, when,
//! and what is said about it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/mod.rs"]
mod support;

mod operator;
mod pod;

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use operator::*;
use pod::Pod;
use sallyport_proto::discovery::{ENVOY_PART, POLICY_PART, Part};
use serde_json::json;
use support::{Call, line, refusal_json, request_body, request_headers, response_body, response_headers};
use tonic::Status;
use tonic::metadata::{MetadataMap, MetadataValue};

/// What a call to this host gets: `passes`, or the code of its refusal.
async fn outcome(pod: &Pod, host: &str) -> String {
    let mut call = Call::open(&pod.socket(), &[]).await;
    let answer = call.ask(request_headers(&[(":authority", host)], true)).await;
    if line(&answer).starts_with("refused") {
        return refusal_json(&answer)["error"]["code"].as_str().unwrap().to_owned();
    }
    "passes".to_owned()
}

async fn outcome_becomes(pod: &Pod, host: &str, expected: &str) -> Duration {
    let start = Instant::now();
    pod.wait(&format!("{host}: {expected}"), async || outcome(pod, host).await == expected).await;
    start.elapsed()
}

async fn started() -> (Authority, Operator, Pod) {
    let authority = Authority::new();
    let operator = Operator::start(&authority).await;
    let pod = Pod::start(&operator, &authority);
    (authority, operator, pod)
}

#[tokio::test]
async fn a_pod_without_its_capture_rules_gets_no_bundle_and_says_why() {
    let authority = Authority::new();
    let operator = Operator::start(&authority).await;
    let mut pod = Pod::new(&operator, &authority);
    // This machine has no such rules.
    pod.run_with(&["--captured"]);
    operator.offer(allowing("a.test"));
    pod.up().await;
    assert_eq!(pod.metric("sallyport_capture_missing").await, Some(1.0));
    // Long enough for a bundle, had it asked for one.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (status, why) = pod.probe().await;
    assert!(status == 1 && why.contains("not captured") && why.contains("delete the pod"), "{status} {why}");
    assert_eq!(pod.http("/ready").await.0, 503);
    assert_eq!(pod.http("/ready/envoy").await.0, 503);
    assert_eq!(outcome(&pod, "a.test").await, "no_bundle");
    assert!(operator.hellos().is_empty(), "the operator was asked");
}

#[tokio::test]
async fn nothing_passes_before_the_first_bundle_and_then_it_is_enforced() {
    let (_, operator, pod) = started().await;
    pod.up().await;
    assert_eq!(outcome(&pod, "a.test").await, "no_bundle");
    let (status, why) = pod.probe().await;
    assert!(status == 1 && why.contains("no bundle is in force"), "{status} {why}");
    assert_eq!(pod.http("/ready").await.0, 503);

    let bundle = allowing("a.test");
    operator.offer(bundle.clone());
    operator.acked(&bundle).await;
    pod.ready().await;
    assert_eq!(outcome(&pod, "a.test").await, "passes");
    assert_eq!(outcome(&pod, "b.test").await, "egress_denied");
    assert_eq!(pod.http("/ready").await.0, 200);
    let (status, why) = pod.http("/ready/envoy").await;
    assert!(status == 503 && why.contains("admin socket"), "{status} {why}");
    let written = std::fs::read_to_string(pod.path("run/envoy.json")).unwrap();
    assert_eq!(written, r#"{"node":{"id":"x"}}"#);
    assert!(pod.path("run/lds.json").exists());

    let hello = operator.hellos()[0].1.clone();
    assert_eq!((hello.schema_least, hello.schema_most), (1, 1));
    assert!(hello.held.is_empty() && hello.in_force.is_empty() && !hello.version.is_empty());
    assert_eq!(pod.metric("sallyport_discovery_connected").await, Some(1.0));
    assert_eq!(pod.metric("sallyport_bundle_generation").await, Some(7.0));
    assert_eq!(pod.metric("sallyport_discovery_bundles_total{outcome=\"ack\"}").await, Some(1.0));
}

#[tokio::test]
async fn what_is_not_what_its_digest_says_is_refused_and_the_old_stays() {
    let (_, operator, pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;

    let mut forged = allowing("b.test");
    forged.digest = "0".repeat(64);
    operator.offer(forged.clone());
    assert!(operator.nacked(&forged).await.contains("another digest"));

    let mut altered = allowing("c.test");
    altered.parts[0].content = Some(spec("evil.test").to_string().into());
    operator.offer(altered.clone());
    assert!(operator.nacked(&altered).await.contains("`policy`"));

    let mut newer = allowing("d.test");
    newer.schema = 9;
    let newer = sealed(newer);
    operator.offer(newer.clone());
    assert!(operator.nacked(&newer).await.contains("schema 9"));

    assert_eq!(outcome(&pod, "a.test").await, "passes");
    assert_eq!(outcome(&pod, "evil.test").await, "egress_denied");
    assert_eq!(operator.hellos().len(), 1, "on one stream");
}

#[tokio::test]
async fn what_can_t_be_loaded_is_refused_with_its_fault_and_the_old_stays() {
    let (_, operator, pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;
    let envoy = json!({"bootstrap": {}, "listeners": {}});
    for (spec, envoy, fault) in [
        (json!({"cedar": {"policies": "permit(principal, nonsense"}}), &envoy, "cedar"),
        (json!({"egres": {}}), &envoy, "egres"),
        (json!({"egress": {"rules": [{"hosts": [], "action": "Allow"}]}}), &envoy, "hosts"),
        (spec("x.test"), &json!({"bootstrap": 1}), "the part `envoy`"),
    ] {
        let bad = bundle(&spec, envoy);
        operator.offer(bad.clone());
        let error = operator.nacked(&bad).await;
        assert!(error.to_lowercase().contains(fault), "{error}");
        assert_eq!(outcome(&pod, "a.test").await, "passes");
    }
    let next = allowing("b.test");
    operator.offer(next.clone());
    operator.acked(&next).await;
    assert_eq!(outcome(&pod, "b.test").await, "passes");
}

#[tokio::test]
async fn a_restart_without_any_operator_enforces_what_was_enforced() {
    let (_, mut operator, mut pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;
    let dead = killed(good.clone());
    for (offer, expected) in [(None, "passes"), (Some(dead), "killed")] {
        if let Some(offer) = offer {
            operator.offer(offer.clone());
            operator.acked(&offer).await;
        }
        operator.stop().await;
        assert_eq!(outcome(&pod, "a.test").await, expected, "also while it runs on");
        pod.kill().await;
        pod.run();
        pod.ready().await;
        assert_eq!(outcome(&pod, "a.test").await, expected);
        assert_ne!(outcome(&pod, "b.test").await, "passes");
        operator.restart(&Authority::new()).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(outcome(&pod, "a.test").await, expected, "an operator of another authority is none");
        operator.stop().await;
        // The first round's authority signs again.
        let authority = Authority::new();
        pod.trust(&[&authority]);
        operator.restart(&authority).await;
        operator
            .wait_for("to be found again", |t| matches!(t.last(), Some(Told::Hello(_) | Told::Ack(_))))
            .await;
    }
}

#[tokio::test]
async fn a_damaged_state_is_put_aside_and_the_next_bundle_counts() {
    let (_, mut operator, mut pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;
    operator.stop().await;
    pod.kill().await;
    let kept = pod.path("state/bundle.pb");
    let mut bytes = std::fs::read(&kept).unwrap();
    let at = bytes.windows(6).position(|w| w == b"a.test").unwrap();
    bytes[at] = b'e';
    std::fs::write(&kept, bytes).unwrap();
    pod.run();
    pod.up().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(pod.probe().await.0, 1);
    assert_eq!(outcome(&pod, "a.test").await, "no_bundle");
    assert!(pod.path("state/bundle.corrupt.pb").exists() && !kept.exists());
    let authority = Authority::new();
    pod.trust(&[&authority]);
    operator.restart(&authority).await;
    pod.ready().await;
    assert_eq!(outcome(&pod, "a.test").await, "passes");
}

#[tokio::test]
async fn the_kill_switch_blocks_within_a_second_also_what_is_under_way_and_is_reversible() {
    let (_, operator, pod) = started().await;
    let mut observing = spec("a.test");
    observing["mode"] = json!("Observe");
    let envoy = json!({"bootstrap": {}, "listeners": {}});
    for alive in [allowing("a.test"), bundle(&observing, &envoy)] {
        operator.offer(alive.clone());
        operator.acked(&alive).await;

        // One waits for its response, one is being streamed, one has not begun.
        let headers = || request_headers(&[(":authority", "a.test")], false);
        let mut waiting = Call::open(&pod.socket(), &[]).await;
        waiting.ask(headers()).await;
        waiting.ask(request_body("hello", true)).await;
        let mut streaming = Call::open(&pod.socket(), &[]).await;
        streaming.ask(headers()).await;
        streaming.ask(request_body("hello", true)).await;
        streaming.ask(response_headers(&[("content-type", "text/event-stream")], false)).await;
        streaming.ask(response_body("data: one\n\n", false)).await;
        let mut fresh = Call::open(&pod.socket(), &[]).await;

        let dead = killed(alive.clone());
        let start = Instant::now();
        operator.offer(dead.clone());
        for call in [&mut waiting, &mut streaming] {
            let answer = call.next().await.expect("an answer").expect("no error, which Envoy may let pass");
            assert_eq!(refusal_json(&answer)["error"]["code"], "killed");
            assert!(refusal_json(&answer).to_string().contains("namespace agents"));
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let answer = fresh.ask(headers()).await;
        assert_eq!(refusal_json(&answer)["error"]["code"], "killed");
        operator.acked(&dead).await;
        assert_eq!(outcome(&pod, "b.test").await, "killed");
        assert_eq!(pod.probe().await.0, 0, "it is ready, to block");

        operator.offer(alive.clone());
        assert!(outcome_becomes(&pod, "a.test", "passes").await < Duration::from_secs(5));
    }
    let name = "sallyport_decisions_total{decision=\"block\",direction=\"response\",enforced=\"true\",reason=\"killed\"}";
    assert_eq!(pod.metric(name).await, Some(4.0), "of both that were under way, twice");
    assert!(pod.log().contains("\"code\":\"killed\""));
}

#[tokio::test]
async fn the_kill_switch_of_a_bundle_that_can_t_be_loaded_blocks_all_the_same() {
    let (_, mut operator, mut pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;
    let broken = killed(bundle(&json!({"egres": {}}), &json!({"bootstrap": {}, "listeners": {}})));
    operator.offer(broken.clone());
    operator.nacked(&broken).await;
    assert_eq!(outcome(&pod, "a.test").await, "killed");
    operator.end_streams();
    operator
        .wait_for("a second stream", |t| t.iter().filter(|t| matches!(t, Told::Hello(_))).count() == 2)
        .await;
    assert_eq!(operator.hellos()[1].1.in_force, killed(good.clone()).digest, "what is in force, by its name");
    // Reversed by one that can't be loaded either: what was in force still is, and it is asked for again.
    let alive = bundle(&json!({"egres": {}}), &json!({"bootstrap": {}, "listeners": {}}));
    operator.offer(alive.clone());
    operator.nacked(&alive).await;
    assert_eq!(outcome(&pod, "a.test").await, "killed");
    operator.end_streams();
    operator
        .wait_for("a third stream", |t| t.iter().filter(|t| matches!(t, Told::Hello(_))).count() == 3)
        .await;
    assert_eq!(operator.hellos()[2].1.in_force, "");
    operator.stop().await;
    pod.kill().await;
    pod.run();
    pod.ready().await;
    assert_eq!(outcome(&pod, "a.test").await, "killed", "after a restart too");
}

#[tokio::test]
async fn an_operator_with_a_new_authority_is_followed_once_the_file_names_it() {
    let (old, mut operator, pod) = started().await;
    let first = allowing("a.test");
    operator.offer(first.clone());
    operator.acked(&first).await;
    let new = Authority::new();
    // Both for a while, as the operator does it.
    pod.trust(&[&old, &new]);
    operator.stop().await;
    operator.restart(&new).await;
    let second = allowing("b.test");
    operator.offer(second.clone());
    operator.acked(&second).await;
    assert_eq!(outcome(&pod, "b.test").await, "passes");
}

#[tokio::test]
async fn a_token_that_the_kubelet_replaced_is_used_on_the_next_stream() {
    let authority = Authority::new();
    let operator = Operator::start(&authority).await;
    let mut pod = Pod::new(&operator, &authority);
    std::fs::write(pod.path("identity/token"), "old").unwrap();
    pod.run();
    pod.wait("to be turned away", async || operator.strangers() > 0).await;
    std::fs::write(pod.path("identity/token"), TOKEN).unwrap();
    let bundle = allowing("a.test");
    operator.offer(bundle.clone());
    operator.acked(&bundle).await;
}

#[tokio::test]
async fn who_is_asked_to_stay_away_does_and_says_what_it_holds_when_it_comes_back() {
    let authority = Authority::new();
    let operator = Operator::start(&authority).await;
    let mut metadata = MetadataMap::new();
    metadata.insert("retry-after", MetadataValue::from_static("2"));
    operator.turn_away(Status::with_metadata(tonic::Code::ResourceExhausted, "too many", metadata));
    let start = Instant::now();
    let pod = Pod::start(&operator, &authority);
    let bundle = allowing("a.test");
    operator.offer(bundle.clone());
    operator.acked(&bundle).await;
    assert!(operator.hellos()[0].0 - start > Duration::from_secs(2));

    // The stream ends as the half hour ends it.
    operator.end_streams();
    operator
        .wait_for("a second stream", |t| t.iter().filter(|t| matches!(t, Told::Hello(_))).count() == 2)
        .await;
    assert_eq!(outcome(&pod, "a.test").await, "passes", "with no gap");
    let hello = operator.hellos()[1].1.clone();
    assert_eq!(hello.in_force, bundle.digest);
    for part in &bundle.parts {
        assert!(hello.held.contains(&part.digest));
    }
    operator.wait_for("a second ack", |t| t.iter().filter(|t| matches!(t, Told::Ack(_))).count() == 2).await;
    assert_eq!(operator.sent().len(), 2, "each part once");

    // Another policy, with the same configuration of Envoy.
    let next = allowing("b.test");
    operator.offer(next.clone());
    operator.acked(&next).await;
    assert_eq!(operator.sent().len(), 3);
    assert_eq!(outcome(&pod, "b.test").await, "passes");
}

#[tokio::test]
async fn a_part_that_is_believed_to_be_held_and_is_not_is_asked_for_again() {
    let (_, operator, pod) = started().await;
    let whole = allowing("a.test");
    let mut thin = whole.clone();
    for part in &mut thin.parts {
        part.content = None;
    }
    operator.offer(thin);
    assert!(operator.nacked(&whole).await.contains("is not held"));
    operator.offer(whole.clone());
    operator.acked(&whole).await;
    assert!(operator.hellos().iter().all(|(_, hello)| hello.held.is_empty()));
    assert_eq!(outcome(&pod, "a.test").await, "passes");
}

#[tokio::test]
async fn parts_of_no_known_name_are_refused() {
    let (_, operator, _pod) = started().await;
    let mut bundle = allowing("a.test");
    bundle.parts.push(operator::part("dns", &json!({})));
    let bundle = sealed(bundle);
    operator.offer(bundle.clone());
    assert!(operator.nacked(&bundle).await.contains("`dns`"));
    assert!(bundle.parts.iter().map(|p: &Part| p.name.as_str()).eq([POLICY_PART, ENVOY_PART, "dns"]));
}

#[tokio::test]
async fn of_many_bundles_the_newest_is_what_counts() {
    let (_, operator, pod) = started().await;
    for i in 0..30 {
        operator.offer(allowing(&format!("host-{i}.test")));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let last = allowing("last.test");
    operator.offer(last.clone());
    operator.acked(&last).await;
    assert_eq!(outcome(&pod, "last.test").await, "passes");
    assert_eq!(operator.told().last(), Some(&Told::Ack(last.digest)));
}

#[tokio::test]
async fn neither_token_nor_payload_is_logged_at_any_level() {
    let (_, operator, pod) = started().await;
    let bundle = allowing("a.test");
    operator.offer(bundle.clone());
    operator.acked(&bundle).await;
    let mut call = Call::open(&pod.socket(), &[]).await;
    call.ask(request_headers(&[(":authority", "a.test"), ("x-own", "hdr-payload-1")], false)).await;
    call.ask(request_body("body-payload-2", true)).await;
    drop(call);
    assert_eq!(outcome(&pod, "b.test").await, "egress_denied");
    let log = pod.log();
    assert!(log.lines().any(|l| l.contains("\"in force\"") && l.contains(&bundle.digest)), "{log}");
    let verdict = log.lines().filter(|l| l.contains("egress_denied")).count();
    assert_eq!(verdict, 1, "one line per refused message");
    let ours = |l: &&str| serde_json::from_str::<serde_json::Value>(l).is_ok();
    assert_eq!(log.lines().filter(ours).count(), log.lines().count(), "nothing but JSON lines");
    assert!(!log.contains(TOKEN));
    for secret in ["hdr-payload-1", "body-payload-2"] {
        let lines: Vec<&str> = log.lines().filter(|l| l.contains(secret)).collect();
        assert!(lines.is_empty(), "{secret}: {lines:?}");
    }
}

#[tokio::test]
async fn idle_and_greedy_scrapers_don_t_keep_the_filter_from_answering() {
    let (_, operator, pod) = started().await;
    let bundle = allowing("a.test");
    operator.offer(bundle.clone());
    operator.acked(&bundle).await;
    let mut idle = Vec::new();
    for _ in 0..64 {
        idle.push(tokio::net::TcpStream::connect(("127.0.0.1", pod.metrics_port)).await.unwrap());
    }
    assert_eq!(outcome(&pod, "a.test").await, "passes");
    pod.ready().await;
    // Their time runs out, one lot after the other.
    let start = Instant::now();
    assert_eq!(pod.http("/metrics").await.0, 200);
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    assert_eq!(pod.http("/").await.0, 404);
    // Both families, where there are two: a pod of a cluster of IPv6 alone has no other address.
    if let Ok(local) = std::net::TcpListener::bind("[::1]:0") {
        drop(local);
        drop(tokio::net::TcpStream::connect(("::1", pod.metrics_port)).await.unwrap());
    }
}

#[tokio::test]
async fn who_sits_on_the_port_for_metrics_does_not_keep_the_filter_from_running() {
    let authority = Authority::new();
    let operator = Operator::start(&authority).await;
    let mut pod = Pod::new(&operator, &authority);
    let squatter = std::net::TcpListener::bind(("127.0.0.1", pod.metrics_port)).unwrap();
    pod.run();
    let bundle = allowing("a.test");
    operator.offer(bundle.clone());
    operator.acked(&bundle).await;
    pod.ready().await;
    assert_eq!(outcome(&pod, "a.test").await, "passes");
    drop(squatter);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(pod.http("/ready").await.0, 200);
}

#[tokio::test]
async fn a_fault_that_passes_is_tried_again_while_the_bundle_is_the_newest() {
    let (_, operator, pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;

    // What is written first can't be: a directory is in its way.
    let obstacle = pod.path("state/.bundle.pb.new");
    std::fs::create_dir(&obstacle).unwrap();
    let next = allowing("b.test");
    operator.offer(next.clone());
    assert!(operator.nacked(&next).await.contains("can't be kept"));
    assert_eq!(outcome(&pod, "a.test").await, "passes", "what was in force still is");
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let nacks = operator.told().iter().filter(|t| matches!(t, Told::Nack(..))).count();
    assert_eq!(nacks, 1, "said once");
    std::fs::remove_dir(&obstacle).unwrap();
    operator.acked(&next).await;
    assert_eq!(outcome(&pod, "b.test").await, "passes");
    assert_eq!(operator.hellos().len(), 1, "on the same stream");

    // One that another took the place of is not tried again.
    std::fs::create_dir(&obstacle).unwrap();
    let late = allowing("c.test");
    operator.offer(late.clone());
    operator.nacked(&late).await;
    let newest = bundle(&json!({"egres": {}}), &json!({"bootstrap": {}, "listeners": {}}));
    operator.offer(newest.clone());
    operator.nacked(&newest).await;
    std::fs::remove_dir(&obstacle).unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(outcome(&pod, "b.test").await, "passes");
    assert_eq!(outcome(&pod, "c.test").await, "egress_denied");
}

#[tokio::test]
async fn listeners_that_a_silent_envoy_did_not_take_are_given_to_it_once_it_speaks() {
    let (_, operator, pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;
    // It accepts connections, and never answers.
    let socket = tokio::net::UnixListener::bind(pod.path("run/admin.sock")).unwrap();
    let listeners = json!({"version_info": "2", "resources": []});
    let next = bundle(&spec("b.test"), &json!({"bootstrap": {"node": {"id": "x"}}, "listeners": listeners}));
    operator.offer(next.clone());
    assert!(operator.nacked(&next).await.contains("did not take the listeners"));
    assert_eq!(outcome(&pod, "a.test").await, "passes");
    // Gone: the next one begins with the file.
    drop(socket);
    std::fs::remove_file(pod.path("run/admin.sock")).unwrap();
    operator.acked(&next).await;
    assert_eq!(outcome(&pod, "b.test").await, "passes");
}

/// What the agent can send to the metrics port, the one port of the filter's that it reaches.
#[tokio::test]
async fn bent_requests_to_the_metrics_port_are_answered_or_closed() {
    let (_, operator, pod) = started().await;
    let good = allowing("a.test");
    operator.offer(good.clone());
    operator.acked(&good).await;
    let port = pod.metrics_port;
    let bent = tokio::task::spawn_blocking(move || {
        let seeds = ["/metrics", "/ready", "/ready/envoy"].map(|path| {
            format!("GET {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}")
                .into_bytes()
        });
        let words =
            ["\r\n", "transfer-encoding: chunked\r\n", "expect: 100-continue\r\n", "PRI * HTTP/2.0\r\n"];
        let words = words.map(|word| word.as_bytes().to_vec());
        sallyport_fuzz::fuzz("metrics", &seeds, &words, |bytes| {
            let start = Instant::now();
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).map_err(|e| e.to_string())?;
            // A peer that has closed already is an answer.
            if stream.write_all(bytes).is_ok() {
                let _ = stream.shutdown(std::net::Shutdown::Write);
            }
            let _ = stream.read_to_end(&mut Vec::new());
            if start.elapsed() > Duration::from_secs(5) { Err("it hangs".to_owned()) } else { Ok(()) }
        });
    });
    bent.await.unwrap();
    assert_eq!(pod.http("/ready").await.0, 200);
    assert_eq!(outcome(&pod, "a.test").await, "passes");
    assert!(!pod.log().contains("panicked"));
}
