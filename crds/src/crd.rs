//! The CustomResourceDefinition, as it is checked in and shipped.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;
use serde_json::{Map, Value};

use crate::AgentPolicyObject;

const HEADER: &str = "\
# Generated from crds/src by `cargo run -p sallyport-api --features kube --example crdgen`; do not edit.
";

/// The CRD could not be written down.
#[derive(Debug, thiserror::Error)]
pub enum CrdError {
    /// As JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// As YAML.
    #[error(transparent)]
    Yaml(#[from] serde_saphyr::SerializeError),
}

/// The CRD of AgentPolicy, with descriptions that `kubectl explain` shows as they are meant.
pub fn crd() -> CustomResourceDefinition {
    let mut crd = AgentPolicyObject::crd();
    for version in &mut crd.spec.versions {
        if let Some(schema) = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()) {
            // The title would be the Rust type's name.
            schema.title = None;
            unwrap_lines(schema);
        }
    }
    crd
}

/// Takes the source's line breaks out of the descriptions; empty lines stay.
fn unwrap_lines(schema: &mut JSONSchemaProps) {
    if let Some(text) = &mut schema.description {
        *text = text.split("\n\n").map(|p| p.replace('\n', " ")).collect::<Vec<_>>().join("\n\n");
    }
    if let Some(properties) = &mut schema.properties {
        properties.values_mut().for_each(unwrap_lines);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        unwrap_lines(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        unwrap_lines(values);
    }
}

/// [`crd`] as the YAML that is checked in.
pub fn crd_yaml() -> Result<String, CrdError> {
    let value = sorted(serde_json::to_value(crd())?);
    Ok(format!("{HEADER}{}", serde_saphyr::to_string(&value)?))
}

/// Keys in alphabetical order, whichever features of serde_json another crate of the build switches on, and
/// whole numbers (bounds are floats in Kubernetes' types) without a fraction.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.into_iter().collect();
            fields.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(fields.into_iter().map(|(k, v)| (k, sorted(v))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        Value::Number(n) => match n.as_f64() {
            Some(f) if n.is_f64() && f.fract() == 0.0 && f.abs() < 1e15 => Value::from(f as i64),
            _ => Value::Number(n),
        },
        other => other,
    }
}
