//! The commands that users have.

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

/// What a command said, with exit status 0.
#[derive(Clone, Debug)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error: warnings, most of all.
    pub stderr: String,
}

/// What a command said with another exit status.
#[derive(Clone, Debug)]
pub struct Failed {
    /// The command.
    pub command: String,
    /// Standard output and error.
    pub said: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.command, self.said)
    }
}

impl Output {
    /// Standard output as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

/// Runs kubectl.
pub fn kubectl(args: &[&str]) -> Result<Output, Failed> {
    run(program("SALLYPORT_KUBECTL", "kubectl"), args, None)
}

/// Runs kubectl with this on its standard input.
pub fn kubectl_input(args: &[&str], input: &str) -> Result<Output, Failed> {
    run(program("SALLYPORT_KUBECTL", "kubectl"), args, Some(input))
}

/// Runs helm.
pub fn helm(args: &[&str]) -> Result<Output, Failed> {
    run(program("SALLYPORT_HELM", "helm"), args, None)
}

/// Runs a line as a user types it, in the repository's root, with kubectl, helm and sallyport on the path.
pub fn shell(line: &str) -> Result<Output, Failed> {
    run(Command::new("bash"), &["-euo", "pipefail", "-c", line], None)
}

fn program(variable: &str, name: &str) -> Command {
    Command::new(std::env::var(variable).unwrap_or_else(|_| name.to_owned()))
}

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn run(mut command: Command, args: &[&str], input: Option<&str>) -> Result<Output, Failed> {
    let line = format!("{} {}", command.get_program().to_string_lossy(), args.join(" "));
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    let mut child = command
        .args(args)
        .current_dir(root())
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{line}: {e}"));
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        // A command that refuses its arguments closes the pipe before it reads.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().unwrap_or_else(|e| panic!("{line}: {e}"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        Ok(Output { stdout, stderr })
    } else {
        Err(Failed { command: line, said: stdout + &stderr })
    }
}
