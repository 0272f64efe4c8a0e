//! The part of the API server's structural validation that our schema uses, with its words. The real one
//! judges the same cases in the cluster tests.

use serde_json::Value;

pub(crate) fn problems(schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut say = |text: String| found.push(format!("{at}: {text}"));
    let limit = |key: &str| schema[key].as_f64();
    let kind = schema["type"].as_str().unwrap_or_default();
    let fits = match value {
        Value::Null => schema["nullable"] == true,
        Value::Bool(_) => kind == "boolean",
        Value::Number(n) => kind == "number" || (kind == "integer" && !n.is_f64()),
        Value::String(_) => kind == "string",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
    };
    // `metadata` and `apiVersion` have no schema of ours.
    if !kind.is_empty() && !fits {
        say(format!("must be of type {kind}"));
        return found;
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        say(format!("Unsupported value: {value}"));
    }
    if let Some(n) = value.as_f64() {
        if limit("minimum").is_some_and(|m| n < m) {
            say(format!("should be greater than or equal to {}", schema["minimum"].as_f64().unwrap()));
        }
        if limit("maximum").is_some_and(|m| n > m) {
            say(format!("should be less than or equal to {}", schema["maximum"].as_f64().unwrap()));
        }
    }
    if let Some(text) = value.as_str() {
        let length = text.chars().count() as f64;
        if limit("maxLength").is_some_and(|m| length > m) {
            say(format!("Too long: may not be more than {} bytes", schema["maxLength"]));
        }
        if limit("minLength").is_some_and(|m| length < m) {
            say(format!("should be at least {} chars long", schema["minLength"]));
        }
        if schema["format"] == "date-time" && text.parse::<jiff::Timestamp>().is_err() {
            say("must be of type date-time".into());
        }
    }
    if let Some(items) = value.as_array() {
        if limit("maxItems").is_some_and(|m| items.len() as f64 > m) {
            say(format!("must have at most {} items", schema["maxItems"]));
        }
        for (i, item) in items.iter().enumerate() {
            found.extend(problems(&schema["items"], item, &format!("{at}[{i}]")));
        }
    } else if let Some(fields) = value.as_object() {
        for required in schema["required"].as_array().into_iter().flatten() {
            if !fields.contains_key(required.as_str().unwrap()) {
                found.push(format!("{at}.{}: Required value", required.as_str().unwrap()));
            }
        }
        for (name, field) in fields {
            let inner = schema["properties"].get(name).or_else(|| schema.get("additionalProperties"));
            if let Some(inner) = inner {
                found.extend(problems(inner, field, &format!("{at}.{name}")));
            }
        }
    }
    found
}

/// The value as the API server stores it.
pub(crate) fn with_defaults(schema: &Value, value: &Value) -> Value {
    let mut value = value.clone();
    match &mut value {
        Value::Object(fields) => {
            for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) = inner.get("default") {
                    fields.entry(name.clone()).or_insert_with(|| default.clone());
                }
                if let Some(field) = fields.get_mut(name) {
                    *field = with_defaults(inner, field);
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                *item = with_defaults(&schema["items"], item);
            }
        }
        _ => {}
    }
    value
}
