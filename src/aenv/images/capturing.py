"""Captures of memory in stages (docs/formats/blockd-control.md), for whoever stops the guest."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from aenv.errors import AenvError, ImageError
from aenv.images.client import BULK, BlockdClient, Event, Layer, carried_out
from aenv.images.protocol import Captured, GuestMemory


class StagedCapture:
    """`images.protocol.Capture`. Made by `begin`."""

    def __init__(
        self, client: BlockdClient, stages: asyncio.Queue[Event], calling: asyncio.Future[dict[str, Any]]
    ) -> None:
        self._client = client
        self._stages = stages
        self._calling = calling
        self._number: Any = None

    @classmethod
    async def begin(
        cls, client: BlockdClient, memory: GuestMemory, output: Path, *, base: Sequence[Layer], mapped: int, later: bool
    ) -> "StagedCapture":
        """One that is prepared; `mapped` is how many layers of `base` the guest maps."""
        stages: asyncio.Queue[Event] = asyncio.Queue()
        arguments = {
            "pid": memory.pid,
            "start_time": memory.start_time,
            "mappings": [asdict(part) for part in memory.ranges],
            "size": memory.size,
            "base": [layer.wire() for layer in base],
            "mapped": mapped if base else None,
            "output": str(output),
            "staged": "copy" if later else "write",
        }
        calling = client.call_staged("capture", arguments, stages, deadline=BULK)
        capture = cls(client, stages, asyncio.ensure_future(calling))
        try:
            await capture._ready()
        except BaseException:
            await capture.abandon()
            raise
        return capture

    async def copy(self) -> None:
        await self._client.call("proceed", capture=self._number)
        await self._reached("copied")

    async def finish(self) -> Captured:
        answer = await carried_out(self._ended())
        try:
            return Captured(**{field.name: answer[field.name] for field in fields(Captured)})
        except KeyError as error:
            raise ImageError(f"aenv-blockd's answer to a capture has no {error}; its version does not fit") from error

    async def abandon(self) -> None:
        with suppress(AenvError):
            await carried_out(self._given_up())

    async def _given_up(self) -> None:
        if self._number is None:
            await self._ready()
        if not self._calling.done():
            with suppress(AenvError):  # one that goes on already
                await self._client.call("proceed", capture=self._number, abandon=True)
        await self._ended()

    async def _ended(self) -> dict[str, Any]:
        return await self._calling

    async def _ready(self) -> None:
        self._number = (await self._reached("ready")).get("id")

    async def _reached(self, stage: str) -> Event:
        """What the daemon says when it is there. Raises what the capture ends with before."""
        waiting = asyncio.ensure_future(self._stages.get())
        try:
            await asyncio.wait((waiting, self._calling), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._calling.result()
            if not waiting.done() or waiting.result().get("stage") != stage:
                raise ImageError(
                    f"aenv-blockd did not say when a capture is {stage}; its version does not fit this one"
                )
            return waiting.result()
        finally:
            waiting.cancel()
