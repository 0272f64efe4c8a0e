//! An API server of a few lines: objects by path, resourceVersions, conflicts, and watches that say nothing.

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

    pub(crate) fn put(&self, path: &str, mut object: Value) {
        let mut inner = self.inner.lock().unwrap();
        inner.version += 1;
        object["metadata"]["resourceVersion"] = json!(inner.version.to_string());
        inner.objects.insert(path.to_owned(), object);
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.inner.lock().unwrap().objects.get(path).cloned()
    }

    pub(crate) fn delete(&self, path: &str) {
        self.inner.lock().unwrap().objects.remove(path);
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
            // A watch on which nothing happens, ended by the client.
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
        let mut inner = self.inner.lock().unwrap();
        if parts.method != Method::GET {
            inner.writes.push(format!("{} {path}", parts.method));
        }
        let given = || serde_json::from_slice::<Value>(&body).unwrap();
        match parts.method {
            Method::GET => match inner.objects.get(&path) {
                Some(object) => reply(object),
                None if is_list(&path) => reply(&inner.list(&path)),
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
            _ => status(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }
}

impl Inner {
    fn store(&mut self, path: String, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(path, object.clone());
        object
    }

    fn list(&self, path: &str) -> Value {
        let under = format!("{path}/");
        let items: Vec<&Value> =
            self.objects.iter().filter(|(p, _)| p.starts_with(&under)).map(|(_, o)| o).collect();
        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": items})
    }
}

fn is_list(path: &str) -> bool {
    ["limitranges", "agentpolicies"].iter().any(|kind| path.ends_with(kind))
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
