//! The sidecar beside a real Envoy: its listeners come from the operator, and change while it runs.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../../extproc/server/tests/sidecar/operator.rs"]
mod operator;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use operator::{Authority, DEADLINE, Operator, TOKEN, bundle, killed};
use sallyport_api::AgentPolicySpec;
use sallyport_api::names::{PROXY_PORT, RUN_DIR};
use sallyport_e2e::client::{Answer, Call, End};
use sallyport_e2e::rig::{envoy_binary, workspace_binary};
use sallyport_e2e::upstream::Upstream;
use sallyport_plan::sidecar::render_sidecar;
use sallyport_proto::discovery::Bundle;
use serde_json::{Value, json};

/// A guarded pod without Kubernetes: the sidecar, Envoy, and an upstream.
struct Pod {
    operator: Operator,
    upstream: Upstream,
    proxy: SocketAddr,
    metrics: SocketAddr,
    sidecar: Child,
    envoy: Option<Child>,
    dir: tempfile::TempDir,
}

fn free() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

impl Pod {
    async fn start() -> Self {
        let authority = Authority::new();
        let operator = Operator::start(&authority).await;
        let dir = tempfile::Builder::new().prefix("sp").tempdir().unwrap();
        for sub in ["run", "state", "identity"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        std::fs::write(dir.path().join("identity/ca.crt"), authority.pem()).unwrap();
        std::fs::write(dir.path().join("identity/token"), TOKEN).unwrap();
        let metrics = free();
        let sidecar = Command::new(workspace_binary("sallyport-extproc", "SALLYPORT_EXTPROC"))
            .args(["sidecar", "--discovery", &operator.url(), "--run-dir", "run", "--state-dir", "state"])
            .args(["--identity-dir", "identity", "--metrics-addr", &metrics.to_string()])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stderr(file(&dir.path().join("sidecar.log")))
            .spawn()
            .unwrap();
        let upstream = Upstream::start(0).unwrap();
        Self { operator, upstream, proxy: free(), metrics, sidecar, envoy: None, dir }
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// A bundle as the operator renders it, moved to this pod's directory and port.
    fn bundle(&self, spec: &Value, change: impl FnOnce(&mut Value)) -> Bundle {
        let mut policy = json!({
            "capture": {"mode": "Explicit"},
            "egress": {"default": "Deny", "rules": [{"hosts": ["127.0.0.1"], "action": "Allow"}]},
        });
        policy.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let parsed: AgentPolicySpec = serde_json::from_value(policy.clone()).unwrap();
        let rendered = render_sidecar(&parsed).to_string();
        let here = rendered.replace(RUN_DIR, &self.run_dir().display().to_string()).replace(
            &format!("\"port_value\":{PROXY_PORT}"),
            &format!("\"port_value\":{}", self.proxy.port()),
        );
        let mut envoy: Value = serde_json::from_str(&here).unwrap();
        change(&mut envoy);
        bundle(&policy, &envoy)
    }

    async fn offer(&self, bundle: &Bundle) {
        self.operator.offer(bundle.clone());
        self.operator.acked(bundle).await;
    }

    async fn start_envoy(&mut self) {
        let envoy = Command::new(envoy_binary())
            .args(["-c", "run/envoy.json", "--concurrency", "1", "--disable-hot-restart", "-l", "warning"])
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file(&self.dir.path().join("envoy.log")))
            .spawn()
            .unwrap();
        self.envoy = Some(envoy);
        let end = Instant::now() + DEADLINE;
        loop {
            let ready = self.http("/ready/envoy").await;
            if ready.status == 200 {
                return;
            }
            assert!(Instant::now() < end, "{}", ready.text());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn send(&self, call: Call) -> Answer {
        tokio::task::spawn_blocking(move || call.send().unwrap()).await.unwrap()
    }

    async fn http(&self, path: &str) -> Answer {
        self.send(Call::get(format!("http://{}{path}", self.metrics))).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(Call::get(self.upstream.url(path)).via(self.proxy)).await
    }

    fn listeners(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.run_dir().join("lds.json")).unwrap()).unwrap()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        for child in [Some(&mut self.sidecar), self.envoy.as_mut()].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for log in ["sidecar.log", "envoy.log"] {
                let text = std::fs::read_to_string(self.dir.path().join(log)).unwrap_or_default();
                eprintln!("--- {log}\n{}", text.get(text.len().saturating_sub(6_000)..).unwrap_or(&text));
            }
        }
    }
}

fn file(path: &Path) -> std::fs::File {
    std::fs::File::options().create(true).append(true).open(path).unwrap()
}

#[tokio::test]
async fn changed_listeners_are_acknowledged_once_envoy_took_them_and_broken_ones_are_put_back() {
    let mut pod = Pod::start().await;
    let first = pod.bundle(&json!({}), |_| {});
    pod.offer(&first).await;
    pod.start_envoy().await;
    let _ = pod.get("/echo").await.expect_status(200);

    // failurePolicy is a field of the listener.
    let second = pod.bundle(&json!({"failurePolicy": "Open"}), |_| {});
    let before = pod.listeners();
    let start = Instant::now();
    pod.offer(&second).await;
    eprintln!("new listeners were taken and acknowledged after {:?}", start.elapsed());
    assert!(start.elapsed() < DEADLINE);
    assert_ne!(pod.listeners()["version_info"], before["version_info"]);
    let page = pod.http("/metrics").await.expect_status(200).text();
    assert!(
        page.contains("envoy_listener_manager_listener_modified{} 1")
            || page.contains("listener_in_place_updated{} 1"),
        "{page}"
    );
    let _ = pod.get("/echo").await.expect_status(200);

    // What Envoy does not take, with what it says to that.
    let taken = pod.listeners();
    let broken = pod.bundle(&json!({"failurePolicy": "Open", "mode": "Observe"}), |envoy| {
        envoy["listeners"]["version_info"] = json!("broken");
        let listener = &mut envoy["listeners"]["resources"][0];
        for chain in listener["filter_chains"].as_array_mut().unwrap() {
            let manager = &mut chain["filters"].as_array_mut().unwrap()[0]["typed_config"];
            // Without the router at their end.
            manager["http_filters"].as_array_mut().unwrap().pop();
        }
    });
    pod.operator.offer(broken.clone());
    let words = pod.operator.nacked(&broken).await;
    eprintln!("{words}");
    assert!(words.starts_with("Envoy rejected the listeners: ") && words.contains("filter"), "{words}");
    assert_eq!(pod.listeners(), taken, "put back");
    // Not Observe: nothing of the bundle is in force.
    let _ = pod.get("/echo").await.expect_status(200);
    let elsewhere = Call::get("http://127.0.0.2:9/").via(pod.proxy);
    let _ = pod.send(elsewhere).await.expect_refusal(403, "egress_denied");

    // What is no listener at all.
    let nonsense = pod.bundle(&json!({"mode": "Observe"}), |envoy| {
        envoy["listeners"]["version_info"] = json!("nonsense");
        envoy["listeners"]["resources"][0]["address"] = json!(7);
    });
    pod.operator.offer(nonsense.clone());
    eprintln!("{}", pod.operator.nacked(&nonsense).await);
    assert_eq!(pod.listeners(), taken, "put back");

    let third = pod.bundle(&json!({"limits": {"maxBodyBytes": 4096}}), |_| {});
    pod.offer(&third).await;
    let _ = pod.get("/echo").await.expect_status(200);
    assert_eq!(pod.http("/ready/envoy").await.status, 200);

    // The page that Prometheus reads.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let page = pod.http("/metrics").await.expect_status(200).text();
    for name in [
        "sallyport_decisions_total",
        "sallyport_envoy_up 1",
        "envoy_http_ext_proc_streams_started",
        "envoy_http_ext_proc_failure_mode_allowed",
        "envoy_http_downstream_rq_total",
        "envoy_http_downstream_cx_active",
        "envoy_cluster_upstream_rq_total",
        "envoy_listener_manager_lds_update_success",
        "envoy_server_live",
    ] {
        assert!(page.contains(name), "{name} in\n{page}");
    }
    eprintln!("the page has {} bytes, {} lines", page.len(), page.lines().count());
}

#[tokio::test]
async fn the_kill_switch_ends_streams_through_envoy_within_a_second_whatever_the_policy_is() {
    let mut pod = Pod::start().await;
    let mut first = true;
    for spec in [
        json!({}),
        json!({"failurePolicy": "Open"}),
        json!({"mode": "Observe"}),
        json!({"mode": "Observe", "failurePolicy": "Open"}),
    ] {
        let alive = pod.bundle(&spec, |_| {});
        pod.offer(&alive).await;
        if std::mem::take(&mut first) {
            pod.start_envoy().await;
        }
        // A hundred events over some ten seconds, and one that says nothing for long.
        let streaming = Call::get(pod.upstream.url("/sse/200")).via(pod.proxy);
        let streaming = tokio::task::spawn_blocking(move || streaming.send().unwrap());
        let silent = Call::get(pod.upstream.url("/sse/20")).header("x-demo-pause-ms", "5000").via(pod.proxy);
        let silent = tokio::task::spawn_blocking(move || silent.send().unwrap());
        tokio::time::sleep(Duration::from_millis(700)).await;
        let start = Instant::now();
        pod.operator.offer(killed(alive));
        for (name, call) in [("streaming", streaming), ("silent", silent)] {
            let answer = call.await.unwrap();
            eprintln!("{spec} {name}: ended {:?} after the switch, {:?}", start.elapsed(), answer.end);
            assert!(start.elapsed() < Duration::from_secs(5), "{spec} {name}: {:?}", start.elapsed());
            assert!(answer.status == 403 || answer.end == End::Cut, "{spec} {name}: {answer:?}");
        }
        let _ = pod.get("/echo").await.expect_refusal(403, "killed");
    }
}
