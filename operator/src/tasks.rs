//! The background tasks. None of them may end before the process is told to stop: a replica that lost one
//! would look alive and do half of its work.

use std::future::Future;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A task that ended, and how.
type Ended = (&'static str, anyhow::Result<()>);

/// Named tasks.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    set: JoinSet<Ended>,
}

/// A task ended before its time.
#[derive(Debug, thiserror::Error)]
#[error("the task `{task}` ended: {why}")]
pub(crate) struct Died {
    task: &'static str,
    why: String,
}

impl Tasks {
    /// Starts a task.
    pub(crate) fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        self.set.spawn(async move {
            let result = AssertUnwindSafe(task).catch_unwind().await;
            (
                name,
                result.unwrap_or_else(|panic| Err(anyhow::anyhow!("it panicked: {}", said(panic.as_ref())))),
            )
        });
    }

    /// Waits for the first task that ends.
    pub(crate) async fn first_end(&mut self) -> Died {
        match self.set.join_next().await {
            Some(Ok((task, Ok(())))) => Died { task, why: "it had nothing left to do".into() },
            Some(Ok((task, Err(error)))) => Died { task, why: format!("{error:#}") },
            Some(Err(error)) => Died { task: "?", why: error.to_string() },
            None => std::future::pending().await,
        }
    }

    /// Waits until every task has ended, as those do that were told to stop.
    pub(crate) async fn all(mut self) {
        while let Some(ended) = self.set.join_next().await {
            if let Ok((task, Err(error))) = ended {
                tracing::warn!(task, error = format!("{error:#}"), "a task ended badly while stopping");
            }
        }
    }
}

/// Waits until it is said, or nobody is left to say it.
pub(crate) async fn stopped(stop: &mut watch::Receiver<bool>) {
    stop.wait_for(|s| *s).await.ok();
}

/// What a panic said.
pub(crate) fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_task_to_end_is_named_with_its_reason() {
        for (task, expected) in [
            (Box::pin(async { Ok(()) }) as futures_util::future::BoxFuture<'static, _>, "nothing left"),
            (Box::pin(async { anyhow::bail!("the watch broke") }), "the watch broke"),
            (Box::pin(async { panic!("oh no {}", 1) }), "it panicked: oh no 1"),
        ] {
            let mut tasks = Tasks::default();
            tasks.spawn("forever", std::future::pending());
            tasks.spawn("brief", task);
            let died = tasks.first_end().await.to_string();
            assert!(died.contains("`brief`") && died.contains(expected), "{died}");
        }
    }
}
