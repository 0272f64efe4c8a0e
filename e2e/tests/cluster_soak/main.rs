//! The operator under many subscribers: real processes, each stream with a token bound to its own pod.
//!
//! `make soak` runs it against the cluster of `make cluster`. The numbers it prints belong into the record;
//! what it asserts are deadlines at five times the target.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sallyport_e2e::cluster::{Namespace, SYSTEM, await_within, kubectl, kubectl_input, usual_spec};
use sallyport_e2e::subscribers::micros;
use serde_json::{Value, json};

/// Subscribers, and the processes that hold them.
const SUBSCRIBERS: usize = 1000;
const PROCESSES: usize = 10;
/// A change is acknowledged by all within this at the 99th percentile; the deadline is five times that.
const ACK_TARGET: Duration = Duration::from_secs(1);
/// After a restart of all replicas, everyone has acknowledged within this; a deadline, not five times it,
/// because the design states it as one.
const RETURN_DEADLINE: Duration = Duration::from_secs(300);

#[derive(Default)]
struct Heard {
    /// Microseconds since the epoch at which each subscriber got a bundle of this digest.
    bundles: Vec<(String, u128)>,
    ended: Vec<String>,
    again: usize,
}

struct Fleet {
    children: Vec<Child>,
    heard: Arc<Mutex<Heard>>,
    _dir: tempfile::TempDir,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Pods that exist but run nowhere: no scheduler of that name exists. What the operator needs of them is
/// their identity.
fn pods(namespace: &Namespace) {
    let pod = |i: usize| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("s{i}"), "labels": {"sallyport.dev/guarded": "true", "app": "fleet"}},
            "spec": {"schedulerName": "nobody", "automountServiceAccountToken": false,
                "containers": [{"name": "c", "image": "localhost/none"}]},
        })
    };
    let items: Vec<_> = (0..SUBSCRIBERS).map(pod).collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    kubectl_input(&["create", "-n", &namespace.name, "-f", "-"], &list.to_string()).unwrap();
}

/// A token of each pod, bound to it.
fn tokens(namespace: &Namespace) -> Vec<String> {
    let token = |i: usize| {
        let name = format!("s{i}");
        let args = [
            "create",
            "token",
            "default",
            "--audience",
            "sallyport.dev",
            "--bound-object-kind",
            "Pod",
            "--bound-object-name",
            &name,
            "--duration",
            "3600s",
        ];
        namespace.kubectl(&args).unwrap().stdout.trim().to_owned()
    };
    let share = SUBSCRIBERS / 8;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|t| scope.spawn(move || (t * share..(t + 1) * share).map(token).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    })
}

fn fleet(tokens: &[String]) -> Fleet {
    let dir = tempfile::tempdir().unwrap();
    let trust = kubectl(&["get", "configmap", "sallyport-trust", "-n", SYSTEM, "-o", "json"])
        .or_else(|_| kubectl(&["get", "configmap", "sallyport-trust", "-A", "-o", "json"]))
        .unwrap()
        .json();
    let trust = if trust["items"].is_array() { trust["items"][0].clone() } else { trust };
    let authorities = dir.path().join("ca.crt");
    std::fs::write(&authorities, trust["data"]["ca.crt"].as_str().unwrap()).unwrap();
    let service =
        kubectl(&["get", "service", "sallyport-operator", "-n", SYSTEM, "-o", "json"]).unwrap().json();
    let address = format!("{}:8443", service["spec"]["clusterIP"].as_str().unwrap());
    let heard = Arc::new(Mutex::new(Heard::default()));
    let children = tokens
        .chunks(SUBSCRIBERS / PROCESSES)
        .enumerate()
        .map(|(i, some)| start(dir.path(), i, some, &address, &authorities, &heard))
        .collect();
    Fleet { children, heard, _dir: dir }
}

fn start(
    dir: &Path,
    i: usize,
    tokens: &[String],
    address: &str,
    ca: &PathBuf,
    heard: &Arc<Mutex<Heard>>,
) -> Child {
    let file = dir.join(format!("tokens{i}"));
    std::fs::File::create(&file).unwrap().write_all(tokens.join("\n").as_bytes()).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_sallyport-e2e-subscribers"))
        .args([address, &format!("sallyport-operator.{SYSTEM}.svc")])
        .args([ca, &file])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (out, heard) = (child.stdout.take().unwrap(), Arc::clone(heard));
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let mut heard = heard.lock().unwrap();
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["bundle", digest, at] => heard.bundles.push((digest.to_owned(), at.parse().unwrap_or(0))),
                ["again"] => heard.again += 1,
                ["ended", ..] => heard.ended.push(line.clone()),
                _ => {}
            }
        }
    });
    child
}

impl Fleet {
    /// When each subscriber got the bundle with this digest.
    fn times(&self, digest: &str) -> Vec<u128> {
        let heard = self.heard.lock().unwrap();
        heard.bundles.iter().filter(|(d, _)| d == digest).map(|(_, at)| *at).collect()
    }

    fn ended(&self) -> Vec<String> {
        self.heard.lock().unwrap().ended.clone()
    }
}

/// Resident memory of every replica, in MiB, from the node's own processes.
fn operator_memory() -> Vec<u64> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        let read = |file: &str| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        if read("cmdline").starts_with("/sallyport-operator\0") {
            let rss = read("status").lines().find_map(|l| l.strip_prefix("VmRSS:").map(str::to_owned));
            all.extend(
                rss.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).map(|kb| kb >> 10),
            );
        }
    }
    all
}

fn digest(namespace: &Namespace) -> String {
    namespace.status("usual")["digest"].as_str().unwrap_or_default().to_owned()
}

fn percentile(sorted: &[u128], percent: usize) -> u128 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

fn change(namespace: &Namespace, to: u32) -> (String, u128) {
    let before = digest(namespace);
    let mut spec: Value = usual_spec();
    spec["limits"] = json!({"maxBodyBytes": to});
    let at = micros();
    namespace.policy("usual", &spec).unwrap();
    let new = await_within(Duration::from_secs(30), "a new digest", || {
        let now = digest(namespace);
        (now != before && !now.is_empty()).then_some(now)
    });
    (new, at)
}

#[test]
fn a_thousand_subscribers_acknowledge_a_change_and_come_back_after_a_restart() {
    let namespace = Namespace::enabled("fleet");
    namespace.usual_policy();
    pods(&namespace);
    let start = Instant::now();
    let tokens = tokens(&namespace);
    println!("{} tokens after {:?}", tokens.len(), start.elapsed());
    let first = await_within(Duration::from_secs(60), "a digest", || {
        Some(digest(&namespace)).filter(|d| !d.is_empty())
    });
    let start = Instant::now();
    let fleet = fleet(&tokens);
    await_within(RETURN_DEADLINE, "every subscriber has the first bundle", || {
        (fleet.times(&first).len() >= SUBSCRIBERS).then_some(())
    });
    println!("all subscribed after {:?}; memory {:?} MiB", start.elapsed(), operator_memory());

    for round in 1..=5_u32 {
        let (new, at) = change(&namespace, (1 << 20) + round);
        await_within(ACK_TARGET * 30, "everyone got the change", || {
            (fleet.times(&new).len() >= SUBSCRIBERS).then_some(())
        });
        let mut took: Vec<_> = fleet.times(&new).iter().map(|t| t.saturating_sub(at) / 1000).collect();
        took.sort_unstable();
        let (p50, p99) = (percentile(&took, 50), percentile(&took, 99));
        println!(
            "change {round}: p50 {p50} ms, p99 {p99} ms after kubectl began; memory {:?} MiB",
            operator_memory()
        );
        assert!(p99 < ACK_TARGET.as_millis() * 5, "p99 {p99} ms");
    }
    await_within(Duration::from_secs(30), "status counts them", || {
        let status = namespace.status("usual");
        let n: usize = status["enforced"].as_str()?.split('/').next()?.parse().ok()?;
        // Pods that run nowhere are not counted as running.
        (n <= SUBSCRIBERS).then_some(())
    });

    let start = Instant::now();
    kubectl(&["delete", "pods", "-n", SYSTEM, "-l", "app.kubernetes.io/name=sallyport-operator", "--now"])
        .unwrap();
    let (new, _) = change(&namespace, 2 << 20);
    await_within(RETURN_DEADLINE, "everyone is back", || {
        (fleet.times(&new).len() >= SUBSCRIBERS).then_some(())
    });
    println!(
        "all back {:?} after every replica was deleted; {} streams ended meanwhile; memory {:?} MiB",
        start.elapsed(),
        fleet.ended().len(),
        operator_memory()
    );
}
