# What a newcomer and CI run. `make` alone lists it.

CARGO ?= cargo
# Its own output stays readable between the stages.
MAKEFLAGS += --no-print-directory

TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE_BINS = -p sallyport -p sallyport-extproc -p sallyport-e2e

.DEFAULT_GOAL := help
.PHONY: help demo build envoy test fuzz preflight clean

help: ## this list
	@printf 'Sallyport: inspects what AI agents send and receive.\n\n'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## build everything, fetch Envoy, and watch an agent's traffic being judged
	@printf '[1/4] checking what is needed\n'
	@tools/preflight
	@printf '[2/4] fetching Envoy\n'
	@tools/envoy-fetch
	@printf '[3/4] building (the first time takes some minutes)\n'
	@$(CARGO) build --release --locked $(RELEASE_BINS) --bins
	@printf '[4/4] running the demo\n'
	@$(TARGET)/release/sallyport-demo policies/samples/support-bot.yaml

build: preflight ## release binaries
	@$(CARGO) build --release --locked $(RELEASE_BINS) --bins

envoy: ## fetch the Envoy that Sallyport is tested with, into .cache
	@tools/envoy-fetch

test: ## every test, the ones against the real Envoy included
	@printf '[1/4] checking what is needed\n'
	@tools/preflight
	@printf '[2/4] fetching Envoy\n'
	@tools/envoy-fetch
	@printf '[3/4] building what the tests start\n'
	@$(CARGO) build --locked --workspace --bins
	@printf '[4/4] testing\n'
	@CARGO='$(CARGO)' tools/run-tests

fuzz: ## bend messages for SALLYPORT_FUZZ_SECONDS (default 30) a target, optimised and with overflow checks
	@SALLYPORT_FUZZ_SECONDS=$${SALLYPORT_FUZZ_SECONDS:-30} $(CARGO) test --profile fuzz --locked \
		-p sallyport-engine -p sallyport-extproc -- bent bodies texts streams heads policies packs cedar

preflight: ## say what is missing on this machine, and how to get it
	@tools/preflight

clean: ## remove what was built; the fetched Envoy stays
	@$(CARGO) clean
