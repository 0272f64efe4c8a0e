//! The ext_proc server inside this process, on a thread of its own: the way it runs in the sidecar.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use sallyport_engine::Engine;
use sallyport_extproc::tls::Tls;
use sallyport_extproc::{Config, Observer, Policy, Server};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// As in the sidecar: large scans run beside the thread that answers.
const SCAN_THREADS: usize = 4;

/// Nothing is open any more when the filter is told to stop; what is left is closing the socket.
const STOP_WITHIN: Duration = Duration::from_secs(3);

/// A filter that serves.
#[derive(Debug)]
pub(crate) struct Filter {
    policy: Policy,
    stop: Option<oneshot::Sender<()>>,
    end: oneshot::Receiver<std::io::Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Filter {
    /// Binds the socket and starts serving.
    pub(crate) fn start(
        socket: &Path,
        engine: Arc<Engine>,
        observer: Arc<dyn Observer>,
        tls: Tls,
    ) -> anyhow::Result<Self> {
        let mut config = Config::new(socket);
        // Envoy has gone through its own drain before the filter is told.
        config.drain = Duration::from_secs(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(SCAN_THREADS)
            .build()
            .context("no runtime for the filter")?;
        let server = Server::bind(config, engine, observer)
            .with_context(|| format!("{}: the filter can't listen", socket.display()))?;
        let server = server.with_tls(tls);
        let policy = server.policy();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended, end) = oneshot::channel();
        let thread = std::thread::Builder::new().name("extproc".into()).spawn(move || {
            let served = runtime.block_on(server.serve(async {
                // A sender that is gone means the same as one that sent.
                let _ = stopped.await;
            }));
            // A scan that hangs must not keep the process.
            runtime.shutdown_background();
            let _ = ended.send(served);
        });
        let thread = thread.context("no thread for the filter")?;
        Ok(Self { policy, stop: Some(stop), end, thread: Some(thread) })
    }

    /// Puts another policy in force, for calls that begin from now on.
    pub(crate) fn swap(&self, engine: Arc<Engine>) {
        self.policy.swap(engine);
    }

    /// Returns when the filter has ended by itself.
    pub(crate) async fn ended(&mut self) -> anyhow::Error {
        match (&mut self.end).await {
            Ok(Ok(())) => anyhow!("the filter ended by itself"),
            Ok(Err(e)) => anyhow!(e).context("the filter failed"),
            Err(_) => anyhow!("the filter's thread failed"),
        }
    }

    /// Ends it and waits for its thread, which takes the socket away.
    pub(crate) async fn stop(mut self) {
        drop(self.stop.take());
        if timeout(STOP_WITHIN, &mut self.end).await.is_ok()
            && let Some(thread) = self.thread.take()
        {
            // It has said that it ended; a panic was printed by itself.
            let _ = thread.join();
        }
    }
}
