//! Notices when the thread that answers Envoy no longer does.
//!
//! Envoy waits for chunks of a forwarded response without a timeout of its own, so a process that hangs
//! would hang every open stream with it. Better to die: Envoy ends the streams, and the kubelet starts anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Starts the watch over the current runtime: a task of it beats, a thread of its own listens. `stalled` is
/// called once no beat came for `limit`.
pub fn start(limit: Duration, stalled: impl FnOnce() + Send + 'static) -> std::io::Result<Heart> {
    let epoch = Instant::now();
    let beat = Arc::new(AtomicU64::new(0));
    let pause = limit / 10;
    let heart = Arc::clone(&beat);
    let told = Heart { epoch, beat: Arc::clone(&beat) };
    tokio::spawn(async move {
        loop {
            heart.store(millis(epoch), Ordering::Relaxed);
            tokio::time::sleep(pause).await;
        }
    });
    std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
        loop {
            std::thread::sleep(pause);
            // A process that was stopped as a whole wakes up with both clocks behind: give the heart one
            // more pause before believing that it stands still.
            if stale(epoch, &beat, limit) {
                std::thread::sleep(pause);
                if stale(epoch, &beat, limit) {
                    return stalled();
                }
            }
        }
    })?;
    Ok(told)
}

/// When the runtime was last seen alive.
#[derive(Clone, Debug)]
pub struct Heart {
    epoch: Instant,
    beat: Arc<AtomicU64>,
}

impl Heart {
    /// How long ago that was.
    pub fn age(&self) -> Duration {
        Duration::from_millis(millis(self.epoch).saturating_sub(self.beat.load(Ordering::Relaxed)))
    }
}

fn stale(epoch: Instant, beat: &AtomicU64, limit: Duration) -> bool {
    u128::from(millis(epoch).saturating_sub(beat.load(Ordering::Relaxed))) > limit.as_millis()
}

fn millis(epoch: Instant) -> u64 {
    u64::try_from(epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_runtime_that_stands_still_is_noticed() {
        let (told, tell) = mpsc::channel();
        runtime().block_on(async move {
            start(Duration::from_millis(100), move || told.send(()).unwrap()).unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            // Blocks the only thread, as a scan that never ends would.
            tell.recv_timeout(Duration::from_secs(10)).unwrap();
        });
    }

    #[test]
    fn a_runtime_that_is_only_idle_is_left_alone() {
        let (told, tell) = mpsc::channel::<()>();
        runtime().block_on(async move {
            start(Duration::from_millis(500), move || told.send(()).unwrap()).unwrap();
            tokio::time::sleep(Duration::from_millis(1500)).await;
            assert_eq!(tell.try_recv(), Err(mpsc::TryRecvError::Empty));
        });
    }
}
