//! Clusters: the filter's process, upstreams by name, upstreams fixed by a base URL.

use sallyport_api::{AgentPolicySpec, DefaultAction, Listed, Mode};
use serde_json::{Value, json};

use crate::http::upstream_http;
use crate::settings::{BaseUrl, Scheme, Settings};
use crate::{extension, path};

/// Name of the cluster that is the filter's process.
pub(crate) const EXTPROC: &str = "extproc";
/// Name of the cluster that takes its address from the request.
pub(crate) const BY_NAME: &str = "by_name";

/// Name of the cluster that dials the address which the filter's process names.
pub(crate) const BY_ADDRESS: &str = "by_address";

/// Name of a base URL's listener and cluster.
pub(crate) fn base_url_name(base: &BaseUrl) -> String {
    format!("base_url_{}", base.port)
}

/// The filter's process, on its unix socket.
pub(crate) fn extproc(settings: &Settings, buffer: u32) -> Value {
    json!({
        "name": EXTPROC,
        "type": "STATIC",
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": buffer,
        "load_assignment": endpoints(EXTPROC, &json!({"pipe": {"path": path(&settings.extproc_socket())}})),
        "typed_extension_protocol_options": protocol_options(json!({
            "explicit_http_config": {"http2_protocol_options": {}},
        })),
        // Every call holds a stream for its whole life. At Envoy's default of 1,024 the 1,025th open SSE
        // stream would be refused (or, with failurePolicy Open, pass uninspected).
        "circuit_breakers": {"thresholds": [{
            "max_connections": settings.max_calls,
            "max_pending_requests": settings.max_calls,
            "max_requests": settings.max_calls,
        }]},
    })
}

/// Upstreams that the explicit proxy's clients name in their requests.
pub(crate) fn by_name(spec: &AgentPolicySpec, settings: &Settings, buffer: u32) -> Value {
    let mut http = upstream_http(None, buffer);
    // Envoy refuses this kind of cluster without them, so that adding TLS can't be done unsafely.
    http["upstream_http_protocol_options"] = json!({"auto_sni": true, "auto_san_validation": true});
    http["http_filters"] = guards(spec, settings).into();
    json!({
        "name": BY_NAME,
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "per_connection_buffer_limit_bytes": buffer,
        "cluster_type": extension(
            "envoy.clusters.dynamic_forward_proxy",
            "envoy.extensions.clusters.dynamic_forward_proxy.v3.ClusterConfig",
            json!({"dns_cache_config": dns_cache()}),
        ),
        "typed_extension_protocol_options": protocol_options(http),
        "circuit_breakers": breakers(settings),
    })
}

/// Upstreams of captured calls. The address is in the metadata of the filter's answer. Where the filter gave none,
/// because it is down and `failurePolicy` is `Open`, it is the one that the agent connected to.
pub(crate) fn by_address(settings: &Settings, buffer: u32) -> Value {
    json!({
        "name": BY_ADDRESS,
        "type": "ORIGINAL_DST",
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {
            "metadata_key": {"key": "sallyport", "path": [{"key": "destination"}]},
        },
        "per_connection_buffer_limit_bytes": buffer,
        "typed_extension_protocol_options": protocol_options(upstream_http(None, buffer)),
        "circuit_breakers": breakers(settings),
    })
}

/// What is refused on the address itself, before connecting and whatever name leads there.
pub(crate) fn guards(spec: &AgentPolicySpec, settings: &Settings) -> Vec<Value> {
    vec![
        address_guard(spec, settings),
        extension(
            "envoy.filters.http.upstream_codec",
            "envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec",
            json!({}),
        ),
    ]
}

/// The upstream of a base URL.
pub(crate) fn fixed(settings: &Settings, base: &BaseUrl, buffer: u32) -> Value {
    let name = base_url_name(base);
    let upstream = &base.upstream;
    let address = json!({"socket_address": {"address": upstream.host, "port_value": upstream.port}});
    let mut cluster = json!({
        "name": name,
        // One address at a time, the way a client would: STRICT_DNS would drain connections whenever a
        // large API's answer rotates.
        "type": "LOGICAL_DNS",
        "dns_lookup_family": "V4_PREFERRED",
        "typed_dns_resolver_config": resolver(),
        "connect_timeout": "5s",
        "per_connection_buffer_limit_bytes": buffer,
        "load_assignment": endpoints(&name, &address),
        "typed_extension_protocol_options": protocol_options(upstream_http(Some(upstream.scheme), buffer)),
        "circuit_breakers": breakers(settings),
    });
    if upstream.scheme == Scheme::Https {
        cluster["transport_socket"] = tls(settings, &upstream.host);
    }
    cluster
}

/// TLS towards an upstream whose name is known beforehand. The name comes from the configuration, never
/// from the request, so nothing a client sends can weaken the check.
fn tls(settings: &Settings, host: &str) -> Value {
    let is_address = host.parse::<std::net::IpAddr>().is_ok();
    let mut context = json!({
        "common_tls_context": {
            "validation_context": {
                "trusted_ca": {"filename": path(&settings.ca_bundle)},
                "match_typed_subject_alt_names": [{
                    "san_type": if is_address { "IP_ADDRESS" } else { "DNS" },
                    "matcher": {"exact": host},
                }],
            },
        },
    });
    if !is_address {
        // An address is no server name (RFC 6066).
        context["sni"] = json!(host);
    }
    extension(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        context,
    )
}

/// The DNS cache shared by the forward-proxy filter and its cluster: both must name the same one.
pub(crate) fn dns_cache() -> Value {
    json!({
        "name": "by_name",
        "dns_lookup_family": "V4_PREFERRED",
        "typed_dns_resolver_config": resolver(),
    })
}

/// The system's resolver: `/etc/hosts`, search domains and nsswitch hold as for every other program.
fn resolver() -> Value {
    extension(
        "envoy.network.dns_resolver.getaddrinfo",
        "envoy.extensions.network.dns_resolver.getaddrinfo.v3.GetAddrInfoDnsResolverConfig",
        json!({}),
    )
}

fn address_guard(spec: &AgentPolicySpec, settings: &Settings) -> Value {
    let listeners = settings.proxy.iter().map(|p| p.port).chain(settings.base_urls.iter().map(|b| b.port));
    let ports = listeners.chain(settings.own_ports.iter().copied());
    let mut rules = Vec::new();
    for port in ports {
        for (address, bits) in [("127.0.0.0", 8), ("::1", 128), ("0.0.0.0", 8), ("::", 128)] {
            rules.push(own_listener(address, bits, port));
        }
    }
    if let Some(proxy) = &settings.proxy
        && !proxy.address.is_loopback()
        && !proxy.address.is_unspecified()
    {
        let bits = if proxy.address.is_ipv4() { 32 } else { 128 };
        rules.push(own_listener(&proxy.address.to_string(), bits, proxy.port));
    }
    let policy = |rules: Vec<Value>| json!({"permissions": [{"or_rules": {"rules": rules}}], "principals": [{"any": true}]});
    // A call that would come back to one of our own listeners would go round until the connections run out.
    let mut policies = json!({"own_listeners": policy(rules)});
    // What only observes refuses nothing.
    if spec.mode == Mode::Enforce {
        policies["never"] = policy(never(spec));
    }
    extension(
        "envoy.filters.http.upstream_rbac",
        "envoy.extensions.filters.http.rbac.v3.RBAC",
        json!({"rules": {"action": "DENY", "policies": policies}}),
    )
}

/// Networks that no call may go to. Private ones are the filter's business, which knows the names.
fn never(spec: &AgentPolicySpec) -> Vec<Value> {
    let mut networks = vec![
        // This machine, by the addresses that mean none; multicast and broadcast.
        ("0.0.0.0", 8),
        ("::", 128),
        ("224.0.0.0", 3),
        ("ff00::", 8),
    ];
    // On a laptop servers of one's own are called, where the policy names them.
    let loopback = ["127.0.0.1", "localhost", "[::1]"];
    if loopback.iter().all(|host| spec.egress.may_allow(host) == Listed::No) {
        networks.extend([("127.0.0.0", 8), ("::1", 128), ("::ffff:127.0.0.0", 104)]);
    }
    let platform = &spec.egress.platform;
    if platform.metadata == DefaultAction::Deny && platform.pod_identity == DefaultAction::Deny {
        networks.extend([("169.254.0.0", 16), ("fd00:ec2::254", 128), ("fd00:ec2::23", 128)]);
    }
    networks.push(("fe80::", 10));
    networks.into_iter().map(|(address, bits)| upstream(address, bits, None)).collect()
}

fn own_listener(address: &str, bits: u8, port: u16) -> Value {
    upstream(address, bits, Some(port))
}

/// Addresses, on one port or on every port.
fn upstream(address: &str, bits: u8, port: Option<u16>) -> Value {
    let mut matcher = json!({"upstream_ip": {"address_prefix": address, "prefix_len": bits}});
    if let Some(port) = port {
        // The end is exclusive.
        matcher["upstream_port_range"] = json!({"start": port, "end": u32::from(port) + 1});
    }
    json!({"matcher": extension(
        "envoy.rbac.matchers.upstream_ip_port",
        "envoy.extensions.rbac.matchers.upstream_ip_port.v3.UpstreamIpPortMatcher",
        matcher,
    )})
}

pub(crate) fn endpoints(name: &str, address: &Value) -> Value {
    json!({"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]})
}

/// The kind of a cluster's protocol options, which is also their key.
const KIND: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// Replaces the protocols that a cluster speaks; everything else in its options stays.
pub(crate) fn set_protocols(cluster: &mut Value, protocols: &Value) {
    let options = &mut cluster["typed_extension_protocol_options"][KIND];
    if let Some(options) = options.as_object_mut() {
        options.remove("use_downstream_protocol_config");
        options.extend(protocols.as_object().cloned().unwrap_or_default());
    }
}

fn protocol_options(mut options: Value) -> Value {
    options["@type"] = json!(format!("type.googleapis.com/{KIND}"));
    json!({KIND: options})
}

/// The same bound as towards the filter: the filter's breaker is the one that decides.
pub(crate) fn breakers(settings: &Settings) -> Value {
    json!({"thresholds": [{
        "max_connections": settings.max_calls,
        "max_pending_requests": settings.max_calls,
        "max_requests": settings.max_calls,
    }]})
}
