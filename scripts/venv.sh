#!/usr/bin/env bash
# Makes .venv with exactly the packages of requirements/dev.txt, and this checkout in it. Does nothing if it has them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

lock=requirements/dev.txt
stamp=.venv/.installed
wanted=$(cat "$lock" pyproject.toml | sha256sum)

if [ -x .venv/bin/aenv ] && [ "$(cat "$stamp" 2> /dev/null)" = "$wanted" ]; then exit 0; fi
say "Installing Python packages"
if ! [ -x .venv/bin/python ]; then python3 -m venv .venv; fi
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
pip install --require-hashes -r "$lock"
pip install --no-deps --no-build-isolation --editable .
echo "$wanted" > "$stamp"
