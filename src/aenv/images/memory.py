"""Memory images: attached once for all VMMs that map them, and kept for a while after the last one.

A VMM's mapping is private, so what is not written is the same page of the kernel's cache in every VMM, for as long as
the image's file is there. That is what makes the next start from it fast.
"""

import asyncio
import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from aenv.errors import AenvError, ImageError, NotFound
from aenv.images.client import ControlError, layers_of
from aenv.images.daemon import BlockDaemon, Run
from aenv.images.protocol import Stack

log = structlog.get_logger(__name__)

PREFIX = "m-"
"""Begins the name under which the daemon serves a memory image; ids of sandboxes, the names of disks, have no dash."""
KEPT = 32
"""Images without a user that stay attached: the templates and forks of one node that are started from again and again,
at a few descriptors and an index in the daemon each. Their pages are the kernel's to evict."""


class _Image:
    """An image that `run` serves at `path`."""

    def __init__(self, run: Run, path: Path) -> None:
        self.run = run
        self.path = path
        self.users: set[str] = set()
        self._top: int | None = None

    def watch(self, stack: Stack) -> None:
        """Find out later when its layers are deleted (checkpoints share files, so no name tells)."""
        if self._top is None:
            with suppress(OSError):
                self._top = os.open(stack.layers[-1], os.O_PATH | os.O_CLOEXEC)

    @property
    def is_useless(self) -> bool:
        """Whether nobody can ask for it again: its daemon has ended, or its top layer was deleted."""
        return self.run.process.ended or (self._top is not None and os.fstat(self._top).st_nlink == 0)

    def close(self) -> None:
        if self._top is not None:
            os.close(self._top)
            self._top = None


class MemoryImages:
    """The memory images of a node. Close with `aclose`."""

    def __init__(self, daemon: BlockDaemon) -> None:
        self._daemon = daemon
        self._images: dict[str, _Image] = {}
        """By name; those that were closed last come last."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._trimming: asyncio.Task[None] | None = None

    def take_over(self, run: Run, attached: Mapping[str, Path], in_use: Set[str]) -> Set[str]:
        """Keep those of `attached` images (name in the daemon and path) that are in use; return their names there."""
        for name in in_use:
            if (path := attached.get(PREFIX + name)) is not None:
                self._images[name] = _Image(run, path)
        return {PREFIX + name for name in self._images}

    async def open(self, name: str, stack: Stack, user: str) -> Path:
        """See `ImageStore.open_memory`."""
        turn = self._turn(name)  # held here, or it would be gone at once
        async with turn:
            image = self._images.get(name)
            if image is None or image.run.process.ended:
                image = await self._attach(name, stack)
            image.watch(stack)
            image.users.add(user)
            return image.path

    def close(self, name: str, user: str) -> None:
        """See `ImageStore.close_memory`. What is to be given up is detached in the background."""
        image = self._images.get(name)
        if image is None or user not in image.users:
            return
        image.users.discard(user)
        if not image.users:
            self._images[name] = self._images.pop(name)
            if self._trimming is None or self._trimming.done():
                self._trimming = asyncio.create_task(self._trim(KEPT), name="memory images")

    async def aclose(self) -> None:
        """Give up all that nobody uses. Idempotent."""
        if self._trimming is not None:
            await asyncio.gather(self._trimming, return_exceptions=True)
        await self._trim(0)

    def _turn(self, name: str) -> asyncio.Lock:
        """Held by who attaches or detaches it."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def _attach(self, name: str, stack: Stack) -> _Image:
        run = await self._daemon.running()
        attaching = asyncio.ensure_future(run.client.attach(PREFIX + name, layers_of(stack), shared=True))
        try:
            path = (await asyncio.shield(attaching)).path
        except asyncio.CancelledError:
            with suppress(AenvError):  # it is then one that nobody uses
                self._put(name, _Image(run, (await asyncio.shield(attaching)).path))
            raise
        except ControlError as error:
            if error.code != "exists":  # an earlier detach did not get through
                raise
            path = Path((await run.client.stat(PREFIX + name))["path"])
        except NotFound as error:
            raise ImageError(f"a layer of memory image {name} is missing: {error.message}") from error
        return self._put(name, _Image(run, path))

    def _put(self, name: str, image: _Image) -> _Image:
        if (before := self._images.pop(name, None)) is not None:
            before.close()
        self._images[name] = image
        return image

    async def _trim(self, kept: int) -> None:
        """Detach what nobody uses: what is useless, and the oldest beyond so many."""
        tried = set[str]()
        while name := next((name for name in self._surplus(kept) if name not in tried), None):
            tried.add(name)
            turn = self._turn(name)
            async with turn:
                image = self._images.get(name)
                if image is None or image.users:
                    continue
                try:
                    if not image.run.process.ended:
                        await image.run.client.detach(PREFIX + name)
                except NotFound:
                    pass
                except AenvError as error:
                    if not image.run.process.ended:  # the next trim tries again
                        log.warning("memory_image.stays", image=name, error=error.message)
                        continue
                self._images.pop(name).close()

    def _surplus(self, kept: int) -> list[str]:
        unused = {name: image for name, image in self._images.items() if not image.users}
        useless = [name for name, image in unused.items() if image.is_useless]
        rest = [name for name in unused if name not in useless]
        return [*useless, *rest[: max(0, len(rest) - kept)]]
