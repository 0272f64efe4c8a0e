# syntax=docker/dockerfile:1.7
# All images of Sallyport, one target each: operator, extproc, capture, cni, envoy; agent is the tests' own.
#
#   docker build --target operator -t sallyport-operator .
#   docker buildx build --platform linux/amd64,linux/arm64 --target extproc .
#
# Rust is compiled on the builder's own platform for the target's: no emulation, whichever way round.
ARG RUST_VERSION=1.90
ARG ENVOY_VERSION=1.40.0

FROM --platform=$BUILDPLATFORM rust:${RUST_VERSION}-bookworm AS build
ARG TARGETARCH
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
# The compiler and C library of the target: some dependencies have C in them.
# hadolint ignore=DL3008
RUN case $TARGETARCH in \
      amd64) triple=x86_64-unknown-linux-gnu gnu=x86_64-linux-gnu package=gcc-x86-64-linux-gnu ;; \
      arm64) triple=aarch64-unknown-linux-gnu gnu=aarch64-linux-gnu package=gcc-aarch64-linux-gnu ;; \
      *) echo "no image for $TARGETARCH" >&2; exit 1 ;; \
    esac; \
    if [ "$(dpkg --print-architecture)" != "$TARGETARCH" ]; then \
      apt-get update; \
      apt-get install -y --no-install-recommends "$package" "libc6-dev-$TARGETARCH-cross"; \
      rm -rf /var/lib/apt/lists/*; \
    fi; \
    rustup target add "$triple"; \
    upper=${triple//-/_}; \
    printf 'export TRIPLE=%s GNU=%s CC_%s=%s-gcc AR_%s=%s-ar CARGO_TARGET_%s_LINKER=%s-gcc\n' \
      "$triple" "$gnu" "$upper" "$gnu" "$upper" "$gnu" "${upper^^}" "$gnu" >/target.env
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=sallyport-target-$TARGETARCH \
    . /target.env; \
    cargo build --release --locked --target "$TRIPLE" --bins \
      -p sallyport-operator -p sallyport-extproc -p sallyport-e2e; \
    cargo build --release --locked --target "$TRIPLE" -p sallyport-cni --bin sallyport-cni-node; \
    # The plugin runs among the node's own files, so it brings its C library along.
    cargo rustc --release --locked --target "$TRIPLE" -p sallyport-cni --bin sallyport-cni -- \
      -C target-feature=+crt-static; \
    mkdir /out; \
    for program in sallyport-operator sallyport-extproc sallyport-cni sallyport-cni-node sallyport-e2e-agent; do \
      "$GNU-strip" -o "/out/$program" "target/$TRIPLE/release/$program"; \
    done

FROM gcr.io/distroless/cc-debian12:nonroot AS operator
COPY --from=build /out/sallyport-operator /sallyport-operator
USER 65532:65532
ENTRYPOINT ["/sallyport-operator"]

FROM gcr.io/distroless/cc-debian12:nonroot AS extproc
COPY --from=build /out/sallyport-extproc /sallyport-extproc
USER 65532:65532
ENTRYPOINT ["/sallyport-extproc"]

FROM gcr.io/distroless/cc-debian12:nonroot AS agent
COPY --from=build /out/sallyport-e2e-agent /sallyport-e2e-agent
USER 65532:65532
ENTRYPOINT ["/sallyport-e2e-agent"]

# Upstream's own, under another user; the chart takes it from upstream by default.
FROM envoyproxy/envoy:distroless-v${ENVOY_VERSION} AS envoy
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/envoy"]

# A shell and nft, to write a pod's capture rules once. The pod runs it as root with NET_ADMIN alone; as
# anybody else it can do nothing.
FROM debian:bookworm-slim AS capture
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends nftables \
    && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENTRYPOINT ["/bin/sh"]

# The plugin, the daemon that installs it, and the nft by which that one writes rules in pods' namespaces. Root, as
# the DaemonSet runs it, with NET_ADMIN and SYS_ADMIN.
FROM debian:bookworm-slim AS cni
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends nftables \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /out/sallyport-cni /sallyport-cni
COPY --from=build /out/sallyport-cni-node /sallyport-cni-node
USER 65532:65532
ENTRYPOINT ["/sallyport-cni-node"]
