#!/usr/bin/env bash
# Makes sure that a server of this checkout runs, detached: starts it, or restarts it if its code is older than ours.
# Running sandboxes live through a restart.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

START_DEADLINE=60 # seconds

home=$(aenv_home)
url=$(.venv/bin/python -c 'from aenv.config import load; api = load().api; print(f"http://{api.host}:{api.port}")')
pid_file=$home/server.pid
log=$home/server.log

healthy() { curl -fsS --noproxy '*' --max-time 2 -o /dev/null "$url/health" 2> /dev/null; }

code_is_newer() { [ -n "$(find src pyproject.toml "$home/guest/current" -newer "$pid_file" -not -path '*/__pycache__*' -type f,l -print -quit)" ]; }

wait_until() {
    local end=$((SECONDS + START_DEADLINE))
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.2
    done
}

gone() { ! kill -0 "$pid" 2> /dev/null; }

if pid=$(server_pid) && healthy; then
    if ! code_is_newer; then
        say "The server runs already (pid $pid)"
        exit 0
    fi
    say "Restarting the server: it runs older code"
    kill -TERM "$pid"
    wait_until gone || die "the server (pid $pid) does not end; see $log"
elif healthy; then
    die "another server answers at $url; stop it, or set AENV_API_PORT"
fi

say "Starting the server (log: $log)"
mkdir -p "$home"
setsid nohup .venv/bin/aenv server >> "$log" 2>&1 < /dev/null &
pid=$!
started() { healthy || gone; }
wait_until started || die "the server does not answer at $url; see $log"
if gone; then
    tail -n 20 "$log" >&2
    die "the server ended; see $log"
fi
