"""What is made ahead of its use, so that a create, a resume or a rollback finds most of its work done.

*Prepared*: a VMM over a memory image that many go on from, a template's above all, with a disk that has no content yet:
it waits for any guest of that image. *Ready*: a template's guest, restored, warmed up and frozen again; a create only
tells it who it is. Neither uses CPU time while it waits.

They belong to nobody yet: no row names them, so the start after a kill sweeps them like any other leftover.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from aenv.config import StandbySettings
from aenv.errors import ImageError
from aenv.images.protocol import Stack
from aenv.orchestrator.launcher import AHEAD, Launcher
from aenv.orchestrator.run import Run
from aenv.snapshots.checkpoint import Checkpoint, Image
from aenv.templates.models import Template

log = structlog.get_logger(__name__)

RECENT = 5.0
"""Seconds of demand that are provided for."""
IDLE = 600.0
"""Seconds without a use after which nothing more is provided."""
QUIET = 2.0
"""Seconds for which making things ahead waits until no launch is under way."""
BACK_OFF = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds to wait after failures in a row."""
MAX_OTHERS = 4
"""Memory images that are no template's for which VMMs are prepared: those that were used last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """VMMs of one kind can stand in for each other. `disk_size` in bytes."""

    image: str
    vcpus: int
    memory_mb: int
    disk_size: int


def kind_of(template: Template, source: Checkpoint, image: Image) -> Kind:
    """Of what goes on from `source`, a checkpoint of a sandbox of `template`, over the memory image `image`."""
    size = source.manifest.disk_size
    return Kind(image=image.id, vcpus=template.cpu_count, memory_mb=template.memory_mb, disk_size=size)


@dataclass(slots=True, eq=False)
class Waiting:
    """One VMM that waits, as that of the sandbox `id` it may become. `ready`: it holds the guest of `source`."""

    id: str
    run: Run
    source: Checkpoint | None
    ready: bool = False
    watch: "asyncio.Task[None] | None" = None

    def unwatched(self) -> "Waiting":
        """No longer taken out of the stock when it dies."""
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None
        return self


@dataclass(slots=True)
class _Stock:
    """What there is of one kind, and how much it is wanted. `stack` is what the image is made of, `source` the
    checkpoint of `template`, if the image is that one's. `creates` and `uses` (creates too) are times, the newest last.
    """

    kind: Kind
    template: Template
    stack: Stack
    source: Checkpoint | None = None
    ready: deque[Waiting] = field(default_factory=deque)
    prepared: deque[Waiting] = field(default_factory=deque)
    creates: deque[float] = field(default_factory=deque)
    uses: deque[float] = field(default_factory=deque)
    failures: int = 0
    not_before: float = 0.0


class Standby:
    """Owns the VMMs that wait, and the task that makes them. Use as an async context manager."""

    def __init__(
        self,
        *,
        settings: StandbySettings,
        launcher: Launcher,
        new_id: Callable[[], str],
        quiet: Callable[[], Awaitable[None]],
    ) -> None:
        """`quiet` returns when no launch is under way: making VMMs ahead must not slow down those asked for."""
        self._settings = settings
        self._launcher = launcher
        self._new_id = new_id
        self._quiet = quiet
        self._stocks: dict[Kind, _Stock] = {}
        self._wanted = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._making: asyncio.Task[None] | None = None
        self._open = False

    async def __aenter__(self) -> "Standby":
        await self._tasks.__aenter__()
        self._open = True
        if self._settings.ready or self._settings.prepared:
            self._making = self._tasks.create_task(self._make(), name="standby")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release all of them. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)
        for kind in list(self._stocks):
            self._close(kind)
        await self._tasks.__aexit__(None, None, None)

    def take(self, kind: Kind) -> Waiting | None:
        """A VMM of this kind; it is the caller's now."""
        stock = self._stocks.get(kind)
        return stock.prepared.popleft().unwatched() if stock is not None and stock.prepared else None

    def take_for(self, template: Template) -> Waiting | None:
        """The readiest there is for a create; it is the caller's now."""
        for stock in self._stocks.values():
            if stock.source is not None and stock.template.id == template.id:
                for kept in (stock.ready, stock.prepared):
                    if kept:
                        waiting = kept.popleft().unwatched()
                        waiting.source = stock.source
                        return waiting
        return None

    def give_back(self, waiting: Waiting) -> None:
        """It was not needed after all."""
        self._drop(waiting)

    def used(self, kind: Kind, template: Template, run: Run, source: Checkpoint | None = None) -> None:
        """Somebody wanted a VMM of this kind, whether or not there was one, and got `run`. A create gives `source`, the
        checkpoint of its template."""
        if self._making is None:
            return
        stock = self._stocks.get(kind)
        # A run's files go with it, a template's checkpoint stays.
        stack = Stack(layers=tuple(run.memory[: run.mapped]), size=kind.memory_mb << 20)
        if source is not None and source.memory is not None:
            stack = source.memory
        if stock is None:
            stock = self._stocks[kind] = _Stock(kind, template, stack)
        if source is not None or stock.source is None:
            stock.stack = stack
        now = time.monotonic()
        stock.uses.append(now)
        if source is not None:
            stock.creates.append(now)
            stock.template, stock.source = template, source
        self._forget(template, stock)
        self._wanted.set()

    def _forget(self, template: Template, but: _Stock) -> None:
        """Give up what is for an earlier checkpoint of a template, and for images that were used long ago."""
        others = [stock for stock in self._stocks.values() if stock is not but]
        for stock in others:
            if stock.source is not None and but.source is not None and stock.template.id == template.id:
                self._close(stock.kind)
        others = [stock for stock in others if stock.source is None]
        others.sort(key=lambda stock: stock.uses[-1])
        for stock in others[:-MAX_OTHERS]:
            self._close(stock.kind)

    async def _make(self) -> None:
        """Make what is wanted, one at a time, while no launch waits; drop what is not wanted any more."""
        while True:
            self._wanted.clear()
            pause = IDLE
            for stock in list(self._stocks.values()):
                if self._stocks.get(stock.kind) is stock:
                    pause = min(pause, await self._tend(stock))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    async def _tend(self, stock: _Stock) -> float:
        """Make at most one VMM of a stock, or drop some; return the seconds until it has to be looked at again."""
        now = time.monotonic()
        if stock.uses[-1] < now - IDLE:
            self._close(stock.kind)
            return IDLE
        if now < stock.not_before:
            return stock.not_before - now
        want_ready = len(stock.ready) < min(_recent(stock.creates, now), self._settings.ready)
        want_ready = want_ready and self._memory_left(stock.template)
        if not want_ready and len(stock.prepared) >= min(_recent(stock.uses, now), self._settings.prepared):
            return stock.uses[-1] + IDLE - now
        with suppress(TimeoutError):  # a launch that hangs must not keep others from being prepared for
            async with asyncio.timeout(QUIET):
                await self._quiet()
        try:
            if want_ready:
                self._keep(stock, stock.ready, await self._ready(stock))
            else:
                self._keep(stock, stock.prepared, await self._prepared(stock))
            stock.failures = 0
        except ImageError as error:
            # Its layers have gone, with whoever they belonged to; the next use tells of others.
            log.warning("standby.failed", image=stock.kind.image, error=error.message)
            if self._stocks.get(stock.kind) is stock:
                self._close(stock.kind)
        except Exception as error:
            back_off = BACK_OFF[min(stock.failures, len(BACK_OFF) - 1)]
            stock.failures += 1
            stock.not_before = time.monotonic() + back_off
            log.warning("standby.failed", image=stock.kind.image, error=repr(error), again_in=back_off)
        return 0.0

    def _memory_left(self, template: Template) -> bool:
        taken = sum(len(stock.ready) * stock.kind.memory_mb for stock in self._stocks.values())
        return taken + template.memory_mb <= self._settings.memory_mb

    async def _prepared(self, stock: _Stock) -> Waiting:
        sandbox_id, kind = self._new_id(), stock.kind
        run = self._launcher.new_run(sandbox_id, AHEAD[1:])
        image = Image(kind.image, len(stock.stack.layers))
        try:
            await self._launcher.prepare(run, stock.template, kind.disk_size, image, stock.stack)
        except BaseException:
            self._tasks.create_task(self._release(run), name=f"release {run.name}")
            raise
        return Waiting(sandbox_id, run, stock.source)

    async def _ready(self, stock: _Stock) -> Waiting:
        waiting = stock.prepared.popleft().unwatched() if stock.prepared else await self._prepared(stock)
        source = stock.source
        assert source is not None, "there was a create"
        assert source.manifest.memory is not None, "it is over a memory image"
        try:
            await self._launcher.fit(waiting.run, source, source.manifest.memory.image)
            await self._launcher.greeter.warm_up(waiting.run, stock.template, source)
        except BaseException:
            self._drop(waiting)
            raise
        return Waiting(waiting.id, waiting.run, source, ready=True)

    def _keep(self, stock: _Stock, where: deque[Waiting], waiting: Waiting) -> None:
        """Have it wait in a stock, if that is still wanted."""
        if self._stocks.get(stock.kind) is not stock:
            self._drop(waiting)
            return
        where.append(waiting)
        waiting.watch = self._tasks.create_task(self._ended(where, waiting), name=f"watch {waiting.run.name}")

    async def _ended(self, where: deque[Waiting], waiting: Waiting) -> None:
        """Take one that died out of the stock."""
        event = await self._launcher.greeter.ended(waiting.run)
        log.warning("standby.died", run=waiting.run.name, detail=event.detail)
        with suppress(ValueError):
            where.remove(waiting)
        self._tasks.create_task(self._release(waiting.run), name=f"release {waiting.run.name}")
        self._wanted.set()

    def _close(self, kind: Kind) -> None:
        """Provide nothing more of a kind."""
        stock = self._stocks.pop(kind)
        for waiting in (*stock.ready, *stock.prepared):
            self._drop(waiting)

    def _drop(self, waiting: Waiting) -> None:
        waiting.unwatched()
        self._tasks.create_task(self._release(waiting.run), name=f"release {waiting.run.name}")

    async def _release(self, run: Run) -> None:
        try:
            await self._launcher.release(run, None)
        except Exception as error:
            log.warning("standby.not_released", run=run.name, error=repr(error))


def _recent(times: deque[float], now: float) -> int:
    """How many there were lately; the last one counts however long ago it was."""
    while len(times) > 1 and times[0] < now - RECENT:
        times.popleft()
    return len(times)
