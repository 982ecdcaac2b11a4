#!/usr/bin/env bash
# Stops the server of this home. Running sandboxes go on; the next start takes them over.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

STOP_DEADLINE=60 # seconds

if ! pid=$(server_pid); then
    say "No server runs"
    exit 0
fi
say "Stopping the server (pid $pid)"
kill -TERM "$pid"
end=$((SECONDS + STOP_DEADLINE))
while kill -0 "$pid" 2> /dev/null; do
    [ "$SECONDS" -lt "$end" ] || die "the server (pid $pid) does not end"
    sleep 0.1
done
