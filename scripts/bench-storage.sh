#!/usr/bin/env bash
# Measures the data plane's disks. Installs fio, and qemu-storage-daemon to compare with, unless they are there.
# Arguments go to `aenv bench storage`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

scripts/system.sh
scripts/venv.sh
scripts/build.sh
missing=()
command -v fio > /dev/null || missing+=(fio)
# Of the same release as qemu-img, which system.sh has installed.
command -v qemu-storage-daemon > /dev/null || missing+=("qemu-utils=$(dpkg-query -W -f '${Version}' qemu-utils)")
if [ "${#missing[@]}" -gt 0 ]; then
    say "Installing ${missing[*]}"
    as_root apt-get update -qq
    as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
fi
.venv/bin/aenv bench storage "$@"
