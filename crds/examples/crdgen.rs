//! Writes the CRD where it is checked in; `--check` compares instead, and fails where it differs.

use std::path::Path;
use std::process::ExitCode;

/// The same file twice: a chart can't follow a link out of itself.
const FILES: [&str; 2] =
    ["crds/yaml/agentpolicies.sallyport.dev.yaml", "charts/sallyport-crds/templates/agentpolicies.yaml"];

fn main() -> ExitCode {
    let check = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--check") => true,
        Some(other) => {
            eprintln!("crdgen: `{other}` is not an argument; there is --check");
            return ExitCode::from(2);
        }
    };
    match run(check) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("crdgen: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run(check: bool) -> Result<(), String> {
    let yaml = sallyport_api::crd_yaml().map_err(|e| e.to_string())?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for file in FILES {
        let path = root.join(file);
        if check {
            let found = std::fs::read_to_string(&path).map_err(|e| format!("{file}: {e}"))?;
            if found != yaml {
                return Err(format!(
                    "{file} is not what crds/src says; run `cargo run -p sallyport-api --features kube \
                     --example crdgen`"
                ));
            }
        } else {
            std::fs::write(&path, &yaml).map_err(|e| format!("{file}: {e}"))?;
            println!("{file}");
        }
    }
    Ok(())
}
