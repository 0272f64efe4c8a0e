//! Puts bundles in force: compiles, has Envoy take its listeners, keeps the bundle, swaps. In this order, so
//! that whatever fails leaves everything as it was.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use sallyport_engine::Engine;
use sallyport_proto::discovery::{Kill, PolicyRef};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::envoy::{Before, Configuration, Envoy};
use super::state::State;
use crate::discovery::{Apply, Failed, Held, Verified};
use crate::server::Policy;
use crate::stop::{Stop, Why};

/// What is in force.
#[derive(Clone, Debug)]
pub(crate) struct InForce {
    pub(crate) digest: String,
    pub(crate) source: PolicyRef,
    pub(crate) killed: bool,
    pub(crate) since: Instant,
}

/// What is put in force, and where.
pub(crate) struct Applier {
    policy: Policy,
    stop: Arc<Stop>,
    state: State,
    envoy: Envoy,
    in_force: watch::Sender<Option<Arc<InForce>>>,
    /// Whether the newest bundle that was heard of has the kill switch on. One before it, that is still being
    /// compiled, must not reverse the switch.
    kill: Mutex<Option<Kill>>,
    /// One bundle at a time.
    current: tokio::sync::Mutex<Current>,
}

#[derive(Default)]
struct Current {
    bundle: Option<Verified>,
    /// The compiled policy and its part's digest: a change of anything else compiles nothing.
    engine: Option<(String, Arc<Engine>)>,
    /// The same of a bundle that failed after it was compiled: it is tried again.
    spare: Option<(String, Arc<Engine>)>,
}

// === impl Applier ===

impl Applier {
    /// Nothing is in force yet, and everything is blocked until something is.
    pub(crate) fn new(policy: Policy, stop: Arc<Stop>, state: State, envoy: Envoy) -> Self {
        stop.set(Some(Why::NoBundle));
        Self {
            policy,
            stop,
            state,
            envoy,
            in_force: watch::Sender::new(None),
            kill: Mutex::default(),
            current: tokio::sync::Mutex::default(),
        }
    }

    /// What is in force, from now on.
    pub(crate) fn watch(&self) -> watch::Receiver<Option<Arc<InForce>>> {
        self.in_force.subscribe()
    }

    /// Puts the last good bundle in force, if there is one. What can't be used is kept aside; then the
    /// operator must send one.
    pub(crate) async fn restore(&self) -> Held {
        let mut held = Held::default();
        let state = self.state.clone();
        let loaded = tokio::task::spawn_blocking(move || state.load()).await;
        let error = match loaded {
            Ok(Ok(None)) => return held,
            Ok(Ok(Some(bundle))) => {
                held.remember(&bundle.bundle().parts);
                self.announce(bundle.kill());
                match self.put_in_force(bundle, false).await {
                    Ok(()) => return held,
                    Err(error) => error.to_string(),
                }
            }
            Ok(Err(unusable)) => unusable.to_string(),
            Err(panic) => panic.to_string(),
        };
        tracing::error!(target: "sallyport::bundle", error, "the bundle that was kept can't be used");
        if let Err(e) = self.state.set_aside() {
            tracing::error!(target: "sallyport::bundle", "it can't be moved out of the way: {e}");
        }
        held
    }

    async fn put_in_force(&self, bundle: Verified, keep: bool) -> Result<(), Failed> {
        let mut current = self.current.lock().await;
        let outcome = self.load(&mut current, &bundle, keep).await;
        if outcome.is_err() && keep {
            self.keep_kill_switch(&mut current, &bundle).await;
        }
        outcome
    }

    async fn load(&self, current: &mut Current, bundle: &Verified, keep: bool) -> Result<(), Failed> {
        let engine = self.compile(current, bundle).await.map_err(Failed::ForGood)?;
        let (_, part) = bundle.policy();
        current.spare = Some((part.to_owned(), Arc::clone(&engine)));
        let configuration = Configuration::read(bundle.envoy())
            .map_err(|e| Failed::ForGood(format!("the part `envoy`: {e}")))?;
        let before = match self.envoy.configure(&configuration).await {
            Ok(before) => before,
            // What was in force before a restart is enforced, whatever Envoy says to its listeners now.
            Err(fault) if !keep => {
                tracing::error!(target: "sallyport::bundle", "{fault}");
                Before::default()
            }
            Err(fault) => return Err(fault.into()),
        };
        if keep && let Err(error) = self.keep(bundle).await {
            self.envoy.put_back(&before);
            return Err(Failed::ForNow(error));
        }
        current.spare = None;
        if current.engine.as_ref().is_none_or(|(held, _)| held != part) {
            self.policy.swap(Arc::clone(&engine) as Arc<dyn crate::Judge>);
        }
        current.engine = Some((part.to_owned(), engine));
        current.bundle = Some(bundle.clone());
        self.settle(bundle);
        Ok(())
    }

    async fn compile(&self, current: &Current, bundle: &Verified) -> Result<Arc<Engine>, String> {
        let (content, part) = bundle.policy();
        let mut compiled = current.engine.iter().chain(&current.spare);
        if let Some((_, engine)) = compiled.find(|(held, _)| held == part) {
            return Ok(Arc::clone(engine));
        }
        let (content, name) = (content.clone(), bundle.source().name);
        let compiled = tokio::task::spawn_blocking(move || {
            let spec: Value =
                serde_json::from_slice(&content).map_err(|e| format!("the part `policy`: {e}"))?;
            // The whole object, because what a spec may be is checked where objects are read.
            let name = if name.is_empty() { "policy".to_owned() } else { name };
            let object = json!({
                "apiVersion": sallyport_api::API_VERSION,
                "kind": sallyport_api::KIND,
                "metadata": {"name": name},
                "spec": spec,
            });
            let policy = sallyport_api::load_policy(&object.to_string()).map_err(|e| e.to_string())?;
            let engine = Engine::new(&policy.spec).map_err(|e| e.to_string())?;
            // Not warm yet: `swap` sees to that on a thread of its own, and enforcing waits for no pattern.
            Ok(Arc::new(engine))
        });
        compiled.await.unwrap_or_else(|_| Err("the policy can't be compiled: the compiler failed".to_owned()))
    }

    async fn keep(&self, bundle: &Verified) -> Result<(), String> {
        let (state, bundle) = (self.state.clone(), bundle.bundle().clone());
        let kept = tokio::task::spawn_blocking(move || state.keep(&bundle)).await;
        kept.map_err(std::io::Error::other)
            .and_then(|kept| kept)
            .map_err(|e| format!("the bundle can't be kept: {e}"))
    }

    /// From here on it is in force.
    fn settle(&self, bundle: &Verified) {
        {
            let newest = self.kill.lock().unwrap_or_else(PoisonError::into_inner);
            let kill = bundle.kill().or(newest.as_ref());
            self.stop.set(kill.map(|kill| Why::Killed(kill.by.clone())));
        }
        let source = bundle.source();
        tracing::info!(
            target: "sallyport::bundle",
            digest = bundle.digest(),
            namespace = source.namespace,
            policy = source.name,
            generation = source.generation,
            killed = bundle.kill().map(|kill| kill.by.as_str()),
            "in force"
        );
        self.in_force.send_replace(Some(Arc::new(InForce {
            digest: bundle.digest().to_owned(),
            source,
            killed: bundle.kill().is_some(),
            since: Instant::now(),
        })));
    }

    /// A bundle that can't be loaded still blocks everything where it says so, and must after a restart too:
    /// what is in force then is the one before with the kill switch on.
    async fn keep_kill_switch(&self, current: &mut Current, refused: &Verified) {
        let (Some(kill), Some(bundle)) = (refused.kill(), &current.bundle) else { return };
        let killed = bundle.clone().killed(kill.clone());
        if let Err(error) = self.keep(&killed).await {
            tracing::error!(target: "sallyport::bundle", error, "the kill switch is on in this process only");
        }
        self.settle(&killed);
        current.bundle = Some(killed);
    }
}

impl Apply for Applier {
    fn announce(&self, kill: Option<&Kill>) {
        let mut newest = self.kill.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kill) = kill {
            self.stop.set(Some(Why::Killed(kill.by.clone())));
            tracing::warn!(target: "sallyport::bundle", by = kill.by, "the kill switch is on");
        }
        *newest = kill.cloned();
    }

    fn apply(self: Arc<Self>, bundle: Verified) -> Pin<Box<dyn Future<Output = Result<(), Failed>> + Send>> {
        Box::pin(async move { self.put_in_force(bundle, true).await })
    }

    fn in_force(&self) -> String {
        let announced = self.kill.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        match &*self.in_force.borrow() {
            // A stream that ended between the word of a bundle and its being in force leaves the switch as that
            // bundle wanted it. The operator must say again what counts, or it stays so.
            Some(now) if now.killed == announced => now.digest.clone(),
            _ => String::new(),
        }
    }
}
