#!/usr/bin/env bash
# Installs the system packages that are missing, from the machine's own package sources. Touches apt only if some are.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

MIN_QEMU=8.2
MIN_CARGO=1.85

# shellcheck disable=SC1091
. /etc/os-release
command -v apt-get > /dev/null || die "Debian 12+ or Ubuntu 24.04+ is needed; this is ${PRETTY_NAME:-unknown}"

case "$(uname -m)" in
    x86_64) qemu_package=qemu-system-x86 ;;
    aarch64) qemu_package=qemu-system-arm ;;
    *) die "no support for $(uname -m) yet: x86_64 and aarch64 only" ;;
esac

updated=
update_once() {
    if [ -z "$updated" ]; then
        say "Reading package lists"
        as_root apt-get update -qq
        updated=1
    fi
}

# Version apt would install of package $1, with further options; empty if none.
candidate() { apt-cache "${@:2}" policy "$1" | sed -n 's/^  Candidate: //p' | grep -v '(none)' || true; }

install() {
    update_once
    say "Installing ${*}"
    as_root apt-get install -y -qq --no-install-recommends "$@" > /dev/null
}

# Commands and files, each with the package that brings it.
missing_packages() {
    local need
    for need in \
        python3:python3 git:git curl:curl gcc:gcc make:make mmdebstrap:mmdebstrap nft:nftables ip:iproute2 \
        mke2fs:e2fsprogs zstd:zstd lz4:lz4 qemu-img:qemu-utils setpriv:util-linux ps:procps cpio:cpio; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "${need%%:*}" > /dev/null || echo "${need#*:}"
    done
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    # In Debian these are packages of their own: the interpreter alone makes no virtual environment.
    python3 -c 'import ensurepip, venv' 2> /dev/null || echo python3-venv
}

# What Debian 12 has only in backports: QEMU, and the guest's kernel (which is not installed, only unpacked).
ensure_backports() {
    [ "$ID $VERSION_CODENAME" = "debian bookworm" ] || return 0
    # shellcheck disable=SC2016 # apt's own placeholder
    if [[ $'\n'$(apt-get indextargets --format '$(RELEASE)') == *$'\n'"$VERSION_CODENAME-backports"* ]]; then return 0; fi
    update_once
    local stanza
    stanza=$(PYTHONPATH=src python3 -m aenv.distro.sources backports)
    [ -n "$stanza" ] || return 0
    say "Adding the suite $VERSION_CODENAME-backports of this machine's mirror"
    printf '%s\n' "$stanza" | as_root tee /etc/apt/sources.list.d/aenv-backports.sources > /dev/null
    updated=
    update_once
}

qemu_version() { "qemu-system-$(uname -m)" --version 2> /dev/null | sed -n 's/.*version \([0-9.]*\).*/\1/p'; }

ensure_qemu() {
    local have
    have=$(qemu_version || true)
    if [ -n "$have" ] && at_least "$have" "$MIN_QEMU"; then return 0; fi
    update_once
    local release=()
    if ! at_least "$(candidate "$qemu_package" | sed 's/^[0-9]*://')" "$MIN_QEMU"; then
        release=(-t "$VERSION_CODENAME-backports")
    fi
    install "${release[@]}" "$qemu_package" qemu-utils
    have=$(qemu_version || true)
    if [ -z "$have" ] || ! at_least "$have" "$MIN_QEMU"; then
        die "QEMU >= $MIN_QEMU is needed; this machine's package sources offer ${have:-none}"
    fi
}

cargo_version() { cargo --version 2> /dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p'; }

# Rust from the distribution: the plain packages where they are new enough, else its versioned ones (Ubuntu), else
# those it keeps current for its browsers (Debian's rustc-web).
ensure_rust() {
    local have
    have=$(cargo_version || true)
    if [ -n "$have" ] && at_least "$have" "$MIN_CARGO"; then return 0; fi
    update_once
    local names=() name version suffix
    mapfile -t names < <(apt-cache pkgnames cargo- | grep -E '^cargo-[0-9.]+$' | sort -Vr)
    for name in cargo "${names[@]}" cargo-web; do
        version=$(candidate "$name")
        if [ "$name" != cargo ] && [ "$name" != cargo-web ]; then version=${name#cargo-}; fi
        if [ -z "$version" ] || ! at_least "$version" "$MIN_CARGO"; then continue; fi
        suffix=${name#cargo}
        install "rustc$suffix" "$name"
        if [ -n "$suffix" ] && [ -x "/usr/bin/cargo$suffix" ]; then
            as_root ln -sf "/usr/bin/cargo$suffix" /usr/local/bin/cargo
            as_root ln -sf "/usr/bin/rustc$suffix" /usr/local/bin/rustc
        fi
        return 0
    done
    die "Rust >= $MIN_CARGO is needed; this machine's package sources have none. Install it (rustup) and run again"
}

mapfile -t missing < <(missing_packages | sort -u)
if [ "${#missing[@]}" -gt 0 ]; then install "${missing[@]}"; fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python >= 3.11 is needed, this is $(python3 --version)"
ensure_backports
ensure_qemu
ensure_rust
