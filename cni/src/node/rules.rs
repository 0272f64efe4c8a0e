//! nft in somebody else's network namespace.
//!
//! A thread enters the namespace, starts nft there and ends; nothing else of this process is ever in it. A script
//! is one transaction: it holds as a whole or not at all.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sallyport_plan::capture::TABLE;
use serde::Deserialize;

/// How long nft may take: it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks whether it has ended.
const TURN: Duration = Duration::from_millis(2);

/// Why nothing was done in the namespace.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file is no network namespace, or may not be entered.
    #[error("entering the pod's network namespace: {0}")]
    Namespace(io::Error),
    /// nft could not be started or talked to.
    #[error("running nft: {0}")]
    Run(io::Error),
    /// nft did not end in time.
    #[error("nft did not end within {} s", PATIENCE.as_secs())]
    Timeout,
    /// nft refused it.
    #[error("nft: {0}")]
    Refused(String),
    /// nft's answer is not what it should be.
    #[error("reading what nft says: {0}")]
    Answer(serde_json::Error),
}

/// What one of the rules' counters says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Counter {
    /// Its name: the reason.
    pub name: String,
    /// Packets; for what is redirected, connections.
    pub packets: u64,
}

/// Loads a script.
pub(super) fn load(netns: BorrowedFd<'_>, script: &str) -> Result<(), RulesError> {
    nft(netns, &["-f", "-"], script).map(drop)
}

/// Whether the table is there.
pub(super) fn present(netns: BorrowedFd<'_>) -> Result<(), RulesError> {
    nft(netns, &["list", "chain", "inet", TABLE, "leaving"], "").map(drop)
}

/// Reads the counters.
pub(super) fn counters(netns: BorrowedFd<'_>) -> Result<Vec<Counter>, RulesError> {
    #[derive(Deserialize)]
    struct Listing {
        nftables: Vec<Item>,
    }
    #[derive(Deserialize)]
    struct Item {
        counter: Option<Counter>,
    }
    let text = nft(netns, &["-j", "list", "counters", "table", "inet", TABLE], "")?;
    let listing: Listing = serde_json::from_str(&text).map_err(RulesError::Answer)?;
    Ok(listing.nftables.into_iter().filter_map(|i| i.counter).collect())
}

fn nft(netns: BorrowedFd<'_>, args: &[&str], input: &str) -> Result<String, RulesError> {
    let outcome = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
                    .map_err(|e| RulesError::Namespace(e.into()))?;
                run(args, input)
            })
            .join()
    });
    outcome.unwrap_or_else(|_| Err(RulesError::Run(io::Error::other("the thread panicked"))))
}

fn run(args: &[&str], input: &str) -> Result<String, RulesError> {
    let mut child = Command::new("nft")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(RulesError::Run)?;
    // Rules and listings are smaller than a pipe, so neither side waits for the other. nft that has ended
    // early says why on its own.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
    let began = Instant::now();
    while child.try_wait().map_err(RulesError::Run)?.is_none() {
        if began.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return Err(RulesError::Timeout);
        }
        std::thread::sleep(TURN);
    }
    let output = child.wait_with_output().map_err(RulesError::Run)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said: String = String::from_utf8_lossy(&output.stderr).chars().take(1000).collect();
    Err(RulesError::Refused(format!("{}, {}", output.status, said.trim().replace('\n', "; "))))
}
