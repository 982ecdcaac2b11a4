#!/usr/bin/env bash
# Builds the Rust binaries, for release.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

say "Building the Rust binaries"
cd rust
cargo build --quiet --locked --release --target "$(rust_target)"
