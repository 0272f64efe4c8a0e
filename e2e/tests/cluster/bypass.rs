//! A guarded pod's agent as the adversary: every way out that does not lead through the filter, and every
//! way to the sidecar. What got where is printed as a table.
//!
//! Ears listen on the node and in an unguarded pod. The same bytes from an unguarded pod must reach them, or
//! their silence would prove nothing.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sallyport_e2e::agent::{Ear, HEARD, Outcome, Remote, Task};
use sallyport_e2e::cluster::{Namespace, Pod, await_condition, cni_spec, usual_spec};
use serde_json::{Value, json};

/// How long an answer may take that should not come.
const PATIENCE: Duration = Duration::from_secs(4);
/// A port that means nothing to anybody.
const ODD: u16 = 4444;
const POD_EAR: u16 = 9999;

/// What must come of an attempt. That no ear hears its mark is demanded of each.
enum Must {
    /// Not one byte comes back.
    Nothing,
    /// One of these statuses.
    Status(&'static [&'static str]),
    /// Anything but these statuses.
    NotStatus(&'static [&'static str]),
}

struct Attempt {
    what: String,
    mark: String,
    task: Task,
    must: Must,
}

struct Attempts {
    tag: &'static str,
    all: Vec<Attempt>,
}

impl Attempts {
    fn new(tag: &'static str) -> Self {
        Self { tag, all: Vec::new() }
    }

    fn mark(&self) -> String {
        format!("{}{:03}END", self.tag, self.all.len())
    }

    fn add(&mut self, what: &str, mark: String, task: Task, must: Must) {
        self.all.push(Attempt { what: what.into(), mark, task, must });
    }

    /// Bytes over TCP; `{MARK}` in them becomes the mark.
    fn tcp(&mut self, what: &str, address: SocketAddr, bytes: &str, must: Must) {
        let mark = self.mark();
        let send = bytes.replace("{MARK}", &mark).into_bytes();
        self.add(what, mark, Task::Tcp { address, send, deadline: PATIENCE }, must);
    }

    fn udp(&mut self, what: &str, address: SocketAddr) {
        let mark = self.mark();
        let task = Task::Udp { address, send: mark.clone().into_bytes(), deadline: PATIENCE };
        self.add(what, mark, task, Must::Nothing);
    }

    /// All at once: most of them wait for what does not come.
    fn run(self, agent: &Remote) -> Vec<(Attempt, Outcome)> {
        let threads: Vec<_> = self
            .all
            .into_iter()
            .map(|attempt| {
                let agent = agent.clone();
                std::thread::spawn(move || {
                    let outcome = agent.run(&attempt.task).unwrap();
                    (attempt, outcome)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    }
}

/// What came back, in a few words, and the statuses in it.
fn said(outcome: &Outcome) -> (String, Vec<String>) {
    match outcome {
        Outcome::Bytes(bytes, closed) => {
            let text = String::from_utf8_lossy(bytes);
            let statuses: Vec<_> = text
                .match_indices("HTTP/1.")
                .filter_map(|(at, _)| text.get(at + 9..at + 12))
                .map(str::to_owned)
                .collect();
            let words = match (bytes.is_empty(), closed, statuses.is_empty()) {
                (true, true, _) => "closed, no byte".into(),
                (true, false, _) => "no byte".into(),
                (_, _, true) => {
                    format!("{} bytes: {}", bytes.len(), text.escape_debug().take(30).collect::<String>())
                }
                _ => format!("status {} {}", statuses.join(", "), code(&text)),
            };
            (words, statuses)
        }
        Outcome::Failed(e) => (e.clone(), Vec::new()),
        other => (format!("{other:?}"), Vec::new()),
    }
}

/// `error.code` and `error.reason` of a refusal in what came back.
fn code(text: &str) -> String {
    let field = |name: &str| {
        let (_, rest) = text.split_once(&format!("\"{name}\":\""))?;
        rest.split('"').next()
    };
    format!("{} {}", field("code").unwrap_or_default(), field("reason").unwrap_or_default())
}

/// Prints the table; the rows that are not as they must be.
fn judge(done: &[(Attempt, Outcome)], heard: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (attempt, outcome) in done {
        let (words, statuses) = said(outcome);
        let arrived = heard.contains(&attempt.mark);
        let fine = match &attempt.must {
            Must::Nothing => !matches!(outcome, Outcome::Bytes(bytes, _) if !bytes.is_empty()),
            Must::Status(these) => statuses.iter().map(String::as_str).collect::<Vec<_>>() == *these,
            Must::NotStatus(these) => !statuses.iter().any(|s| these.contains(&s.as_str())),
        };
        let got_out =
            matches!(outcome, Outcome::Bytes(bytes, _) if bytes.windows(HEARD.len()).any(|w| w == HEARD));
        let verdict = if arrived || got_out {
            "GOT OUT"
        } else if fine {
            "held"
        } else {
            "UNEXPECTED"
        };
        let row = format!("{verdict:10} {:58} {words}", attempt.what);
        println!("{row}");
        if verdict != "held" {
            wrong.push(row);
        }
    }
    wrong
}

struct Stage {
    namespace: Namespace,
    guarded: Pod,
    outsider: Pod,
    /// The allowed upstream's name.
    host: String,
    node: IpAddr,
}

fn address(pod: &Value, field: &str) -> IpAddr {
    pod["status"][field].as_str().unwrap().parse().unwrap()
}

fn plain_agent(name: &str) -> Value {
    let mut manifest = Namespace::agent_manifest(name);
    manifest["metadata"]["annotations"] = json!({"sallyport.dev/inject": "false"});
    manifest
}

impl Stage {
    fn new(name: &str, spec: &Value) -> Self {
        // With the CNI plugin no pod needs a right that `restricted` does not admit.
        let cni = spec["capture"]["mode"] == "CNI";
        let namespace = if cni { Namespace::restricted(name) } else { Namespace::enabled(name) };
        namespace.policy("usual", spec).unwrap();
        let host = namespace.upstream();
        let guarded = namespace.agent("agent");
        let outsider = namespace.run(&plain_agent("outsider"));
        let node = address(&namespace.pod("agent").unwrap(), "hostIP");
        Self { namespace, guarded, outsider, host, node }
    }

    fn pod_ip(&self, name: &str) -> IpAddr {
        address(&self.namespace.pod(name).unwrap(), "podIP")
    }

    fn text(&self, task: &Task) -> Result<String, String> {
        match self.guarded.agent.run(task).unwrap() {
            Outcome::Text(text) => Ok(text),
            Outcome::Failed(e) => Err(e),
            other => panic!("{other:?}"),
        }
    }
}

/// The interface's number and link-local address in `/proc/net/if_inet6`, of the first that `wanted` takes.
fn link_local(table: &str, wanted: impl Fn(&str) -> bool) -> Option<(std::net::Ipv6Addr, u32)> {
    table.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (address, index, name) = (fields.first()?, fields.get(1)?, fields.get(5)?);
        let address = u128::from_str_radix(address, 16).ok()?;
        (address >> 118 == 0xfe80 >> 6 && wanted(name))
            .then(|| Some((address.into(), u32::from_str_radix(index, 16).ok()?)))
            .flatten()
    })
}

/// The node's link-local address on the pods' bridge, as the node and as the pod write it.
fn link_local_ears(stage: &Stage) -> Option<(SocketAddrV6, SocketAddrV6)> {
    let in_pod = stage.text(&Task::Read("/proc/net/if_inet6".into())).ok()?;
    let (_, pod_index) = link_local(&in_pod, |name| name != "lo")?;
    let on_node = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    let bridge = |name: &str| std::path::Path::new(&format!("/sys/class/net/{name}/bridge")).exists();
    // /sys may show another network namespace than this process' own; then the name decides.
    let (address, index) =
        link_local(&on_node, bridge).or_else(|| link_local(&on_node, |name| name == "sallyport0"))?;
    Some((SocketAddrV6::new(address, ODD, 0, index), SocketAddrV6::new(address, ODD, 0, pod_index)))
}

/// The node's ears are on fixed ports.
static EARS: Mutex<()> = Mutex::new(());

#[test]
fn nothing_gets_out_but_through_the_filter() {
    let _alone = EARS.lock().unwrap_or_else(PoisonError::into_inner);
    nothing_gets_out(&Stage::new("out", &usual_spec()));
}

#[test]
fn nothing_gets_out_of_a_restricted_namespace_captured_by_cni() {
    let _alone = EARS.lock().unwrap_or_else(PoisonError::into_inner);
    let stage = Stage::new("cni-out", &cni_spec());
    let pod = stage.namespace.pod("agent").unwrap();
    let init: Vec<_> = pod["spec"]["initContainers"].as_array().unwrap().iter().map(|c| &c["name"]).collect();
    assert_eq!(init, ["sallyport-extproc", "sallyport-envoy"]);
    nothing_gets_out(&stage);
}

fn nothing_gets_out(stage: &Stage) {
    let (node, host) = (stage.node, stage.host.as_str());
    let outsider = stage.pod_ip("outsider");
    let upstream = SocketAddr::new(stage.pod_ip("upstream"), 8080);
    let ears: Vec<_> = [53, 80, 443, ODD]
        .map(|port| Ear::listen(SocketAddr::new(node, port)).unwrap_or_else(|e| panic!("{node}:{port}: {e}")))
        .into();
    let hearing = Task::Hear { port: POD_EAR, during: Duration::from_secs(25) };
    let agent = stage.outsider.agent.clone();
    let in_pod = std::thread::spawn(move || agent.run(&hearing).unwrap());
    let v6 = link_local_ears(stage);
    let v6_ear = v6.map(|(here, _)| Ear::listen(here.into()).unwrap_or_else(|e| panic!("{here}: {e}")));
    std::thread::sleep(Duration::from_secs(1));

    // The control: what an unguarded pod sends is heard, at every ear.
    let mut control = Attempts::new("CONTROL");
    for port in [53, 80, 443, ODD] {
        control.tcp("control", SocketAddr::new(node, port), "{MARK}", Must::Nothing);
        control.udp("control", SocketAddr::new(node, port));
    }
    if let Some((_, there)) = v6 {
        control.tcp("control", there.into(), "{MARK}", Must::Nothing);
        control.udp("control", there.into());
    }
    for (attempt, outcome) in control.run(&stage.namespace.run(&plain_agent("control")).agent) {
        assert!(
            matches!(&outcome, Outcome::Bytes(bytes, _) if bytes.starts_with(HEARD)),
            "the ears do not hear {:?}: {outcome:?}",
            attempt.task
        );
    }

    let there = SocketAddr::new(node, ODD);
    let mut tries = Attempts::new("MARK");
    let raw = "EHLO {MARK}\r\n\x01\x02\x03 no HTTP\r\n";
    for port in [53, 80, 443, ODD] {
        let to = SocketAddr::new(node, port);
        tries.tcp(&format!("TCP to the node, port {port}, not HTTP"), to, raw, Must::NotStatus(&["200"]));
        tries.udp(&format!("UDP to the node, port {port}"), to);
    }
    let pod_ear = SocketAddr::new(outsider, POD_EAR);
    tries.tcp("TCP to another pod, not HTTP", pod_ear, raw, Must::NotStatus(&["200"]));
    tries.udp("UDP to another pod", pod_ear);
    tries.tcp("TCP to the allowed pod itself, not HTTP", upstream, raw, Must::NotStatus(&["200"]));
    tries.tcp("TCP where the client says nothing", there, "", Must::Nothing);
    // A ClientHello as far as its name; Envoy needs no more to see what it is.
    let mark = tries.mark();
    let hello = client_hello(&mark);
    let task = |address, send| Task::Tcp { address, send, deadline: PATIENCE };
    tries.add("TLS to port 443", mark, task(SocketAddr::new(node, 443), hello), Must::Nothing);
    let mark = tries.mark();
    let hello = client_hello(host);
    tries.add(
        "TLS with the allowed host's name",
        mark,
        task(SocketAddr::new(node, 443), hello),
        Must::Nothing,
    );
    if let Some((_, there)) = v6 {
        tries.tcp("IPv6 TCP to the node's link-local address", there.into(), raw, Must::NotStatus(&["200"]));
        tries.udp("IPv6 UDP to the node's link-local address", there.into());
        let get = format!("GET /{{MARK}} HTTP/1.1\r\nHost: {there}\r\nConnection: close\r\n\r\n");
        tries.tcp(
            "IPv6 HTTP to the node's link-local address",
            there.into(),
            &get,
            Must::NotStatus(&["200"]),
        );
    }
    let service: IpAddr = await_condition("the upstream's name resolves", || {
        stage.text(&Task::Resolve(host.into())).ok()?.split_whitespace().next()?.parse().ok()
    });
    http_tricks(&mut tries, there, SocketAddr::new(service, 80), host);
    let done = tries.run(&stage.guarded.agent);

    let Outcome::Text(pod_heard) = in_pod.join().unwrap() else { panic!("the pod's ear failed") };
    let mut heard: String = ears.iter().map(Ear::heard).collect();
    heard += &pod_heard;
    heard += &v6_ear.map(|e| e.heard()).unwrap_or_default();
    assert!(heard.contains("CONTROL000END"), "{heard}");
    println!("\nfrom a guarded pod, egress denied but for {host}; ears on {node} and {outsider}");
    let wrong = judge(&done, &heard);
    if v6.is_none() {
        println!("not run    IPv6 (no IPv6 in this cluster)");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// `there` is where nothing may go, `service` the address of the allowed host.
fn http_tricks(tries: &mut Attempts, there: SocketAddr, service: SocketAddr, host: &str) {
    let end = "X-Mark: {MARK}\r\nConnection: close\r\n\r\n";
    let get = "GET /api/orders HTTP/1.1\r\n";
    tries.tcp(
        "Host of the allowed, its own address",
        service,
        &format!("{get}Host: {host}\r\n{end}"),
        Must::Status(&["200"]),
    );
    let trick = format!(
        "{get}Host: {host}\r\nX-Envoy-Original-Dst-Host: {there}\r\nX-Forwarded-Host: {there}\r\n{end}"
    );
    tries.tcp("x-envoy-original-dst-host: goes to the allowed", service, &trick, Must::Status(&["200"]));
    let mut http = |what: &str, text: String, must| tries.tcp(what, there, &text, must);
    http("HTTP, its own name", format!("{get}Host: {there}\r\n{end}"), Must::Status(&["403"]));
    http(
        "Host of the allowed, another address",
        format!("{get}Host: {host}\r\n{end}"),
        Must::Status(&["403"]),
    );
    let absolute = |to: &str| format!("GET http://{to}/{{MARK}} HTTP/1.1\r\nHost: {host}\r\n{end}");
    http("absolute form to another host", absolute(&there.to_string()), Must::Status(&["403"]));
    http("absolute form, user@host", absolute(&format!("{host}@{there}")), Must::NotStatus(&["200"]));
    http(
        "absolute form, https",
        format!("GET https://{there}/ HTTP/1.1\r\nHost: {host}\r\n{end}"),
        Must::NotStatus(&["200"]),
    );
    http(
        "two Host headers",
        format!("{get}Host: {host}\r\nHost: {there}\r\n{end}"),
        Must::NotStatus(&["200"]),
    );
    http(
        "Host with a space and another",
        format!("{get}Host: {host} {there}\r\n{end}"),
        Must::NotStatus(&["200"]),
    );
    http(
        "CONNECT to another host",
        format!("CONNECT {there} HTTP/1.1\r\nHost: {there}\r\n\r\n{{MARK}}"),
        Must::NotStatus(&["200", "101"]),
    );
    http(
        "CONNECT to the allowed host",
        format!("CONNECT {host}:80 HTTP/1.1\r\nHost: {host}:80\r\n\r\n{{MARK}}"),
        Must::NotStatus(&["200", "101"]),
    );
    http("HTTP/1.0 without Host", "GET /{MARK} HTTP/1.0\r\n\r\n".into(), Must::NotStatus(&["200"]));
    http(
        "HTTP/1.0 with another Host",
        format!("GET /{{MARK}} HTTP/1.0\r\nHost: {there}\r\n\r\n"),
        Must::NotStatus(&["200"]),
    );
    http("HTTP/1.1 without Host", format!("GET /{{MARK}} HTTP/1.1\r\n{end}"), Must::NotStatus(&["200"]));
    let h2c = |to: &str| {
        format!(
            "{get}Host: {to}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n{{MARK}}"
        )
    };
    http("h2c upgrade, another host", h2c(&there.to_string()), Must::NotStatus(&["200", "101"]));
    http(
        "HTTP/2 with prior knowledge, then anything",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{MARK}".into(),
        Must::NotStatus(&["200"]),
    );
    // From here on where the host may be called.
    let mut allowed = |what: &str, text: String, must| tries.tcp(what, service, &text, must);
    allowed("h2c upgrade, the allowed host", h2c(host), Must::NotStatus(&["101"]));
    let ws = format!(
        "{get}Host: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n{{MARK}}"
    );
    allowed("websocket to the allowed host", ws, Must::NotStatus(&["200", "101"]));
    let two = format!("{get}Host: {host}\r\n\r\n{get}Host: {there}\r\n{end}");
    allowed("second request of a connection to another host", two, Must::Status(&["200", "403"]));
    let smuggled = format!(
        "POST /echo HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{get}Host: {there}\r\n{end}"
    );
    allowed("Content-Length and Transfer-Encoding", smuggled, Must::NotStatus(&["200"]));
}

/// The record of a TLS ClientHello that names a server.
fn client_hello(name: &str) -> Vec<u8> {
    let short = |n: usize| u16::try_from(n).unwrap().to_be_bytes();
    let mut server = vec![0];
    server.extend(short(name.len()));
    server.extend(name.as_bytes());
    let mut list = short(server.len()).to_vec();
    list.extend(server);
    let mut extensions = vec![0, 0];
    extensions.extend(short(list.len()));
    extensions.extend(list);
    extensions.extend([0, 43, 0, 3, 2, 3, 4]); // TLS 1.3
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend(short(extensions.len()));
    body.extend(extensions);
    let mut message = vec![1, 0];
    message.extend(short(body.len()));
    message.extend(body);
    let mut record = vec![22, 3, 1];
    record.extend(short(message.len()));
    record.extend(message);
    record
}

#[test]
fn the_sidecar_is_out_of_the_agents_and_everybody_elses_reach() {
    // Allowed is everything, so what is refused is so because of the sidecar's own walls.
    let stage = Stage::new("in", &json!({"egress": {"default": "Allow"}}));
    let own = stage.pod_ip("agent");
    let mut tries = Attempts::new("MARK");
    let get = |to: &str| {
        format!("GET /metrics HTTP/1.1\r\nHost: {to}\r\nX-Mark: {{MARK}}\r\nConnection: close\r\n\r\n")
    };
    let ports: [u16; 4] = [15_001, 15_002, 15_020, 15_053];
    for ip in [IpAddr::from([127, 0, 0, 1]), own, IpAddr::from([127, 9, 9, 9])] {
        for port in ports {
            let to = SocketAddr::new(ip, port);
            tries.tcp(&format!("the sidecar's {to}"), to, &get(&stage.host), Must::Nothing);
        }
    }
    let v6 = SocketAddr::new(IpAddr::from(std::net::Ipv6Addr::LOCALHOST), ports[0]);
    tries.tcp(&format!("the sidecar's {v6}"), v6, &get(&stage.host), Must::Nothing);
    // By the sidecar's own hand, as a proxy dials whatever the request names.
    let upstream = SocketAddr::new(stage.pod_ip("upstream"), 8080);
    for name in ["127.0.0.1", "localhost", &own.to_string(), "agent"] {
        for port in ports {
            let what = format!("through the filter to {name}:{port}");
            tries.tcp(&what, upstream, &get(&format!("{name}:{port}")), Must::NotStatus(&["200"]));
        }
    }
    let done = tries.run(&stage.guarded.agent);
    println!("\nfrom a guarded pod, everything allowed, to its own sidecar");
    let mut wrong = judge(&done, "");

    let mut tries = Attempts::new("MARK");
    for port in [ports[0], ports[1], ports[3]] {
        let to = SocketAddr::new(own, port);
        let get =
            |form: &str| format!("GET {form} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", stage.host);
        tries.tcp(&format!("another pod to {to}"), to, &get("/api/orders"), Must::Nothing);
        tries.tcp(
            &format!("another pod to {to}, as a proxy"),
            to,
            &get(&format!("http://{upstream}/api/orders")),
            Must::Nothing,
        );
    }
    let scrape = SocketAddr::new(own, ports[2]);
    for path in ["/config_dump", "/stats", "/quitquitquit", "/subscribers"] {
        let text = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        tries.tcp(&format!("another pod to {scrape}{path}"), scrape, &text, Must::Status(&["404"]));
    }
    println!("\nfrom an unguarded pod, to a guarded pod's sidecar");
    wrong.extend(judge(&tries.run(&stage.outsider.agent), ""));
    wrong.extend(what_the_agent_sees(&stage));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Files, processes and sockets of the sidecar, as the agent sees them.
fn what_the_agent_sees(stage: &Stage) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut row = |fine: bool, what: &str, words: &str| {
        let row = format!("{:10} {what:58} {words}", if fine { "held" } else { "GOT IN" });
        println!("{row}");
        if !fine {
            wrong.push(row);
        }
    };
    println!("\nwhat the agent sees of the sidecar");
    for path in [
        "/run/sallyport",
        "/var/lib/sallyport",
        "/var/run/secrets/sallyport.dev",
        "/run/secrets/sallyport.dev",
    ] {
        let listed = stage.text(&Task::List(path.into()));
        row(listed.is_err(), path, &listed.unwrap_or_else(|e| e));
    }
    for path in [
        "/var/run/secrets/sallyport.dev/token",
        "/run/sallyport/envoy.json",
        "/proc/1/root/run/sallyport/envoy.json",
    ] {
        let read = stage.text(&Task::Read(path.into()));
        row(read.is_err(), path, &read.map_or_else(|e| e, |text| format!("{} bytes", text.len())));
    }
    let mounts = stage.text(&Task::Read("/proc/self/mountinfo".into())).unwrap();
    // The fifth field is where it is mounted.
    let of_ours: Vec<_> = mounts
        .lines()
        .filter_map(|l| l.split_whitespace().nth(4))
        .filter(|at| at.contains("sallyport"))
        .collect();
    row(of_ours.is_empty(), "mounts named after the sidecar", &of_ours.join(" "));

    let all = stage.text(&Task::List("/proc".into())).unwrap();
    let processes: Vec<_> = all.lines().filter(|n| n.bytes().all(|b| b.is_ascii_digit())).collect();
    let commands: BTreeSet<_> = processes
        .iter()
        .filter_map(|pid| stage.text(&Task::Read(format!("/proc/{pid}/cmdline"))).ok())
        .map(|line| line.split('\0').next().unwrap_or_default().to_owned())
        .collect();
    let only = commands.iter().all(|c| c == "/sallyport-e2e-agent");
    row(only, "processes", &commands.into_iter().collect::<Vec<_>>().join(", "));

    // Listening sockets of the pod's network namespace: the agent's own, the transparent listener, the
    // metrics, the resolver. Envoy's admin is a socket in a directory that the agent does not have.
    let mut ports = BTreeSet::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = stage.text(&Task::Read(table.into())).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<_> = line.split_whitespace().collect();
            if fields.get(3) == Some(&"0A") {
                let port = fields[1].rsplit_once(':').unwrap().1;
                ports.insert(u16::from_str_radix(port, 16).unwrap());
            }
        }
    }
    row(
        ports == BTreeSet::from([8000, 15_001, 15_020, 15_053]),
        "listening TCP ports of the pod",
        &format!("{ports:?}"),
    );
    let unix = stage.text(&Task::Read("/proc/net/unix".into())).unwrap_or_default();
    let abstract_ones: Vec<_> =
        unix.lines().filter_map(|l| l.split_whitespace().nth(7)).filter(|p| p.starts_with('@')).collect();
    row(abstract_ones.is_empty(), "abstract sockets of the pod", &abstract_ones.join(" "));
    wrong
}
