//! Hosts that are addresses, in every spelling that some reader takes for one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address that a host means, and whether it is spelled the usual way.
pub(super) fn parse(host: &str) -> Option<(IpAddr, bool)> {
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']').unwrap_or(inner);
        let inner = inner.split('%').next().unwrap_or_default();
        let v6: Ipv6Addr = inner.parse().ok()?;
        return Some(match embedded(v6) {
            Some(v4) => (IpAddr::V4(v4), false),
            None => (IpAddr::V6(v6), true),
        });
    }
    let first = host.as_bytes().first()?;
    if !(first.is_ascii_digit() || (*first | 32 == b'o')) {
        return None;
    }
    v4(host).map(|(a, plain)| (IpAddr::V4(a), plain))
}

/// The IPv4 address inside an IPv6 one: mapped, compatible, 6to4, NAT64.
fn embedded(v6: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = v6.segments();
    let low = |hi: u16, lo: u16| Ipv4Addr::from(u32::from(hi) << 16 | u32::from(lo));
    match s {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        [0, 0, 0, 0, 0 | 0xffff, 0 | 0xffff, hi, lo] | [0x64, 0xff9b, 0, 0, 0, 0, hi, lo] => {
            Some(low(hi, lo))
        }
        [0x2002, hi, lo, ..] => Some(low(hi, lo)),
        _ => None,
    }
}

/// One to four numbers, each decimal, octal or hexadecimal; the last one fills what is left. Numbers that are
/// too large lose their upper bits, as some readers have it.
fn v4(host: &str) -> Option<(Ipv4Addr, bool)> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let mut parts = [0u64; 4];
    let mut count = 0;
    let mut plain = true;
    for part in host.split('.') {
        if count == 4 {
            return None;
        }
        let (value, usual) = number(part)?;
        parts[count] = value;
        plain &= usual && value <= 255;
        count += 1;
    }
    let mut address = 0u32;
    for (i, part) in parts[..count].iter().enumerate() {
        if i + 1 == count {
            let bits = 32 - 8 * i as u32;
            let mask = if bits == 32 { u64::from(u32::MAX) } else { (1 << bits) - 1 };
            address |= (part & mask) as u32;
        } else {
            address |= ((part & 0xff) as u32) << (24 - 8 * i);
        }
    }
    Some((Ipv4Addr::from(address), plain && count == 4))
}

/// A number and whether it is a plain decimal one.
fn number(part: &str) -> Option<(u64, bool)> {
    let bytes = part.as_bytes();
    let radix = |digits: &str, radix: u32| {
        // As many digits as fit; those before them are lost to who reads 64 bits.
        let digits = digits.trim_start_matches('0');
        let digits = if digits.len() > 16 { digits.get(digits.len() - 16..)? } else { digits };
        if digits.is_empty() { Some(0) } else { u64::from_str_radix(digits, radix).ok() }
    };
    match bytes {
        [] => None,
        [b'0', b'x' | b'X', ..] => radix(&part[2..], 16).map(|v| (v, false)),
        [b'0', b'o' | b'O', ..] if bytes.len() > 2 => radix(&part[2..], 8).map(|v| (v, false)),
        [b'o' | b'O', _, ..] => radix(&part[1..], 8).map(|v| (v, false)),
        [b'0', _, ..] => radix(part, 8).or_else(|| radix(part, 10)).map(|v| (v, false)),
        _ if bytes.iter().all(u8::is_ascii_digit) && bytes.len() <= 20 => radix(part, 10).map(|v| (v, true)),
        _ => None,
    }
}

/// Whether an address is one of this machine, this network or nobody: what a public URL never names.
/// Addresses for documentation are left out, because documentation holds them.
pub(super) fn special(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => {
            let [x, y, z, _] = a.octets();
            matches!(x, 0 | 10 | 127 | 224..=255)
                || (x == 100 && (64..128).contains(&y))
                || (x == 169 && y == 254)
                || (x == 172 && (16..32).contains(&y))
                || (x == 192 && (y == 168 || (y == 0 && z == 0)))
                || (x == 198 && (y == 18 || y == 19))
        }
        IpAddr::V6(a) => {
            let first = a.segments()[0];
            a.is_unspecified()
                || a.is_loopback()
                || first & 0xfe00 == 0xfc00
                || first & 0xffc0 == 0xfe80
                || first & 0xff00 == 0xff00
        }
    }
}

/// An address that stands in a host name whose owner answers with it: `10.0.0.1.nip.io`,
/// `make-127-0-0-1.rr.1u.ms`, `7f000001.c0a80001.rbndr.us`.
pub(super) fn in_name(host: &str) -> Option<Ipv4Addr> {
    // Names of pods and of cloud machines are made so too, and mean themselves.
    if host.ends_with(".cluster.local") || host.ends_with(".internal") || host.ends_with(".amazonaws.com") {
        return None;
    }
    if !host.bytes().any(|b| b.is_ascii_digit()) && !WILDCARD.iter().any(|w| under(host, w)) {
        return None;
    }
    let octets = |mut parts: Vec<&str>| {
        parts.truncate(4);
        let mut v = [0u8; 4];
        for (i, p) in parts.iter().enumerate() {
            v[i] = p.parse().ok()?;
        }
        (parts.len() == 4).then(|| Ipv4Addr::from(v))
    };
    let labels: Vec<&str> = host.split('.').collect();
    for (i, label) in labels.iter().enumerate() {
        if i + 4 < labels.len()
            && label.bytes().all(|b| b.is_ascii_digit())
            && let Some(a) = octets(labels[i..i + 4].to_vec())
        {
            return Some(a);
        }
        if label.bytes().filter(|b| *b == b'-').count() >= 3 && i + 1 < labels.len() {
            let words: Vec<&str> = label.split('-').collect();
            for w in words.windows(4) {
                if words[0] != "ip"
                    && w.iter().all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
                    && let Some(a) = octets(w.to_vec())
                {
                    return Some(a);
                }
            }
        }
        if label.len() == 8
            && label.bytes().all(|b| b.is_ascii_hexdigit())
            && WILDCARD.iter().any(|w| under(host, w))
        {
            return u32::from_str_radix(label, 16).ok().map(Ipv4Addr::from);
        }
    }
    None
}

/// Services that answer with the address in the name that they are asked for.
pub(super) const WILDCARD: [&str; 15] = [
    "nip.io",
    "sslip.io",
    "xip.io",
    "xip.name",
    "1u.ms",
    "rbndr.us",
    "lock.cmpxchg8b.com",
    "localtest.me",
    "lvh.me",
    "vcap.me",
    "lacolhost.com",
    "localdomain.pw",
    "traefik.me",
    "backname.io",
    "r3dir.me",
];

/// Endings that only a resolver inside answers for. A cluster's own services are what its pods are for.
const INSIDE: [&str; 14] = [
    "internal",
    "intranet",
    "local",
    "localdomain",
    "lan",
    "corp",
    "home",
    "home.arpa",
    "private",
    "consul",
    "priv",
    "host.docker.internal",
    "gateway.docker.internal",
    "kubernetes.default",
];

/// Names of what runs a machine or a cluster: its interface, its metadata, its secrets.
const INNER: [&str; 8] = [
    "kubernetes",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "metadata",
    "instance-data",
    "consul",
    "vault",
    "etcd",
];

/// Names of this machine, and of what only this network knows.
pub(super) fn inside_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    if INNER.contains(&host) {
        return true;
    }
    if under(host, "svc") || under(host, "cluster.local") {
        return false;
    }
    local_name(host) || (host.contains('.') && INSIDE.iter().any(|n| under(host, n)))
}

/// Names that mean this machine.
fn local_name(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    [
        "localhost",
        "localhost.localdomain",
        "localhost6",
        "ip6-localhost",
        "ip6-loopback",
        "loopback",
        "broadcasthost",
    ]
    .iter()
    .any(|n| host.eq_ignore_ascii_case(n))
        || host.len() > 10 && host.as_bytes()[host.len() - 10..].eq_ignore_ascii_case(b".localhost")
}

/// Whether `host` is `name` or below it.
pub(super) fn under(host: &str, name: &str) -> bool {
    // Asked of many names for every URL: most differ in their last letter.
    host.as_bytes().last() == name.as_bytes().last()
        && host.strip_suffix(name).is_some_and(|h| h.is_empty() || h.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(host: &str, wanted: &str, plain: bool) {
        let (a, p) = parse(host).unwrap_or_else(|| panic!("{host} is an address"));
        assert_eq!((a.to_string().as_str(), p), (wanted, plain), "{host}");
    }

    #[test]
    fn every_spelling_of_an_address_is_read() {
        is("127.0.0.1", "127.0.0.1", true);
        is("127.0.0.1.", "127.0.0.1", true);
        for host in [
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "017700000001",
            "0177.0.0.1",
            "0x7f.0.0.0x1",
            "0o177.0.0.1",
            "o177.0.0.1",
            "0x41414141_7f000001",
        ] {
            if host.contains('_') {
                is(&host.replace('_', ""), "127.0.0.1", false);
            } else {
                is(host, "127.0.0.1", false);
            }
        }
        for host in [
            "[::ffff:127.0.0.1]",
            "[::127.0.0.1]",
            "[::ffff:7f00:1]",
            "[2002:7f00:1::]",
            "[64:ff9b::7f00:1]",
            "[0:0:0:0:0:ffff:7f00:0001]",
            "[::ffff:127.0.0.1%25eth0]",
        ] {
            is(host, "127.0.0.1", false);
        }
        is("[::1]", "::1", true);
        is("[::]", "::", true);
        for host in ["example.com", "1.2.3.4.5", "o.com", "10.example.com", "[::g]", "0xg", ""] {
            assert_eq!(parse(host), None, "{host}");
        }
    }

    #[test]
    fn what_is_public_is_told_from_what_is_not() {
        for a in [
            "0.0.0.0",
            "10.1.2.3",
            "127.0.0.1",
            "100.64.0.1",
            "169.254.0.1",
            "172.16.0.1",
            "172.31.9.9",
            "192.168.1.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fd00::1",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(special(a.parse().unwrap()), "{a}");
        }
        for a in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.2.1",
            "193.168.1.1",
            "2606:4700::1111",
        ] {
            assert!(!special(a.parse().unwrap()), "{a}");
        }
    }

    #[test]
    fn names_of_the_inside_are_told_from_public_ones_and_from_services() {
        for host in
            ["localhost", "db.internal", "printer.local", "kubernetes.default.svc", "host.docker.internal"]
        {
            assert!(inside_name(host), "{host}");
        }
        for host in [
            "orders.shop.svc",
            "orders.shop.svc.cluster.local",
            "localhost.run",
            "local",
            "internal.example.com",
        ] {
            assert!(!inside_name(host), "{host}");
        }
    }

    #[test]
    fn names_made_of_addresses_are_read() {
        for host in [
            "127.0.0.1.nip.io",
            "app.127-0-0-1.sslip.io",
            "make-127-0-0-1.rr.1u.ms",
            "7f000001.c0a80001.rbndr.us",
        ] {
            assert_eq!(in_name(host), Some(Ipv4Addr::LOCALHOST), "{host}");
        }
        for host in [
            "127-0-0-1.ns.pod.cluster.local",
            "ip-10-0-0-1.ec2.internal",
            "a-1-2.example.com",
            "1.2.3.example.com",
        ] {
            assert_eq!(in_name(host), None, "{host}");
        }
    }
}
