//! The process itself: its exit statuses, its socket, its signals.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use support::*;
use tokio::process::{Child, Command};

const POLICY: &str = "
apiVersion: sallyport.dev/v1alpha1
kind: AgentPolicy
metadata: {name: test}
spec: {egress: {default: Allow}}
";

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sallyport-extproc"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn outcome(args: &[&str]) -> (i32, String) {
    let output = tokio::time::timeout(DEADLINE, command().args(args).output()).await.unwrap().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

async fn running(dir: &Path, more: &[&str]) -> Child {
    std::fs::write(dir.join("policy.yaml"), POLICY).unwrap();
    let (policy, socket) = (dir.join("policy.yaml"), dir.join("s"));
    let child =
        command().arg("--policy").arg(policy).arg("--socket").arg(&socket).args(more).spawn().unwrap();
    let up = async {
        while tokio::net::UnixStream::connect(&socket).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(DEADLINE, up).await.expect("the socket is there in time");
    child
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[tokio::test]
async fn wrong_usage_and_what_can_t_be_read_have_their_own_status() {
    let (status, text) = outcome(&["--bogus"]).await;
    assert!(status == 2 && text.contains("--bogus") && text.contains("--help"), "{status} {text}");
    let (status, text) = outcome(&["--policy", "/nonexistent/p.yaml", "--socket", "/nonexistent/s"]).await;
    assert!(status == 1 && text.contains("/nonexistent/p.yaml"), "{status} {text}");
    let (status, text) = outcome(&["--help"]).await;
    assert!(status == 0 && text.contains("--scan-timeout-ms"), "{status} {text}");
    let (status, text) = outcome(&["--version"]).await;
    assert!(status == 0 && text.starts_with("sallyport-extproc "), "{status} {text}");
}

#[tokio::test]
async fn it_answers_on_a_private_socket_and_ends_on_signals() {
    for sig in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let dir = tempfile::tempdir().unwrap();
        let child = running(dir.path(), &["--log-level", "debug"]).await;
        let socket = dir.path().join("s");
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        let mut call = Call::open(&socket, &[]).await;
        let answer = call.ask_line(request_headers(&[], true)).await;
        assert_eq!(answer, "request headers +accept-encoding=identity");
        drop(call);
        signal(&child, sig);
        let ended = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.unwrap().unwrap();
        assert_eq!(ended.status.code(), Some(0));
        assert!(!socket.exists());
        let log = String::from_utf8(ended.stderr).unwrap();
        let line = log.lines().find(|l| l.contains("sallyport::verdict")).expect("a line per message");
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["fields"]["path"], "/v1", "without its query: {line}");
        assert_eq!(line["fields"]["decision"], "allow");
    }
}

#[tokio::test]
async fn an_exchange_that_is_open_when_the_drain_ends_is_ended_by_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = running(dir.path(), &["--drain-s", "1"]).await;
    let mut call = Call::open(&dir.path().join("s"), &[]).await;
    call.ask(request_headers(&[], false)).await;
    signal(&child, rustix::process::Signal::TERM);
    let status = call.next().await.expect("not an OK end").unwrap_err();
    assert_eq!(status.message(), "shutting_down");
    let ended = tokio::time::timeout(DEADLINE, child.wait()).await.unwrap().unwrap();
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test]
async fn a_second_process_does_not_take_the_socket_over() {
    let dir = tempfile::tempdir().unwrap();
    let _first = running(dir.path(), &[]).await;
    let (policy, socket) = (dir.path().join("policy.yaml"), dir.path().join("s"));
    let args = ["--policy", policy.to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    let (status, text) = outcome(&args).await;
    assert!(status == 1 && text.contains("another process answers"), "{status} {text}");
    assert!(text.contains(socket.to_str().unwrap()), "{text}");
}

#[tokio::test]
async fn a_process_that_is_killed_ends_its_exchanges_by_an_error_and_its_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = running(dir.path(), &[]).await;
    let mut call = Call::open(&dir.path().join("s"), &[]).await;
    call.ask(request_headers(&[], false)).await;
    first.kill().await.unwrap();
    assert!(call.next().await.expect("not an OK end").is_err());
    assert!(dir.path().join("s").exists(), "left behind");
    let _second = running(dir.path(), &[]).await;
    let mut call = Call::open(&dir.path().join("s"), &[]).await;
    call.ask(request_headers(&[], true)).await;
}
