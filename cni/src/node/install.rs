//! The plugin on the node: its file among the other plugins, its entry in the list that the runtime reads.
//!
//! Other programs write there too: a network's own installer may rewrite its list at any time. So both
//! directories are watched, and what is missing is put back within moments. A pod that starts in such a moment is
//! one that its sidecar's check holds back.
//!
//! Files are replaced by rename: the runtime never reads half of one.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use serde_json::Value;

use super::pages::Metrics;
use crate::conf::{PLUGIN, entry};

/// How often both are looked at when nothing was noticed.
const TURN: Duration = Duration::from_secs(5);
/// Larger files are no configuration.
const MOST_BYTES: u64 = 1 << 20;

/// Where things are.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// The node's directory of CNI configuration.
    pub conf_dir: PathBuf,
    /// The node's directory of CNI plugins.
    pub bin_dir: PathBuf,
    /// The plugin to install.
    pub plugin: PathBuf,
    /// Where the plugin finds the daemon.
    pub socket: String,
}

/// Installs, repairs and removes the plugin. Once it began to remove, it repairs no more.
#[derive(Debug)]
pub struct Installer {
    paths: Paths,
    /// Held while anything is changed: a repair under way must not follow the removal.
    left: Mutex<bool>,
}

/// Why the plugin is not installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// A file can't be read or written.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// No network is configured yet.
    #[error("{}: no list of plugins yet; it is there once the cluster's network is installed", .0.display())]
    NoList(PathBuf),
    /// The runtime reads one plugin's configuration, into which nothing can be chained.
    #[error("{}: one plugin, not a list: have the network's installer write a .conflist", .0.display())]
    SinglePlugin(PathBuf),
}

/// What had to be put there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// The plugin's file.
    pub binary: bool,
    /// The entry in the list.
    pub list: bool,
}

// === impl Installer ===

impl Installer {
    /// An installer that has done nothing yet.
    pub fn new(paths: Paths) -> Self {
        Self { paths, left: Mutex::new(false) }
    }

    /// Puts there what is missing. First the file, then what names it.
    pub fn repair(&self) -> Result<Repaired, InstallError> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if *left {
            return Ok(Repaired::default());
        }
        let binary = self.install_binary()?;
        let path = self.list()?;
        let (mut list, mode) =
            read_list(&path)?.ok_or_else(|| InstallError::NoList(self.paths.conf_dir.clone()))?;
        let wanted = entry(&self.paths.socket);
        let plugins = plugins(&mut list);
        let ours = plugins.iter().filter(|p| is_ours(p)).count();
        // Behind whoever makes the network; others may stand behind it.
        if ours == 1 && plugins.iter().position(|p| *p == wanted).is_some_and(|at| at > 0) {
            return Ok(Repaired { binary, list: false });
        }
        plugins.retain(|p| !is_ours(p));
        plugins.push(wanted);
        write(&path, list.to_string().as_bytes(), mode)?;
        Ok(Repaired { binary, list: true })
    }

    /// Takes the entry out of every list, for good. The file must stay until the runtime has noticed.
    pub fn leave_lists(&self) -> Result<(), InstallError> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = true;
        for path in self.files()? {
            let Some((mut list, mode)) = read_list(&path)? else { continue };
            let plugins = plugins(&mut list);
            if plugins.iter().any(is_ours) {
                plugins.retain(|p| !is_ours(p));
                write(&path, list.to_string().as_bytes(), mode)?;
            }
        }
        Ok(())
    }

    /// Removes the plugin's file.
    pub fn leave_binary(&self) -> Result<(), InstallError> {
        let path = self.paths.bin_dir.join(PLUGIN);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(InstallError::File { path, error }),
            _ => Ok(()),
        }
    }

    fn install_binary(&self) -> Result<bool, InstallError> {
        let target = self.paths.bin_dir.join(PLUGIN);
        let ours = fs::read(&self.paths.plugin).map_err(|e| failed(&self.paths.plugin, e))?;
        let executable = |path: &Path| fs::metadata(path).is_ok_and(|m| m.permissions().mode() & 0o111 != 0);
        if fs::read(&target).is_ok_and(|there| there == ours) && executable(&target) {
            return Ok(false);
        }
        write(&target, &ours, 0o755)?;
        Ok(true)
    }

    /// The list that the runtime reads: of the files in the order of their names, the first that is one.
    fn list(&self) -> Result<PathBuf, InstallError> {
        for path in self.files()? {
            if path.extension().is_some_and(|e| e == "conflist") {
                if read_list(&path)?.is_some() {
                    return Ok(path);
                }
            } else if read_json(&path)?.is_some_and(|(conf, _)| conf["type"].is_string()) {
                return Err(InstallError::SinglePlugin(path));
            }
        }
        Err(InstallError::NoList(self.paths.conf_dir.clone()))
    }

    fn files(&self) -> Result<Vec<PathBuf>, InstallError> {
        let entries = fs::read_dir(&self.paths.conf_dir).map_err(|e| failed(&self.paths.conf_dir, e))?;
        let mut files: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|p| p.extension().is_some_and(|e| e == "conf" || e == "conflist" || e == "json"))
            .collect();
        files.sort();
        Ok(files)
    }
}

/// Keeps it there, for ever.
pub(super) fn keep(installer: &Installer, metrics: &Metrics) {
    let watch = watch(installer).inspect_err(|error| {
        tracing::warn!(%error, "the node's directories can't be watched; they are looked at every few seconds");
    });
    let mut said = String::new();
    loop {
        match installer.repair() {
            Ok(repaired) => {
                if repaired != Repaired::default() {
                    tracing::info!(binary = repaired.binary, list = repaired.list, "the plugin is installed");
                }
                said.clear();
                metrics.installed(true, repaired);
            }
            Err(error) => {
                let error = error.to_string();
                // Every few seconds the same would fill the log.
                if said != error {
                    tracing::warn!(error, "the plugin is not installed");
                    said = error;
                }
                metrics.installed(false, Repaired::default());
            }
        }
        match &watch {
            Ok(watch) => wait(watch),
            Err(_) => std::thread::sleep(TURN),
        }
    }
}

fn watch(installer: &Installer) -> io::Result<rustix::fd::OwnedFd> {
    use inotify::{CreateFlags, WatchFlags};
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let what = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::MOVED_FROM | WatchFlags::DELETE;
    for directory in [&installer.paths.conf_dir, &installer.paths.bin_dir] {
        inotify::add_watch(&watch, directory, what)?;
    }
    Ok(watch)
}

/// Until something happens there, or a while has passed.
fn wait(watch: &rustix::fd::OwnedFd) {
    let turn = Timespec { tv_sec: TURN.as_secs().cast_signed(), tv_nsec: 0 };
    let _ = poll(&mut [PollFd::new(watch, PollFlags::IN)], Some(&turn));
    // What happened does not matter: everything is looked at again.
    let mut buffer = [0; 4096];
    while rustix::io::read(watch, &mut buffer).is_ok_and(|n| n > 0) {}
}

fn is_ours(plugin: &Value) -> bool {
    plugin["type"] == PLUGIN
}

/// The list's plugins; of a value that [`read_list`] gave.
fn plugins(list: &mut Value) -> &mut Vec<Value> {
    let plugins = &mut list["plugins"];
    if !plugins.is_array() {
        *plugins = Value::Array(Vec::new());
    }
    match plugins {
        Value::Array(all) => all,
        _ => unreachable!("it was made an array"),
    }
}

/// A list of plugins and the file's mode; none where the file is no list that a runtime would take.
fn read_list(path: &Path) -> Result<Option<(Value, u32)>, InstallError> {
    let usable = |list: &Value| {
        let plugins = list["plugins"].as_array();
        // With ours alone there is no network to chain to.
        list["name"].is_string() && plugins.is_some_and(|all| all.iter().any(|p| !is_ours(p)))
    };
    Ok(read_json(path)?.filter(|(list, _)| usable(list)))
}

/// A file's JSON and its mode. What is no JSON is left to the runtime, which skips it too; a file that is gone
/// by now is none.
fn read_json(path: &Path) -> Result<Option<(Value, u32)>, InstallError> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(path, error)),
    };
    let mode = file.metadata().map_err(|e| failed(path, e))?.permissions().mode() & 0o7777;
    let mut text = String::new();
    match file.take(MOST_BYTES).read_to_string(&mut text) {
        Err(error) if error.kind() != io::ErrorKind::InvalidData => Err(failed(path, error)),
        _ => Ok(serde_json::from_str(&text).ok().map(|value| (value, mode))),
    }
}

/// Replaces a file. The name it is written under ends in what no runtime reads.
fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), InstallError> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".sallyport");
    let beside = path.with_file_name(name);
    let written = (|| {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&beside)?;
        io::Write::write_all(&mut file, bytes)?;
        // An earlier one's mode, or the umask, may be another.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    written.map_err(|error| {
        let _ = fs::remove_file(&beside);
        failed(path, error)
    })
}

fn failed(path: &Path, error: io::Error) -> InstallError {
    InstallError::File { path: path.to_owned(), error }
}
