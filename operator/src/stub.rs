//! STUB: stands in for `index`, `discovery` and `status` until their branch is merged. It knows no policy.
#![allow(missing_docs, clippy::unused_async)]

pub mod index {
    use std::collections::{BTreeMap, BTreeSet};
    use std::future::Future;

    use sallyport_api::AgentPolicyObject;
    use sallyport_plan::inject::InjectSettings;
    use tokio::sync::watch;

    #[derive(Clone, Debug)]
    pub struct Index {
        guarded: watch::Sender<BTreeSet<String>>,
    }

    impl Index {
        pub fn policies(&self, _: &str) -> Vec<AgentPolicyObject> {
            Vec::new()
        }

        pub fn namespace(&self, _: &str) -> Option<BTreeMap<String, String>> {
            Some(BTreeMap::new())
        }

        pub fn guarded_namespaces(&self) -> watch::Receiver<BTreeSet<String>> {
            self.guarded.subscribe()
        }

        pub fn synced(&self) -> bool {
            true
        }
    }

    pub fn start(_: kube::Client, _: InjectSettings) -> (Index, impl Future<Output = anyhow::Result<()>>) {
        let guarded = watch::Sender::new(BTreeSet::from(["default".to_owned()]));
        (Index { guarded }, std::future::pending())
    }
}

pub mod discovery {
    pub fn router(_: kube::Client, _: crate::index::Index, _: &prometheus::Registry) -> axum::Router {
        axum::Router::new()
    }
}

pub mod status {
    use tokio::sync::watch;

    #[derive(Clone, Debug)]
    pub struct Identity {
        pub namespace: String,
        pub pod_name: String,
    }

    pub async fn run(
        _: kube::Client,
        _: crate::index::Index,
        _: watch::Receiver<bool>,
        _: Identity,
    ) -> anyhow::Result<()> {
        std::future::pending().await
    }
}
