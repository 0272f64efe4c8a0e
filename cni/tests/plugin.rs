//! The plugin as a runtime calls it: its program, an environment, a configuration on standard input. Where a pod is
//! captured, in a real network namespace; that needs root, `ip` and `nft`, and says so where they are missing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use sallyport_cni::node::{Metrics, Server};
use serde_json::{Value, json};

/// A network namespace that goes with this value.
struct Netns(String);

impl Netns {
    fn new(name: &str) -> Option<Self> {
        let name = format!("slp-cni-{name}-{}", std::process::id());
        let able = rustix::process::geteuid().is_root() && sh("command -v nft").status.success();
        if !able || !sh(&format!("ip netns add {name}")).status.success() {
            println!("not run (needs root, nft, ip and network namespaces)");
            return None;
        }
        Some(Self(name))
    }

    fn path(&self) -> String {
        format!("/run/netns/{}", self.0)
    }

    fn sh(&self, command: &str) -> Output {
        sh(&format!("ip netns exec {} {command}", self.0))
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        sh(&format!("ip netns delete {}", self.0));
    }
}

fn sh(command: &str) -> Output {
    Command::new("sh").args(["-c", command]).output().unwrap()
}

/// The daemon's socket, answered or not.
struct Node {
    dir: tempfile::TempDir,
    server: Option<Arc<Server>>,
}

impl Node {
    fn without_daemon() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), server: None }
    }

    fn with_daemon() -> Self {
        let mut node = Self::without_daemon();
        let metrics = Arc::new(Metrics::new().unwrap());
        let server = Arc::new(Server::bind(&node.socket(), metrics).unwrap());
        let serving = Arc::clone(&server);
        std::thread::spawn(move || serving.serve());
        node.server = Some(server);
        node
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/cni.sock")
    }

    /// The configuration as containerd writes it, for a pod with this annotation.
    fn config(&self, version: &str, status: Option<&str>) -> Value {
        let mut annotations = json!({"kubernetes.io/config.source": "api"});
        if let Some(status) = status {
            annotations["sallyport.dev/status"] = json!(status);
        }
        json!({
            "cniVersion": version, "name": "pods", "type": "sallyport-cni",
            "capabilities": {"io.kubernetes.cri.pod-annotations": true},
            "socket": self.socket(),
            "prevResult": previous(version),
            "runtimeConfig": {
                "io.kubernetes.cri.pod-annotations": annotations,
            },
        })
    }
}

fn previous(version: &str) -> Value {
    json!({
        "cniVersion": version,
        "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
        "ips": [{"address": "10.244.0.9/24", "gateway": "10.244.0.1", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {},
    })
}

/// What injection writes for a pod that the plugin captures.
fn status() -> String {
    json!({
        "version": "0.1.0", "policy": "bot", "generation": 3, "digest": "sha256:0", "containers": [],
        "volumes": [], "capture": {"mode": "CNI", "excludeCIDRs": ["10.1.0.0/16"], "excludePorts": [5432]},
    })
    .to_string()
}

/// Calls the plugin: exit status and standard output.
fn call(command: &str, netns: &str, config: &str) -> (i32, String) {
    call_with(
        &[("CNI_COMMAND", command), ("CNI_NETNS", netns), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")],
        config,
    )
}

fn call_with(environment: &[(&str, &str)], config: &str) -> (i32, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_sallyport-cni"))
        .env_clear()
        .env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=agents;K8S_POD_NAME=bot;K8S_POD_UID=u")
        .env("CNI_PATH", "/opt/cni/bin")
        .envs(environment.iter().filter(|(_, value)| !value.is_empty()).copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It may end without reading all of it.
    let _ = child.stdin.take().unwrap().write_all(config.as_bytes());
    let output = child.wait_with_output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn version_names_what_is_spoken() {
    let (status, text) = call_with(&[("CNI_COMMAND", "VERSION")], r#"{"cniVersion": "1.0.0"}"#);
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 0);
    assert_eq!(value["cniVersion"], "1.0.0");
    assert_eq!(value["supportedVersions"], json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]));
}

#[test]
fn unguarded_pods_pass_with_the_result_they_came_with_and_need_no_daemon() {
    let node = Node::without_daemon();
    let init = json!({"containers": ["sallyport-capture"]}).to_string();
    let explicit = json!({"capture": {"mode": "Explicit"}}).to_string();
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        for annotation in [None, Some(init.as_str()), Some(explicit.as_str())] {
            let config = node.config(version, annotation).to_string();
            let (status, text) = call("ADD", "/nowhere", &config);
            assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()), (0, previous(version)));
            for command in ["CHECK", "DEL"] {
                assert_eq!(call(command, "/nowhere", &config), (0, String::new()), "{command}");
            }
        }
    }
    // A runtime that passes no annotations.
    let mut config = node.config("1.0.0", None);
    config["runtimeConfig"] = json!({});
    assert_eq!(call("ADD", "/nowhere", &config.to_string()).0, 0);
    for command in ["STATUS", "GC"] {
        assert_eq!(call_with(&[("CNI_COMMAND", command)], &config.to_string()), (0, String::new()));
    }
}

#[test]
fn a_guarded_pod_has_its_rules_before_the_runtime_has_its_answer() {
    let Some(netns) = Netns::new("add") else { return };
    let node = Node::with_daemon();
    let config = node.config("1.0.0", Some(&status())).to_string();
    assert!(!netns.sh("nft list table inet sallyport").status.success());
    // Twice: a runtime that lost the first answer asks again.
    for _ in 0..2 {
        let (status, text) = call("ADD", &netns.path(), &config);
        assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()), (0, previous("1.0.0")), "{text}");
    }
    let rules = String::from_utf8(netns.sh("nft list table inet sallyport").stdout).unwrap();
    for part in
        ["policy drop", "10.1.0.0/16", "tcp dport 5432 return", "redirect to :15001", "redirect to :15053"]
    {
        assert!(rules.contains(part), "{part}: {rules}");
    }
    assert!(!sh("nft list table inet sallyport").status.success(), "they are in the pod's namespace alone");

    let (_, _, counters) = node.server.as_ref().unwrap().counters().remove(0);
    assert!(counters.iter().any(|c| c.name == "redirected"), "{counters:?}");
    assert_eq!(call("CHECK", &netns.path(), &config), (0, String::new()));
    assert!(netns.sh("nft delete table inet sallyport").status.success());
    let (status, text) = call("CHECK", &netns.path(), &config);
    assert!(status == 1 && text.contains(r#""code":102"#), "{text}");

    // The namespace may be gone by then.
    assert_eq!(call("DEL", "", &config), (0, String::new()));
    assert!(node.server.as_ref().unwrap().counters().is_empty());
}

#[test]
fn gc_forgets_all_but_what_is_still_attached() {
    let Some(netns) = Netns::new("gc") else { return };
    let node = Node::with_daemon();
    let mut config = node.config("1.1.0", Some(&status()));
    assert_eq!(call("ADD", &netns.path(), &config.to_string()).0, 0);
    for (attachments, left) in [(json!([{"containerID": "c1", "ifname": "eth0"}]), 1), (json!([]), 0)] {
        config["cni.dev/valid-attachments"] = attachments;
        assert_eq!(call_with(&[("CNI_COMMAND", "GC")], &config.to_string()), (0, String::new()));
        assert_eq!(node.server.as_ref().unwrap().counters().len(), left);
    }
}

#[test]
fn every_error_has_its_code_and_words() {
    let (away, node) = (Node::without_daemon(), Node::with_daemon());
    // No namespace at all: should one of these go through, it harms nothing.
    let netns = "/proc/self/status";
    let with = |node: &Node, version: &str, status: &str| node.config(version, Some(status)).to_string();
    let good = with(&node, "1.0.0", &status());
    let mut no_result = node.config("1.0.0", Some(&status()));
    no_result.as_object_mut().unwrap().remove("prevResult");
    let later_field = r#"{"capture": {"mode": "CNI", "excludeNames": ["x"]}}"#;
    for (what, command, netns, config, code, part) in [
        ("no command", "", netns, good.clone(), 4, "CNI_COMMAND"),
        ("an unknown command", "UPDATE", netns, good.clone(), 4, "UPDATE"),
        ("no namespace", "ADD", "", good.clone(), 4, "CNI_NETNS"),
        ("no such namespace", "ADD", "/nowhere", good.clone(), 5, "/nowhere"),
        ("no JSON", "ADD", netns, "{".to_owned(), 6, "standard input"),
        ("a version before chains", "ADD", netns, with(&node, "0.2.0", &status()), 1, "0.2.0"),
        ("a later version", "ADD", netns, with(&node, "2.0.0", &status()), 1, "1.1.0"),
        ("first of the list", "ADD", netns, no_result.to_string(), 7, "prevResult"),
        ("CHECK without a result", "CHECK", netns, no_result.to_string(), 7, "prevResult"),
        ("an annotation that is no JSON", "ADD", netns, with(&node, "1.0.0", "x"), 100, "no JSON"),
        (
            "an unknown mode",
            "ADD",
            netns,
            with(&node, "1.0.0", r#"{"capture": {"mode": "Tap"}}"#),
            100,
            "mode",
        ),
        ("a later field", "ADD", netns, with(&node, "1.0.0", later_field), 100, "excludeNames"),
        ("a file that is no namespace", "ADD", netns, good.clone(), 101, "namespace"),
        ("no daemon", "ADD", netns, with(&away, "1.0.0", &status()), 11, "sallyport-cni"),
        ("CHECK without a daemon", "CHECK", netns, with(&away, "1.0.0", &status()), 11, "sallyport-cni"),
    ] {
        let (status, text) = call(command, netns, &config);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{what}: {e}: {text}"));
        assert_eq!((status, &value["code"]), (1, &json!(code)), "{what}: {text}");
        assert!(value["msg"].as_str().unwrap().contains(part), "{what}: {text}");
        assert!(value["cniVersion"].is_string(), "{what}: {text}");
    }
    // What goes never waits for the daemon.
    assert_eq!(call("DEL", netns, &with(&away, "1.0.0", &status())), (0, String::new()));
}
