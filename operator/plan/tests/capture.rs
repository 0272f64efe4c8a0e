//! The capture rules in a real kernel.
//!
//! Needs root, `ip` and `nft`; where they are missing it says so and does nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod net;

use std::net::UdpSocket;

use net::{AGENT, FAR, NEAR, Net, PATIENCE, POD, ROOT, SIDECAR, ask, at, serve, serve_at, within};
use sallyport_api::Capture;
use sallyport_api::names::{
    CHECK_ADDRESSES, CHECK_PORT, DNS_PORT, METRICS_PORT, PROXY_PORT, TRANSPARENT_PORT,
};

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

/// Who answers a datagram, if anybody does.
fn ask_datagram(net: &Net, uid: u32, to: &str, port: u16) -> Option<String> {
    let any = if to.contains(':') { "::" } else { "0.0.0.0" };
    within(&net.pod, uid, || {
        let socket = UdpSocket::bind(at(any, 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        // Connected: an answer from another address than the one that was asked does not count.
        socket.connect(at(to, port)).ok()?;
        socket.send(b"x").ok()?;
        let mut answer = [0; 32];
        let length = socket.recv(&mut answer).ok()?;
        Some(String::from_utf8_lossy(&answer[..length]).into_owned())
    })
}

/// Answers every datagram with `name`, on the loopback of both families as the resolver does, for as long as the process lives.
fn serve_datagrams(ns: &str, uid: u32, port: u16, name: &'static str) {
    for any in ["127.0.0.1", "::1"] {
        let Ok(socket) = within(ns, uid, || UdpSocket::bind(at(any, port))) else { continue };
        let ns = ns.to_owned();
        std::thread::spawn(move || {
            within(&ns, uid, || {
                while let Ok((_, from)) = socket.recv_from(&mut [0; 512]) {
                    let _ = socket.send_to(name.as_bytes(), from);
                }
            });
        });
    }
}

fn world(name: &str) -> Option<Net> {
    let net = Net::new(name)?;
    for port in [53, 80, 5432] {
        serve(&net.outside, ROOT, port, "outside");
    }
    serve(&net.pod, SIDECAR, TRANSPARENT_PORT, "sidecar");
    serve(&net.pod, SIDECAR, PROXY_PORT, "sidecar");
    serve(&net.pod, SIDECAR, METRICS_PORT, "metrics");
    serve(&net.pod, SIDECAR, DNS_PORT, "resolver");
    serve_datagrams(&net.pod, SIDECAR, DNS_PORT, "resolver");
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
            for (host, port) in [(far, 80), (near, 80), (far, 9), (far, TRANSPARENT_PORT)] {
                let answer = ask(&net.pod, uid, host, port);
                assert_eq!(answer.as_deref(), Some("sidecar"), "uid {uid} to {host} {port}");
            }
            for port in [443, 80, 9999] {
                assert!(!datagram_arrives(&net, uid, far, port), "uid {uid}, UDP {port} to {far}");
            }
            // Names, over UDP and TCP, whichever nameserver is asked: the pod's or another.
            for host in [near, far] {
                assert!(!datagram_arrives(&net, uid, host, 53), "uid {uid}, {host}");
                assert_eq!(ask_datagram(&net, uid, host, 53).as_deref(), Some("resolver"), "uid {uid}");
                assert_eq!(ask(&net.pod, uid, host, 53).as_deref(), Some("resolver"), "uid {uid}");
                assert_eq!(ask(&net.pod, uid, host, 853), None, "names over TLS");
                assert!(!datagram_arrives(&net, uid, host, 853), "names over QUIC");
            }
        }
        assert_eq!(ask(&net.pod, SIDECAR, far, 80).as_deref(), Some("outside"));
        assert!(datagram_arrives(&net, SIDECAR, far, 443));
        assert!(datagram_arrives(&net, SIDECAR, near, 53), "the sidecar reaches the pod's nameserver");
        assert_eq!(ask(&net.pod, SIDECAR, near, 53).as_deref(), Some("outside"));
        // The pod's own address leads over the loopback.
        let local = ["127.0.0.1", "::1"][family];
        for host in [local, pod] {
            for port in [TRANSPARENT_PORT, PROXY_PORT, METRICS_PORT, DNS_PORT] {
                assert_eq!(ask(&net.pod, AGENT, host, port), None, "agent to {host} {port}");
                assert_eq!(ask(&net.pod, SIDECAR, host, port), None, "sidecar to {host} {port}");
            }
            assert_eq!(ask(&net.pod, AGENT, host, 8080).as_deref(), Some("agent"), "{host}");
            assert_eq!(ask_datagram(&net, AGENT, host, DNS_PORT), None, "the resolver itself");
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
        for port in [TRANSPARENT_PORT, PROXY_PORT, DNS_PORT] {
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
        assert_eq!(
            ask_datagram(&net, AGENT, FAR[family], 53).as_deref(),
            Some("resolver"),
            "names can't be excluded"
        );
        assert_eq!(ask(&net.pod, AGENT, NEAR[family], 5432).as_deref(), Some("outside"));
        assert_eq!(ask(&net.pod, AGENT, NEAR[family], 80).as_deref(), Some("sidecar"));
        assert!(!datagram_arrives(&net, AGENT, NEAR[family], 5432), "ports are TCP ports");
    }
    assert_eq!(ask(&net.pod, AGENT, "127.0.0.1", METRICS_PORT), None, "no exclusion opens the sidecar");
    assert!(net.counter("excluded") > 0);
}

#[test]
fn the_sidecars_check_comes_back_to_it_and_only_where_the_rules_are() {
    let Some(net) = world("d") else { return };
    for local in &["127.0.0.1", "::1"][..net.families] {
        serve_at(&net.pod, SIDECAR, at(local, CHECK_PORT), "check");
    }
    let addresses = CHECK_ADDRESSES.map(|a| a.to_string());
    for address in &addresses[..net.families] {
        assert_eq!(ask(&net.pod, SIDECAR, address, CHECK_PORT), None, "there are no rules");
    }
    net.capture(&Capture { exclude_cidrs: vec!["0.0.0.0/0".into(), "::/0".into()], ..Capture::default() });
    for address in &addresses[..net.families] {
        assert_eq!(ask(&net.pod, SIDECAR, address, CHECK_PORT).as_deref(), Some("check"), "{address}");
        assert_eq!(ask(&net.pod, AGENT, address, CHECK_PORT), None, "{address}: it is the sidecar's alone");
    }
    net.capture(&Capture::default());
    for address in &addresses[..net.families] {
        assert_eq!(ask(&net.pod, SIDECAR, address, CHECK_PORT).as_deref(), Some("check"), "{address}");
        assert_eq!(ask(&net.pod, SIDECAR, address, 80), None, "{address}: one port of it");
        assert_eq!(ask(&net.pod, AGENT, address, CHECK_PORT).as_deref(), Some("sidecar"), "{address}");
    }
}
