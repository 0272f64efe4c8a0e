//! The operator's own authorities, in one Secret.
//!
//! Every replica watches the Secret and mints its own serving certificate in memory; only the leader
//! changes the list, with the resourceVersion it saw, so that two leaders can't undo each other's work.
//! While there is no Secret any replica may create it: the API server lets one win, the others adopt it.
//!
//! What is not guaranteed: whoever can write the Secret owns the trust of every guarded pod. A Secret that
//! is deleted or damaged is restored by the leader from memory; if nobody remembers, a new authority is
//! made, and clients refuse the operator until they have read the new bundle.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Instant;

use futures_util::StreamExt;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use sallyport_api::names;
use tokio::sync::watch;

use super::authority::{Authority, bundle, next, signer};
use super::{Certificates, LOOK, mint};

/// The Secret's name.
pub const SECRET: &str = "sallyport-ca";
/// The key under which the list stands, JSON.
pub const LIST_KEY: &str = "authorities.json";
/// The key under which the bundle stands, for people.
pub const BUNDLE_KEY: &str = "ca.crt";

/// Where the authorities are and for whom they sign.
#[derive(Clone, Debug)]
pub struct Own {
    /// The operator's namespace.
    pub namespace: String,
    /// Names in the serving certificate.
    pub names: Vec<String>,
    /// The pod's name, as field manager's instance in logs.
    pub identity: String,
}

/// The names under which the API server and the sidecars call the operator.
pub fn service_names(service: &str, namespace: &str) -> Vec<String> {
    ["svc", "svc.cluster.local", ""]
        .iter()
        .map(|tail| format!("{service}.{namespace}.{tail}").trim_end_matches('.').to_owned())
        .collect()
}

/// The Secret as it was last seen.
#[derive(Debug, Default)]
enum Seen {
    #[default]
    Nothing,
    Absent,
    There(Box<Secret>),
}

/// Keeps the authorities and the serving certificate until the watch ends.
pub async fn run(
    client: Client,
    own: Own,
    certificates: Certificates,
    leader: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let api: Api<Secret> = Api::namespaced(client, &own.namespace);
    let mut events = pin!(watcher::watch_object(api.clone(), SECRET).backoff(crate::watch_backoff()));
    let mut keeper = Keeper { api, own, certificates, seen: Seen::Nothing, list: Vec::new() };
    let mut leader = leader;
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut clock = Clock::new();
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(Some(secret))) => keeper.saw(secret),
                Some(Ok(None)) => keeper.seen = Seen::Absent,
                Some(Err(error)) => {
                    tracing::warn!(%error, secret = SECRET, "watching the authorities");
                    continue;
                }
                None => anyhow::bail!("the watch on Secret {SECRET} ended"),
            },
            changed = leader.changed() => changed?,
            _ = look.tick() => {}
        }
        let now = Timestamp::now();
        let jumped = clock.jumped(now);
        if let Some(by) = jumped {
            tracing::warn!(seconds = by.as_secs(), "the clock was set; the serving certificate is made anew");
        }
        let leads = *leader.borrow_and_update();
        if let Err(error) = keeper.write(leads, now).await {
            tracing::warn!(%error, secret = SECRET, identity = keeper.own.identity, "writing the authorities");
        }
        keeper.publish(now, jumped.is_some());
    }
}

struct Keeper {
    api: Api<Secret>,
    own: Own,
    certificates: Certificates,
    seen: Seen,
    /// The last good list; it outlives the Secret.
    list: Vec<Authority>,
}

impl Keeper {
    fn saw(&mut self, secret: Secret) {
        let list = decode(&secret);
        if list.is_empty() {
            tracing::error!(secret = SECRET, "holds no readable authority; the last good ones stay in force");
        } else {
            self.list = list;
        }
        self.seen = Seen::There(Box::new(secret));
    }

    /// Brings the Secret to what it should be. Errors are tried again at the next look; a conflict means
    /// that another replica was faster, and its work comes by the watch.
    async fn write(&mut self, leads: bool, now: Timestamp) -> anyhow::Result<()> {
        let first = matches!(self.seen, Seen::Absent) && self.list.is_empty();
        if matches!(self.seen, Seen::Nothing) || !(leads || first) {
            return Ok(());
        }
        let (wanted, stale) = match &self.seen {
            Seen::There(secret) => (
                secret.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(names::ROTATE)),
                decode(secret) != self.list,
            ),
            _ => (false, true),
        };
        let list = match next(&self.list, now, wanted, mint::authority)? {
            Some(list) => list,
            None if stale => self.list.clone(),
            None => return Ok(()),
        };
        let params = PostParams { field_manager: Some(names::FIELD_MANAGER.into()), ..PostParams::default() };
        let result = match &self.seen {
            Seen::There(secret) => {
                let mut secret = secret.clone();
                if let Some(annotations) = secret.metadata.annotations.as_mut() {
                    annotations.remove(names::ROTATE);
                }
                secret.data = Some(encode(&list)?);
                self.api.replace(SECRET, &params, &secret).await
            }
            _ => self.api.create(&params, &fresh(&list)?).await,
        };
        match result {
            Ok(secret) => {
                tracing::info!(secret = SECRET, authorities = list.len(), "wrote the authorities");
                self.saw(secret);
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Publishes the bundle, and a serving certificate where the one in use is due, or another authority
    /// signs now.
    fn publish(&self, now: Timestamp, again: bool) {
        let Some(signs) = signer(&self.list, now) else {
            return;
        };
        // Never before the Secret holds it: a bundle that exists in one replica's memory only can't be
        // trusted by anyone.
        self.certificates.trust(&bundle(&self.list), signs.expires());
        let due = self
            .certificates
            .leaf()
            .is_none_or(|leaf| again || leaf.authority != Some(signs.created) || leaf.renews <= now);
        if due {
            match mint::leaf(signs, &self.own.names, now) {
                Ok(leaf) => self.certificates.serve(leaf),
                Err(error) => tracing::error!(%error, "making a serving certificate"),
            }
        }
    }
}

fn fresh(list: &[Authority]) -> Result<Secret, serde_json::Error> {
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.into()),
            labels: Some(crate::managed_by()),
            ..ObjectMeta::default()
        },
        type_: Some("Opaque".into()),
        data: Some(encode(list)?),
        ..Secret::default()
    })
}

fn encode(list: &[Authority]) -> Result<BTreeMap<String, ByteString>, serde_json::Error> {
    Ok(BTreeMap::from([
        (LIST_KEY.to_owned(), ByteString(serde_json::to_vec_pretty(list)?)),
        (BUNDLE_KEY.to_owned(), ByteString(bundle(list).into_bytes())),
    ]))
}

/// The readable authorities of a Secret; one bad entry does not take the others away.
fn decode(secret: &Secret) -> Vec<Authority> {
    let data = secret.data.as_ref().and_then(|d| d.get(LIST_KEY));
    let entries: Vec<serde_json::Value> =
        data.and_then(|d| serde_json::from_slice(&d.0).ok()).unwrap_or_default();
    entries
        .into_iter()
        .enumerate()
        .filter_map(|(i, entry)| match serde_json::from_value::<Authority>(entry) {
            Ok(a) if mint::usable(&a) => Some(a),
            Ok(_) => {
                tracing::warn!(secret = SECRET, entry = i, "the certificate or its key can't be used");
                None
            }
            // The error would show the value, which is a key.
            Err(_) => {
                tracing::warn!(secret = SECRET, entry = i, "is not an authority");
                None
            }
        })
        .collect()
}

/// Finds out that the wall clock was set: it went another way than the monotonic one.
struct Clock {
    wall: Timestamp,
    steady: Instant,
}

impl Clock {
    /// Less is drift, and harmless: certificates begin an hour early.
    const MOST: SignedDuration = SignedDuration::from_secs(60);

    fn new() -> Self {
        Self { wall: Timestamp::now(), steady: Instant::now() }
    }

    fn jumped(&mut self, now: Timestamp) -> Option<SignedDuration> {
        let steady = SignedDuration::try_from(self.steady.elapsed()).unwrap_or(SignedDuration::ZERO);
        let by = now.duration_since(self.wall) - steady;
        *self = Self { wall: now, steady: Instant::now() };
        (by.abs() > Self::MOST).then_some(by)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_by_which_a_service_is_called() {
        assert_eq!(
            service_names("sallyport-operator", "sallyport-system"),
            [
                "sallyport-operator.sallyport-system.svc",
                "sallyport-operator.sallyport-system.svc.cluster.local",
                "sallyport-operator.sallyport-system",
            ]
        );
    }

    #[test]
    fn one_bad_entry_does_not_take_the_others_away() {
        let good = mint::authority(Timestamp::now()).unwrap();
        let mut list = serde_json::json!([{"cert": "x"}, good, "no"]);
        list[0]["key"] = "y".into();
        let bytes = serde_json::to_vec(&list).unwrap();
        let secret = Secret {
            data: Some(BTreeMap::from([(LIST_KEY.to_owned(), ByteString(bytes))])),
            ..Secret::default()
        };
        assert_eq!(decode(&secret), [good]);
        assert_eq!(decode(&Secret::default()), []);
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let list = [mint::authority(Timestamp::now()).unwrap()];
        let secret = fresh(&list).unwrap();
        assert_eq!(decode(&secret), list);
    }

    #[test]
    fn a_clock_that_was_set_is_noticed_once() {
        let mut clock = Clock::new();
        let now = clock.wall;
        assert_eq!(clock.jumped(now), None);
        let later = now + SignedDuration::from_hours(5);
        assert!(clock.jumped(later).is_some());
        assert_eq!(clock.jumped(later), None);
        assert!(clock.jumped(now).is_some(), "backwards too");
    }
}
