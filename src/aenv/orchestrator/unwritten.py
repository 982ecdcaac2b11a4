"""Ends that could not be written, as on a full disk: tried again until they are.

A restart would otherwise find the row of a running sandbox without its VMM, and give its end another reason.
"""

import asyncio
from typing import Protocol

import structlog

from aenv.errors import InfrastructureError

log = structlog.get_logger(__name__)

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0
"""Seconds between tries; each failed one doubles the pause."""


class Unwritten(Protocol):
    """A sandbox that has ended and whose newest row is not written."""

    async def write_again(self) -> None:
        """Raises an InfrastructureError, and has then added itself again."""
        ...


class Rewriter:
    """Owns no sandbox; knows which rows are behind. `run` is a task of the orchestrator."""

    def __init__(self) -> None:
        self._behind: list[Unwritten] = []
        self._added = asyncio.Event()

    def add(self, sandbox: Unwritten) -> None:
        """Remember it until it is written."""
        if sandbox not in self._behind:
            self._behind.append(sandbox)
        self._added.set()

    async def run(self) -> None:
        """Write what is behind, for ever."""
        while True:
            await self._added.wait()
            self._added.clear()
            pause = FIRST_PAUSE
            while self._behind:
                await asyncio.sleep(pause)
                try:
                    await self.write()
                except InfrastructureError as error:
                    pause = min(2 * pause, LONGEST_PAUSE)
                    log.warning("ends.unwritten", sandboxes=len(self._behind), error=error.message, again_in=pause)

    async def write(self) -> None:
        """One try, up to the first that fails. Raises an InfrastructureError."""
        while self._behind:
            await self._behind.pop(0).write_again()
