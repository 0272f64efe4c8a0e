//! Bent bytes: what a runtime gives the plugin, what the plugin gives the daemon, and what the daemon answers.
//!
//! No namespace is entered here: what is passed for one is a file that is none. So a guarded pod's ADD must fail,
//! whatever else is said.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sallyport_cni::node::{Metrics, Server};
use sallyport_cni::plugin::{self, Answer, Environment};
use sallyport_cni::wire::{self, Command, Reply, Request};
use sallyport_fuzz::{Rng, fuzz};
use serde_json::{Value, json};

const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";
const STATUS: &str = "sallyport.dev/status";
const PATIENCE: Duration = Duration::from_secs(20);
/// A file that is no namespace.
const NO_NAMESPACE: &str = "/proc/self/status";

fn ensure(ok: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if ok { Ok(()) } else { Err(why()) }
}

/// A directory, and in it the socket of a daemon.
fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("cni.sock");
    (dir, socket)
}

fn daemon(socket: &Path) -> Arc<Server> {
    let server = Arc::new(Server::bind(socket, Arc::new(Metrics::new().unwrap())).unwrap());
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve());
    server
}

fn capture(mode: &str) -> String {
    json!({"version": "0.1.0", "capture": {"mode": mode, "excludeCIDRs": ["10.1.0.0/16"], "excludePorts": [5432]}})
        .to_string()
}

/// What containerd writes, for pods of each kind.
fn configurations(socket: &Path) -> Vec<Vec<u8>> {
    let (cni, init) = (capture("CNI"), capture("Init"));
    let annotations = [json!({}), json!({STATUS: cni}), json!({STATUS: init}), json!({STATUS: "{}"})];
    let configuration = |annotations: &Value| {
        json!({
            "cniVersion": "1.0.0", "name": "pods", "type": "sallyport-cni",
            "capabilities": {ANNOTATIONS: true}, "socket": socket,
            "prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
                "ips": [{"address": "10.244.0.9/24", "interface": 0}], "dns": {}},
            "runtimeConfig": {ANNOTATIONS: annotations},
            "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}],
        })
    };
    annotations.iter().map(|a| configuration(a).to_string().into_bytes()).collect()
}

fn words() -> Vec<Vec<u8>> {
    let words = [
        STATUS,
        ANNOTATIONS,
        "prevResult",
        "cniVersion",
        "0.2.0",
        "1.1.0",
        "runtimeConfig",
        "null",
        "{}",
        "[]",
        r#"\"mode\":\"CNI\""#,
        r#"\"mode\":\"Explicit\""#,
        r#"\"capture\":null"#,
        "\"ADD\"",
        "\"CHECK\"",
        "\"DEL\"",
        "\"GC\"",
        "\"status\":",
        "\"done\"",
        "\"failed\":",
        "{\"done\":null}",
        "18446744073709551616",
    ];
    words.map(|word| word.as_bytes().to_vec()).to_vec()
}

fn environment(command: &str, arguments: &str) -> Environment {
    let pairs = [
        ("CNI_COMMAND", command),
        ("CNI_NETNS", NO_NAMESPACE),
        ("CNI_CONTAINERID", "c1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_ARGS", arguments),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

/// An error says why, in the shape that runtimes read; everything else says nothing that is not JSON.
fn check_answer(answer: &Answer) -> Result<Value, String> {
    let shown = || format!("{answer:?}");
    if answer.status == 0 && answer.text.is_empty() {
        return Ok(Value::Null);
    }
    let value: Value = serde_json::from_str(&answer.text).map_err(|e| format!("{e}: {answer:?}"))?;
    let error = value["code"].is_u64()
        && value["msg"].as_str().is_some_and(|m| m.starts_with("sallyport: "))
        && value["cniVersion"].is_string();
    ensure(answer.status == 0 || (answer.status == 1 && error), shown)?;
    Ok(value)
}

/// The pod's annotation in a configuration, if it has one.
fn annotation(configuration: &Value) -> Option<&str> {
    configuration.get("runtimeConfig")?.get(ANNOTATIONS)?.get(STATUS)?.as_str()
}

#[test]
fn bent_configurations_are_served_or_refused_and_no_guarded_pod_passes() {
    let (_dir, socket) = place();
    let server = daemon(&socket);
    fuzz("cni-configuration", &configurations(&socket), &words(), |bytes| {
        let text = String::from_utf8_lossy(bytes);
        // Read apart from the plugin's own types. What is no JSON is guarded, as far as can be known; of a half of
        // a surrogate pair in what the plugin does not read this reader makes an error, and the plugin nothing.
        let configuration: Option<Value> = serde_json::from_str(&text).ok();
        let unguarded = configuration.as_ref().map_or(text.contains("\\u"), |c| {
            annotation(c).is_none_or(|status| {
                serde_json::from_str::<Value>(status).is_ok_and(|s| {
                    let mode = s.get("capture").map(|c| c.get("mode").unwrap_or(c).clone());
                    [None, Some(Value::Null), Some("Init".into()), Some("Explicit".into())].contains(&mode)
                })
            })
        });
        for command in ["ADD", "CHECK"] {
            let answer = plugin::run(&environment(command, &text), &text);
            let value = check_answer(&answer)?;
            ensure(answer.status == 1 || unguarded, || format!("{command} of a guarded pod: {answer:?}"))?;
            if let Some(configuration) =
                configuration.as_ref().filter(|_| command == "ADD" && answer.status == 0)
            {
                // Passed on as it came, save for the version.
                let mut previous = configuration["prevResult"].clone();
                previous["cniVersion"] = value["cniVersion"].clone();
                ensure(value == previous, || format!("not the result before: {answer:?}"))?;
            }
        }
        for command in ["DEL", "GC", "STATUS", "VERSION"] {
            check_answer(&plugin::run(&environment(command, &text), &text))?;
        }
        Ok(())
    });
    assert!(server.counters().is_empty(), "nothing was captured");
}

#[test]
fn bent_requests_are_answered_and_write_no_rules() {
    let (_dir, socket) = place();
    let server = daemon(&socket);
    let attachment = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let seeds: Vec<Vec<u8>> = [
        json!({"command": "ADD", "container_id": "c1", "namespace": "a", "pod": "b", "status": capture("CNI")}),
        json!({"command": "ADD", "status": capture("Init")}),
        json!({"command": "CHECK", "container_id": "c1", "status": capture("CNI")}),
        json!({"command": "DEL", "container_id": "c1"}),
        json!({"command": "GC", "valid": attachment}),
    ]
    .iter()
    .map(|request| format!("{request}\n").into_bytes())
    .collect();
    let no_namespace = File::open(NO_NAMESPACE).unwrap();
    fuzz("cni-request", &seeds, &words(), |bytes| {
        let said = |e: std::io::Error| e.to_string();
        let mut stream = UnixStream::connect(&socket).map_err(said)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(said)?;
        // With a file before the first byte, as the plugin sends it, or without one.
        let sent = if Rng::of(bytes).below(2) == 0 {
            send_with(&stream, bytes, &no_namespace)
        } else {
            stream.write_all(bytes)
        };
        // It may have closed by then.
        if sent.is_ok() {
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        let mut answer = Vec::new();
        // Reset: after its answer it left unread what stands behind a line.
        match stream.read_to_end(&mut answer) {
            Err(e) if e.kind() != std::io::ErrorKind::ConnectionReset => {
                return Err(format!("no answer: {e}"));
            }
            _ => {}
        }
        let reply: Reply = serde_json::from_slice(&answer)
            .map_err(|e| format!("{e}: {}", String::from_utf8_lossy(&answer)))?;
        ensure(answer.ends_with(b"\n"), || "no line".into())?;
        let command = serde_json::from_slice::<Request>(bytes).map(|r| r.command);
        // What was understood to be there without a namespace is at most forgetting.
        let harmless = matches!(command, Ok(Command::Del | Command::Gc));
        ensure(reply != Reply::Done || harmless, || "done".into())
    });
    assert!(server.counters().is_empty(), "nothing was captured");
}

fn send_with(stream: &UnixStream, bytes: &[u8], file: &File) -> std::io::Result<()> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let sent = sendmsg(stream, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    (&*stream).write_all(&bytes[sent..])
}

#[test]
fn bent_replies_of_the_daemon_let_a_pod_pass_only_if_they_say_done() {
    let (_dir, socket) = place();
    let listener = UnixListener::bind(&socket).unwrap();
    let told = Arc::new(Mutex::new(Vec::<u8>::new()));
    let telling = Arc::clone(&told);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let (request, namespace): (Request, _) = wire::receive(&mut stream).unwrap();
            assert!(namespace.is_some() && request.command == Command::Add);
            let reply = telling.lock().unwrap().clone();
            // The plugin may have closed by then.
            let _ = stream.write_all(&reply);
        }
    });
    let seeds = [
        &b"\"done\"\n"[..],
        b"{\"failed\":{\"code\":101,\"message\":\"nft\"}}\n",
        b"{\"failed\":{\"code\":0,\"message\":\"\"}}\n",
    ]
    .map(<[u8]>::to_vec);
    let configuration = String::from_utf8(configurations(&socket).swap_remove(1)).unwrap();
    fuzz("cni-reply", &seeds, &words(), |bytes| {
        *told.lock().unwrap() = bytes.to_vec();
        let answer = plugin::run(&environment("ADD", ""), &configuration);
        check_answer(&answer)?;
        let done = serde_json::from_slice::<Value>(bytes)
            .is_ok_and(|v| bytes.ends_with(b"\n") && (v == "done" || v == json!({"done": null})));
        ensure((answer.status == 0) == done, || format!("{answer:?}"))
    });
}
