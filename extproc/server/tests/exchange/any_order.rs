//! Messages in any order, as no Envoy sends them: what must hold even then.

use proptest::prelude::*;

use super::*;

/// Every kind of message, harmless and not. `BLOCK` comes whole and in two parts.
fn messages() -> Vec<ProcessingRequest> {
    vec![
        request_headers(&[], true),
        request_headers(&[], false),
        request_headers(&[("content-length", "10")], false),
        request_headers(&[("content-encoding", "gzip")], false),
        request_headers(&[("x", "BLOCK")], false),
        request_headers(&[("upgrade", "websocket")], false),
        request_body("fine", true),
        request_body("fine", false),
        request_body("BLOCK", true),
        request_body("REDACT SECRET", true),
        request_trailers(&[("x", "y")]),
        request_trailers(&[("x", "BLOCK")]),
        response_headers(&[], true),
        response_headers(&[], false),
        response_headers(&[("content-type", "text/event-stream")], false),
        response_headers(&[("content-length", "10")], false),
        response_headers(&[("content-encoding", "gzip")], false),
        response_headers(&[(":status", "101")], false),
        response_body("fine\n", false),
        response_body("BLO", false),
        response_body("CK\n", false),
        response_body("REDACT SECRET\n", true),
        response_body("", true),
        response_body(gzip("BLOCK"), true),
        response_trailers(&[("x", "y")]),
        response_trailers(&[("x", "BLOCK")]),
    ]
}

/// The message's text, for what it would be to let it pass as it came.
fn text(message: &ProcessingRequest) -> String {
    format!("{:?}", message.request)
}

/// Mostly begun as an exchange begins, or it would end before it has.
fn any_order() -> impl Strategy<Value = Vec<usize>> {
    let rest = prop::collection::vec(0..messages().len(), 0..8);
    (prop::option::weighted(0.9, 0..4_usize), rest)
        .prop_map(|(first, rest)| first.into_iter().chain(rest).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn enforce_lets_nothing_forbidden_pass_and_nothing_at_all_after_a_refusal(
        order in any_order()
    ) {
        let table = messages();
        let mut b = Bench::enforce();
        let (mut over, mut forwarded, came) = (false, String::new(), order.len());
        for i in order {
            let message = table[i].clone();
            let sent = text(&message);
            let mut step = b.exchange.take(message);
            if let Step::Judge(work) = step {
                prop_assert!(!b.settled(), "settled while a verdict is out");
                step = b.exchange.judged(work.run());
            }
            let answers: Vec<ProcessingResponse> = match step {
                Step::Answer(answer) => vec![*answer],
                Step::AnswerTwice(answers) => (*answers).into(),
                Step::Wait => vec![],
                Step::Fail(_) => { over = true; break }
                step => panic!("not in Enforce: {step:?}"),
            };
            prop_assert!(!over || answers.is_empty(), "answered after a refusal");
            for answer in &answers {
                let line = line(answer);
                if line.starts_with("refused") {
                    over = true;
                } else if let Some((_, emitted)) = line.split_once(" emit=") {
                    forwarded += emitted;
                } else if !line.contains(" body=") {
                    prop_assert!(!sent.contains("BLOCK") && !sent.contains("SECRET"), "{line} lets pass {sent}");
                }
            }
            prop_assert!(!forwarded.contains("BLOCK") && !forwarded.contains("SECRET"), "{forwarded}");
        }
        prop_assert!(!over || b.settled());
        let Bench { exchange, budget, memory } = b;
        drop(exchange);
        prop_assert_eq!(budget.used(), 0);
        prop_assert!(came == 0 || !memory.all().is_empty(), "whatever came left a record");
    }

    #[test]
    fn observe_answers_everything_and_changes_nothing(
        order in any_order()
    ) {
        let table = messages();
        let mut b = Bench::observe();
        for i in order {
            let answers = b.take(table[i].clone());
            prop_assert_eq!(answers.len(), 1);
            let line = &answers[0];
            let kind = line.split(" mode=").next().unwrap();
            prop_assert!(!kind.contains(['+', '-', '=']) && !kind.starts_with("refused"), "{line}");
        }
        let Bench { exchange, budget, .. } = b;
        drop(exchange);
        prop_assert_eq!(budget.used(), 0);
    }
}
