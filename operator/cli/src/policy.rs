//! Reading an AgentPolicy from a file; every error names the file and the place in it.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use sallyport_api::{AgentPolicy, AgentPolicySpec};
use sallyport_engine::Engine;

/// Reads and checks a policy file.
pub(crate) fn load(path: &Path) -> anyhow::Result<AgentPolicy> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: can't be read", path.display()))?;
    sallyport_api::load_policy(&text).map_err(|e| anyhow!("{}: {e}", path.display()))
}

/// Compiles a policy that came from `path`.
pub(crate) fn compile(path: &Path, spec: &AgentPolicySpec) -> anyhow::Result<Engine> {
    Engine::new(spec).map_err(|e| anyhow!("{}: {e}", path.display()))
}

/// The engine of `scan` and `eval`: the file's policy, or everything that ships.
pub(crate) fn engine(path: Option<&Path>) -> anyhow::Result<Engine> {
    match path {
        Some(path) => compile(path, &load(path)?.spec),
        None => Engine::new(&AgentPolicySpec::default())
            .map_err(|e| anyhow!("the shipped policy does not compile: {e}")),
    }
}
