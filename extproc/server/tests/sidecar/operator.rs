//! An operator for tests: honest, small, and with a memory of what it was told.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use sallyport_proto::discovery::{
    Bundle, Discovery, DiscoveryServer, ENVOY_PART, Hello, Kill, POLICY_PART, Part, PolicyRef,
    Request as Kind, Response as Reply, SCHEMA, SubscribeRequest, SubscribeResponse, bundle_digest,
    part_digest,
};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

pub const DEADLINE: Duration = Duration::from_secs(20);
pub const TOKEN: &str = "t0ken-that-nobody-may-log";

/// An authority of its own.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    fn identity(&self) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity::from_pem(certificate.pem(), key.serialize_pem())
    }
}

/// What a sidecar told.
#[derive(Clone, Debug, PartialEq)]
pub enum Told {
    Hello(Hello),
    Ack(String),
    Nack(String, String),
}

#[derive(Default)]
struct Memory {
    told: Mutex<Vec<(Instant, Told)>>,
    /// Digests that were sent with their content.
    sent: Mutex<Vec<String>>,
    turn_away: Mutex<VecDeque<Status>>,
    strangers: Mutex<usize>,
}

/// The operator. What it is told and what it offers outlive a restart.
pub struct Operator {
    pub address: SocketAddr,
    memory: Arc<Memory>,
    offer: watch::Sender<Option<Bundle>>,
    end: watch::Sender<u32>,
    server: tokio::task::JoinHandle<()>,
}

impl Operator {
    pub async fn start(authority: &Authority) -> Self {
        let (memory, offer, end) = (Arc::default(), watch::Sender::new(None), watch::Sender::new(0));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = serve(listener, authority, &memory, &offer, &end);
        Self { address, memory, offer, end, server }
    }

    /// Every connection breaks, and nobody listens any more.
    pub async fn stop(&mut self) {
        self.server.abort();
        let _ = (&mut self.server).await;
        self.end_streams();
    }

    /// Listens again where it did.
    pub async fn restart(&mut self, authority: &Authority) {
        // A connection of somebody else's may have the port for a moment; it was any free one.
        let mut tries = 0;
        let listener = loop {
            match tokio::net::TcpListener::bind(self.address).await {
                Ok(listener) => break listener,
                Err(e) if tries == 200 => panic!("{}: {e}", self.address),
                Err(_) => tries += 1,
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        };
        self.server = serve(listener, authority, &self.memory, &self.offer, &self.end);
    }

    /// Ends every stream, as the half hour does.
    pub fn end_streams(&self) {
        self.end.send_modify(|n| *n += 1);
    }

    pub fn url(&self) -> String {
        format!("https://localhost:{}", self.address.port())
    }

    pub fn offer(&self, bundle: Bundle) {
        self.offer.send_replace(Some(bundle));
    }

    pub fn turn_away(&self, status: Status) {
        self.memory.turn_away.lock().unwrap().push_back(status);
    }

    pub fn told(&self) -> Vec<Told> {
        self.memory.told.lock().unwrap().iter().map(|(_, told)| told.clone()).collect()
    }

    pub fn hellos(&self) -> Vec<(Instant, Hello)> {
        let hello = |(at, told): &(Instant, Told)| match told {
            Told::Hello(hello) => Some((*at, hello.clone())),
            _ => None,
        };
        self.memory.told.lock().unwrap().iter().filter_map(hello).collect()
    }

    pub fn sent(&self) -> Vec<String> {
        self.memory.sent.lock().unwrap().clone()
    }

    pub fn strangers(&self) -> usize {
        *self.memory.strangers.lock().unwrap()
    }

    pub async fn wait_for(&self, what: &str, found: impl Fn(&[Told]) -> bool) {
        let end = Instant::now() + DEADLINE;
        while !found(&self.told()) {
            assert!(Instant::now() < end, "{what}; was told {:#?}", self.told());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn acked(&self, bundle: &Bundle) {
        self.wait_for("an ack", |t| t.contains(&Told::Ack(bundle.digest.clone()))).await;
    }

    pub async fn nacked(&self, bundle: &Bundle) -> String {
        let of = |t: &Told| match t {
            Told::Nack(digest, error) if *digest == bundle.digest => Some(error.clone()),
            _ => None,
        };
        self.wait_for("a nack", |t| t.iter().any(|t| of(t).is_some())).await;
        self.told().iter().find_map(of).unwrap()
    }
}

fn serve(
    listener: tokio::net::TcpListener,
    authority: &Authority,
    memory: &Arc<Memory>,
    offer: &watch::Sender<Option<Bundle>>,
    end: &watch::Sender<u32>,
) -> tokio::task::JoinHandle<()> {
    let service = Service { memory: Arc::clone(memory), offer: offer.subscribe(), end: end.subscribe() };
    let tls = ServerTlsConfig::new().identity(authority.identity());
    tokio::spawn(async move {
        let mut server = Server::builder().tls_config(tls).unwrap();
        let served = server
            .add_service(DiscoveryServer::new(service))
            .serve_with_incoming(TcpListenerStream::new(listener))
            .await;
        served.unwrap();
    })
}

struct Service {
    memory: Arc<Memory>,
    offer: watch::Receiver<Option<Bundle>>,
    end: watch::Receiver<u32>,
}

#[tonic::async_trait]
impl Discovery for Service {
    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<SubscribeResponse, Status>> + Send>>;

    async fn subscribe(
        &self,
        request: Request<Streaming<SubscribeRequest>>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        if let Some(status) = self.memory.turn_away.lock().unwrap().pop_front() {
            return Err(status);
        }
        let bearer = request.metadata().get("authorization").and_then(|v| v.to_str().ok());
        if bearer != Some(&format!("Bearer {TOKEN}")) {
            *self.memory.strangers.lock().unwrap() += 1;
            return Err(Status::unauthenticated("who are you?"));
        }
        let mut inbound = request.into_inner();
        let first = inbound.next().await.ok_or_else(|| Status::invalid_argument("no hello"))??;
        let Some(Kind::Hello(hello)) = first.kind else { return Err(Status::invalid_argument("no hello")) };
        let mut known: HashSet<String> = hello.held.iter().cloned().collect();
        let note = |memory: &Memory, told| memory.told.lock().unwrap().push((Instant::now(), told));
        note(&self.memory, Told::Hello(hello));

        let memory = Arc::clone(&self.memory);
        tokio::spawn(async move {
            while let Some(Ok(message)) = inbound.next().await {
                match message.kind.unwrap() {
                    Kind::Hello(_) => panic!("a second hello"),
                    Kind::Ack(ack) => note(&memory, Told::Ack(ack.digest)),
                    Kind::Nack(nack) => note(&memory, Told::Nack(nack.digest, nack.error)),
                }
            }
        });
        let (send, messages) = mpsc::channel(16);
        let (mut offer, mut end, memory) = (self.offer.clone(), self.end.clone(), Arc::clone(&self.memory));
        end.mark_unchanged();
        offer.mark_changed();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = end.changed() => {
                        let _ = send.send(Err(Status::unavailable("come again"))).await;
                        return;
                    }
                    changed = offer.changed() => if changed.is_err() { return },
                }
                let Some(mut bundle) = offer.borrow_and_update().clone() else { continue };
                for part in &mut bundle.parts {
                    if !known.insert(part.digest.clone()) {
                        part.content = None;
                    } else if part.content.is_some() {
                        memory.sent.lock().unwrap().push(part.digest.clone());
                    }
                }
                let message = SubscribeResponse { kind: Some(Reply::Bundle(bundle)) };
                if send.send(Ok(message)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

pub fn part(name: &str, content: &Value) -> Part {
    let content = content.to_string();
    Part { name: name.into(), digest: part_digest(content.as_bytes()), content: Some(content.into()) }
}

/// A bundle of a policy's spec and Envoy's configuration.
pub fn bundle(spec: &Value, envoy: &Value) -> Bundle {
    let policy = PolicyRef { namespace: "agents".into(), name: "bot".into(), generation: 7 };
    let parts = vec![part(POLICY_PART, spec), part(ENVOY_PART, envoy)];
    sealed(Bundle { schema: SCHEMA, policy: Some(policy), parts, ..Bundle::default() })
}

/// A bundle whose policy allows this host alone.
pub fn allowing(host: &str) -> Bundle {
    let listeners = json!({"version_info": "1", "resources": []});
    bundle(&spec(host), &json!({"bootstrap": {"node": {"id": "x"}}, "listeners": listeners}))
}

pub fn spec(host: &str) -> Value {
    json!({"egress": {"default": "Deny", "rules": [{"hosts": [host], "action": "Allow"}]}})
}

pub fn killed(mut bundle: Bundle) -> Bundle {
    bundle.kill = Some(Kill { by: "namespace agents".into() });
    sealed(bundle)
}

/// With the digest that belongs to it.
pub fn sealed(mut bundle: Bundle) -> Bundle {
    bundle.digest = bundle_digest(&bundle);
    bundle
}
