#!/usr/bin/env bash
# Installs what the tests need and runs all of them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

scripts/system.sh
scripts/venv.sh
scripts/build.sh
say "Provisioning"
.venv/bin/aenv setup
say "Rust tests"
(cd rust && cargo test --quiet --locked --workspace --target "$(rust_target)")
say "Python tests"
.venv/bin/python -m pytest "$@"
