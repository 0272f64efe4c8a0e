//! The README's journey, every command as it stands there.

use std::path::Path;

use sallyport_e2e::cluster::{await_condition, installed, kubectl, shell};

/// The commands of the block after the line that holds `heading`.
fn commands(heading: &str) -> Vec<String> {
    let readme =
        std::fs::read_to_string(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"))).unwrap();
    let after = readme.split_once(heading).unwrap_or_else(|| panic!("no {heading:?} in the README")).1;
    let block = after.split("```").nth(1).expect("a block of commands");
    block
        .lines()
        .skip(1)
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_journey_of_the_readme_works_as_written() {
    installed();
    let _ = kubectl(&["create", "namespace", "agents"]);
    await_condition("the default service account", || {
        kubectl(&["get", "serviceaccount", "default", "-n", "agents"]).ok()
    });
    // What the README takes for given: an agent that runs already.
    shell("kubectl apply -n agents -f e2e/node/support-bot.yaml").unwrap_or_else(|e| panic!("{e}"));
    let lines = commands("## In a cluster");
    assert!(lines.iter().any(|l| l.starts_with("kubectl patch deploy support-bot")), "{lines:?}");
    for line in lines {
        // The charts are installed already, by the same commands with this checkout's images.
        if line.starts_with("helm install") {
            continue;
        }
        println!("$ {line}");
        match shell(&line) {
            Ok(output) => println!("{}{}", output.stdout, output.stderr),
            Err(e) => panic!("{e}"),
        }
    }
    shell("kubectl rollout status deploy/support-bot -n agents --timeout=120s")
        .unwrap_or_else(|e| panic!("{e}"));
    await_condition("the policy is enforced", || {
        let policy =
            kubectl(&["get", "agentpolicy", "support-bot", "-n", "agents", "-o", "json"]).ok()?.json();
        (policy["status"]["enforced"] == "1/1").then_some(())
    });
    let _ = kubectl(&["delete", "namespace", "agents", "--wait=false"]);
}
