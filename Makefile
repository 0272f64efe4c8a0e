# What a newcomer and CI run. `make` alone lists it.

CARGO ?= cargo
# Its own output stays readable between the stages.
MAKEFLAGS += --no-print-directory

TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE_BINS = -p sallyport -p sallyport-extproc -p sallyport-e2e
CLUSTER_BINS = $(RELEASE_BINS) -p sallyport-operator

.DEFAULT_GOAL := help
.PHONY: help demo build envoy test soak cluster cluster-down kind kind-down fuzz preflight clean

help: ## this list
	@printf 'Sallyport: inspects what AI agents send and receive.\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## build everything, fetch Envoy, and watch an agent's traffic being judged
	@printf '[1/4] checking what is needed\n'
	@tools/preflight
	@printf '[2/4] fetching Envoy\n'
	@tools/envoy-fetch
	@printf '[3/4] building (the first time takes some minutes)\n'
	@$(CARGO) build --release --locked $(RELEASE_BINS) --bins
	@printf '[4/4] running the demo\n'
	@$(TARGET)/release/sallyport-demo policies/samples/support-bot.yaml

build: ## release binaries
	@tools/preflight
	@$(CARGO) build --release --locked $(RELEASE_BINS) --bins

envoy: ## fetch the Envoy that Sallyport is tested with, into .cache
	@tools/envoy-fetch

test: ## every test, the ones against the real Envoy and a real Kubernetes included
	@CARGO='$(CARGO)' tools/test

soak: ## a thousand subscribers of the operator, minutes of traffic, long outages, in a real Kubernetes
	@CARGO='$(CARGO)' tools/soak

cluster: ## a real Kubernetes of one node on this machine, with Sallyport and a guarded agent
	@printf '[1/5] checking what is needed\n'
	@tools/preflight && tools/preflight-cluster
	@printf '[2/5] building (the first time takes some minutes)\n'
	@e2e/node/build --background >/dev/null
	@$(CARGO) build --release --locked $(CLUSTER_BINS) --bins
	@printf '[3/5] bringing up Kubernetes (compiled once, which takes about ten minutes)\n'
	@e2e/node/up
	@printf '[4/5] making images of this checkout\n'
	@e2e/node/images $(TARGET)/release
	@printf '[5/5] installing\n'
	@eval "$$(e2e/node/env)" && e2e/install
	@printf '\nIt is up. In a shell that knows it:\n\n'
	@printf '  eval "$$(e2e/node/env)"                 # KUBECONFIG, and kubectl and helm on the path\n'
	@printf '  kubectl get agentpolicy -n agents\n'
	@printf '  kubectl get pods -n agents\n'
	@printf '  kubectl exec -n agents deploy/support-bot -c agent -- /sallyport-e2e-agent once 403 http://10.96.0.1/\n'
	@printf '  make cluster-down                      # end it, and leave nothing\n'

cluster-down: ## end that cluster, and leave nothing of it on the machine
	@e2e/node/down --purge

kind: ## the same in kind, where Docker is
	@e2e/kind/up

kind-down: ## end the cluster in kind
	@e2e/kind/down

fuzz: ## bend messages for SALLYPORT_FUZZ_SECONDS (default 30) a target, optimised and with overflow checks
	@SALLYPORT_FUZZ_SECONDS=$${SALLYPORT_FUZZ_SECONDS:-30} $(CARGO) test --profile fuzz --locked \
		-p sallyport-engine -p sallyport-extproc -p sallyport-cni -- bent bodies texts streams heads policies packs cedar

preflight: ## say what is missing on this machine, and how to get it
	@tools/preflight
	@e2e/node/can-run || true

clean: ## remove what was built; the fetched Envoy and the compiled Kubernetes stay
	@$(CARGO) clean
