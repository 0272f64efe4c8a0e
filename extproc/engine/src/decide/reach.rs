//! What may be said of an address before anything is sent to it. Not a decision: Cedar reads the answer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sallyport_api::{AgentPolicySpec, DefaultAction, Listed, network_holds};

use crate::message::{Destination, Peer, RequestHead};

/// Where a call leads, as Cedar reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Nothing is known of the address.
    #[default]
    Unknown,
    /// To the host that the request names.
    Bound,
    /// To what the platform serves, and `egress.platform` allows it.
    Platform,
    /// To an address that the host does not have.
    Unbound,
    /// To an address of which nobody could say whose it is.
    Unresolved,
    /// To an address that no call may go to.
    Denied,
}

impl Reach {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Bound => "bound",
            Self::Platform => "platform",
            Self::Unbound => "unbound",
            Self::Unresolved => "unresolved",
            Self::Denied => "denied",
        }
    }
}

const METADATA: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];
const POD_IDENTITY: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 23)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)),
];
/// Other clouds' services of the kind, which no field allows, in networks that are nobody's in particular.
const OTHER_METADATA: [Ipv4Addr; 3] =
    [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(192, 0, 0, 192)];
const PLATFORM_PORT: u16 = 80;
const POD_IDENTITY_PATH: &str = "/v1/credentials";
const METADATA_IDENTITY_PATH: &str = "/computeMetadata/v1/instance/service-accounts/";

/// What is to be said of a call's destination, and a sentence where it can't be reached.
pub(crate) fn of_call(spec: &AgentPolicySpec, head: &RequestHead) -> (Reach, String) {
    match &head.destination {
        Destination::Unknown => (Reach::Unknown, String::new()),
        Destination::Unbound(why) => (Reach::Unbound, why.clone()),
        Destination::Unresolved(why) => (Reach::Unresolved, why.clone()),
        Destination::Bound(peer) => {
            let path = head.path.split(['?', '#']).next().unwrap_or_default();
            of_peer(spec, &head.host, *peer, Some((head.port, path)))
        }
    }
}

/// The same of an address; `call` is the port and path where a call is made, none where a name is resolved.
pub(crate) fn of_peer(
    spec: &AgentPolicySpec,
    host: &str,
    peer: Peer,
    call: Option<(u16, &str)>,
) -> (Reach, String) {
    let platform = &spec.egress.platform;
    let allowed = |field: DefaultAction| field == DefaultAction::Allow;
    let address = plain(peer.address);
    let denied = |what: &str, field: &str| {
        (
            Reach::Denied,
            format!("{host} leads to {address}, {what}; {field} of the AgentPolicy would allow it"),
        )
    };
    if peer.api_server {
        return if allowed(platform.kubernetes_api) {
            (Reach::Platform, String::new())
        } else {
            denied("the Kubernetes API", "spec.egress.platform.kubernetesAPI")
        };
    }
    // A name may lead there where some call to it would be allowed.
    let at = |path: &str| call.is_none_or(|(port, p)| port == PLATFORM_PORT && holds(path, p));
    if METADATA.contains(&address) {
        let whole = allowed(platform.metadata) && at("/");
        let identity = allowed(platform.pod_identity) && at(METADATA_IDENTITY_PATH);
        return if whole || identity {
            (Reach::Platform, String::new())
        } else {
            denied("the metadata service (port 80)", "spec.egress.platform.metadata")
        };
    }
    if POD_IDENTITY.contains(&address) {
        return if allowed(platform.pod_identity) && at(POD_IDENTITY_PATH) {
            (Reach::Platform, String::new())
        } else {
            denied(
                "the pod's cloud credentials (port 80, /v1/credentials)",
                "spec.egress.platform.podIdentity",
            )
        };
    }
    match network(address) {
        None => (Reach::Bound, String::new()),
        Some(Network::Never(what)) => {
            (Reach::Denied, format!("{host} leads to {address}, {what}, which no call may go to"))
        }
        Some(Network::Private) => {
            let listed = || spec.egress.may_allow(&literal(address)) == Listed::ByName;
            let network = || spec.egress.private_cidrs.iter().any(|n| network_holds(n, address));
            // The request names the address itself, and so does the policy; or the cluster gave the name.
            if peer.of_cluster || (literal(address) == host && listed()) || network() {
                (Reach::Bound, String::new())
            } else {
                denied("a private address outside of the cluster's names", "spec.egress.privateCIDRs")
            }
        }
    }
}

/// An address as the host of a URL.
fn literal(address: IpAddr) -> String {
    match address {
        IpAddr::V4(a) => a.to_string(),
        IpAddr::V6(a) => format!("[{a}]"),
    }
}

/// A path that could mean another one upstream holds nothing.
fn holds(prefix: &str, path: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/-_.=,:@".contains(&b);
    path.starts_with(prefix) && path.bytes().all(plain) && !path.contains("..") && !path.contains("//")
}

/// An IPv4 address that an IPv6 one stands for, where a translator on the way would make it so.
fn plain(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let s = v6.segments();
    let v4 = |high: u16, low: u16| IpAddr::V4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    match s {
        // IPv4-mapped, NAT64 of RFC 6052 and of RFC 8215, and 6to4.
        [0, 0, 0, 0, 0, 0xffff, h, l]
        | [0x64, 0xff9b, 0, 0, 0, 0, h, l]
        | [0x64, 0xff9b, 1, .., h, l]
        | [0x2002, h, l, ..] => v4(h, l),
        _ => address,
    }
}

enum Network {
    Never(&'static str),
    Private,
}

fn network(address: IpAddr) -> Option<Network> {
    use Network::{Never, Private};
    match address {
        IpAddr::V4(a) => match a.octets() {
            _ if OTHER_METADATA.contains(&a) => Some(Never("a cloud's metadata service")),
            [0, ..] => Some(Never("an address of this machine")),
            [127, ..] => Some(Never("the loopback")),
            [169, 254, ..] => Some(Never("a link-local address")),
            [224..=239, ..] => Some(Never("a multicast address")),
            [240..=255, ..] => Some(Never("a reserved address")),
            [10, ..]
            | [172, 16..=31, ..]
            | [192, 168, ..]
            | [100, 64..=127, ..]
            | [192, 0, 0, _]
            | [198, 18..=19, ..] => Some(Private),
            _ => None,
        },
        IpAddr::V6(a) => match a.segments() {
            [0, 0, 0, 0, 0, 0, 0, 1] => Some(Never("the loopback")),
            // Unspecified, and IPv4 in an old form.
            [0, 0, 0, 0, 0, 0, ..] => Some(Never("an address of this machine")),
            [first, ..] if first & 0xffc0 == 0xfe80 => Some(Never("a link-local address")),
            [first, ..] if first & 0xff00 == 0xff00 => Some(Never("a multicast address")),
            // Unique local, and the site-local that came before.
            [first, ..] if first & 0xfe00 == 0xfc00 || first & 0xffc0 == 0xfec0 => Some(Private),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use sallyport_api::{EgressAction, EgressRule};

    use super::*;

    fn peer(address: &str) -> Peer {
        Peer { address: address.parse().unwrap(), of_cluster: false, api_server: false }
    }

    fn reach(spec: &AgentPolicySpec, host: &str, peer: Peer) -> Reach {
        of_peer(spec, host, peer, Some((80, "/"))).0
    }

    #[test]
    fn names_lead_to_public_addresses_only_in_whatever_clothes() {
        let spec = AgentPolicySpec::default();
        for address in
            ["93.184.216.34", "2606:2800:220:1::1", "100.63.0.1", "172.32.0.1", "64:ff9b::5db8:d822"]
        {
            assert_eq!(reach(&spec, "a.test", peer(address)), Reach::Bound, "{address}");
        }
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.1.1",
            "224.0.0.1",
            "255.255.255.255",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "::",
            "::1",
            "::7f00:1",
            "fe80::1",
            "ff02::1",
            "fc00::1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fec0::1",
            "::ffff:127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
            "64:ff9b:1::a00:1",
        ] {
            assert_eq!(reach(&spec, "a.test", peer(address)), Reach::Denied, "{address}");
        }
    }

    #[test]
    fn private_addresses_are_the_clusters_or_listed() {
        let mut spec = AgentPolicySpec::default();
        let ten = peer("10.1.2.3");
        assert_eq!(reach(&spec, "x.svc", Peer { of_cluster: true, ..ten }), Reach::Bound);
        let loopback = Peer { of_cluster: true, ..peer("127.0.0.1") };
        assert_eq!(reach(&spec, "x.svc", loopback), Reach::Denied, "not even there");
        assert_eq!(reach(&spec, "10.1.2.3", ten), Reach::Denied);
        let rule = |host: &str| EgressRule {
            hosts: vec![host.into()],
            ports: vec![],
            methods: vec![],
            paths: vec![],
            action: EgressAction::Allow,
        };
        spec.egress.rules = vec![rule("*")];
        assert_eq!(reach(&spec, "10.1.2.3", ten), Reach::Denied, "a pattern does not name it");
        spec.egress.rules = vec![rule("10.1.2.3")];
        assert_eq!(reach(&spec, "10.1.2.3", ten), Reach::Bound);
        assert_eq!(reach(&spec, "a.test", ten), Reach::Denied, "another name does not get there by it");
        spec.egress.private_cidrs = vec!["10.1.0.0/16".into()];
        assert_eq!(reach(&spec, "a.test", ten), Reach::Bound);
        assert_eq!(reach(&spec, "a.test", peer("10.2.0.1")), Reach::Denied);
    }

    #[test]
    fn the_platform_is_reached_by_address_port_and_path_or_not_at_all() {
        let mut spec = AgentPolicySpec::default();
        let at = |spec: &AgentPolicySpec, address: &str, port: u16, path: &str| {
            of_peer(spec, address, peer(address), Some((port, path)))
        };
        let (reach, why) = at(&spec, "169.254.169.254", 80, "/latest");
        assert!(reach == Reach::Denied && why.contains("spec.egress.platform.metadata"), "{why}");
        spec.egress.platform.pod_identity = DefaultAction::Allow;
        for (address, port, path, wanted) in [
            ("169.254.170.23", 80, "/v1/credentials", Reach::Platform),
            ("fd00:ec2::23", 80, "/v1/credentials", Reach::Platform),
            ("169.254.170.23", 8080, "/v1/credentials", Reach::Denied),
            ("169.254.170.23", 80, "/v1/other", Reach::Denied),
            (
                "169.254.169.254",
                80,
                "/computeMetadata/v1/instance/service-accounts/default/token",
                Reach::Platform,
            ),
            ("169.254.169.254", 80, "/computeMetadata/v1/instance/service-accounts/../../x", Reach::Denied),
            ("169.254.169.254", 80, "/computeMetadata/v1/instance/service-accounts/%2e%2e/x", Reach::Denied),
            ("169.254.169.254", 80, "/latest/user-data", Reach::Denied),
        ] {
            assert_eq!(at(&spec, address, port, path).0, wanted, "{address}:{port}{path}");
        }
        spec.egress.platform.metadata = DefaultAction::Allow;
        assert_eq!(at(&spec, "169.254.169.254", 80, "/latest/user-data").0, Reach::Platform);
        let api = Peer { api_server: true, ..peer("10.96.0.1") };
        let (reach, why) = of_peer(&spec, "kubernetes.default.svc", api, Some((443, "/")));
        assert!(reach == Reach::Denied && why.contains("kubernetesAPI"), "{why}");
        spec.egress.platform.kubernetes_api = DefaultAction::Allow;
        assert_eq!(of_peer(&spec, "kubernetes.default.svc", api, None).0, Reach::Platform);
    }
}
