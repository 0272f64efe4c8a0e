//! Every case, against the CRD (its schema, and its CEL rules run here) and against `load_policy`: both must
//! take the valid ones and refuse the invalid ones, each with the words that the case asks for.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;

use kube::core::cel::Validator;
use sallyport_api::{AgentPolicy, AgentPolicyObject, AgentPolicySpec, CLASSES, class, crd, load_policy};
use serde_json::{Value, json};

mod structure;

struct Case {
    name: String,
    text: String,
    document: Value,
}

impl Case {
    /// What a comment line of the file says.
    fn says(&self, key: &str) -> &str {
        let line = self.text.lines().find_map(|l| l.strip_prefix(key));
        line.unwrap_or_else(|| panic!("{} has no line `{key}`", self.name)).trim()
    }
}

fn cases(kind: &str) -> Vec<Case> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases").join(kind);
    let mut cases: Vec<Case> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let document = serde_saphyr::from_str(&text).unwrap();
            Case { name: path.file_name().unwrap().to_string_lossy().into_owned(), text, document }
        })
        .collect();
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    cases
}

fn schema() -> Value {
    let crd = crd();
    let schema = crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap();
    serde_json::to_value(schema).unwrap()
}

/// What the API server would say of a document: of its structure, else of the rules.
fn api_server(schema: &Value, document: &Value) -> Vec<String> {
    let problems = structure::problems(schema, document, "");
    if !problems.is_empty() {
        return problems;
    }
    match Validator::new().validate_with_defaults(schema, document, None) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.as_slice().iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn valid_cases_are_taken_by_the_schema_and_by_the_loader() {
    let schema = schema();
    for case in cases("valid") {
        assert_eq!(api_server(&schema, &case.document), Vec::<String>::new(), "{}", case.name);
        load_policy(&case.text).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    }
}

#[test]
fn invalid_cases_are_refused_by_the_schema_and_by_the_loader_in_words() {
    let schema = schema();
    for case in cases("invalid") {
        let said = api_server(&schema, &case.document);
        let expected = case.says("# expect:");
        // Where the CEL library of these tests is laxer than the API server's.
        let lax = case.text.contains("\n# only the API server\n");
        assert!(
            lax || said.iter().any(|s| s.contains(expected)),
            "{}: expected `{expected}` in {said:?}",
            case.name
        );
        let said =
            load_policy(&case.text).err().unwrap_or_else(|| panic!("{} was loaded", case.name)).to_string();
        let place = case.says("# place:");
        assert!(said.contains(place), "{}: expected `{place}` in `{said}`", case.name);
    }
}

#[test]
fn every_rule_has_an_invalid_case() {
    fn messages(schema: &Value, found: &mut Vec<String>) {
        match schema {
            Value::Object(fields) => {
                for rule in
                    fields.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten()
                {
                    found.push(rule["message"].as_str().expect("a rule without a message").to_owned());
                }
                fields.values().for_each(|v| messages(v, found));
            }
            Value::Array(items) => items.iter().for_each(|v| messages(v, found)),
            _ => {}
        }
    }
    let schema = schema();
    let mut rules = Vec::new();
    messages(&schema, &mut rules);
    assert!(rules.len() > 25, "{} rules", rules.len());
    let said: Vec<String> = cases("invalid").iter().flat_map(|c| api_server(&schema, &c.document)).collect();
    for message in rules {
        assert!(said.iter().any(|s| s.contains(&message)), "no case breaks the rule `{message}`");
    }
}

/// The API server refuses a CRD whose rules could cost too much, so nothing may be unbounded.
#[test]
fn every_list_map_and_string_of_the_spec_is_bounded() {
    fn walk(schema: &Value, at: &str) {
        let bound = match schema["type"].as_str() {
            Some("string") if schema.get("enum").is_none() && schema.get("format").is_none() => "maxLength",
            Some("array") => "maxItems",
            Some("object") if schema.get("properties").is_none() => "maxProperties",
            Some("integer") => "maximum",
            _ => "type",
        };
        assert!(schema.get(bound).is_some(), "{at} has no {bound}");
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            walk(property, &format!("{at}.{name}"));
        }
        for key in ["items", "additionalProperties"] {
            if let Some(inner) = schema.get(key) {
                walk(inner, &format!("{at}[]"));
            }
        }
    }
    walk(&schema()["properties"]["spec"], "spec");
}

#[test]
fn every_field_of_the_spec_says_its_class() {
    let schema = schema();
    let fields = schema["properties"]["spec"]["properties"].as_object().unwrap();
    let whole = CLASSES.iter().filter(|(field, _)| !field.contains('.'));
    assert_eq!(fields.len(), whole.count());
    for (field, property) in fields {
        let class = class(field).unwrap_or_else(|| panic!("{field} has no class"));
        let description = property["description"].as_str().unwrap();
        assert!(description.ends_with(&format!(". {}.", class.name())), "{field}: {description}");
    }
}

#[test]
fn a_spec_with_the_schemas_defaults_is_the_default_spec() {
    let object = json!({"apiVersion": sallyport_api::API_VERSION, "kind": "AgentPolicy",
        "metadata": {"name": "x"}, "spec": {}});
    let filled = structure::with_defaults(&schema(), &object);
    // What a user sees in `kubectl get -o yaml`.
    assert_eq!(
        filled["spec"],
        json!({
            "mode": "Enforce",
            "failurePolicy": "Closed",
            "capture": {"mode": "Init"},
            "egress": {"default": "Deny"},
            "limits": {"maxBodyBytes": 1_048_576},
            "isolation": {"allowRoot": false, "readOnlyRoot": false},
            "capacity": {
                "requestsPerSecond": 50, "requestBodyP95": "8Ki", "responseBodyP95": "16Ki",
                "headroomPercent": 30
            },
        })
    );
    let parsed: AgentPolicyObject = serde_json::from_value(filled).unwrap();
    assert_eq!(parsed.spec, AgentPolicySpec::default());
    assert_eq!(
        serde_json::to_value(AgentPolicySpec::default()).unwrap(),
        serde_json::to_value(&parsed.spec).unwrap()
    );
}

#[test]
fn the_sample_is_the_same_policy_with_and_without_kubernetes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/samples/support-bot.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let plain = load_policy(&text).unwrap();
    let object: AgentPolicyObject = serde_saphyr::from_str(&text).unwrap();
    let document: Value = serde_json::to_value(&object).unwrap();
    assert_eq!(api_server(&schema(), &document), Vec::<String>::new());
    assert_eq!(AgentPolicy::from(object), plain);
    let again: AgentPolicyObject = serde_json::from_value(document).unwrap();
    assert_eq!(again.spec, plain.spec);
}

#[test]
fn what_is_checked_in_is_what_the_types_say() {
    let yaml = sallyport_api::crd_yaml().unwrap();
    for file in
        ["yaml/agentpolicies.sallyport.dev.yaml", "../charts/sallyport-crds/templates/agentpolicies.yaml"]
    {
        let found = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        assert!(found == yaml, "{file} is stale; run the example crdgen");
    }
    // Helm would read it as a template.
    assert!(!yaml.contains("{{"));
}

#[test]
fn capabilities_that_defeat_the_sidecar_are_all_refused() {
    let schema = schema();
    for capability in sallyport_api::Isolation::FORBIDDEN_CAPABILITIES {
        let text = format!(
            "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {{name: x}}\n\
             spec: {{isolation: {{allowCapabilities: [CHOWN, {capability}]}}}}"
        );
        let document: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(api_server(&schema, &document).len(), 1, "{capability}");
        assert!(load_policy(&text).unwrap_err().to_string().contains("allowCapabilities[1]"), "{capability}");
    }
}
