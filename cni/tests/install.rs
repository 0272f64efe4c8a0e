//! The plugin's file and entry on a node, whatever others do to them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::core::Status;
use sallyport_cni::node::{Installer, Paths, Repaired, decide};
use serde_json::{Value, json};

const NETWORK: &str =
    r#"{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge"}, {"type": "portmap"}]}"#;

struct Node {
    dir: tempfile::TempDir,
    installer: Installer,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["conf", "bin"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("plugin"), "the plugin").unwrap();
        let installer = Installer::new(Paths {
            conf_dir: at("conf"),
            bin_dir: at("bin"),
            plugin: at("plugin"),
            socket: "/run/sallyport-cni/cni.sock".into(),
        });
        Self { dir, installer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn list(&self, name: &str) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.path(name)).unwrap()).unwrap()
    }

    fn types(&self, name: &str) -> Vec<String> {
        let list = self.list(name);
        list["plugins"].as_array().unwrap().iter().map(|p| p["type"].as_str().unwrap().to_owned()).collect()
    }
}

const BOTH: Repaired = Repaired { binary: true, list: true };
const NOTHING: Repaired = Repaired { binary: false, list: false };

#[test]
fn it_stands_behind_the_network_and_goes_without_a_trace() {
    let node = Node::new();
    node.write("conf/10-pods.conflist", NETWORK);
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(node.path("conf/10-pods.conflist"), mode).unwrap();
    assert_eq!(node.installer.repair().unwrap(), BOTH);
    assert_eq!(node.installer.repair().unwrap(), NOTHING);
    assert_eq!(node.types("conf/10-pods.conflist"), ["bridge", "portmap", "sallyport-cni"]);
    let entry = &node.list("conf/10-pods.conflist")["plugins"][2];
    assert_eq!(entry["capabilities"], json!({"io.kubernetes.cri.pod-annotations": true}));
    let mode = |name: &str| std::fs::metadata(node.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("conf/10-pods.conflist"), mode("bin/sallyport-cni")), (0o600, 0o755));

    node.installer.leave_lists().unwrap();
    node.installer.leave_binary().unwrap();
    assert_eq!(node.list("conf/10-pods.conflist"), serde_json::from_str::<Value>(NETWORK).unwrap());
    for (dir, left) in [("conf", 1), ("bin", 0)] {
        assert_eq!(std::fs::read_dir(node.path(dir)).unwrap().count(), left, "{dir}");
    }
    // Whoever watches meanwhile puts nothing back.
    assert_eq!(node.installer.repair().unwrap(), NOTHING);
    assert_eq!(node.types("conf/10-pods.conflist"), ["bridge", "portmap"]);
    node.installer.leave_lists().unwrap();
    node.installer.leave_binary().unwrap();
}

#[test]
fn what_others_do_to_it_is_repaired() {
    let node = Node::new();
    let list = "conf/10-pods.conflist";
    node.write(list, NETWORK);
    node.installer.repair().unwrap();
    // The network's installer writes its list anew.
    node.write(list, NETWORK);
    assert_eq!(node.installer.repair().unwrap(), Repaired { binary: false, list: true });
    // Somebody has it twice, first, or of an older version of ours.
    for plugins in [
        json!([{"type": "sallyport-cni"}, {"type": "bridge"}]),
        json!([{"type": "bridge"}, {"type": "sallyport-cni", "socket": "/old"}, {"type": "sallyport-cni"}]),
    ] {
        node.write(list, &json!({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}).to_string());
        assert!(node.installer.repair().unwrap().list);
        assert_eq!(node.types(list), ["bridge", "sallyport-cni"]);
    }
    // Others may stand behind it.
    let mut after = node.list(list);
    after["plugins"].as_array_mut().unwrap().push(json!({"type": "other"}));
    node.write(list, &after.to_string());
    assert_eq!(node.installer.repair().unwrap(), NOTHING);
    // The file is another, not executable, or gone.
    node.write("bin/sallyport-cni", "something else");
    assert!(node.installer.repair().unwrap().binary);
    let mode = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(node.path("bin/sallyport-cni"), mode).unwrap();
    assert!(node.installer.repair().unwrap().binary);
    std::fs::remove_file(node.path("bin/sallyport-cni")).unwrap();
    assert!(node.installer.repair().unwrap().binary);
    // Another network comes first now, and the runtime reads that one.
    node.write("conf/05-new.conflist", NETWORK);
    assert!(node.installer.repair().unwrap().list);
    assert_eq!(node.types("conf/05-new.conflist")[2], "sallyport-cni");
    node.installer.leave_lists().unwrap();
    assert_eq!(node.types(list), ["bridge", "other"]);
}

#[test]
fn what_the_runtime_would_not_read_is_left_alone_and_said() {
    let node = Node::new();
    let error = || node.installer.repair().unwrap_err().to_string();
    assert!(error().contains("no list of plugins yet"), "{}", error());
    let files = [
        ("conf/00-broken.conflist", "{"),
        ("conf/01-empty.conflist", r#"{"name": "x", "plugins": []}"#),
        ("conf/02-only-ours.conflist", r#"{"name": "x", "plugins": [{"type": "sallyport-cni"}]}"#),
        ("conf/03-notes.txt", NETWORK),
    ];
    for (name, text) in files {
        node.write(name, text);
    }
    assert!(error().contains("no list of plugins yet"), "{}", error());
    node.write("conf/20-pods.conflist", NETWORK);
    node.installer.repair().unwrap();
    for (name, text) in files {
        assert_eq!(std::fs::read_to_string(node.path(name)).unwrap(), text, "{name}");
    }
    node.write("conf/10-single.conf", r#"{"cniVersion": "1.0.0", "name": "x", "type": "bridge"}"#);
    assert!(error().contains("10-single.conf: one plugin, not a list"), "{}", error());
}

#[test]
fn it_leaves_for_good_only_when_its_daemonset_is_gone() {
    let api = |code| Err(kube::Error::Api(Status::failure("no", "x").with_code(code).boxed()));
    let there = DaemonSet::default();
    let mut going = DaemonSet::default();
    going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert!(!decide(&Ok(there)), "a rollout or a restart");
    assert!(decide(&Ok(going)), "an uninstall under way");
    for (what, code, leaves) in [
        ("an uninstall that is done", 404, true),
        ("its rights are gone", 403, true),
        ("its account is gone", 401, true),
        ("an API server with a fault", 500, false),
        ("a busy API server", 429, false),
    ] {
        assert_eq!(decide(&api(code)), leaves, "{what}");
    }
}
