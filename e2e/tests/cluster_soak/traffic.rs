//! A guarded agent that never rests: pages, prompts and event streams, all of them harmless.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use sallyport_e2e::client::{Answer, Call, End};
use sallyport_e2e::cluster::Pod;
use sallyport_e2e::messages::chat;

/// Bytes of the large prompts.
const LARGE: usize = 8 << 10;

/// How many calls there were, and what was wrong.
type Calls = (usize, Vec<String>);

/// Calls until it is stopped, each kind on a thread of its own.
pub(crate) struct Traffic {
    stop: Arc<AtomicBool>,
    threads: Vec<(&'static str, JoinHandle<Calls>)>,
}

impl Traffic {
    pub(crate) fn start(pod: &Pod, host: &str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let chat_url = format!("http://{host}/v1/chat/completions");
        let prompt = "Where is my order 1042? It left the warehouse on Monday and has not arrived. ";
        let large = prompt.repeat(LARGE / prompt.len());
        let ends = |answer: &Answer| answer.text().trim_end().ends_with("data: [DONE]");
        let threads = vec![
            ("pages", spawn(&stop, pod, Call::get(format!("http://{host}/api/orders")), |_| true)),
            (
                "prompts",
                spawn(&stop, pod, Call::post_json(&chat_url, &chat("demo", prompt, false)), |_| true),
            ),
            (
                "large prompts",
                spawn(&stop, pod, Call::post_json(&chat_url, &chat("demo", &large, false)), |_| true),
            ),
            (
                "event streams",
                spawn(&stop, pod, Call::post_json(&chat_url, &chat("demo", prompt, true)), ends),
            ),
        ];
        Self { stop, threads }
    }

    /// Ends it: how many calls of each kind there were, and what was wrong.
    pub(crate) fn stop(self) -> (Vec<(&'static str, usize)>, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let (mut counts, mut wrong) = (Vec::new(), Vec::new());
        for (kind, thread) in self.threads {
            let (calls, bad) = thread.join().unwrap();
            counts.push((kind, calls));
            wrong.extend(bad.into_iter().map(|w| format!("{kind}: {w}")));
        }
        (counts, wrong)
    }
}

fn spawn(
    stop: &Arc<AtomicBool>,
    pod: &Pod,
    call: Call,
    good: impl Fn(&Answer) -> bool + Send + 'static,
) -> JoinHandle<Calls> {
    let (stop, agent) = (Arc::clone(stop), pod.agent.clone());
    std::thread::spawn(move || {
        let (mut calls, mut wrong) = (0, Vec::new());
        while !stop.load(Ordering::Relaxed) {
            match agent.call(&call) {
                Ok(a) if a.status == 200 && a.end == End::Clean && good(&a) => {}
                Ok(a) => wrong.push(format!("{} {:?} {}", a.status, a.end, a.text())),
                Err(e) => wrong.push(e.to_string()),
            }
            calls += 1;
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        (calls, wrong)
    })
}
