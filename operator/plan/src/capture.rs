//! The rules by which a pod's connections reach the sidecar, as an nft script.
//!
//! What leaves the pod leaves as the sidecar's user; everything else is brought to the sidecar: names (port 53)
//! to its resolver, other TCP to the transparent listener. What is left is dropped and counted. Both families
//! stand in one table, so IPv6 is no way round.
//!
//! What this does *not* promise: traffic within the pod (loopback, the pod's own addresses) and replies to
//! inbound connections are not inspected.

use std::fmt::Write as _;
use std::net::IpAddr;

use sallyport_api::Capture;
use sallyport_api::names::{
    CHECK_ADDRESSES, CHECK_PORT, DNS_PORT, METRICS_PORT, PROXY_PORT, SIDECAR_UID, TRANSPARENT_PORT,
};

/// The table of family `inet` that holds the rules.
pub const TABLE: &str = "sallyport";

/// What the capture container runs, by `/bin/sh -c`, with the rules as `$1`. nft takes them as one transaction:
/// there is no moment with half of the rules, and an error leaves none and fails the pod.
///
/// Written for every shell, and for a read-only root: no here-document, which some shells keep in a file.
pub const SCRIPT: &str = r#"set -eu
printf '%s\n' "$1" | nft -f -
"#;

/// Renders the rules. The same policy gives the same script; it may be loaded again over itself.
pub fn nft_rules(capture: &Capture) -> String {
    let (v4, v6) = excluded_networks(capture);
    let ports: Vec<String> = capture.exclude_ports.iter().map(u16::to_string).collect();
    let ports = ports.join(", ");
    let [check4, check6] = CHECK_ADDRESSES;
    let own = format!("{TRANSPARENT_PORT}, {PROXY_PORT}, {METRICS_PORT}, {DNS_PORT}");
    let mut past = String::new(); // past the redirection: what the policy excludes
    let mut pass = String::new(); // out of the pod: the same
    for (network, set) in [(&v4, "ip daddr @excluded4"), (&v6, "ip6 daddr @excluded6")] {
        if !network.is_empty() {
            let _ = writeln!(past, "    {set} return");
            let _ = writeln!(pass, "    {set} meta l4proto {{ tcp, udp }} counter name excluded accept");
        }
    }
    if !ports.is_empty() {
        let _ = writeln!(past, "    tcp dport {{ {ports} }} return");
        let _ = writeln!(pass, "    tcp dport {{ {ports} }} counter name excluded accept");
    }
    let counters = COUNTERS.map(|name| format!("  counter {name} {{\n  }}\n")).concat();
    format!(
        "\
table inet sallyport
delete table inet sallyport
table inet sallyport {{
{counters}{excluded4}{excluded6}
  # TCP goes to the transparent listener, whatever its destination. Loopback is the pod talking to itself.
  chain to_sidecar {{
    type nat hook output priority -100
    policy accept
    # The sidecar's check from inside that these rules are there. The agent's connections go where all go.
    meta skuid {SIDECAR_UID} ip daddr {check4} tcp dport {CHECK_PORT} redirect to :{CHECK_PORT}
    meta skuid {SIDECAR_UID} ip6 daddr {check6} tcp dport {CHECK_PORT} redirect to :{CHECK_PORT}
    meta skuid {SIDECAR_UID} return
    oifname \"lo\" return
    # Before what the policy excludes: whichever nameserver is asked, ours answers.
    meta l4proto {{ tcp, udp }} th dport 53 counter name dns redirect to :{DNS_PORT}
    meta l4proto != tcp return
    # Names over TLS would go past our resolver.
    tcp dport 853 return
{past}    meta l4proto tcp counter name redirected redirect to :{TRANSPARENT_PORT}
  }}

  chain leaving {{
    type filter hook output priority 0
    policy drop
    ct status dnat tcp dport {TRANSPARENT_PORT} accept
    ct status dnat meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept
    # Before every accept: nobody in the pod reaches the sidecar's ports but by redirection. For the sidecar
    # itself this ends a call to the pod's own address, which would come back for ever.
    oifname \"lo\" meta l4proto {{ tcp, udp }} th dport {{ {own} }} meta skuid {SIDECAR_UID} counter name self_loop drop
    oifname \"lo\" meta l4proto {{ tcp, udp }} th dport {{ {own} }} counter name sidecar_ports drop
    oifname \"lo\" accept
    meta skuid {SIDECAR_UID} accept
    # Replies to inbound connections, and the last packets of sockets that nobody owns any more. No flow of
    # the agent's gets here unless a rule of this chain let its first packet out.
    ct state established accept
    # ICMP and ICMPv6 by number: an image this small has no /etc/protocols.
    ct state related meta l4proto {{ 1, 58 }} accept
    # Without neighbour discovery there is no IPv6. Only the kernel can send these without NET_RAW.
    icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit }} accept
    icmpv6 type {{ mld-listener-report, mld-listener-done, mld2-listener-report }} accept
{pass}    meta l4proto {{ tcp, udp }} th dport {{ 53, 853 }} counter name dropped_dns drop
    udp dport {{ 80, 443 }} counter name dropped_quic drop
    meta l4proto udp counter name dropped_udp drop
    meta l4proto tcp counter name dropped_tcp drop
    meta l4proto {{ 1, 58 }} counter name dropped_icmp drop
    counter name dropped_other drop
  }}

  # Another pod that connects to the listener was not redirected, and is turned away before Envoy sees it.
  chain arriving {{
    type filter hook input priority 0
    policy accept
    iifname != \"lo\" meta l4proto {{ tcp, udp }} th dport {{ {TRANSPARENT_PORT}, {PROXY_PORT}, {DNS_PORT} }} counter name inbound_to_sidecar drop
  }}
}}
",
        excluded4 = network_set("excluded4", "ipv4_addr", &v4),
        excluded6 = network_set("excluded6", "ipv6_addr", &v6),
    )
}

/// One counter per reason. Public API: metrics and the probe read them by name.
const COUNTERS: [&str; 12] = [
    "redirected",
    "excluded",
    "dns",
    "self_loop",
    "sidecar_ports",
    "inbound_to_sidecar",
    "dropped_dns",
    "dropped_quic",
    "dropped_udp",
    "dropped_tcp",
    "dropped_icmp",
    "dropped_other",
];

fn network_set(name: &str, kind: &str, networks: &[String]) -> String {
    if networks.is_empty() {
        return String::new();
    }
    let elements = networks.join(", ");
    format!(
        "  set {name} {{\n    type {kind}\n    flags interval\n    auto-merge\n    elements = {{ {elements} }}\n  }}\n"
    )
}

/// The policy's networks, by family. What is no network is left out, so it is captured: the rules must never
/// hold text that was not understood.
fn excluded_networks(capture: &Capture) -> (Vec<String>, Vec<String>) {
    let (mut v4, mut v6) = (Vec::new(), Vec::new());
    for cidr in &capture.exclude_cidrs {
        match network(cidr) {
            Some((address @ IpAddr::V4(_), bits)) => v4.push(format!("{address}/{bits}")),
            Some((address @ IpAddr::V6(_), bits)) => v6.push(format!("{address}/{bits}")),
            None => {}
        }
    }
    (v4, v6)
}

/// Reads `address/bits`, or an address alone, and cuts off what stands beyond the prefix.
pub(crate) fn network(cidr: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = cidr.split_once('/').map_or((cidr, None), |(a, b)| (a, Some(b)));
    let address: IpAddr = address.parse().ok()?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let bits = bits.map_or(Some(most), |b| b.parse::<u8>().ok().filter(|b| *b <= most))?;
    let masked = match address {
        IpAddr::V4(a) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            IpAddr::V4((u32::from(a) & mask).into())
        }
        IpAddr::V6(a) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            IpAddr::V6((u128::from(a) & mask).into())
        }
    };
    Some((masked, bits))
}
