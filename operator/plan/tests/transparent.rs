//! The whole way of a captured connection in a real kernel and the real Envoy, with the rules and the
//! configuration of a pod. The filter's process is not there, so the policy lets calls pass without it.
//!
//! Needs root, `ip`, `nft`, `setpriv` and Envoy (`tools/envoy-fetch`, or SALLYPORT_ENVOY); where one is missing
//! it says so and does nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod net;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use net::{AGENT, FAR, NEAR, Net, PATIENCE, POD, ROOT, SIDECAR, at, sh, within};
use sallyport_api::names::{RUN_DIR, TRANSPARENT_PORT};
use sallyport_api::{AgentPolicySpec, Capture, FailurePolicy};
use sallyport_plan::sidecar::render_sidecar;

fn envoy_binary() -> Option<PathBuf> {
    let cached = format!("../../.cache/envoy/1.40.0-{}/envoy", std::env::consts::ARCH);
    let path = std::env::var_os("SALLYPORT_ENVOY")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(cached), PathBuf::from);
    path.is_file().then_some(path)
}

struct Envoy(Child);

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Envoy as in a pod, its files in a directory of the test's own.
fn envoy(net: &Net, dir: &Path, binary: &Path) -> Envoy {
    let spec = AgentPolicySpec { failure_policy: FailurePolicy::Open, ..AgentPolicySpec::default() };
    let rendered = render_sidecar(&spec);
    for (file, part) in [("envoy.json", "bootstrap"), ("lds.json", "listeners")] {
        let text = rendered[part].to_string().replace(RUN_DIR, dir.to_str().unwrap());
        std::fs::write(dir.join(file), text).unwrap();
    }
    assert!(sh(&format!("chown -R {SIDECAR} {}", dir.display())).status.success());
    let log = std::fs::File::create(dir.join("envoy.log")).unwrap();
    let child = Command::new("ip")
        .args(["netns", "exec", &net.pod, "setpriv", "--reuid", &SIDECAR.to_string(), "--clear-groups"])
        .arg(binary)
        .arg("-c")
        .arg(dir.join("envoy.json"))
        .args(["--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"])
        .arg("--reject-unknown-dynamic-fields")
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    Envoy(child)
}

/// A web server outside, which says where it is and closes.
fn upstream(net: &Net, port: u16) {
    let listener = within(&net.outside, ROOT, || {
        TcpListener::bind(at("::", port)).or_else(|_| TcpListener::bind(at("0.0.0.0", port))).unwrap()
    });
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.set_read_timeout(Some(PATIENCE));
            let _ = stream.read(&mut [0; 4096]);
            let body = format!("upstream on {port}");
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
}

/// What comes back for these bytes; none if the connection does not come about.
fn send(ns: &str, uid: u32, to: &str, port: u16, bytes: &[u8]) -> Option<String> {
    within(ns, uid, || {
        let mut stream = TcpStream::connect_timeout(&at(to, port), PATIENCE).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        stream.write_all(bytes).ok()?;
        let mut answer = Vec::new();
        // A reset is an answer, too: an empty one.
        let _ = stream.read_to_end(&mut answer);
        Some(String::from_utf8_lossy(&answer).into_owned())
    })
}

fn get(host: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").into_bytes()
}

#[test]
fn a_captured_call_goes_where_it_was_going_and_nothing_else_goes_anywhere() {
    let Some(binary) = envoy_binary() else {
        println!("not run (needs Envoy: tools/envoy-fetch)");
        return;
    };
    if !sh("command -v setpriv").status.success() {
        println!("not run (needs setpriv)");
        return;
    }
    let Some(net) = Net::new("e") else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    upstream(&net, 8080);
    upstream(&net, 80);
    net.capture(&Capture::default());
    let _envoy = envoy(&net, dir.path(), &binary);
    let log = || std::fs::read_to_string(dir.path().join("envoy.log")).unwrap();

    let end = Instant::now() + Duration::from_secs(20);
    let agent = |to: &str, port, bytes: &[u8]| send(&net.pod, AGENT, to, port, bytes);
    let near = format!("{}:8080", NEAR[0]);
    while !agent(NEAR[0], 8080, &get(&near)).is_some_and(|a| a.contains("upstream on 8080")) {
        assert!(Instant::now() < end, "no answer by way of Envoy: {}", log());
        std::thread::sleep(Duration::from_millis(100));
    }
    if net.families == 2 {
        let answer = agent(NEAR[1], 8080, &get(&format!("[{}]:8080", NEAR[1]))).unwrap();
        assert!(answer.contains("upstream on 8080"), "{answer}");
    }
    // Without the filter, which holds the host against the address, it goes to the address. No name is resolved
    // here, so none can lead elsewhere.
    for host in [near.as_str(), "elsewhere.test"] {
        let answer = agent(FAR[0], 80, &get(host)).unwrap();
        assert!(answer.contains("upstream on 80"), "{host}: {answer}");
    }
    // Envoy's own guard: addresses that no call may go to, whoever says so.
    for to in ["169.254.169.254", "169.254.7.7"] {
        let answer = agent(to, 80, &get(&near)).unwrap();
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("egress_denied"), "{to}: {answer}");
        assert!(answer.contains("no call may go to") && answer.contains("[never]"), "{to}: {answer}");
    }
    // TLS is closed without a byte, and so is what is no HTTP.
    let hello = b"\x16\x03\x01\x00\x2f\x01\x00\x00\x2b\x03\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x00\x00\x02\x13\x01\x01\x00\x00\x00";
    assert_eq!(agent(FAR[0], 443, hello).as_deref(), Some(""));
    let answer = agent(FAR[0], 22, b"SSH-2.0-agent\r\n\r\n").unwrap();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(agent(NEAR[0], 80, b"GET / HTTP/1.1\r\n\r\n").unwrap().starts_with("HTTP/1.1 400"), "no host");
    let tunnel = format!("CONNECT {near} HTTP/1.1\r\nhost: {near}\r\n\r\n");
    assert!(agent(FAR[0], 3128, tunnel.as_bytes()).unwrap().starts_with("HTTP/1.1 403"));
    // The listener is nobody's proxy: dropped by the rules, and closed by Envoy where there are none.
    let foreign = || send(&net.outside, ROOT, POD[0], TRANSPARENT_PORT, &get(&near));
    assert_eq!(foreign(), None);
    assert!(
        sh(&format!("ip netns exec {} nft flush chain inet sallyport arriving", net.pod)).status.success()
    );
    assert_eq!(foreign().as_deref(), Some(""));
    // One captured on its way to another pod's listener is closed as well, rather than going round.
    assert_eq!(agent(FAR[0], TRANSPARENT_PORT, &get(&near)).as_deref(), Some(""));
}
