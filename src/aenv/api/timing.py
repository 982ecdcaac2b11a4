"""The Server-Timing header (W3C): where the milliseconds of an operation went."""

from contextlib import suppress

from fastapi import Response

from aenv.errors import NotFound
from aenv.orchestrator.models import Sandbox
from aenv.orchestrator.protocol import Sandboxes

HEADER = "Server-Timing"
LAUNCH = "Milliseconds of each step of the launch."
STOPPED = "Milliseconds for which the guest was stopped."


def note_launch(response: Response, sandbox: Sandbox) -> None:
    """Tell how long each step of a launch took."""
    response.headers[HEADER] = ", ".join(f"{step};dur={took:g}" for step, took in sandbox.timings.items())


def note_stop(response: Response, sandboxes: Sandboxes, sandbox_id: str) -> None:
    """Tell how long the capture that was just made stopped the guest, unless the sandbox is gone already."""
    with suppress(NotFound):
        if (stopped := sandboxes.get(sandbox_id).timings.get("stopped")) is not None:
            response.headers[HEADER] = f"stopped;dur={stopped:g}"
