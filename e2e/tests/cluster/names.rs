//! Names from inside a guarded pod: every way to ask, what is told in a question, and calls whose address is not
//! the one of the host they name. The nameserver is the cluster's own.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use sallyport_e2e::agent::{Outcome, Task};
use sallyport_e2e::cluster::{Namespace, await_condition};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(10);
const NO_ERROR: u8 = 0;
const NX_DOMAIN: u8 = 3;

/// A question with EDNS, so that a refusal can say why.
fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1, 0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    bytes
}

struct Stage {
    namespace: Namespace,
    agent: sallyport_e2e::cluster::Pod,
    host: String,
}

impl Stage {
    fn new(name: &str, spec: &serde_json::Value) -> Self {
        let namespace = Namespace::enabled(name);
        namespace.policy("usual", spec).unwrap();
        let host = namespace.upstream();
        let agent = namespace.agent("agent");
        Self { namespace, agent, host }
    }

    /// The code, the number of answers and the whole answer to a question sent to `server`.
    fn ask(&self, server: IpAddr, tcp: bool, name: &str, kind: u16) -> Option<(u8, u16, String)> {
        let (address, send, deadline) = (SocketAddr::new(server, 53), question(name, kind), PATIENCE);
        let task = if tcp {
            let mut framed = u16::try_from(send.len()).unwrap().to_be_bytes().to_vec();
            framed.extend(send);
            // The resolver keeps the connection for the next question; this is long enough for one answer.
            Task::Tcp { address, send: framed, deadline: Duration::from_secs(3) }
        } else {
            Task::Udp { address, send, deadline }
        };
        let Outcome::Bytes(bytes, _) = self.agent.agent.run(&task).unwrap() else { return None };
        let bytes = bytes.get(if tcp { 2 } else { 0 }..)?;
        let answers = u16::from_be_bytes([*bytes.get(6)?, *bytes.get(7)?]);
        Some((bytes.get(3)? & 15, answers, String::from_utf8_lossy(bytes).into_owned()))
    }

    fn resolve(&self, name: &str) -> Result<IpAddr, String> {
        match self.agent.agent.run(&Task::Resolve(name.into())).unwrap() {
            Outcome::Text(text) => Ok(text.split_whitespace().next().ok_or("no address")?.parse().unwrap()),
            Outcome::Failed(e) => Err(e),
            other => panic!("{other:?}"),
        }
    }

    /// The allowed host's.
    fn address(&self) -> IpAddr {
        await_condition("the upstream's name resolves", || self.resolve(&self.host).ok())
    }

    /// The status and the body of a call to `host` at an address.
    fn call(&self, address: SocketAddr, host: &str) -> String {
        let text = format!("GET /api/orders HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let task = Task::Tcp { address, send: text.into_bytes(), deadline: PATIENCE };
        match self.agent.agent.run(&task).unwrap() {
            Outcome::Bytes(bytes, _) => String::from_utf8_lossy(&bytes).into_owned(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn whichever_nameserver_is_asked_and_how_the_policy_answers() {
    let spec = json!({
        "egress": {"default": "Deny", "rules": [
            {"hosts": ["*.svc", "*.pattern.example.com"], "action": "Allow"},
        ]},
    });
    let stage = Stage::new("names", &spec);
    let full = format!("{}.cluster.local", stage.host);
    let node: IpAddr =
        stage.namespace.pod("agent").unwrap()["status"]["hostIP"].as_str().unwrap().parse().unwrap();
    // The cluster's, one on the node that does not exist, one nowhere.
    let servers = ["10.96.0.10".parse().unwrap(), node, IpAddr::from([198, 51, 100, 53])];
    for server in servers {
        for tcp in [false, true] {
            let what = format!("{server}, TCP {tcp}");
            let (code, answers, _) = stage.ask(server, tcp, &full, 1).expect(&what);
            assert_eq!((code, answers), (NO_ERROR, 1), "{what}: A");
            let (code, answers, _) = stage.ask(server, tcp, &full, 28).expect(&what);
            assert_eq!((code, answers), (NO_ERROR, 0), "{what}: AAAA of a name that has an A");
            let (code, answers, text) = stage.ask(server, tcp, "evil.example.org", 16).expect(&what);
            assert_eq!((code, answers), (NX_DOMAIN, 0), "{what}: another name");
            assert!(text.contains("spec.dns.allow"), "{what}: {text}");
        }
    }
    println!("any nameserver, UDP and TCP: allowed names resolve, others do not exist");
    // By the pod's own stub resolver, short and long, with the pod's search domains.
    let address = stage.address();
    let short = format!("upstream.{}", stage.namespace.name);
    assert_eq!(stage.resolve(&full).unwrap(), address);
    // Short names are not in the policy, which speaks of `*.svc`.
    let refused = stage.resolve(&short).is_err();
    println!("{} resolves to {address}; {short} refused: {refused}", stage.host);
    assert!(stage.resolve("evil.example.org").is_err());
    let why = stage.resolve("kubernetes.default.svc").unwrap_err();
    println!("kubernetes.default.svc: {why}");
    let (code, _, text) = stage.ask(servers[0], false, "kubernetes.default.svc.cluster.local", 1).unwrap();
    assert!(code == NX_DOMAIN && text.contains("spec.egress.platform.kubernetesAPI"), "{code} {text}");
    for (name, rule) in [
        ("nbswy3dpeb3w64tmmqqhi2djomqgs4zamrqxiyi.pattern.example.com".to_owned(), "SLP-DNS-0001"),
        (format!("{}.pattern.example.com", "a-word-".repeat(8) + "x"), "SLP-DNS-0002"),
    ] {
        let (code, _, text) = stage.ask(servers[0], false, &name, 1).unwrap();
        assert!(code == NX_DOMAIN && text.contains(rule), "{name}: {code} {text}");
    }
    // Names over TLS go nowhere.
    let dot = Task::Tcp {
        address: SocketAddr::new(node, 853),
        send: b"x".to_vec(),
        deadline: Duration::from_secs(3),
    };
    let dot = stage.agent.agent.run(&dot).unwrap();
    assert!(!matches!(&dot, Outcome::Bytes(bytes, _) if !bytes.is_empty()), "{dot:?}");
}

#[test]
fn a_call_goes_to_an_address_of_the_host_it_names() {
    let spec = json!({"egress": {"default": "Deny", "rules": [
        {"hosts": ["*.svc", "10.96.0.1"], "action": "Allow"},
    ]}});
    let stage = Stage::new("bound", &spec);
    let pod: IpAddr =
        stage.namespace.pod("upstream").unwrap()["status"]["podIP"].as_str().unwrap().parse().unwrap();
    let address = stage.address();
    let answer = stage.call(SocketAddr::new(address, 80), &stage.host);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // The same server by its own address, which its service's name does not have.
    for (to, host, code) in [
        (SocketAddr::new(pod, 8080), format!("{}:8080", stage.host), "destination_not_bound"),
        (SocketAddr::new(pod, 8080), format!("{pod}:8080"), "egress_denied"),
        (SocketAddr::new(address, 80), "kubernetes.default.svc".into(), "destination_not_bound"),
        ("10.96.0.1:443".parse().unwrap(), "10.96.0.1:443".into(), "destination_denied"),
        ("169.254.169.254:80".parse().unwrap(), stage.host.clone(), "destination_not_bound"),
    ] {
        let answer = stage.call(to, &host);
        println!("{to} as {host}: {}", answer.lines().last().unwrap_or_default());
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains(code), "{to} as {host}: {answer}");
    }
}
