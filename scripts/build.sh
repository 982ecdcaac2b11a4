#!/usr/bin/env bash
# Builds the Rust binaries, for release.
set -euo pipefail
cd "$(dirname "$0")/../rust"
. ../scripts/lib.sh

say "Building the Rust binaries"
cargo build --quiet --locked --release --target "$(rust_target)"
