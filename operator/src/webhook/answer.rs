//! What a webhook answers.

use k8s_openapi::ByteString;
use kube::core::Status;
use kube::core::admission::AdmissionResponse;
use serde_json::{Value, json};

use super::review::Envelope;

/// The API server cuts longer ones.
const MOST_WARNING: usize = 250;

/// An answer to a review.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The object may be stored, changed by the patch.
    Allowed {
        /// What happened, for metrics.
        outcome: &'static str,
        /// Why, for metrics; one of few.
        reason: &'static str,
        /// Shown to who sent the object.
        warnings: Vec<String>,
        /// Changes to the object.
        patch: json_patch::Patch,
    },
    /// The object may not be stored.
    Denied {
        /// HTTP status.
        code: u16,
        /// One of few.
        reason: &'static str,
        /// What is wrong and the way out.
        message: String,
    },
    /// There is no answer; `failurePolicy` decides.
    Failed {
        /// One of few.
        reason: &'static str,
        /// What is missing.
        message: String,
    },
}

impl Answer {
    pub(super) fn allowed(outcome: &'static str, reason: &'static str) -> Self {
        Self::Allowed { outcome, reason, warnings: Vec::new(), patch: json_patch::Patch::default() }
    }

    pub(super) fn denied(code: u16, reason: &'static str, message: String) -> Self {
        Self::Denied { code, reason, message }
    }

    pub(super) fn failed(reason: &'static str, message: String) -> Self {
        Self::Failed { reason, message }
    }

    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Allowed { outcome, .. } => outcome,
            Self::Denied { .. } => "denied",
            Self::Failed { .. } => "error",
        }
    }

    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Allowed { reason, .. } | Self::Denied { reason, .. } | Self::Failed { reason, .. } => {
                reason
            }
        }
    }

    /// The review that is sent back, or the text of an error. Plain text of status 500 is what the API
    /// server shows to who sent the object.
    pub(super) fn into_review(self, envelope: &Envelope) -> Result<Value, String> {
        let mut response = AdmissionResponse::from(&*envelope.request);
        let mut operations = None;
        match self {
            Self::Allowed { warnings, patch, .. } => {
                let warnings: Vec<String> = warnings.iter().map(|w| warning(w)).collect();
                response.warnings = (!warnings.is_empty()).then_some(warnings);
                if !patch.0.is_empty() {
                    operations = Some(ByteString(serde_json::to_vec(&patch).map_err(|e| e.to_string())?));
                }
            }
            Self::Denied { code, reason, message } => {
                let message = format!("sallyport: {reason}: {message}");
                response.allowed = false;
                response.result = Status::failure(&message, reason).with_code(code);
            }
            Self::Failed { reason, message } => return Err(format!("{reason}: {message}")),
        }
        let mut review = serde_json::to_value(response.into_review()).map_err(|e| e.to_string())?;
        // kube writes the bytes as a list of numbers, four times the size; the API says base64.
        if let Some(operations) = operations {
            review["response"]["patch"] = json!(operations);
            review["response"]["patchType"] = json!("JSONPatch");
        }
        Ok(review)
    }
}

fn warning(text: &str) -> String {
    let mut line = format!("sallyport: {}", text.replace(['\n', '\r'], " "));
    if line.len() > MOST_WARNING {
        super::cut(&mut line, MOST_WARNING - 3);
        line.push_str("...");
    }
    line
}
