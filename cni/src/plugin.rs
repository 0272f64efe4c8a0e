//! The plugin: what comes from the runtime, what goes to the daemon, what the runtime is told.
//!
//! A pod that is not guarded in CNI mode costs one look at its annotations, and needs no daemon. A guarded
//! one is not let into being unless the daemon says that its rules are written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sallyport_api::names::STATUS;
use serde_json::{Value, json};

use crate::conf::{Config, Error, PLUGIN, SOCKET, VERSIONS, code};
use crate::wire::{self, Command, Reply, Request};

/// How long the daemon may take. Runtimes give a sandbox minutes; nft takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// The environment, as far as the specification has a meaning for it.
pub type Environment = BTreeMap<String, String>;

/// What is written to standard output, and the exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// For standard output; may be empty.
    pub text: String,
    /// 0, or 1 for an error.
    pub status: u8,
}

/// Does what the runtime asks for.
pub fn run(environment: &Environment, stdin: &str) -> Answer {
    let config: Result<Config, _> = serde_json::from_str(stdin);
    let version = match &config {
        Ok(config) if !config.cni_version.is_empty() => config.cni_version.clone(),
        _ => VERSIONS[VERSIONS.len() - 1].to_owned(),
    };
    let result = match config {
        Ok(config) => execute(environment, &config, &version),
        Err(e) => Err(Error::new(code::DECODE, format!("the configuration on standard input: {e}"))),
    };
    match result {
        Ok(None) => Answer { text: String::new(), status: 0 },
        Ok(Some(value)) => Answer { text: value.to_string(), status: 0 },
        Err(error) => Answer { text: error.json(&version).to_string(), status: 1 },
    }
}

fn execute(environment: &Environment, config: &Config, version: &str) -> Result<Option<Value>, Error> {
    let command = variable(environment, "CNI_COMMAND")?;
    if command == "VERSION" {
        return Ok(Some(json!({"cniVersion": version, "supportedVersions": VERSIONS})));
    }
    if !VERSIONS.contains(&version) {
        let all = VERSIONS.join(", ");
        return Err(Error::new(code::VERSION, format!("cniVersion {version} is not spoken here; {all} are")));
    }
    match command {
        "ADD" => {
            let previous = previous(config)?;
            guarded(environment, config, Command::Add)?;
            let mut result = previous.clone();
            // The specification has the answer in the configuration's version; runtimes convert before they ask.
            result["cniVersion"] = json!(version);
            Ok(Some(result))
        }
        "CHECK" => {
            previous(config)?;
            guarded(environment, config, Command::Check)?;
            Ok(None)
        }
        "DEL" => {
            // Rules go with their namespace. The daemon only forgets; a pod's end never waits for it.
            let container_id = environment.get("CNI_CONTAINERID").cloned().unwrap_or_default();
            let _ = ask(config, &Request { container_id, ..request(Command::Del) }, None);
            Ok(None)
        }
        "GC" => {
            let valid = config.valid_attachments.clone().unwrap_or_default();
            let _ = ask(config, &Request { valid, ..request(Command::Gc) }, None);
            Ok(None)
        }
        // Always well: without the daemon unguarded pods are served, and a node that is not ready serves none.
        "STATUS" => Ok(None),
        other => {
            Err(Error::new(code::ENVIRONMENT, format!("CNI_COMMAND is `{other}`, which means nothing here")))
        }
    }
}

fn previous(config: &Config) -> Result<&Value, Error> {
    match &config.prev_result {
        Some(result) if result.is_object() => Ok(result),
        _ => Err(Error::new(
            code::CONFIG,
            format!(
                "no prevResult: {PLUGIN} makes no network, so it can't be the first of a list of plugins"
            ),
        )),
    }
}

/// Has the daemon do it, where the pod is guarded in CNI mode.
fn guarded(environment: &Environment, config: &Config, command: Command) -> Result<(), Error> {
    let path = variable(environment, "CNI_NETNS")?;
    let container_id = variable(environment, "CNI_CONTAINERID")?.to_owned();
    variable(environment, "CNI_IFNAME")?;
    let annotations = config.runtime_config.annotations.as_ref();
    let Some(status) = annotations.and_then(|a| a.get(STATUS)) else { return Ok(()) };
    if !captured_here(status)? {
        return Ok(());
    }
    let netns = File::open(path).map_err(|e| Error::new(code::IO, format!("CNI_NETNS {path}: {e}")))?;
    let told = arguments(environment);
    let named = |key: &str| told.get(key).copied().unwrap_or_default().to_owned();
    let request = Request {
        container_id,
        namespace: named("K8S_POD_NAMESPACE"),
        pod: named("K8S_POD_NAME"),
        status: status.clone(),
        ..request(command)
    };
    match ask(config, &request, Some(&netns)) {
        Ok(Reply::Done) => Ok(()),
        Ok(Reply::Failed { code, message }) => Err(Error { code, message }),
        Err(e) => Err(Error::new(
            code::LATER,
            format!(
                "the pod is guarded, and the daemon that captures it does not answer on this node ({}: {e}); it is \
                 tried again; see the pods of DaemonSet sallyport-cni",
                socket(config)
            ),
        )),
    }
}

/// Whether the annotation says that this plugin is to capture the pod. What can't be read is no "no".
fn captured_here(status: &str) -> Result<bool, Error> {
    let status: Value = serde_json::from_str(status)
        .map_err(|e| Error::new(code::STATUS, format!("the pod's annotation {STATUS} is no JSON: {e}")))?;
    match status.get("capture") {
        None | Some(Value::Null) => Ok(false),
        Some(capture) => match capture.get("mode").and_then(Value::as_str) {
            Some("CNI") => Ok(true),
            Some("Init" | "Explicit") => Ok(false),
            _ => Err(Error::new(
                code::STATUS,
                format!("the pod's annotation {STATUS} names no capture mode that this plugin knows"),
            )),
        },
    }
}

fn ask(config: &Config, request: &Request, netns: Option<&File>) -> io::Result<Reply> {
    let mut stream = UnixStream::connect(socket(config))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    wire::send(&mut stream, request, netns.map(File::as_fd))?;
    Ok(wire::receive(&mut stream)?.0)
}

fn socket(config: &Config) -> &str {
    if config.socket.is_empty() { SOCKET } else { &config.socket }
}

fn request(command: Command) -> Request {
    Request {
        command,
        container_id: String::new(),
        namespace: String::new(),
        pod: String::new(),
        status: String::new(),
        valid: Vec::new(),
    }
}

fn variable<'e>(environment: &'e Environment, name: &str) -> Result<&'e str, Error> {
    match environment.get(name) {
        Some(value) if !value.is_empty() => Ok(value),
        _ => Err(Error::new(code::ENVIRONMENT, format!("the environment has no {name}"))),
    }
}

/// `CNI_ARGS`: `KEY=VALUE;KEY=VALUE`.
fn arguments(environment: &Environment) -> BTreeMap<&str, &str> {
    let all = environment.get("CNI_ARGS").map_or("", String::as_str);
    all.split(';').filter_map(|pair| pair.split_once('=')).collect()
}
