//! Finding, starting, watching and stopping Envoy.

use std::collections::VecDeque;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::admin::Admin;

/// The version everything is tested with; others differ in the fields they know and in the faults they
/// have, and the filter's safety rests on both.
const VERSION: &str = "1.40.";

/// Envoy is up within a third of a second on an idle machine; a busy one may take its time.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// What an Envoy that dies has to say stands in its last lines.
const LOG_LINES: usize = 20;

/// Finds Envoy: what the command line names, `$SALLYPORT_ENVOY`, what `tools/envoy-fetch` put into
/// `.cache` here or above, and at last PATH.
pub(crate) fn find(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(path) = named {
        return right_version(path).with_context(|| format!("--envoy {}", path.display()));
    }
    if let Some(path) = std::env::var_os("SALLYPORT_ENVOY").filter(|p| !p.is_empty()) {
        let path = PathBuf::from(path);
        return right_version(&path).with_context(|| format!("$SALLYPORT_ENVOY {}", path.display()));
    }
    let fetched = format!(".cache/envoy/1.40.0-{}/envoy", std::env::consts::ARCH);
    let here = std::env::current_dir().context("the current directory can't be read")?;
    if let Some(path) = here.ancestors().map(|dir| dir.join(&fetched)).find(|p| p.is_file()) {
        return right_version(&path).with_context(|| path.display().to_string());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("envoy")).find(|p| p.is_file());
    let found = match on_path.as_deref().map(|p| (p, right_version(p))) {
        Some((_, Ok(path))) => return Ok(path),
        Some((path, Err(e))) => format!("\n  {}: {e:#}", path.display()),
        None => String::new(),
    };
    bail!(
        "no Envoy 1.40 found; looked at --envoy, $SALLYPORT_ENVOY, {fetched} here and above, and PATH{found}\n  \
         get it with: tools/envoy-fetch"
    )
}

fn right_version(path: &Path) -> anyhow::Result<PathBuf> {
    let output = std::process::Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| anyhow!("can't be run ({e}); get Envoy 1.40 with: tools/envoy-fetch"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version =
        version(&text).ok_or_else(|| anyhow!("`--version` gives no Envoy version; is it Envoy?"))?;
    ensure!(
        version.starts_with(VERSION),
        "is version {version}, Sallyport needs {VERSION}x; get it with: tools/envoy-fetch"
    );
    std::path::absolute(path).context("the current directory can't be read")
}

/// `envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL` gives `1.40.0`.
fn version(text: &str) -> Option<&str> {
    let (_, version) = text.lines().find_map(|l| l.split_once("version:"))?;
    version.split('/').nth(1)
}

/// A running Envoy. Dropped, it is killed; killed ourselves, the kernel kills it.
#[derive(Debug)]
pub(crate) struct Envoy {
    child: Child,
    admin: Admin,
    log: Arc<Mutex<VecDeque<String>>>,
}

impl Envoy {
    /// Starts Envoy on a bootstrap file. Call it on the main thread: the kernel ties the child to the
    /// thread that started it.
    pub(crate) fn start(binary: &Path, bootstrap: &Path, admin: Admin) -> anyhow::Result<Self> {
        let mut command = tethered(binary.as_os_str());
        command
            .arg("--config-path")
            .arg(bootstrap)
            .args(["--concurrency", "1"])
            .args(["--disable-hot-restart", "--reject-unknown-dynamic-fields"])
            .args(["--log-level", "warning"])
            .args(["--drain-strategy", "immediate", "--drain-time-s", "5"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = Command::from(command)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} can't be started", binary.display()))?;
        let log = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(stderr) = child.stderr.take() {
            let log = Arc::clone(&log);
            tokio::spawn(async move {
                let mut lines = BufReader::new(stderr).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                    if log.len() == LOG_LINES {
                        log.pop_front();
                    }
                    log.push_back(line);
                }
            });
        }
        Ok(Self { child, admin, log })
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits until all listeners serve.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().context("Envoy can't be watched")? {
                return Err(self.died(status).await);
            }
            if self.admin.live().await {
                return Ok(());
            }
            if start.elapsed() > READY_WITHIN {
                bail!("Envoy was not ready within {READY_WITHIN:?}{}", self.last_words());
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns when Envoy has ended by itself, with what it said last.
    pub(crate) async fn ended(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => self.died(status).await,
            Err(e) => anyhow!(e).context("Envoy can't be watched"),
        }
    }

    async fn died(&self, status: ExitStatus) -> anyhow::Error {
        // Its last line may still be in the pipe.
        sleep(Duration::from_millis(100)).await;
        anyhow!("Envoy ended by itself ({status}){}", self.last_words())
    }

    fn last_words(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.is_empty() {
            return String::new();
        }
        let lines: Vec<_> = log.iter().map(|l| format!("\n  {l}")).collect();
        format!("; its last log lines:{}", lines.concat())
    }

    /// Stops without cutting what is open: told to drain, open calls get up to `patience`, then it ends.
    /// (A plain SIGTERM would cut every open stream at once.)
    pub(crate) async fn stop(mut self, patience: Duration) -> anyhow::Result<()> {
        let admin = self.admin.clone();
        let drained = async {
            admin.drain().await?;
            let end = Instant::now() + patience;
            while Instant::now() < end && admin.active_requests().await? > 0 {
                sleep(Duration::from_millis(50)).await;
            }
            admin.quit().await
        };
        let asked = drained.await;
        if timeout(Duration::from_secs(3), self.child.wait()).await.is_err() || asked.is_err() {
            self.kill().await;
        }
        asked
    }

    pub(crate) async fn kill(&mut self) {
        // Fails only where there is nothing left to kill.
        let _ = self.child.start_kill();
        let _ = timeout(Duration::from_secs(3), self.child.wait()).await;
    }
}

/// A command that will not outlive this process, even if that is killed, and that a Ctrl-C in the
/// terminal does not reach: it is for us to say when it stops.
///
/// Only the child itself can ask the kernel for the first, so this program starts itself, asks, and
/// becomes the wanted program.
pub(crate) fn tethered(program: &std::ffi::OsStr) -> std::process::Command {
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg("tether").arg(std::process::id().to_string()).arg(program).process_group(0);
    command
}

/// The hidden subcommand behind [`tethered`].
#[derive(Debug, clap::Args)]
pub(crate) struct Tether {
    parent: i32,
    program: std::ffi::OsString,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<std::ffi::OsString>,
}

impl Tether {
    pub(crate) fn run(&self) -> anyhow::Result<std::process::ExitCode> {
        use rustix::process::{Signal, getppid, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::KILL)).context("can't be tied to the parent process")?;
        // The parent may have gone before the kernel knew.
        let parent = getppid().map(|p| p.as_raw_nonzero().get());
        ensure!(parent == Some(self.parent), "the parent process is gone");
        let error = std::process::Command::new(&self.program).args(&self.args).exec();
        Err(error).with_context(|| format!("{} can't be run", self.program.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_envoys_own_words() {
        let text = "\n/x/envoy  version: 9e55809/1.40.0/Clean/RELEASE/BoringSSL\n\n";
        assert_eq!(version(text), Some("1.40.0"));
        assert_eq!(version("something else"), None);
    }

    #[test]
    fn a_program_that_is_not_envoy_is_refused_by_name() {
        let e = format!("{:#}", find(Some(Path::new("/bin/true"))).unwrap_err());
        assert!(e.contains("--envoy /bin/true") && e.contains("is it Envoy?"), "{e}");
        let e = format!("{:#}", find(Some(Path::new("/nowhere/envoy"))).unwrap_err());
        assert!(e.contains("tools/envoy-fetch"), "{e}");
    }
}
