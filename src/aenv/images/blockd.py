"""Disks by the data plane: the layers of a template, shared by all its sandboxes, under a writable upper for each.

An image is attached under its sandbox's id, which is the name of the sandbox's folder; its upper lives in that folder.
"""

import asyncio
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from aenv.errors import AenvError, ImageError, NotFound
from aenv.images.client import ControlError
from aenv.images.daemon import BlockDaemon, Run
from aenv.images.layers import LayerStore, Stack, read_stack
from aenv.images.protocol import Disk

UPPER = "upper"
_BUSY_PAUSES = (0.05, 0.1, 0.2, 0.5)
"""Seconds between tries to detach an image that is still being attached."""


class BlockImages:
    """`ImageStore` over `aenv-blockd`. Close with `aclose`."""

    def __init__(self, *, templates_dir: Path, layers: LayerStore, daemon: BlockDaemon) -> None:
        self._templates = templates_dir
        self._layers = layers
        self._daemon = daemon
        self._runs: dict[str, Run] = {}
        """Which daemon serves which disk."""

    async def start(self, in_use: Iterable[Path]) -> None:
        run = await self._daemon.start()
        kept = {directory.name for directory in in_use}
        for image in await run.client.list():
            name = str(image.get("image"))
            if name not in kept:
                await _detach(run, name)

    async def attach(self, image: str, directory: Path, uid: int) -> Disk:
        stack = await asyncio.to_thread(read_stack, self._templates / image)
        run = await self._daemon.running()
        layers = self._layers.files(stack)
        attaching = asyncio.ensure_future(
            run.client.attach(directory.name, layers, upper=directory / UPPER, size=stack.size, owner=uid)
        )
        try:
            attached = await asyncio.shield(attaching)
        except asyncio.CancelledError:
            # The daemon does what it was told. Known to be done, it can be undone.
            with suppress(AenvError):
                await asyncio.shield(attaching)
            raise
        except NotFound as error:
            raise ImageError(f"a layer of image '{image}' is missing; run `aenv setup`: {error.message}") from error
        except AenvError:
            with suppress(AenvError):
                await self.detach(directory)
            raise
        self._runs[directory.name] = run
        return _disk(attached.path, stack)

    async def open(self, image: str, directory: Path) -> Disk:
        stack = await asyncio.to_thread(read_stack, self._templates / image)
        run = await self._daemon.running()
        try:
            found = await run.client.stat(directory.name)
        except NotFound as error:
            raise ImageError(
                f"the disk in {directory} is gone: the aenv-blockd that served it has ended meanwhile"
            ) from error
        self._runs[directory.name] = run
        return _disk(Path(found["path"]), stack)

    async def lost(self, directory: Path) -> str:
        run = self._runs.get(directory.name)
        if run is None:
            raise ImageError(f"no disk is attached in {directory}")
        return f"{await run.ended()}, and with it the disk"

    async def detach(self, directory: Path) -> None:
        self._runs.pop(directory.name, None)
        # Nobody can have a disk of a daemon that is no more; its files are then ours to delete.
        if (run := self._daemon.current) is not None:
            await _detach(run, directory.name)
        await asyncio.to_thread(shutil.rmtree, directory / UPPER, ignore_errors=True)

    async def aclose(self) -> None:
        await self._daemon.aclose()


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


def _disk(path: Path, stack: Stack) -> Disk:
    return Disk(path=path, format="raw", size=stack.size)
