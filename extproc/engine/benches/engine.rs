//! What the engine costs, on inputs of the shapes that other products publish figures for.
//!
//! `cargo bench -p sallyport-engine`. Records with their machine stand in `docs/benchmarks/`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a bench may stop at what it did not expect"
)]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use jiff::Timestamp;
use sallyport_api::AgentPolicySpec;
use sallyport_engine::{Decision, Engine, Protocol, RequestHead, ResponseHead, Surface};
use serde::Deserialize;

#[derive(Deserialize)]
struct Haystack {
    name: String,
    surface: Surface,
    text: String,
    wanted: String,
}

fn haystacks() -> Vec<Haystack> {
    include_str!("haystacks/peers.jsonl")
        .lines()
        .map(|l| serde_json::from_str::<Haystack>(l).unwrap())
        .map(|h| Haystack { text: h.text.replace("{+}", ""), ..h })
        .collect()
}

fn engine() -> Arc<Engine> {
    let mut spec = AgentPolicySpec::default();
    spec.egress.default = sallyport_api::DefaultAction::Allow;
    Arc::new(Engine::new(&spec).unwrap())
}

fn peers(c: &mut Criterion) {
    let engine = engine();
    let now = Timestamp::UNIX_EPOCH;
    for h in haystacks() {
        let mut group = c.benchmark_group("peers");
        group.throughput(Throughput::Bytes(h.text.len() as u64));
        let found = engine.scan_text(h.surface, &h.text, now).decision != Decision::Allow;
        match h.wanted.as_str() {
            "found" => assert!(found, "{} is not found", h.name),
            "clean" => assert!(!found, "{} is not clean", h.name),
            _ => {}
        }
        let json = h.text.starts_with('{');
        group.bench_function(&h.name, |b| {
            b.iter(|| {
                if json {
                    engine.scan_json(h.surface, black_box(h.text.as_bytes()), now)
                } else {
                    engine.scan_text(h.surface, black_box(&h.text), now)
                }
            });
        });
        group.finish();
    }
}

fn bodies(c: &mut Criterion) {
    let engine = engine();
    let head = RequestHead {
        method: "POST".into(),
        scheme: "https".into(),
        host: "api.example.org".into(),
        port: 443,
        path: "/v1/chat/completions".into(),
        headers: vec![
            ("content-type".into(), "application/json".into()),
            ("user-agent".into(), "bench/1".into()),
        ],
        ..RequestHead::default()
    };
    let now = Timestamp::UNIX_EPOCH;
    let mut group = c.benchmark_group("chat_request");
    group.bench_function("head", |b| b.iter(|| engine.request_head(black_box(&head), now)));
    let sentence = "Please summarise the delivery terms of order 4711 and list the open points in a table. ";
    for (kib, bytes) in [("0.5", 512), ("2", 2048), ("10", 10_240), ("100", 102_400)] {
        let text: String = sentence.chars().cycle().take(bytes - 80).collect();
        let body = format!(r#"{{"model":"gpt-4o-mini","messages":[{{"role":"user","content":"{text}"}}]}}"#);
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(format!("body_{kib}k"), |b| {
            b.iter(|| engine.request_body(&head, black_box(body.as_bytes()), now));
        });
    }
    group.finish();
    let events: Vec<String> = (0..100)
        .map(|i| {
            format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"word{i} \"}}}}]}}\n\n")
        })
        .collect();
    c.bench_function("stream/100_events", |b| {
        b.iter_batched(
            || engine.response_stream(&head, &ResponseHead::default(), &Protocol::Chat),
            |mut s| {
                for e in &events {
                    black_box(s.push(e.as_bytes(), false, now));
                }
            },
            BatchSize::SmallInput,
        );
    });
}

fn load(c: &mut Criterion) {
    c.bench_function("load/all_packs", |b| b.iter(engine));
}

criterion_group!(benches, peers, bodies, load);
criterion_main!(benches);
