//! A change of the operator's authority under guarded pods.
//!
//! A new authority signs ten minutes after it was made, when every sidecar trusts it. Nobody waits for that
//! here: once the new bundle is where it must be, its date in the Secret is set back.

use std::time::{Duration, Instant};

use sallyport_e2e::client::Call;
use sallyport_e2e::cluster::{
    Namespace, OPERATOR, Pod, SYSTEM, await_condition, await_within, file_in, kubectl, kubectl_input,
    name_of, pods_of, shell, usual_spec,
};
use serde_json::{Value, json};

use crate::{Traffic, alone, enforces, guarded};

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";

fn secret() -> Value {
    kubectl(&["get", "secret", "sallyport-ca", "-n", SYSTEM, "-o", "json"]).unwrap().json()
}

fn authorities() -> Vec<Value> {
    let path = "jsonpath={.data.authorities\\.json}";
    let line = kubectl(&["get", "secret", "sallyport-ca", "-n", SYSTEM, "-o", path]).unwrap().stdout;
    serde_json::from_slice(&base64(&line)).unwrap()
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut out, mut held, mut bits) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().filter_map(|b| DIGITS.iter().position(|d| *d == b)) {
        held = (held << 6 | u32::try_from(digit).unwrap()) & 0xff_ffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push(u8::try_from(held >> bits & 0xff).unwrap());
        }
    }
    out
}

/// How many certificates stand in every caBundle and in the namespace's trust ConfigMap.
fn trusted(namespace: &Namespace) -> Vec<usize> {
    let count = |text: &str| text.matches(BEGIN).count();
    let map = namespace.kubectl(&["get", "configmap", "sallyport-trust", "-o", "json"]).unwrap().json();
    let mut all = vec![count(map["data"]["ca.crt"].as_str().unwrap_or_default())];
    for kind in ["mutatingwebhookconfiguration", "validatingwebhookconfiguration"] {
        let object = kubectl(&["get", kind, "sallyport", "-o", "json"]).unwrap().json();
        for webhook in object["webhooks"].as_array().unwrap() {
            let bundle = base64(webhook["clientConfig"]["caBundle"].as_str().unwrap_or_default());
            all.push(count(&String::from_utf8(bundle).unwrap()));
        }
    }
    all
}

/// What `date` makes of a time.
fn date(of: &str, format: &str) -> String {
    shell(&format!("date -u -d '{of}' '+{format}'")).unwrap().stdout.trim().to_owned()
}

/// When the authority that signs ends, as every replica says: seconds since 1970.
fn ends() -> Vec<i64> {
    let pods = pods_of(SYSTEM, OPERATOR).unwrap();
    let said = pods.iter().map(name_of).filter_map(|pod| {
        let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/metrics");
        let page = kubectl(&["get", "--raw", &path]).ok()?.stdout;
        let line = page.lines().find(|l| {
            l.starts_with("sallyport_operator_certificate_expiry_seconds") && l.contains("certificate=\"ca\"")
        })?;
        Some(line.rsplit(' ').next()?.parse::<f64>().ok()? as i64)
    });
    said.collect()
}

/// An edit is taken, and holds in the running pod, and so does its taking back.
fn edited_and_enforced(namespace: &Namespace, pod: &Pod, host: &str) {
    let page = Call::get(format!("http://{host}/page/clean"));
    let mut denied = usual_spec();
    denied["egress"]["rules"] = json!([
        {"hosts": ["*.svc"], "paths": ["/page/*"], "action": "Deny"},
        {"hosts": ["*.svc"], "action": "Allow"},
    ]);
    for (spec, status) in [(denied, 403), (usual_spec(), 200)] {
        await_condition("the edit is taken", || namespace.policy("usual", &spec).ok());
        await_within(Duration::from_secs(60), "the edit holds", || {
            (pod.agent.call(&page).unwrap().status == status).then_some(())
        });
    }
}

#[test]
fn a_new_authority_takes_over_under_connected_pods() {
    let _alone = alone();
    let (namespace, pod, host) = guarded("rotate");
    let traffic = Traffic::start(&pod, &host);
    let before = authorities().len();
    kubectl(&["annotate", "secret", "sallyport-ca", "-n", SYSTEM, "sallyport.dev/rotate=now"]).unwrap();
    await_condition("one authority more, and the wish taken off", || {
        let asked = secret()["metadata"]["annotations"]["sallyport.dev/rotate"].is_string();
        (authorities().len() == before + 1 && !asked).then_some(())
    });
    let start = Instant::now();
    await_condition("every webhook and the trust ConfigMap name both", || {
        trusted(&namespace).iter().all(|n| *n == before + 1).then_some(())
    });
    println!("both are trusted {} ms later", start.elapsed().as_millis());
    // The old one still signs, and everything goes on.
    namespace.agent("overlap");
    namespace.await_enforced("usual", 2);
    await_within(Duration::from_secs(180), "kubelet brings the bundle to the sidecar", || {
        let object = namespace.pod("agent")?;
        let text = file_in(&object, "sallyport-extproc", "/var/run/secrets/sallyport.dev/ca.crt").ok()?;
        (text.matches(BEGIN).count() == before + 1).then_some(())
    });
    println!("the running sidecar has both {} s after", start.elapsed().as_secs());

    // As if eleven minutes had passed: the newest signs.
    let mut list = authorities();
    for authority in &mut list {
        let created = authority["created"].as_str().unwrap().to_owned();
        authority["created"] = date(&format!("{created} 11 minutes ago"), "%Y-%m-%dT%H:%M:%SZ").into();
    }
    list.sort_by_key(|a| a["created"].as_str().unwrap().to_owned());
    let newest = list.last().unwrap()["created"].as_str().unwrap();
    let end = date(newest, "%s").parse::<i64>().unwrap() + 365 * 86_400;
    let patch = json!({"stringData": {"authorities.json": json!(list).to_string()}});
    kubectl_input(
        &["patch", "secret", "sallyport-ca", "-n", SYSTEM, "--patch-file", "/dev/stdin"],
        &patch.to_string(),
    )
    .unwrap_or_else(|e| panic!("{e}"));
    await_condition("every replica serves by the new one", || {
        let ends = ends();
        (!ends.is_empty() && ends.iter().all(|e| (e - end).abs() < 5)).then_some(())
    });
    // Admission works and edits arrive, by streams that began under the old one.
    edited_and_enforced(&namespace, &pod, &host);
    // Streams that begin anew are taken by sidecars that were never restarted.
    kubectl(&["rollout", "restart", "deploy/sallyport-operator", "-n", SYSTEM]).unwrap();
    kubectl(&["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=120s"]).unwrap();
    edited_and_enforced(&namespace, &pod, &host);
    namespace.agent("after");
    namespace.await_enforced("usual", 3);
    enforces(&pod, &host);
    traffic.stop();
    let object = namespace.pod("agent").unwrap();
    let statuses = object["status"]["initContainerStatuses"].as_array().unwrap();
    assert!(statuses.iter().all(|c| c["restartCount"] == 0), "{statuses:?}");
    assert_eq!(authorities().len(), before + 1, "the old authority stays trusted for a day");
}
