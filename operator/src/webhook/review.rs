//! Reading an AdmissionReview.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::FromRequest;
use axum::http::StatusCode;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionReview, Operation};
use serde::de::DeserializeOwned;

use super::Answer;

/// A review as the handlers see it.
#[derive(Debug)]
pub(super) struct Request(AdmissionRequest<DynamicObject>);

/// What an answer repeats of its request.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    pub(super) uid: String,
    pub(super) request: Box<AdmissionRequest<DynamicObject>>,
}

/// Why a request is no review.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("the body is larger than {} bytes", super::MOST_BYTES)]
    Large,
    #[error("the body did not come in time")]
    Slow,
    #[error("the body can't be read: {0}")]
    Body(String),
    #[error("not an AdmissionReview: {path}: {problem}")]
    Shape { path: String, problem: String },
}

impl ReadError {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Large => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Body(_) | Self::Shape { .. } => StatusCode::BAD_REQUEST,
        }
    }

    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Large => "TooLarge",
            Self::Slow => "TooSlow",
            Self::Body(_) | Self::Shape { .. } => "Malformed",
        }
    }
}

pub(super) async fn read(request: axum::extract::Request, deadline: Duration) -> Result<Request, ReadError> {
    let body = tokio::time::timeout(deadline, Bytes::from_request(request, &()));
    let bytes = match body.await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(e)) if e.status() == StatusCode::PAYLOAD_TOO_LARGE => return Err(ReadError::Large),
        Ok(Err(e)) => return Err(ReadError::Body(e.body_text())),
        Err(_) => return Err(ReadError::Slow),
    };
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Result<Request, ReadError> {
    let shape = |path: &str, problem: String| ReadError::Shape { path: path.into(), problem };
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let review: AdmissionReview<DynamicObject> = serde_path_to_error::deserialize(&mut json)
        .map_err(|e| shape(&e.path().to_string(), e.inner().to_string()))?;
    if review.types.kind != "AdmissionReview" {
        return Err(shape("kind", format!("is `{}`", review.types.kind)));
    }
    if review.types.api_version != "admission.k8s.io/v1" {
        return Err(shape(
            "apiVersion",
            format!("is `{}`, not admission.k8s.io/v1", review.types.api_version),
        ));
    }
    let mut request = review.request.ok_or_else(|| shape("request", "is missing".into()))?;
    request.types = review.types;
    Ok(Request(request))
}

impl Request {
    pub(super) fn envelope(&self) -> Envelope {
        // The objects are not repeated.
        let bare = AdmissionRequest { object: None, old_object: None, options: None, ..self.0.clone() };
        Envelope { uid: bare.uid.clone(), request: Box::new(bare) }
    }

    /// The namespace; that of the object may be missing or, in a malicious one, another.
    pub(super) fn namespace(&self) -> Result<&str, Answer> {
        let given = self.0.namespace.as_deref().filter(|n| !n.is_empty());
        given.ok_or_else(|| Answer::denied(400, "Malformed", "request.namespace: is missing".into()))
    }

    pub(super) fn operation(&self) -> &Operation {
        &self.0.operation
    }

    pub(super) fn subresource(&self) -> Option<&str> {
        self.0.sub_resource.as_deref().filter(|s| !s.is_empty())
    }

    pub(super) fn dry_run(&self) -> bool {
        self.0.dry_run
    }

    pub(super) fn object<T: DeserializeOwned>(&self) -> Result<T, Answer> {
        object("request.object", self.0.object.as_ref())
    }

    pub(super) fn old_object<T: DeserializeOwned>(&self) -> Result<T, Answer> {
        object("request.oldObject", self.0.old_object.as_ref())
    }

    /// The object as it came.
    pub(super) fn json(&self) -> Option<&DynamicObject> {
        self.0.object.as_ref()
    }

    /// The object before, as it came.
    pub(super) fn old_json(&self) -> Option<&DynamicObject> {
        self.0.old_object.as_ref()
    }
}

/// An object of a kind we know; the answer, if it is not, names the field.
fn object<T: DeserializeOwned>(place: &str, object: Option<&DynamicObject>) -> Result<T, Answer> {
    let bad = |problem: String| Answer::denied(400, "Malformed", problem);
    let object = object.ok_or_else(|| bad(format!("{place}: is missing")))?;
    let value = serde_json::to_value(object).map_err(|e| bad(format!("{place}: {e}")))?;
    serde_path_to_error::deserialize(value).map_err(|e| bad(format!("{place}.{}: {}", e.path(), e.inner())))
}
