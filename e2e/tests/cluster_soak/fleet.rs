//! Subscribers: guarded pods that run nowhere, their tokens, and the processes that speak for them.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};

use sallyport_e2e::cluster::{Namespace, SYSTEM, await_within, kubectl};
use serde_json::json;

use crate::DEADLINE;
use crate::api::{Api, each};

/// Streams that one process holds.
const A_PROCESS: usize = 100;

/// What the subscribers said so far. Times are microseconds since the epoch: one clock for all processes.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// When each bundle came, by digest.
    bundles: HashMap<String, Vec<u128>>,
    /// When streams began again.
    back: Vec<u128>,
    /// Why streams ended, or did not begin, and how often.
    ended: HashMap<String, usize>,
}

/// The processes; they end with this value.
pub(crate) struct Fleet {
    pub(crate) size: usize,
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

/// Pods that are guarded as any other and run nowhere, since no scheduler has that name; then they are said
/// to run, so that the policy's status counts them. What the operator needs of them is all there.
pub(crate) fn pods(api: &Api, namespace: &Namespace, size: usize) {
    let path = format!("/api/v1/namespaces/{}/pods", namespace.name);
    each(size, |i| {
        let mut pod = Namespace::agent_manifest(&format!("s{i}"));
        pod["spec"]["schedulerName"] = "nobody".into();
        let made = api.post(&path, &pod);
        assert_eq!(made["metadata"]["labels"]["sallyport.dev/guarded"], "true", "{made}");
        let running = json!({"status": {"phase": "Running"}});
        let answer = api.patch(&format!("{path}/s{i}/status"), &running).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    });
}

/// A token of each pod, bound to it, as the kubelet would ask for it.
pub(crate) fn tokens(api: &Api, namespace: &Namespace, size: usize) -> Vec<String> {
    let path = format!("/api/v1/namespaces/{}/serviceaccounts/default/token", namespace.name);
    each(size, |i| {
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": ["sallyport.dev"], "expirationSeconds": 7200,
                "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": format!("s{i}")}},
        });
        api.post(&path, &request)["status"]["token"].as_str().unwrap().to_owned()
    })
}

impl Fleet {
    /// Starts the processes, which subscribe at once.
    pub(crate) fn start(namespace: &Namespace, tokens: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The operator writes it into every namespace with guarded pods.
        let authorities = await_within(DEADLINE, "the trust ConfigMap", || {
            let map = namespace.kubectl(&["get", "configmap", "sallyport-trust", "-o", "json"]).ok()?.json();
            map["data"]["ca.crt"].as_str().map(str::to_owned)
        });
        std::fs::write(dir.path().join("ca.crt"), authorities).unwrap();
        let service = ["get", "service", "sallyport-operator", "-n", SYSTEM, "-o", "json"];
        let service = kubectl(&service).unwrap().json();
        let address = format!("{}:8443", service["spec"]["clusterIP"].as_str().unwrap());
        let heard = Arc::new(Mutex::new(Heard::default()));
        let begin = |(i, some): (usize, &[String])| process(dir.path(), i, some, &address, &heard);
        let children = tokens.chunks(A_PROCESS).enumerate().map(begin).collect();
        Self { size: tokens.len(), children, heard, _dir: dir }
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap()
    }

    /// When each subscriber got the bundle with this digest, in order.
    pub(crate) fn times(&self, digest: &str) -> Vec<u128> {
        let mut times = self.heard().bundles.get(digest).cloned().unwrap_or_default();
        times.sort_unstable();
        times
    }

    /// How many got the bundle with this digest.
    pub(crate) fn count(&self, digest: &str) -> usize {
        self.heard().bundles.get(digest).map_or(0, Vec::len)
    }

    /// Digests that were heard.
    pub(crate) fn digests(&self) -> Vec<String> {
        self.heard().bundles.keys().cloned().collect()
    }

    /// When streams began again since then, in order.
    pub(crate) fn back(&self, since: u128) -> Vec<u128> {
        let mut back: Vec<_> = self.heard().back.iter().copied().filter(|at| *at > since).collect();
        back.sort_unstable();
        back
    }

    /// Why streams ended or did not begin, most often first; and forgets it.
    pub(crate) fn ended(&self) -> Vec<(String, usize)> {
        let mut ended: Vec<_> = self.heard().ended.drain().collect();
        ended.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        ended
    }
}

fn process(dir: &Path, i: usize, tokens: &[String], address: &str, heard: &Arc<Mutex<Heard>>) -> Child {
    let file = dir.join(format!("tokens{i}"));
    std::fs::write(&file, tokens.join("\n")).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_sallyport-e2e-subscribers"))
        .args([address, &format!("sallyport-operator.{SYSTEM}.svc")])
        .args([&dir.join("ca.crt"), &file])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (out, heard) = (child.stdout.take().unwrap(), Arc::clone(heard));
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let mut heard = heard.lock().unwrap();
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["bundle", digest, at] => {
                    heard.bundles.entry(digest.to_owned()).or_default().push(at.parse().unwrap());
                }
                ["back", at] => heard.back.push(at.parse().unwrap()),
                ["ended", ref why @ ..] => *heard.ended.entry(why.join(" ")).or_default() += 1,
                _ => {}
            }
        }
    });
    child
}
