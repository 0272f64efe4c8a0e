//! `certManager.enabled`, with cert-manager's own controllers as a process beside the cluster.
//!
//! `SALLYPORT_CERT_MANAGER` names the folder that `e2e/cert-manager/build` made; without it nothing is run.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use sallyport_e2e::cluster::{
    Namespace, SYSTEM, await_operator, await_within, helm, install, installed, kubectl, kubectl_input,
};
use serde_json::{Value, json};

use crate::measure::{metrics, operators};
use crate::outages::{Guarded, restarts};
use crate::{DEADLINE, alone};

const AUTHORITY: &str = "sallyport-operator-ca";
const SERVING: &str = "sallyport-operator-tls";

/// cert-manager, and Sallyport that relies on it. When this ends, Sallyport is installed as it was.
struct CertManager {
    process: Child,
}

impl CertManager {
    fn start(folder: &Path) -> Self {
        installed();
        helm(&["uninstall", "sallyport", "-n", SYSTEM, "--wait"]).unwrap_or_else(|e| panic!("{e}"));
        let definitions = folder.join("crds").display().to_string();
        kubectl(&["apply", "--server-side", "-f", &definitions]).unwrap_or_else(|e| panic!("{e}"));
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let process = Command::new(folder.join("cert-manager"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let manager = Self { process };
        let args =
            ["install", "sallyport", "charts/sallyport", "-n", SYSTEM, "--set=certManager.enabled=true"];
        helm(&args).unwrap_or_else(|e| panic!("{e}"));
        // Its pods wait for the Secret, which cert-manager writes meanwhile.
        let ready = ["rollout", "status", "deploy/sallyport-operator", "-n", SYSTEM, "--timeout=300s"];
        kubectl(&ready).unwrap_or_else(|e| panic!("{e}"));
        await_operator();
        // The API server learns of each configuration's caBundle in its own time.
        let first = Namespace::enabled("first");
        first.usual_policy();
        await_within(DEADLINE, "the first pod is guarded", || {
            first.apply(&Namespace::agent_manifest("first")).ok()
        });
        manager
    }
}

impl Drop for CertManager {
    fn drop(&mut self) {
        let _ = helm(&["uninstall", "sallyport", "-n", SYSTEM, "--wait"]);
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = kubectl(&["delete", "secret", AUTHORITY, SERVING, "-n", SYSTEM]);
        if !std::thread::panicking() {
            install();
        }
    }
}

/// Renews a certificate as `cmctl renew` does, and waits until it is there.
fn renew(certificate: &str) {
    let revision = || {
        let args = ["get", "certificate", certificate, "-n", SYSTEM, "-o", "json"];
        let object = kubectl(&args).ok()?.json();
        let ready = object["status"]["conditions"]
            .as_array()?
            .iter()
            .any(|c| c["type"] == "Ready" && c["status"] == "True");
        ready.then(|| object["status"]["revision"].as_u64())?
    };
    let before = await_within(DEADLINE, "the certificate is ready", revision);
    let issuing = json!([{"op": "add", "path": "/status/conditions/-", "value": {
        "type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "by the suite",
    }}]);
    let args = [
        "patch",
        "certificate",
        certificate,
        "-n",
        SYSTEM,
        "--subresource=status",
        "--type=json",
        "--patch-file=/dev/stdin",
    ];
    kubectl_input(&args, &issuing.to_string()).unwrap_or_else(|e| panic!("{e}"));
    await_within(DEADLINE, "it is renewed", || (revision()? > before).then_some(()));
}

/// Certificates that the replicas took over since they were started.
fn rotations(of: &str) -> f64 {
    let name = format!("sallyport_operator_certificate_rotations_total{{certificate=\"{of}\"}}");
    metrics().get(&name).copied().unwrap_or_default()
}

fn await_rotations(of: &str, count: f64) {
    await_within(DEADLINE, "every replica took it over", || (rotations(of) >= count).then_some(()));
}

/// The `caBundle` of every webhook, as the API server keeps it.
fn bundles() -> Vec<Value> {
    let kinds = ["mutatingwebhookconfiguration", "validatingwebhookconfiguration"];
    let objects = kinds.map(|kind| kubectl(&["get", kind, "sallyport", "-o", "json"]).unwrap().json());
    objects
        .iter()
        .flat_map(|o| o["webhooks"].as_array().unwrap())
        .map(|w| w["clientConfig"]["caBundle"].clone())
        .collect()
}

#[test]
fn certificates_of_cert_manager_are_taken_over_without_a_restart() {
    let Some(folder) = std::env::var_os("SALLYPORT_CERT_MANAGER").map(PathBuf::from) else {
        println!("cert-manager: not run (SALLYPORT_CERT_MANAGER is not set)");
        return;
    };
    let _alone = alone();
    let manager = CertManager::start(&folder);
    {
        let guarded = Guarded::new("issued");
        let watch = guarded.watch();
        renew(SERVING);
        await_rotations("serving", 2.0);
        guarded.edit(1, 1);
        guarded.namespace.agent("renewed");
        guarded.await_counted(2);

        // Another authority: what it signs comes with the next certificate.
        renew(AUTHORITY);
        renew(SERVING);
        await_rotations("ca", 2.0);
        let authority = kubectl(&["get", "secret", SERVING, "-n", SYSTEM, "-o", "json"]).unwrap().json();
        let authority = authority["data"]["ca.crt"].clone();
        await_within(DEADLINE, "caBundle is the new authority", || {
            bundles().iter().all(|b| *b == authority).then_some(())
        });
        let took = guarded.edit(2, 2);
        println!("cert-manager: an edit is in force {took:.1?} after a new authority");
        await_within(DEADLINE, "a pod is guarded", || {
            guarded.namespace.apply(&Namespace::agent_manifest("anew")).ok()
        });
        guarded.namespace.await_ready("anew");
        guarded.await_counted(3);
        let seen = watch.stop();
        println!("cert-manager: {seen}");
        seen.no_key_passed();
        seen.pages_were_served();
        let all = operators();
        assert!(
            all.len() == 2 && all.iter().all(|o| restarts(o, "operator") == 0),
            "operators were restarted"
        );
        assert_eq!(guarded.restarts("sallyport-extproc"), 0);
    }
    drop(manager);
}
