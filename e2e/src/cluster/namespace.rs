//! A namespace of a test's own, and its pods.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use super::kubectl::Failed;
use super::{Output, await_condition, installed, kubectl, kubectl_input, state_of};
use crate::agent::Remote;

/// A namespace that goes with this value. When the test is failing at that moment, what is in it is printed.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: String,
}

/// A pod that runs the suite's agent.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Its agent.
    pub agent: Remote,
}

/// The image of the suite's agent.
pub fn agent_image() -> String {
    std::env::var("SALLYPORT_AGENT_IMAGE").unwrap_or_else(|_| "localhost/sallyport-agent:dev".into())
}

impl Namespace {
    /// A namespace without any label of ours.
    pub fn plain(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        installed();
        let name = format!("t-{name}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        kubectl(&["create", "namespace", &name]).unwrap_or_else(|e| panic!("{e}"));
        // A pod is refused before its namespace's service account exists.
        await_condition("the default service account", || {
            kubectl(&["get", "serviceaccount", "default", "-n", &name]).ok()
        });
        Self { name }
    }

    /// A namespace where pods may opt in.
    pub fn enabled(name: &str) -> Self {
        let namespace = Self::plain(name);
        namespace.label("sallyport.dev/inject=enabled");
        namespace
    }

    /// A namespace where every pod is guarded.
    pub fn required(name: &str) -> Self {
        let namespace = Self::plain(name);
        namespace.label("sallyport.dev/inject=required");
        namespace
    }

    fn label(&self, label: &str) {
        kubectl(&["label", "namespace", &self.name, label]).unwrap_or_else(|e| panic!("{e}"));
    }

    /// kubectl in this namespace.
    pub fn kubectl(&self, args: &[&str]) -> Result<Output, Failed> {
        let all: Vec<_> = args.iter().copied().chain(["-n", self.name.as_str()]).collect();
        kubectl(&all)
    }

    /// Applies a manifest here.
    pub fn apply(&self, manifest: &Value) -> Result<Output, Failed> {
        self.apply_text(&manifest.to_string())
    }

    /// Applies a manifest here, as text. Where the operator says that it is busy, it is asked again, as it
    /// wants: on a loaded machine a debug build takes seconds for a policy.
    pub fn apply_text(&self, manifest: &str) -> Result<Output, Failed> {
        const TIMES: usize = 5;
        let apply = || kubectl_input(&["apply", "-n", &self.name, "-f", "-"], manifest);
        let busy = |result: &Result<Output, Failed>| {
            result.as_ref().is_err_and(|e| e.said.contains("compile") && e.said.contains("try again"))
        };
        (1..TIMES).map(|_| apply()).find(|result| !busy(result)).unwrap_or_else(apply)
    }

    /// Applies a policy with this spec.
    pub fn policy(&self, name: &str, spec: &Value) -> Result<Output, Failed> {
        self.apply(&json!({
            "apiVersion": "sallyport.dev/v1alpha1",
            "kind": "AgentPolicy",
            "metadata": {"name": name},
            "spec": spec,
        }))
    }

    /// A policy that lets the agent talk to the upstreams of the suite and to nobody else.
    pub fn usual_policy(&self) {
        self.policy("usual", &usual_spec()).unwrap_or_else(|e| panic!("{e}"));
    }

    /// The policy's status.
    pub fn status(&self, policy: &str) -> Value {
        self.kubectl(&["get", "agentpolicy", policy, "-o", "json"]).unwrap_or_else(|e| panic!("{e}")).json()
            ["status"]
            .clone()
    }

    /// Waits until that many guarded pods, of as many, enforce the policy's newest generation.
    pub fn await_enforced(&self, policy: &str, pods: u32) {
        await_condition(&format!("{policy} enforced in {pods} pods"), || {
            let object = self.kubectl(&["get", "agentpolicy", policy, "-o", "json"]).ok()?.json();
            let newest = object["status"]["observedGeneration"] == object["metadata"]["generation"];
            (newest && object["status"]["enforced"] == format!("{pods}/{pods}")).then_some(())
        });
    }

    /// A namespace where pods may opt in, and whose pods must meet the Pod Security Standard `restricted`.
    pub fn restricted(name: &str) -> Self {
        let namespace = Self::enabled(name);
        namespace.label("pod-security.kubernetes.io/enforce=restricted");
        namespace
    }

    /// The manifest of an agent's pod that asks to be guarded. It fits a `restricted` namespace as it is.
    pub fn agent_manifest(name: &str) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"app": name},
                "annotations": {"sallyport.dev/inject": "true"},
            },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": false,
                "containers": [{
                    "name": "agent",
                    "image": agent_image(),
                    "imagePullPolicy": "Never",
                    "command": ["/sallyport-e2e-agent"],
                    "args": ["agent"],
                    "securityContext": {
                        "runAsUser": 1000, "runAsNonRoot": true, "allowPrivilegeEscalation": false,
                        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
                }],
            },
        })
    }

    /// Creates a pod and waits until it is ready.
    pub fn run(&self, manifest: &Value) -> Pod {
        // A refused pod is the test's business; a webhook that could not be reached is kube-proxy's.
        if let Err(e) = self.apply(manifest) {
            panic!("{e}\n{}", state_of(super::SYSTEM));
        }
        let name = manifest["metadata"]["name"].as_str().expect("a named pod");
        self.await_ready(name)
    }

    /// A guarded agent under the policy in force.
    pub fn agent(&self, name: &str) -> Pod {
        self.run(&Self::agent_manifest(name))
    }

    /// Waits until a pod is ready.
    pub fn await_ready(&self, name: &str) -> Pod {
        let address = await_condition(&format!("pod {name} ready in {}", self.name), || {
            let pod = self.pod(name)?;
            let conditions = pod["status"]["conditions"].as_array()?;
            let ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
            ready.then(|| pod["status"]["podIP"].as_str()?.parse::<IpAddr>().ok()).flatten()
        });
        Pod { name: name.to_owned(), agent: Remote::new(address) }
    }

    /// A pod as the API server shows it.
    pub fn pod(&self, name: &str) -> Option<Value> {
        self.kubectl(&["get", "pod", name, "-o", "json"]).ok().map(|o| o.json())
    }

    /// An upstream in this namespace, unguarded, behind a Service; its host name.
    pub fn upstream(&self) -> String {
        let mut pod = Self::agent_manifest("upstream");
        pod["metadata"]["annotations"] = json!({"sallyport.dev/inject": "false"});
        pod["spec"]["containers"][0]["args"] = json!(["upstream"]);
        pod["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"] = json!(8080);
        self.apply(&pod).unwrap_or_else(|e| panic!("{e}"));
        self.apply(&json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "upstream"},
            "spec": {"selector": {"app": "upstream"}, "ports": [{"port": 80, "targetPort": 8080}]},
        }))
        .unwrap_or_else(|e| panic!("{e}"));
        self.await_ready("upstream");
        format!("upstream.{}.svc", self.name)
    }

    /// The logs of a pod's container.
    pub fn logs(&self, pod: &str, container: &str) -> String {
        self.kubectl(&["logs", pod, "-c", container]).map_or_else(|e| e.to_string(), |o| o.stdout)
    }
}

/// What [`Namespace::usual_policy`] says, with capture by the CNI plugin.
pub fn cni_spec() -> Value {
    let mut spec = usual_spec();
    spec["capture"] = json!({"mode": "CNI"});
    spec
}

/// What [`Namespace::usual_policy`] says.
pub fn usual_spec() -> Value {
    json!({"egress": {"default": "Deny", "rules": [{"hosts": ["*.svc"], "action": "Allow"}]}})
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", state_of(&self.name));
        }
        // Not waited for: names are never used again.
        let _ = kubectl(&["delete", "namespace", &self.name, "--wait=false", "--now"]);
    }
}
