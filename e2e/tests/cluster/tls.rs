//! TLS from inside a guarded pod: opened with certificates that the agent trusts by what injection gave it, judged
//! like clear HTTP, and closed again towards the address that the agent connected to.

use std::net::SocketAddr;
use std::time::Duration;

use sallyport_e2e::agent::{Outcome, Task};
use sallyport_e2e::client::{Answer, Call};
use sallyport_e2e::cluster::{Namespace, Pod, await_condition, cni_spec, usual_spec};
use sallyport_e2e::messages::{chat, rules};
use sallyport_e2e::upstream::fake_key;
use serde_json::{Value, json};

/// Nobody's address: what is sent there is answered by Envoy or not at all.
const NOWHERE: &str = "192.0.2.1:443";

struct Stage {
    _namespace: Namespace,
    agent: Pod,
    host: String,
}

impl Stage {
    fn new(name: &str, spec: &Value) -> Self {
        let namespace = Namespace::enabled(name);
        namespace.policy("usual", spec).unwrap();
        let host = namespace.upstream();
        let agent = namespace.agent("agent");
        Self { _namespace: namespace, agent, host }
    }

    /// A host's address, as the agent is told, with the port of https.
    fn address(&self, host: &str) -> SocketAddr {
        let address = await_condition(&format!("{host} resolves"), || {
            match self.agent.agent.run(&Task::Resolve(host.to_owned())).ok()? {
                Outcome::Text(text) => text.split_whitespace().next()?.parse().ok(),
                _ => None,
            }
        });
        SocketAddr::new(address, 443)
    }

    /// By the trust that injection gave the agent's container, and no other.
    fn call(&self, call: Call) -> Result<Answer, String> {
        let call = call.trusting_variable("SSL_CERT_FILE").deadline(Duration::from_secs(20));
        self.agent.agent.call(&call).map_err(|e| e.to_string())
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.host)
    }
}

#[test]
fn a_captured_pod_s_tls_is_opened_and_judged() {
    opened_and_judged(&Stage::new("tls", &usual_spec()));
}

#[test]
fn a_pod_captured_by_cni_has_its_tls_opened_and_judged() {
    opened_and_judged(&Stage::new("tls-cni", &cni_spec()));
}

fn opened_and_judged(stage: &Stage) {
    let service = stage.address(&stage.host);
    let to_service = |call: Call| stage.call(call.connect_to(service));

    let prompt = chat("demo", &format!("why? aws_access_key_id = {}", fake_key()), false);
    let refused = to_service(Call::post_json(stage.url("/v1/chat/completions"), &prompt)).unwrap();
    let refused = refused.expect_refusal(403, "policy_denied");
    assert!(rules(&refused.json()["error"]) > 0, "{}", refused.text());
    assert!(!refused.text().contains(&fake_key()), "the refusal repeats the key");

    // The service has no port 443: what is let pass is dialled there, and nobody answers.
    let passed = to_service(Call::get(stage.url("/api/orders"))).unwrap();
    let _ = passed.expect_refusal(503, "upstream_unavailable");

    let elsewhere = Call::get(stage.url("/api/orders")).connect_to(NOWHERE.parse().unwrap());
    let _ = stage.call(elsewhere).unwrap().expect_refusal(403, "destination_not_bound");

    let other = Call::get(stage.url("/api/orders")).host("other.agents.svc");
    let _ = to_service(other).unwrap().expect_refusal(421, "misdirected");

    // A name that no request may go to gets no certificate.
    let denied = Call::get("https://example.com/").connect_to(NOWHERE.parse().unwrap());
    assert!(stage.call(denied).is_err(), "a handshake for a name that nobody may call");
    let unnamed = Call::get(stage.url("/")).server_name("192.0.2.1").connect_to(service);
    assert!(stage.call(unnamed).is_err(), "a handshake without a name");

    // Without what injection gave it the agent would not trust it.
    let untrusting = Call::get(stage.url("/")).connect_to(service);
    assert!(stage.agent.agent.call(&untrusting).is_err());
}

/// The API server's certificate is of the cluster's own authority, the operator's of one that nobody else knows.
#[test]
fn an_upstream_is_talked_to_where_its_authority_is_known() {
    let spec = json!({"egress": {
        "default": "Deny",
        "rules": [{"hosts": ["*.svc"], "action": "Allow"}],
        "platform": {"kubernetesAPI": "Allow"},
    }});
    let stage = Stage::new("tls-upstream", &spec);
    let get = |host: &str, path: &str| {
        let to = stage.address(host);
        stage.call(Call::get(format!("https://{host}{path}")).connect_to(to)).unwrap()
    };
    let version = get("kubernetes.default.svc", "/version").expect_status(200);
    assert!(version.json()["gitVersion"].is_string(), "{}", version.text());
    let _ = get("sallyport-operator.sallyport-system.svc", "/").expect_refusal(503, "upstream_untrusted");
}
