# shellcheck shell=bash
# Shared by the scripts here; to be sourced. Each script starts in the root of the checkout.

export DEBIAN_FRONTEND=noninteractive

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo --preserve-env=DEBIAN_FRONTEND "$@"; fi
}

# Whether version $1 is at least version $2, by dpkg's order.
at_least() { dpkg --compare-versions "$1" ge "$2"; }

# The rustc target of this machine. Naming it is what makes envd static (rust/.cargo/config.toml).
rust_target() { echo "$(uname -m)-unknown-linux-gnu"; }

# A rustup installation is used although a non-login shell does not have it on PATH.
if [ -d "${HOME:-/root}/.cargo/bin" ]; then PATH="$PATH:${HOME:-/root}/.cargo/bin"; fi

aenv_home() {
    if [ -n "${AENV_HOME:-}" ]; then echo "$AENV_HOME"
    elif [ "$(id -u)" -eq 0 ]; then echo /var/lib/aenv
    else echo "$HOME/.local/share/aenv"; fi
}

# The pid of the server that runs on this home; fails if none does.
server_pid() {
    local pid
    pid=$(cat "$(aenv_home)/server.pid" 2> /dev/null) && [ -n "$pid" ] || return 1
    { tr '\0' ' ' < "/proc/$pid/cmdline"; } 2> /dev/null | grep -q 'aenv server' && echo "$pid"
}
