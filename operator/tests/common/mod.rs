//! An API server of a few lines: objects by path, resourceVersions, conflicts, lists, watches, and of patches
//! what the operator sends.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::to_bytes;
use axum::http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};

/// The server; clones are the same.
#[derive(Clone, Default)]
pub(crate) struct FakeApi {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// What happened: at which version, which kind of event, where, and the object.
    events: Vec<(u64, &'static str, String, Value)>,
    /// How the server behaves.
    ill: Ill,
    /// `METHOD path` of every write.
    writes: Vec<String>,
}

/// How the server behaves.
#[derive(Clone, Copy, Default, PartialEq)]
#[allow(dead_code, reason = "each test uses its part")]
pub(crate) enum Ill {
    /// It works.
    #[default]
    Not,
    /// It answers 500.
    Failing,
    /// It never answers.
    Silent,
}

#[allow(dead_code, reason = "each test uses its part")]
impl FakeApi {
    pub(crate) fn client(&self) -> kube::Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        kube::Client::new(service, "default")
    }

    pub(crate) fn put(&self, path: &str, object: Value) {
        self.inner.lock().unwrap().store(path.to_owned(), object);
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.inner.lock().unwrap().objects.get(path).cloned()
    }

    pub(crate) fn delete(&self, path: &str) {
        let mut inner = self.inner.lock().unwrap();
        let gone = inner.objects.remove(path).unwrap();
        inner.version += 1;
        let version = inner.version;
        inner.events.push((version, "DELETED", path.to_owned(), gone));
    }

    pub(crate) fn be(&self, ill: Ill) {
        self.inner.lock().unwrap().ill = ill;
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.inner.lock().unwrap().writes.clone()
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let ill = self.inner.lock().unwrap().ill;
        match ill {
            Ill::Silent => std::future::pending().await,
            Ill::Failing => return status(StatusCode::INTERNAL_SERVER_ERROR, "ill"),
            Ill::Not => {}
        }
        let (parts, body) = request.into_parts();
        let (path, query) = (parts.uri.path().to_owned(), parts.uri.query().unwrap_or_default().to_owned());
        let body = to_bytes(axum::body::Body::new(body), usize::MAX).await.unwrap();
        if query.contains("watch=") {
            return self.watch(&path, &query).await;
        }
        let mut inner = self.inner.lock().unwrap();
        if parts.method != Method::GET {
            inner.writes.push(format!("{} {path}", parts.method));
        }
        let given = || serde_json::from_slice::<Value>(&body).unwrap();
        match parts.method {
            Method::GET => match inner.objects.get(&path) {
                Some(object) => reply(object),
                None if is_list(&path) => reply(&inner.list(&path, &query)),
                None => status(StatusCode::NOT_FOUND, "NotFound"),
            },
            Method::POST => {
                let object = given();
                let path = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap());
                if inner.objects.contains_key(&path) {
                    return status(StatusCode::CONFLICT, "AlreadyExists");
                }
                reply(&inner.store(path, object))
            }
            Method::PUT => {
                let object = given();
                let Some(held) = inner.objects.get(&path) else {
                    return status(StatusCode::NOT_FOUND, "NotFound");
                };
                let version = &object["metadata"]["resourceVersion"];
                if !version.is_null() && *version != held["metadata"]["resourceVersion"] {
                    return status(StatusCode::CONFLICT, "Conflict");
                }
                reply(&inner.store(path, object))
            }
            Method::PATCH => {
                let patch = given();
                let kind = parts.headers["content-type"].to_str().unwrap();
                let mut object = match inner.objects.get(&path) {
                    Some(object) => object.clone(),
                    None if kind.contains("apply") => json!({"metadata": {"namespace": namespace(&path)}}),
                    None => return status(StatusCode::NOT_FOUND, "NotFound"),
                };
                merge(&mut object, &patch);
                reply(&inner.store(path, object))
            }
            _ => status(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }

    /// What happened since the version that is asked for; the client asks again.
    async fn watch(&self, path: &str, query: &str) -> Response<Body> {
        let since: u64 = parameter(query, "resourceVersion").unwrap().parse().unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
        let inner = self.inner.lock().unwrap();
        let happened = inner.events.iter().filter(|(v, _, at, _)| *v > since && listed(path, query, at));
        let lines: String = happened
            .map(|(version, kind, _, object)| {
                let mut object = object.clone();
                object["metadata"]["resourceVersion"] = json!(version.to_string());
                format!("{}\n", json!({"type": kind, "object": object}))
            })
            .collect();
        Response::new(Body::from(lines.into_bytes()))
    }
}

/// Whether an object belongs to a list.
fn listed(list: &str, query: &str, path: &str) -> bool {
    let (kind, name) = (list.rsplit('/').next().unwrap(), path.rsplit('/').next().unwrap());
    let named = parameter(query, "fieldSelector").is_none_or(|f| f.ends_with(name));
    let prefix = list.strip_suffix(kind).unwrap();
    let of_kind = path.rsplit('/').nth(1).unwrap() == kind;
    named && of_kind && path.starts_with(prefix)
}

fn parameter<'q>(query: &'q str, name: &str) -> Option<&'q str> {
    query.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('='))
}

fn namespace(path: &str) -> &str {
    path.split("/namespaces/").nth(1).unwrap().split('/').next().unwrap()
}

/// Objects by field, webhooks by name.
fn merge(object: &mut Value, patch: &Value) {
    match (object, patch) {
        (Value::Object(object), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(object.entry(key).or_insert(Value::Null), value);
            }
        }
        (Value::Array(all), Value::Array(patch)) => {
            for one in patch {
                let same = all.iter_mut().find(|a| a["name"] == one["name"]);
                merge(same.unwrap(), one);
            }
        }
        (object, patch) => *object = patch.clone(),
    }
}

impl Inner {
    fn store(&mut self, path: String, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let kind = if self.objects.contains_key(&path) { "MODIFIED" } else { "ADDED" };
        self.events.push((self.version, kind, path.clone(), object.clone()));
        self.objects.insert(path, object.clone());
        object
    }

    fn list(&self, path: &str, query: &str) -> Value {
        let items: Vec<&Value> =
            self.objects.iter().filter(|(p, _)| listed(path, query, p)).map(|(_, o)| o).collect();
        let version = self.version.to_string();
        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": version}, "items": items})
    }
}

fn is_list(path: &str) -> bool {
    ["limitranges", "agentpolicies", "secrets", "configmaps", "webhookconfigurations"]
        .iter()
        .any(|kind| path.ends_with(kind))
}

fn reply(object: &Value) -> Response<Body> {
    Response::builder()
        .header("content-type", "application/json")
        .body(Body::from(object.to_string().into_bytes()))
        .unwrap()
}

fn status(code: StatusCode, reason: &str) -> Response<Body> {
    let object = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure",
        "reason": reason, "message": reason, "code": code.as_u16(),
    });
    let mut response = reply(&object);
    *response.status_mut() = code;
    response
}
