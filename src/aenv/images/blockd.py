"""Images by the data plane, `aenv-blockd`: layers shared by all, under a writable upper for each disk.

A disk is attached under its sandbox's id, which is the name of the sandbox's folder; its upper lives in that folder.
Memory images are in `memory.py`.
"""

import asyncio
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from aenv.errors import AenvError, ImageError, NotFound
from aenv.images.capturing import StagedCapture
from aenv.images.client import ControlError, Layer, carried_out, layers_of
from aenv.images.daemon import BlockDaemon, Run
from aenv.images.durable import sync_files
from aenv.images.memory import MemoryImages
from aenv.images.protocol import Disk, GuestMemory, Stack
from aenv.threads import to_its_end

UPPER = "upper"
_BUSY_PAUSES = (0.05, 0.1, 0.2, 0.5)
"""Seconds between tries to detach an image that is still being attached."""


class BlockImages:
    """`ImageStore` over `aenv-blockd`. Close with `aclose`."""

    def __init__(self, daemon: BlockDaemon) -> None:
        self._daemon = daemon
        self._memory = MemoryImages(daemon)
        self._runs: dict[str, Run] = {}
        """Which daemon serves which disk."""

    async def start(self, in_use: Iterable[Path], memory_in_use: Iterable[str]) -> None:
        run = await self._daemon.start()
        disks = {directory.name for directory in in_use}
        listed = await run.client.list()
        attached = {str(image.get("image")): Path(image.get("path", "")) for image in listed if not image.get("blank")}
        memory = self._memory.take_over(run, attached, set(memory_in_use))
        for name in {str(image.get("image")) for image in listed} - (disks & attached.keys()) - memory:
            await _detach(run, name)

    async def attach(self, stack: Stack, directory: Path, uid: int) -> Disk:
        return await self._attach(directory, uid, layers_of(stack), stack.size)

    async def attach_blank(self, size: int, directory: Path, uid: int) -> Disk:
        return await self._attach(directory, uid, [], size, blank=True)

    async def _attach(
        self, directory: Path, uid: int, layers: Sequence[Layer], size: int, *, blank: bool = False
    ) -> Disk:
        run = await self._daemon.running()
        attaching = run.client.attach(
            directory.name, layers, upper=directory / UPPER, size=size, owner=uid, blank=blank
        )
        try:
            attached = await carried_out(attaching)
        except NotFound as error:
            raise ImageError(f"a layer of the disk in {directory} is missing: {error.message}") from error
        except AenvError:
            with suppress(AenvError):
                await self.detach(directory)
            raise
        self._runs[directory.name] = run
        return Disk(path=attached.path, size=attached.size)

    async def bind(self, stack: Stack, directory: Path) -> None:
        binding = self._run_of(directory).client.bind(directory.name, layers_of(stack), size=stack.size)
        try:
            await carried_out(binding)
        except NotFound as error:
            raise ImageError(f"the blank disk in {directory} is gone: {error.message}") from error

    async def open(self, directory: Path) -> Disk:
        run = await self._daemon.running()
        try:
            found = await run.client.stat(directory.name)
        except NotFound as error:
            raise ImageError(
                f"the disk in {directory} is gone: the aenv-blockd that served it has ended meanwhile"
            ) from error
        self._runs[directory.name] = run
        return Disk(path=Path(found["path"]), size=int(found["size"]))

    async def layers(self, directory: Path) -> tuple[Path, ...]:
        about = await self._run_of(directory).client.stat(directory.name)
        return tuple(Path(layer["path"]) for layer in about["layers"])

    async def seal(self, directory: Path, layer: Path) -> None:
        await carried_out(self._run_of(directory).client.seal(directory.name, layer))

    async def lost(self, directory: Path) -> str:
        return f"{await self._run_of(directory).ended()}, and with it the disk"

    async def detach(self, directory: Path) -> None:
        self._runs.pop(directory.name, None)
        # Nobody can have a disk of a daemon that is no more; its files are then ours to delete.
        if (run := self._daemon.current) is not None:
            await _detach(run, directory.name)
        await asyncio.to_thread(shutil.rmtree, directory / UPPER, ignore_errors=True)

    async def open_memory(self, name: str, stack: Stack, user: str) -> Path:
        return await self._memory.open(name, stack, user)

    async def close_memory(self, name: str, user: str) -> None:
        self._memory.close(name, user)

    async def begin_capture(
        self, memory: GuestMemory, base: Stack | None, mapped: int, output: Path, *, write_later: bool
    ) -> StagedCapture:
        run = await self._daemon.running()
        layers = layers_of(base) if base else []
        return await StagedCapture.begin(run.client, memory, output, base=layers, mapped=mapped, later=write_later)

    async def restore(self, memory: GuestMemory, layers: Sequence[Path]) -> None:
        run = await self._daemon.running()
        restoring = run.client.restore(
            memory.pid,
            [asdict(part) for part in memory.ranges],
            [Layer(path=path) for path in layers],
            size=memory.size,
            start_time=memory.start_time,
        )
        try:
            await carried_out(restoring)
        except NotFound as error:
            raise ImageError(f"memory cannot be restored: {error.message}") from error

    async def compact(self, layers: Sequence[Path], output: Path, *, base: bool) -> None:
        run = await self._daemon.running()
        await run.client.compact(output, layers=[Layer(path=path) for path in layers], base=base)

    async def compact_disk(self, directory: Path, first: int, last: int, output: Path) -> None:
        await self._run_of(directory).client.compact(output, image=directory.name, run=(first, last))

    async def make_durable(self, files: Sequence[Path]) -> None:
        await to_its_end(sync_files, files)

    async def aclose(self) -> None:
        await self._memory.aclose()
        await self._daemon.aclose()

    def _run_of(self, directory: Path) -> Run:
        run = self._runs.get(directory.name)
        if run is None:
            raise ImageError(f"no disk is attached in {directory}")
        return run


async def _detach(run: Run, name: str) -> None:
    """Take an image from a daemon, wherever it is in its life there."""
    pauses = iter(_BUSY_PAUSES)
    while not run.process.ended:
        try:
            return await run.client.detach(name, discard_upper=True)
        except NotFound:
            return None
        except ControlError as error:
            # Also while a cancelled attach still goes on there.
            if error.code != "busy" or (pause := next(pauses, None)) is None:
                raise
            await asyncio.sleep(pause)
        except ImageError:
            if not run.process.ended:
                raise
    return None
