"""What is made ahead of its use, so that a create, a resume or a rollback finds most of its work done.

*Ready*: a template's guest, restored, warmed up and frozen; a create only tells it who it is. *Prepared*: a VMM that
waits for the state of a checkpoint that is used again and again: a template's, or a snapshot that sandboxes go back to.
*Blank*: a VMM that waits for any sandbox of its size to be resumed. None of them costs CPU time while it waits.

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
from aenv.network.protocol import EgressPolicy
from aenv.orchestrator.launcher import AHEAD, Launcher
from aenv.orchestrator.run import Run
from aenv.snapshots.checkpoint import Checkpoint
from aenv.templates.models import Template

log = structlog.get_logger(__name__)

RECENT = 5.0
"""Seconds of demand that are provided for."""
IDLE = 600.0
"""Seconds without a use after which nothing more is provided."""
BACK_OFF = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds to wait after failures in a row."""
MAX_SNAPSHOTS = 4
"""Snapshots for which VMMs are prepared: those that were last gone back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What is wanted ahead: VMMs of a template's size, for the guest of `source` if that is known. `ready`: the guest
    may be restored already. What has the same `key` serves the same purpose."""

    key: str
    template: Template
    disk_size: int
    source: Checkpoint | None = None
    ready: bool = False


def for_creates(template: Template, source: Checkpoint) -> Want:
    """`source` is the checkpoint of this template."""
    size = source.manifest.disk_size
    return Want(key=template.id, template=template, disk_size=size, source=source, ready=True)


def for_rollbacks(template: Template, source: Checkpoint) -> Want:
    """To `source`, of a sandbox of this template."""
    return Want(key=source.manifest.id, template=template, disk_size=source.manifest.disk_size, source=source)


def for_resumes(template: Template, source: Checkpoint) -> Want:
    """Of any sandbox that is as large as that of `source`."""
    size = source.manifest.disk_size
    return Want(key=f"{template.cpu_count}/{template.memory_mb}/{size}", template=template, disk_size=size)


@dataclass(slots=True, eq=False)
class Waiting:
    """One VMM that waits, as that of the sandbox `id` it may become."""

    id: str
    run: Run
    want: Want
    watch: "asyncio.Task[None] | None" = None

    def unwatched(self) -> "Waiting":
        """No longer taken out of the stock when it dies."""
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None
        return self


@dataclass(slots=True)
class _Stock:
    """What there is of one kind, and how much it is wanted. `uses` are times, the newest last."""

    want: Want
    ready: deque[Waiting] = field(default_factory=deque)
    prepared: deque[Waiting] = field(default_factory=deque)
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
        self._stocks: dict[str, _Stock] = {}
        self._wanted = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._making: asyncio.Task[None] | None = None
        self._open = False

    async def __aenter__(self) -> "Standby":
        await self._tasks.__aenter__()
        self._open = True
        if self._settings.ready or self._settings.prepared or self._settings.blank:
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
        for key in list(self._stocks):
            self._close(key)
        await self._tasks.__aexit__(None, None, None)

    def take(self, key: str) -> Waiting | None:
        """The readiest there is of a kind; it is the caller's now."""
        stock = self._stocks.get(key)
        if stock is None:
            return None
        for kept in (stock.ready, stock.prepared):
            if kept:
                return kept.popleft().unwatched()
        return None

    def give_back(self, waiting: Waiting) -> None:
        """It was not needed after all."""
        self._drop(waiting)

    def used(self, want: Want) -> None:
        """Somebody wanted that, whether or not it was there."""
        if self._making is None:
            return
        stock = self._stocks.get(want.key)
        if stock is not None and stock.want.source != want.source:
            self._close(want.key)
            stock = None
        if stock is None:
            stock = self._stocks[want.key] = _Stock(want)
            self._forget_snapshots()
        stock.uses.append(time.monotonic())
        self._wanted.set()

    def _forget_snapshots(self) -> None:
        snapshots = [stock for stock in self._stocks.values() if stock.want.source is not None and not stock.want.ready]
        snapshots.sort(key=lambda stock: stock.uses[-1] if stock.uses else time.monotonic())
        for stock in snapshots[:-MAX_SNAPSHOTS]:
            self._close(stock.want.key)

    async def _make(self) -> None:
        """Make what is wanted, one at a time, while no launch waits; drop what is not wanted any more."""
        while True:
            self._wanted.clear()
            pause = IDLE
            for stock in list(self._stocks.values()):
                if self._stocks.get(stock.want.key) is stock:
                    pause = min(pause, await self._tend(stock))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    async def _tend(self, stock: _Stock) -> float:
        """Make at most one VMM of a stock, or drop some; return the seconds until it has to be looked at again."""
        now = time.monotonic()
        while len(stock.uses) > 1 and stock.uses[0] < now - RECENT:
            stock.uses.popleft()
        if stock.uses[-1] < now - IDLE:
            self._close(stock.want.key)
            return IDLE
        if now < stock.not_before:
            return stock.not_before - now
        demand = len(stock.uses)
        most_ready = self._settings.ready if stock.want.ready else 0
        most_prepared = self._settings.blank if stock.want.source is None else self._settings.prepared
        want_ready = len(stock.ready) < min(demand, most_ready) and self._memory_left(stock.want.template)
        if not want_ready and len(stock.prepared) >= min(demand, most_prepared):
            return stock.uses[-1] + IDLE - now
        await self._quiet()
        try:
            if want_ready:
                self._keep(stock, stock.ready, await self._ready(stock))
            else:
                self._keep(stock, stock.prepared, await self._prepared(stock.want))
            stock.failures = 0
        except Exception as error:
            back_off = BACK_OFF[min(stock.failures, len(BACK_OFF) - 1)]
            stock.failures += 1
            stock.not_before = time.monotonic() + back_off
            log.warning("standby.failed", what=stock.want.key, error=repr(error), again_in=back_off)
        return 0.0

    def _memory_left(self, template: Template) -> bool:
        taken = sum(len(stock.ready) * stock.want.template.memory_mb for stock in self._stocks.values())
        return taken + template.memory_mb <= self._settings.memory_mb

    async def _prepared(self, want: Want) -> Waiting:
        sandbox_id = self._new_id()
        run = self._launcher.new_run(sandbox_id, AHEAD[1:])
        try:
            if want.source is None:
                await self._launcher.prepare_blank(run, want.template, want.disk_size)
            else:
                await self._launcher.prepare(run, want.template, EgressPolicy(), want.source)
        except BaseException:
            self._tasks.create_task(self._release(run), name=f"release {run.name}")
            raise
        return Waiting(sandbox_id, run, want)

    async def _ready(self, stock: _Stock) -> Waiting:
        waiting = stock.prepared.popleft().unwatched() if stock.prepared else await self._prepared(stock.want)
        source = stock.want.source
        assert source is not None, "what is ready is a guest of something"
        try:
            await self._launcher.go_on(waiting.run, source)
            await self._launcher.warm_up(waiting.run, stock.want.template, source)
        except BaseException:
            self._drop(waiting)
            raise
        return waiting

    def _keep(self, stock: _Stock, where: deque[Waiting], waiting: Waiting) -> None:
        """Have it wait in a stock, if that is still wanted."""
        if self._stocks.get(stock.want.key) is not stock:
            self._drop(waiting)
            return
        where.append(waiting)
        waiting.watch = self._tasks.create_task(self._ended(where, waiting), name=f"watch {waiting.run.name}")

    async def _ended(self, where: deque[Waiting], waiting: Waiting) -> None:
        """Take one that died out of the stock."""
        event = await self._launcher.ended(waiting.run)
        log.warning("standby.died", run=waiting.run.name, detail=event.detail)
        with suppress(ValueError):
            where.remove(waiting)
        self._tasks.create_task(self._release(waiting.run), name=f"release {waiting.run.name}")
        self._wanted.set()

    def _close(self, key: str) -> None:
        """Provide nothing more of a kind."""
        stock = self._stocks.pop(key)
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
