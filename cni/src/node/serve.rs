//! Answers the plugin.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sallyport_plan::capture::nft_rules;
use sallyport_plan::inject::cni_capture;

use super::pages::Metrics;
use super::rules::{self, Counter};
use crate::conf::code;
use crate::wire::{self, Command, Reply, Request};

/// Requests at once. A node starts pods a few at a time.
const MOST_AT_ONCE: usize = 64;
/// Pods whose counters are read; Kubernetes supports 110 on a node, some run 500.
const MOST_PODS: usize = 1024;
/// How long a plugin may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// A pod whose rules were written since the daemon started.
struct Captured {
    namespace: String,
    pod: String,
    /// Held open for the counters. The kernel keeps the namespace until DEL lets it go.
    netns: Arc<OwnedFd>,
}

/// Listens for the plugin.
pub struct Server {
    listener: UnixListener,
    busy: AtomicUsize,
    pods: Mutex<BTreeMap<String, Captured>>,
    metrics: Arc<Metrics>,
}

// === impl Server ===

impl Server {
    /// Listens at a path, in a directory that is made if need be. Root's alone: who may connect may write rules.
    pub fn bind(path: &Path, metrics: Arc<Metrics>) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700))?;
        }
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, busy: AtomicUsize::new(0), pods: Mutex::default(), metrics })
    }

    /// Answers for ever.
    pub fn serve(self: &Arc<Self>) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "accepting");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            if self.busy.fetch_add(1, Ordering::Relaxed) >= MOST_AT_ONCE {
                self.busy.fetch_sub(1, Ordering::Relaxed);
                continue; // Closed unanswered: the plugin says "later".
            }
            let server = Arc::clone(self);
            std::thread::spawn(move || {
                let place = Place(&server.busy);
                server.answer(stream);
                drop(place);
            });
        }
    }

    fn answer(&self, mut stream: UnixStream) {
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let (request, netns): (Request, _) = match wire::receive(&mut stream) {
            Ok(got) => got,
            Err(error) => {
                tracing::warn!(%error, "a request that can't be read");
                let reply = Reply::Failed { code: code::DECODE, message: format!("the request: {error}") };
                let _ = wire::send(&mut stream, &reply, None);
                return;
            }
        };
        let reply = self.execute(&request, netns);
        let outcome = match &reply {
            Reply::Done => "done",
            Reply::Failed { code, message } => {
                tracing::warn!(
                    namespace = request.namespace,
                    pod = request.pod,
                    command = ?request.command,
                    code,
                    error = message,
                    "failed"
                );
                "failed"
            }
        };
        self.metrics.request(request.command, outcome);
        let _ = wire::send(&mut stream, &reply, None);
    }

    fn execute(&self, request: &Request, netns: Option<OwnedFd>) -> Reply {
        let result = match request.command {
            Command::Add => self.add(request, netns),
            Command::Check => check(netns),
            Command::Del => {
                self.pods().remove(&request.container_id);
                Ok(())
            }
            Command::Gc => {
                self.pods().retain(|id, _| request.valid.iter().any(|v| v.container_id == *id));
                Ok(())
            }
        };
        match result {
            Ok(()) => Reply::Done,
            Err((code, message)) => Reply::Failed { code, message },
        }
    }

    fn add(&self, request: &Request, netns: Option<OwnedFd>) -> Result<(), (u32, String)> {
        let capture = cni_capture(&request.status)
            .map_err(|e| (code::STATUS, format!("the pod's annotation sallyport.dev/status: {e}")))?
            .ok_or_else(|| (code::STATUS, "the pod's annotation asks for no capture by CNI".to_owned()))?;
        let netns = netns.ok_or_else(no_namespace)?;
        let script = nft_rules(&capture);
        rules::load(netns.as_fd(), &script).map_err(|e| (code::RULES, e.to_string()))?;
        tracing::info!(namespace = request.namespace, pod = request.pod, "captured");
        let mut pods = self.pods();
        if pods.len() < MOST_PODS || pods.contains_key(&request.container_id) {
            let captured = Captured {
                namespace: request.namespace.clone(),
                pod: request.pod.clone(),
                netns: Arc::new(netns),
            };
            pods.insert(request.container_id.clone(), captured);
        }
        Ok(())
    }

    /// The counters of every pod that was captured since the daemon started, by namespace and pod.
    pub fn counters(&self) -> Vec<(String, String, Vec<Counter>)> {
        let pods: Vec<_> = {
            let pods = self.pods();
            pods.values().map(|p| (p.namespace.clone(), p.pod.clone(), Arc::clone(&p.netns))).collect()
        };
        let read =
            |(namespace, pod, netns): (String, String, Arc<OwnedFd>)| match rules::counters(netns.as_fd()) {
                Ok(counters) => Some((namespace, pod, counters)),
                Err(error) => {
                    tracing::warn!(namespace, pod, %error, "reading counters");
                    None
                }
            };
        pods.into_iter().filter_map(read).collect()
    }

    fn pods(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Captured>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among those that are answered; free again also after a panic.
struct Place<'s>(&'s AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

fn check(netns: Option<OwnedFd>) -> Result<(), (u32, String)> {
    let netns = netns.ok_or_else(no_namespace)?;
    rules::present(netns.as_fd())
        .map_err(|e| (code::NO_RULES, format!("the capture rules are not there: {e}")))
}

fn no_namespace() -> (u32, String) {
    (code::DECODE, "the request came without the pod's network namespace".to_owned())
}
