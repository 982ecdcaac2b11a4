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
if command -v npm > /dev/null; then
    (
        cd tests/conformance/js
        if [ package-lock.json -nt node_modules/.package-lock.json ]; then
            say "Installing the JavaScript SDK"
            npm ci --ignore-scripts --no-audit --no-fund --silent
        fi
    )
else
    say "npm is not installed: the JavaScript SDK is not tested"
fi
say "Python tests"
.venv/bin/python -m pytest "$@"
