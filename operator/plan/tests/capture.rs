//! The capture rules in a real kernel: two network namespaces, one a pod, one what is outside of it.
//!
//! Needs root, `ip` and `nft`; where they are missing it says so and does nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::Uid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space, set_thread_uid};
use sallyport_api::Capture;
use sallyport_api::names::{METRICS_PORT, PROXY_PORT, SIDECAR_UID, TRANSPARENT_PORT};
use sallyport_plan::capture::{SCRIPT, nft_rules};

const ROOT: u32 = 0;
const AGENT: u32 = 1000;
const SIDECAR: u32 = SIDECAR_UID as u32;

/// A packet that is dropped is a connect that hangs.
const PATIENCE: Duration = Duration::from_millis(400);

const POD: [&str; 2] = ["10.77.0.2", "fd77::2"];
/// The pod's nameserver, and a web server.
const NEAR: [&str; 2] = ["10.77.0.1", "fd77::1"];
/// Another host.
const FAR: [&str; 2] = ["10.78.0.1", "fd78::1"];

/// Two namespaces joined by a wire; gone with the value.
struct Net {
    pod: String,
    outside: String,
    families: usize,
    resolv_conf: tempfile::NamedTempFile,
}

fn sh(command: &str) -> Output {
    Command::new("sh").args(["-c", command]).output().unwrap()
}

fn must(command: &str) {
    let out = sh(command);
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

impl Net {
    /// None, with the reason printed, where this machine can't do it.
    fn new(name: &str) -> Option<Self> {
        let not_run = |why: &str| {
            println!("not run ({why})");
            None
        };
        if !rustix::process::geteuid().is_root() {
            return not_run("needs root");
        }
        if !sh("command -v nft && command -v ip").status.success() {
            return not_run("needs nft and ip");
        }
        let id = std::process::id();
        let (pod, outside) = (format!("slp-{name}-pod-{id}"), format!("slp-{name}-out-{id}"));
        if !sh(&format!("ip netns add {pod} && ip netns add {outside}")).status.success() {
            return not_run("no network namespaces here");
        }
        let mut resolv_conf = tempfile::NamedTempFile::new().unwrap();
        writeln!(resolv_conf, "search svc.test\nnameserver {}\nnameserver {}", NEAR[0], NEAR[1]).unwrap();
        let mut net = Self { pod, outside, families: 2, resolv_conf };
        let (p, o) = (net.pod.clone(), net.outside.clone());
        must(&format!("ip -n {p} link add eth0 type veth peer name eth0 netns {o}"));
        for (ns, address) in [(&p, POD[0]), (&o, NEAR[0])] {
            must(&format!("ip -n {ns} link set lo up && ip -n {ns} link set eth0 up"));
            must(&format!("ip -n {ns} address add {address}/24 dev eth0"));
        }
        must(&format!("ip -n {o} address add {}/32 dev eth0", FAR[0]));
        must(&format!("ip -n {p} route add default via {}", NEAR[0]));
        let v6 = sh(&format!(
            "ip -n {p} address add {}/64 dev eth0 nodad && ip -n {o} address add {}/64 dev eth0 nodad && \
             ip -n {o} address add {}/128 dev eth0 nodad && ip -n {p} route add default via {}",
            POD[1], NEAR[1], FAR[1], NEAR[1]
        ));
        if !v6.status.success() {
            println!("IPv6: not run (the kernel has none)");
            net.families = 1;
        }
        Some(net)
    }

    fn capture(&self, capture: &Capture) {
        let out = Command::new("ip")
            .args(["netns", "exec", &self.pod, "sh", "-c", SCRIPT, "sallyport-capture", &nft_rules(capture)])
            .env("RESOLV_CONF", self.resolv_conf.path())
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    fn counter(&self, name: &str) -> u64 {
        let out = sh(&format!("ip netns exec {} nft list counter inet sallyport {name}", self.pod));
        let text = String::from_utf8(out.stdout).unwrap();
        let mut words = text.split_whitespace().skip_while(|w| *w != "packets");
        words.nth(1).unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for ns in [&self.pod, &self.outside] {
            sh(&format!("ip netns delete {ns}"));
        }
    }
}

/// Runs `f` in a namespace as a user. Both hold for the thread only, and it ends here.
fn within<T: Send>(ns: &str, uid: u32, f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let file = std::fs::File::open(format!("/run/netns/{ns}")).unwrap();
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            set_thread_uid(Uid::from_raw(uid)).unwrap();
            f()
        });
        thread.join().unwrap()
    })
}

fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse::<IpAddr>().unwrap(), port)
}

/// Answers every connection with `name`, in both families, for as long as the process lives.
fn serve(ns: &str, uid: u32, port: u16, name: &'static str) {
    let bind = || TcpListener::bind(at("::", port)).or_else(|_| TcpListener::bind(at("0.0.0.0", port)));
    let listener = within(ns, uid, || bind().unwrap());
    let ns = ns.to_owned();
    // Who accepts is of the same user, as the answers must be.
    std::thread::spawn(move || {
        within(&ns, uid, || {
            for stream in listener.incoming() {
                let _ = stream.and_then(|mut s| s.write_all(name.as_bytes()));
            }
        });
    });
}

/// Who answers; none if the connection does not come about.
fn ask(ns: &str, uid: u32, to: &str, port: u16) -> Option<String> {
    within(ns, uid, || {
        let mut stream = TcpStream::connect_timeout(&at(to, port), PATIENCE).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    })
}

/// Whether a datagram arrives.
fn datagram_arrives(net: &Net, uid: u32, to: &str, port: u16) -> bool {
    let receiver = within(&net.outside, ROOT, || UdpSocket::bind(at(to, port)).unwrap());
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let any = if to.contains(':') { "::" } else { "0.0.0.0" };
    within(&net.pod, uid, || {
        let socket = UdpSocket::bind(at(any, 0)).unwrap();
        let _ = socket.send_to(b"x", at(to, port));
    });
    receiver.recv(&mut [0; 8]).is_ok()
}

fn world(name: &str) -> Option<Net> {
    let net = Net::new(name)?;
    for port in [53, 80, 5432] {
        serve(&net.outside, ROOT, port, "outside");
    }
    serve(&net.pod, SIDECAR, TRANSPARENT_PORT, "sidecar");
    serve(&net.pod, SIDECAR, PROXY_PORT, "sidecar");
    serve(&net.pod, SIDECAR, METRICS_PORT, "metrics");
    serve(&net.pod, AGENT, 8080, "agent");
    // Without the rules everything goes everywhere, so what follows is the rules' doing.
    for far in &FAR[..net.families] {
        assert_eq!(ask(&net.pod, AGENT, far, 80).as_deref(), Some("outside"));
        assert!(datagram_arrives(&net, AGENT, far, 443));
    }
    Some(net)
}

#[test]
fn nothing_leaves_a_pod_but_by_the_sidecar() {
    let Some(net) = world("a") else { return };
    net.capture(&Capture::default());
    // Loaded again over itself, as after a restart of the init container.
    net.capture(&Capture::default());
    for family in 0..net.families {
        let (pod, near, far) = (POD[family], NEAR[family], FAR[family]);
        for uid in [AGENT, ROOT] {
            for (host, port) in [(far, 80), (near, 80), (far, 53), (far, 9), (far, TRANSPARENT_PORT)] {
                let answer = ask(&net.pod, uid, host, port);
                assert_eq!(answer.as_deref(), Some("sidecar"), "uid {uid} to {host} {port}");
            }
            for port in [443, 80, 9999] {
                assert!(!datagram_arrives(&net, uid, far, port), "uid {uid}, UDP {port} to {far}");
            }
            assert!(!datagram_arrives(&net, uid, far, 53), "a nameserver that is not the pod's");
        }
        assert_eq!(ask(&net.pod, SIDECAR, far, 80).as_deref(), Some("outside"));
        assert!(datagram_arrives(&net, SIDECAR, far, 443));
        // The pod's own nameserver, for everybody.
        assert!(datagram_arrives(&net, AGENT, near, 53));
        assert_eq!(ask(&net.pod, AGENT, near, 53).as_deref(), Some("outside"));
        // The pod's own address leads over the loopback.
        let local = ["127.0.0.1", "::1"][family];
        for host in [local, pod] {
            for port in [TRANSPARENT_PORT, PROXY_PORT, METRICS_PORT] {
                assert_eq!(ask(&net.pod, AGENT, host, port), None, "agent to {host} {port}");
                assert_eq!(ask(&net.pod, SIDECAR, host, port), None, "sidecar to {host} {port}");
            }
            assert_eq!(ask(&net.pod, AGENT, host, 8080).as_deref(), Some("agent"), "{host}");
        }
    }
    for name in
        ["redirected", "dns", "sidecar_ports", "self_loop", "dropped_quic", "dropped_udp", "dropped_dns"]
    {
        assert!(net.counter(name) > 0, "{name}");
    }
    assert_eq!(net.counter("dropped_tcp"), 0, "TCP is brought to the sidecar, not dropped");
}

#[test]
fn inbound_connections_work_and_the_listener_is_nobodys_proxy() {
    let Some(net) = world("b") else { return };
    net.capture(&Capture::default());
    for pod in &POD[..net.families] {
        assert_eq!(ask(&net.outside, ROOT, pod, 8080).as_deref(), Some("agent"));
        assert_eq!(ask(&net.outside, ROOT, pod, METRICS_PORT).as_deref(), Some("metrics"));
        for port in [TRANSPARENT_PORT, PROXY_PORT] {
            assert_eq!(ask(&net.outside, ROOT, pod, port), None, "{pod} {port}");
        }
    }
    assert!(net.counter("inbound_to_sidecar") > 0);
}

#[test]
fn exclusions_pass_by_and_take_nothing_else_with_them() {
    let Some(net) = world("c") else { return };
    let capture = Capture {
        exclude_cidrs: ["10.78.0.0/24", "fd78::/64", "127.0.0.0/8"].map(str::to_owned).to_vec(),
        exclude_ports: vec![5432],
        ..Capture::default()
    };
    net.capture(&capture);
    for family in 0..net.families {
        assert_eq!(ask(&net.pod, AGENT, FAR[family], 80).as_deref(), Some("outside"));
        assert!(datagram_arrives(&net, AGENT, FAR[family], 443));
        assert_eq!(ask(&net.pod, AGENT, NEAR[family], 5432).as_deref(), Some("outside"));
        assert_eq!(ask(&net.pod, AGENT, NEAR[family], 80).as_deref(), Some("sidecar"));
        assert!(!datagram_arrives(&net, AGENT, NEAR[family], 5432), "ports are TCP ports");
    }
    assert_eq!(ask(&net.pod, AGENT, "127.0.0.1", METRICS_PORT), None, "no exclusion opens the sidecar");
    assert!(net.counter("excluded") > 0);
}
