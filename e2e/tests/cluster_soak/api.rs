//! The API server without kubectl's own start: a thousand objects, and times that are the cluster's alone.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sallyport_e2e::client::{Answer, Body, Call};
use serde_json::Value;

use crate::DEADLINE;

/// Calls that are under way at once. The API server has two cores, and shares them.
const AT_ONCE: usize = 8;
/// The pause before what was turned away is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// `kubectl proxy`, which adds the credentials. It ends with this value.
pub(crate) struct Api {
    proxy: Child,
    address: SocketAddr,
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

impl Api {
    pub(crate) fn start() -> Self {
        let program = std::env::var("SALLYPORT_KUBECTL").unwrap_or_else(|_| "kubectl".into());
        let mut proxy =
            Command::new(program).args(["proxy", "--port=0"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(proxy.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().parse();
        Self { proxy, address: address.unwrap_or_else(|e| panic!("{e}: {line}")) }
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        let answer = Call::get(self.url(path)).send().unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    /// Creates something; fails if the API server does not. What a webhook that is busy, or that does not know
    /// the policy yet, turns away is said, and tried again, as any controller does.
    pub(crate) fn post(&self, path: &str, object: &Value) -> Value {
        let call = Call::post_json(self.url(path), object);
        let start = Instant::now();
        let mut answer = call.send().unwrap();
        while start.elapsed() < DEADLINE && (answer.status == 500 || answer.text().contains("NoPolicy")) {
            println!("{path}: {}", answer.json()["message"]);
            std::thread::sleep(AGAIN);
            answer = call.send().unwrap();
        }
        assert!((200..300).contains(&answer.status), "{path}: {}", answer.text());
        answer.json()
    }

    /// A merge patch, and what came of it.
    pub(crate) fn patch(&self, path: &str, patch: &Value) -> std::io::Result<Answer> {
        Call::new("PATCH", self.url(path))
            .header("content-type", "application/merge-patch+json")
            .body(Body::Sized(patch.to_string().into()))
            .send()
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

/// Does something for each number below `n`, several at once; the results in order.
pub(crate) fn each<T: Send>(n: usize, act: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                return done;
            }
            done.push((i, act(i)));
        }
    };
    let mut all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, value)| value).collect()
}
