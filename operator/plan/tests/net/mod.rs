//! Two network namespaces in a real kernel: one a pod, one what is outside of it.
//!
//! Needs root, `ip` and `nft`; where they are missing it says so.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "shared by tests that each use a part")]

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::Uid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space, set_thread_uid};
use sallyport_api::Capture;
use sallyport_api::names::SIDECAR_UID;
use sallyport_plan::capture::{SCRIPT, nft_rules};

pub const ROOT: u32 = 0;
pub const AGENT: u32 = 1000;
pub const SIDECAR: u32 = SIDECAR_UID as u32;

/// A packet that is dropped is a connect that hangs.
pub const PATIENCE: Duration = Duration::from_millis(400);

pub const POD: [&str; 2] = ["10.77.0.2", "fd77::2"];
/// The pod's nameserver, and a web server.
pub const NEAR: [&str; 2] = ["10.77.0.1", "fd77::1"];
/// Another host.
pub const FAR: [&str; 2] = ["10.78.0.1", "fd78::1"];

/// Two namespaces joined by a wire; gone with the value.
pub struct Net {
    pub pod: String,
    pub outside: String,
    pub families: usize,
}

pub fn sh(command: &str) -> Output {
    Command::new("sh").args(["-c", command]).output().unwrap()
}

pub fn must(command: &str) {
    let out = sh(command);
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

impl Net {
    /// None, with the reason printed, where this machine can't do it.
    pub fn new(name: &str) -> Option<Self> {
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
        let mut net = Self { pod, outside, families: 2 };
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

    pub fn capture(&self, capture: &Capture) {
        let out = Command::new("ip")
            .args(["netns", "exec", &self.pod, "sh", "-c", SCRIPT, "sallyport-capture", &nft_rules(capture)])
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    pub fn counter(&self, name: &str) -> u64 {
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
pub fn within<T: Send>(ns: &str, uid: u32, f: impl FnOnce() -> T + Send) -> T {
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

pub fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse::<IpAddr>().unwrap(), port)
}

/// Answers every connection with `name`, in both families, for as long as the process lives.
pub fn serve(ns: &str, uid: u32, port: u16, name: &'static str) {
    let bind = || TcpListener::bind(at("::", port)).or_else(|_| TcpListener::bind(at("0.0.0.0", port)));
    answer(ns, uid, within(ns, uid, || bind().unwrap()), name);
}

/// The same at one address.
pub fn serve_at(ns: &str, uid: u32, address: SocketAddr, name: &'static str) {
    answer(ns, uid, within(ns, uid, || TcpListener::bind(address).unwrap()), name);
}

fn answer(ns: &str, uid: u32, listener: TcpListener, name: &'static str) {
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
pub fn ask(ns: &str, uid: u32, to: &str, port: u16) -> Option<String> {
    within(ns, uid, || {
        let mut stream = TcpStream::connect_timeout(&at(to, port), PATIENCE).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    })
}
