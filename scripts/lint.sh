#!/usr/bin/env bash
# All static checks.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

scripts/system.sh
scripts/venv.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
(cd rust && cargo fmt --check && cargo clippy --quiet --locked --all-targets --target "$(rust_target)" -- -D warnings)
if command -v shellcheck > /dev/null; then
    git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck -x
else
    say "shellcheck is not installed: shell scripts not checked"
fi
