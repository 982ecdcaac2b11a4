#!/usr/bin/env bash
# Renews the lock files in requirements/ from pyproject.toml; needs uv. The index is the one pip or uv is configured for.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

uv=$(command -v uv || echo .venv/bin/uv)
[ -x "$uv" ] || die "uv is not installed; run: .venv/bin/python -m pip install uv"
for extra in server dev; do
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
        --no-header --extra "$extra" --output-file "requirements/$extra.txt" pyproject.toml requirements/build.in "$@"
done
