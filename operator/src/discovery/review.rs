//! Who a token belongs to. The API server says so; its word is remembered by the token's hash.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use sallyport_api::names;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// How long a good verdict may be believed, whatever the token says of itself: what is revoked within this
/// time still connects. Its pod must be in the index all the same.
const LONGEST: Duration = Duration::from_secs(10 * 60);
/// How long a bad verdict is believed. Long enough that a sidecar with a bad token costs the API server
/// little, short enough that one that was early recovers.
const REJECTED: Duration = Duration::from_secs(10);
/// Verdicts kept; twice the subscribers that one replica is made for. Each takes about 250 bytes.
const MOST: usize = 10_000;
/// How long the API server may take.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// A pod that proved itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// What the API server says of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is this pod's.
    Pod(PodIdentity),
    /// It is not good, and why.
    Rejected(&'static str),
}

/// The API server could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// It answered with an error.
    #[error("TokenReview failed: {0}")]
    Api(#[source] Box<kube::Error>),
    /// It did not answer.
    #[error("TokenReview took longer than {} s", TIMEOUT.as_secs())]
    Timeout,
}

/// Judges tokens: the API server, or a test.
pub trait Reviewer: Send + Sync + 'static {
    /// Judges one token.
    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Verdict, ReviewError>>;
}

impl Reviewer for Client {
    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Verdict, ReviewError>> {
        Box::pin(async move {
            let ask = TokenReview {
                spec: TokenReviewSpec {
                    token: Some(token.to_owned()),
                    audiences: Some(vec![names::AUDIENCE.to_owned()]),
                },
                ..TokenReview::default()
            };
            let api = Api::<TokenReview>::all(self.clone());
            let answer = tokio::time::timeout(TIMEOUT, api.create(&PostParams::default(), &ask)).await;
            let review =
                answer.map_err(|_| ReviewError::Timeout)?.map_err(|e| ReviewError::Api(Box::new(e)))?;
            Ok(verdict(review.status.unwrap_or_default()))
        })
    }
}

/// Reads the API server's answer. Only a token of our audience that is bound to a pod counts: any other
/// could be taken from one pod and used by another.
fn verdict(status: TokenReviewStatus) -> Verdict {
    if status.authenticated != Some(true) {
        return Verdict::Rejected("the API server does not know the token");
    }
    if !status.audiences.unwrap_or_default().iter().any(|a| a == names::AUDIENCE) {
        return Verdict::Rejected("the token is for another audience");
    }
    let user = status.user.unwrap_or_default();
    let username = user.username.unwrap_or_default();
    let namespace = username
        .strip_prefix("system:serviceaccount:")
        .and_then(|rest| rest.split_once(':'))
        .map(|(namespace, _)| namespace.to_owned());
    let extra = user.extra.unwrap_or_default();
    let one = |key: &str| match extra.get(key).map(Vec::as_slice) {
        Some([value]) => Some(value.clone()),
        _ => None,
    };
    let name = one("authentication.kubernetes.io/pod-name");
    let uid = one("authentication.kubernetes.io/pod-uid");
    match (namespace, name, uid) {
        (Some(namespace), Some(name), Some(uid)) => Verdict::Pod(PodIdentity { namespace, name, uid }),
        (None, ..) => Verdict::Rejected("the token is no service account's"),
        _ => Verdict::Rejected("the token is not bound to a pod"),
    }
}

type Hash = [u8; 32];

/// Verdicts that were given lately.
#[derive(Debug, Default)]
pub(super) struct Cache {
    verdicts: Mutex<HashMap<Hash, (Verdict, Instant)>>,
}

impl Cache {
    pub(super) fn get(&self, token: &str, now: Instant) -> Option<Verdict> {
        let verdicts = self.lock();
        let (verdict, until) = verdicts.get(&hash(token))?;
        (*until > now).then(|| verdict.clone())
    }

    pub(super) fn put(&self, token: &str, verdict: &Verdict, now: Instant) {
        let life = match verdict {
            Verdict::Pod(_) => time_left(token, Timestamp::now()),
            Verdict::Rejected(_) => REJECTED,
        };
        let mut verdicts = self.lock();
        if verdicts.len() >= MOST {
            verdicts.retain(|_, (_, until)| *until > now);
        }
        // Still full: asking again is the price, never more memory.
        if verdicts.len() < MOST {
            verdicts.insert(hash(token), (verdict.clone(), now + life));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Hash, (Verdict, Instant)>> {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hash(token: &str) -> Hash {
    Sha256::digest(token).into()
}

/// How long the token holds by its own word. Not checked, so it can only shorten how long the API server's
/// word is kept.
fn time_left(token: &str, now: Timestamp) -> Duration {
    let exp = token
        .split('.')
        .nth(1)
        .and_then(|claims| URL_SAFE_NO_PAD.decode(claims).ok())
        .and_then(|claims| serde_json::from_slice::<serde_json::Value>(&claims).ok())
        .and_then(|claims| claims.get("exp")?.as_i64());
    match exp {
        Some(exp) => {
            Duration::from_secs(u64::try_from(exp.saturating_sub(now.as_second())).unwrap_or(0)).min(LONGEST)
        }
        None => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::*;

    fn status(change: impl FnOnce(&mut TokenReviewStatus)) -> TokenReviewStatus {
        let extra = [("pod-name", "bot-1"), ("pod-uid", "u1")];
        let mut status = TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec![names::AUDIENCE.into()]),
            user: Some(UserInfo {
                username: Some("system:serviceaccount:agents:default".into()),
                extra: Some(
                    extra
                        .into_iter()
                        .map(|(k, v)| (format!("authentication.kubernetes.io/{k}"), vec![v.to_owned()]))
                        .collect(),
                ),
                ..UserInfo::default()
            }),
            ..TokenReviewStatus::default()
        };
        change(&mut status);
        status
    }

    #[test]
    fn a_token_of_a_pod_names_it() {
        let pod = PodIdentity { namespace: "agents".into(), name: "bot-1".into(), uid: "u1".into() };
        assert_eq!(verdict(status(|_| {})), Verdict::Pod(pod));
    }

    #[test]
    fn any_other_token_is_rejected() {
        let user = |s: &mut TokenReviewStatus, name: &str| {
            s.user.as_mut().unwrap().username = Some(name.into());
        };
        for bad in [
            status(|s| s.authenticated = Some(false)),
            status(|s| s.authenticated = None),
            status(|s| s.audiences = Some(vec!["https://kubernetes.default.svc".into()])),
            status(|s| s.audiences = None),
            status(|s| s.user = None),
            status(|s| user(s, "system:node:n1")),
            status(|s| s.user.as_mut().unwrap().extra = None),
        ] {
            assert!(matches!(verdict(bad.clone()), Verdict::Rejected(_)), "{bad:?}");
        }
    }

    #[test]
    fn a_verdict_is_kept_as_long_as_the_token_holds_but_ten_minutes_at_most() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let token = |exp: &str| format!("e30.{}.sig", URL_SAFE_NO_PAD.encode(format!("{{\"exp\":{exp}}}")));
        for (token, left) in [
            (token("1000060"), 60),
            (token("1009999"), 600),
            (token("999999"), 0),
            (token("-9223372036854775808"), 0),
            (token("\"x\""), 0),
            ("x".into(), 0),
            ("a.!.b".into(), 0),
        ] {
            assert_eq!(time_left(&token, now).as_secs(), left, "{token}");
        }
    }

    #[test]
    fn a_rejection_is_forgotten_soon() {
        let cache = Cache::default();
        let now = Instant::now();
        cache.put("t", &Verdict::Rejected("no"), now);
        assert!(cache.get("t", now).is_some());
        assert_eq!(cache.get("t", now + REJECTED), None);
    }
}
