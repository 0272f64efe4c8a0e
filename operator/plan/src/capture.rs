//! The rules by which a pod's connections reach the sidecar, as an nft script.
//!
//! What leaves the pod leaves as the sidecar's user; everything else is brought to the transparent listener
//! (TCP), or dropped and counted. Both families stand in one table, so IPv6 is no way round.
//!
//! What this does *not* promise: DNS is not inspected yet. UDP and TCP 53 pass, to the nameservers of the
//! pod's own `/etc/resolv.conf` only, and a resolver can carry a tunnel. Traffic within the pod (loopback,
//! the pod's own addresses) and replies to inbound connections are not inspected either.

use std::fmt::Write as _;
use std::net::IpAddr;

use sallyport_api::Capture;
use sallyport_api::names::{
    CHECK_ADDRESSES, CHECK_PORT, METRICS_PORT, PROXY_PORT, SIDECAR_UID, TRANSPARENT_PORT,
};

/// The table of family `inet` that holds the rules.
pub const TABLE: &str = "sallyport";
/// The set of IPv4 nameservers, filled in by [`SCRIPT`].
const NAMESERVERS_4: &str = "nameservers4";
/// The set of IPv6 nameservers, filled in by [`SCRIPT`].
const NAMESERVERS_6: &str = "nameservers6";

/// What the capture container runs, by `/bin/sh -c`, with the rules as `$1`. It reads the nameservers, which
/// only the pod knows, and hands everything to nft as one transaction: there is no moment with half of the
/// rules, and an error leaves none and fails the pod.
///
/// Written for every shell, and for a read-only root: no here-document, which some shells keep in a file. What
/// looks like no address is left
/// out, so a line of `/etc/resolv.conf` can't become a rule.
pub const SCRIPT: &str = r#"set -eu
rules=$1
while read -r key value rest || [ -n "${key:-}" ]; do
  [ "${key:-}" = nameserver ] || continue
  value=${value%%\%*}
  case $value in
    ''|*[!0-9a-fA-F:.]*) continue ;;
    *:*) set=nameservers6 ;;
    *) set=nameservers4 ;;
  esac
  rules="$rules
add element inet sallyport $set { $value }"
done < "${RESOLV_CONF:-/etc/resolv.conf}"
printf '%s\n' "$rules" | nft -f -
"#;

/// The rules with the pod's nameservers, for whoever knows them before the pod runs: one script, to be handed
/// to nft as it is.
pub fn nft_script(capture: &Capture, nameservers: &[IpAddr]) -> String {
    let mut script = nft_rules(capture);
    for address in nameservers {
        let set = if address.is_ipv4() { NAMESERVERS_4 } else { NAMESERVERS_6 };
        let _ = writeln!(script, "add element inet {TABLE} {set} {{ {address} }}");
    }
    script
}

/// Renders the rules. The same policy gives the same script; it may be loaded again over itself.
pub fn nft_rules(capture: &Capture) -> String {
    let (v4, v6) = excluded_networks(capture);
    let ports: Vec<String> = capture.exclude_ports.iter().map(u16::to_string).collect();
    let ports = ports.join(", ");
    let [check4, check6] = CHECK_ADDRESSES;
    let own = format!("{TRANSPARENT_PORT}, {PROXY_PORT}, {METRICS_PORT}");
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
{counters}  set {NAMESERVERS_4} {{
    type ipv4_addr
  }}
  set {NAMESERVERS_6} {{
    type ipv6_addr
  }}
{excluded4}{excluded6}
  # TCP goes to the transparent listener, whatever its destination. Loopback is the pod talking to itself.
  chain to_sidecar {{
    type nat hook output priority -100
    policy accept
    meta l4proto != tcp return
    # The sidecar's check from inside that these rules are there. The agent's connections go where all go.
    meta skuid {SIDECAR_UID} ip daddr {check4} tcp dport {CHECK_PORT} redirect to :{CHECK_PORT}
    meta skuid {SIDECAR_UID} ip6 daddr {check6} tcp dport {CHECK_PORT} redirect to :{CHECK_PORT}
    meta skuid {SIDECAR_UID} return
    oifname \"lo\" return
    ip daddr @{NAMESERVERS_4} tcp dport 53 return
    ip6 daddr @{NAMESERVERS_6} tcp dport 53 return
{past}    meta l4proto tcp counter name redirected redirect to :{TRANSPARENT_PORT}
  }}

  chain leaving {{
    type filter hook output priority 0
    policy drop
    ct status dnat tcp dport {TRANSPARENT_PORT} accept
    # Before every accept: nobody in the pod reaches the sidecar's ports but by redirection. For the sidecar
    # itself this ends a call to the pod's own address, which would come back for ever.
    oifname \"lo\" tcp dport {{ {own} }} meta skuid {SIDECAR_UID} counter name self_loop drop
    oifname \"lo\" tcp dport {{ {own} }} counter name sidecar_ports drop
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
    ip daddr @{NAMESERVERS_4} meta l4proto {{ tcp, udp }} th dport 53 counter name dns accept
    ip6 daddr @{NAMESERVERS_6} meta l4proto {{ tcp, udp }} th dport 53 counter name dns accept
{pass}    udp dport 53 counter name dropped_dns drop
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
    iifname != \"lo\" tcp dport {{ {TRANSPARENT_PORT}, {PROXY_PORT} }} counter name inbound_to_sidecar drop
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
