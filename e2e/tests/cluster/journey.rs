//! The README's journey, every command as it stands there.

use sallyport_e2e::cluster::{await_condition, installed, kubectl, readme_commands, shell};

#[test]
fn the_journey_of_the_readme_works_as_written() {
    installed();
    // What the README takes for given: an agent that runs already.
    let _ = kubectl(&["create", "namespace", "agents"]);
    shell("kubectl apply -n agents -f e2e/node/support-bot.yaml").unwrap_or_else(|e| panic!("{e}"));
    let lines = readme_commands();
    assert!(lines.iter().any(|l| l.starts_with("kubectl patch deploy support-bot")), "{lines:?}");
    // The charts stand at the beginning, and were installed by these very lines.
    for line in lines.iter().filter(|l| !l.starts_with("helm install ")) {
        println!("$ {line}");
        match shell(line) {
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
    println!("{}", kubectl(&["get", "agentpolicy", "-n", "agents"]).unwrap_or_else(|e| panic!("{e}")).stdout);
    let _ = kubectl(&["delete", "namespace", "agents", "--wait=false"]);
}
