#!/usr/bin/env bash
# From a checkout to a command run in a microVM. Every step does only what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

scripts/system.sh
scripts/venv.sh
scripts/build.sh
say "Provisioning"
.venv/bin/aenv setup
scripts/server.sh
.venv/bin/python scripts/first_sandbox.py
