//! Edits to the policy file. A good one takes effect, a bad one is reported and changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use sallyport_api::AgentPolicy;
use sallyport_engine::Engine;

/// A policy file, its text when last looked at, and what that was compiled to.
#[derive(Debug)]
pub(crate) struct PolicyFile {
    path: PathBuf,
    text: Option<String>,
}

/// A policy that loads and compiles.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) policy: AgentPolicy,
    pub(crate) engine: Arc<Engine>,
}

impl PolicyFile {
    /// Reads and compiles the file.
    pub(crate) fn open(path: &Path) -> anyhow::Result<(Self, Loaded)> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{}: can't be read", path.display()))?;
        let loaded = compile(path, &text)?;
        Ok((Self { path: path.to_owned(), text: Some(text) }, loaded))
    }

    /// What changed since the last look; nothing if nothing did.
    ///
    /// The text is compared, not the time stamp: the file is small, and editors that write a new file and
    /// rename it, or keep the time, are seen just as well.
    pub(crate) fn poll(&mut self) -> Option<anyhow::Result<Loaded>> {
        match std::fs::read_to_string(&self.path) {
            Ok(text) if self.text.as_ref() == Some(&text) => None,
            Ok(text) => {
                let loaded = compile(&self.path, &text);
                self.text = Some(text);
                Some(loaded)
            }
            // Said once; a file that comes back is read again.
            Err(e) if self.text.take().is_some() => {
                Some(Err(anyhow!(e).context(format!("{}: can't be read", self.path.display()))))
            }
            Err(_) => None,
        }
    }
}

fn compile(path: &Path, text: &str) -> anyhow::Result<Loaded> {
    let policy = sallyport_api::load_policy(text).map_err(|e| anyhow!("{}: {e}", path.display()))?;
    let engine = crate::policy::compile(path, &policy.spec)?;
    Ok(Loaded { policy, engine: Arc::new(engine) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_seen_once_and_bad_ones_name_their_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.yaml");
        let write = |spec: &str| {
            let head = "apiVersion: sallyport.dev/v1alpha1\nkind: AgentPolicy\nmetadata: {name: x}\n";
            std::fs::write(&path, format!("{head}spec: {spec}\n")).unwrap();
        };
        write("{mode: Enforce}");
        let (mut file, first) = PolicyFile::open(&path).unwrap();
        assert_eq!(first.policy.metadata.name, "x");
        assert!(file.poll().is_none());

        write("{mode: Observe}");
        assert_eq!(file.poll().unwrap().unwrap().policy.spec.mode, sallyport_api::Mode::Observe);
        assert!(file.poll().is_none());

        write("{mod: Observe}");
        let e = file.poll().unwrap().unwrap_err().to_string();
        assert!(e.contains("p.yaml") && e.contains("mod"), "{e}");
        assert!(file.poll().is_none(), "a bad edit is reported once");

        std::fs::remove_file(&path).unwrap();
        assert!(file.poll().unwrap().is_err());
        assert!(file.poll().is_none());
        write("{mode: Enforce}");
        assert!(file.poll().unwrap().is_ok());
    }
}
