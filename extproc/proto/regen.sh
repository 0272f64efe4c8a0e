#!/bin/sh
# Regenerates src/generated; with --check, fails and shows the difference where what is checked in is stale.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
cargo run --quiet --locked --manifest-path "$here/gen/Cargo.toml" -- "$fresh"
case "${1:-}" in
  --check) diff -ru "$here/src/generated" "$fresh" ;;
  "") rm -rf "$here/src/generated"; mkdir "$here/src/generated"; cp "$fresh"/* "$here/src/generated/" ;;
  *) echo "usage: regen.sh [--check]" >&2; exit 2 ;;
esac
