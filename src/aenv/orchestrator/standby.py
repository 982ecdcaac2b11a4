"""Guests made ahead of the creates that will want them, for the templates in use.

*Ready*: restored, running, its daemon has answered; a create only gives it its identity. *Prepared*: a VMM that waits
for the template's state, with all else in place; it costs no CPU time and little memory.

Both belong to nobody yet: no row names them, so the start after a kill sweeps them like any other leftover.
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
from aenv.orchestrator.launcher import Launcher, remove_folder
from aenv.orchestrator.run import Run
from aenv.snapshots.checkpoint import Checkpoint
from aenv.templates.models import Template
from aenv.threads import to_its_end

log = structlog.get_logger(__name__)

RECENT = 5.0
"""Seconds of demand that are provided for."""
IDLE = 600.0
"""Seconds without a create after which a template is no longer in use."""
BACK_OFF = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds to wait after failures in a row."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One guest that waits, as the sandbox `id` it may become."""

    id: str
    template: Template
    source: Checkpoint
    run: Run
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
    """What there is for one template, and how much it is wanted. `uses` are times of creates, the newest last."""

    template: Template
    source: Checkpoint
    ready: deque[Waiting] = field(default_factory=deque)
    prepared: deque[Waiting] = field(default_factory=deque)
    uses: deque[float] = field(default_factory=deque)
    failures: int = 0
    not_before: float = 0.0


class Standby:
    """Owns the guests that wait, and the task that makes them. Use as an async context manager."""

    def __init__(
        self,
        *,
        settings: StandbySettings,
        launcher: Launcher,
        new_id: Callable[[], str],
        quiet: Callable[[], Awaitable[None]],
    ) -> None:
        """`quiet` returns when no create is under way: making guests ahead must not slow down those asked for."""
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
        for stock in self._stocks.values():
            for waiting in (*stock.ready, *stock.prepared):
                self._drop(waiting)
        self._stocks.clear()
        await self._tasks.__aexit__(None, None, None)

    def take(self, template: Template) -> Waiting | None:
        """A guest of this template, the readiest there is; it is the caller's now."""
        stock = self._stocks.get(template.id)
        if stock is None:
            return None
        for kept in (stock.ready, stock.prepared):
            if kept:
                return kept.popleft().unwatched()
        return None

    def give_back(self, waiting: Waiting) -> None:
        """It was not needed after all."""
        self._drop(waiting)

    def used(self, template: Template, source: Checkpoint) -> None:
        """A sandbox was created from `source`, the checkpoint of this template."""
        if self._making is None:
            return
        stock = self._stocks.setdefault(template.id, _Stock(template, source))
        if stock.source.manifest.id != source.manifest.id:
            for waiting in (*stock.ready, *stock.prepared):
                self._drop(waiting)
            stock = self._stocks[template.id] = _Stock(template, source)
        stock.uses.append(time.monotonic())
        self._wanted.set()

    async def _make(self) -> None:
        """Make what is wanted, one at a time, while no create waits; drop what is not wanted any more."""
        while True:
            self._wanted.clear()
            pause = IDLE
            for stock in list(self._stocks.values()):
                pause = min(pause, await self._tend(stock))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wanted.wait()

    async def _tend(self, stock: _Stock) -> float:
        """Make at most one guest of a stock, or drop some; return the seconds until it has to be looked at again."""
        now = time.monotonic()
        while len(stock.uses) > 1 and stock.uses[0] < now - RECENT:
            stock.uses.popleft()
        if stock.uses[-1] < now - IDLE:
            del self._stocks[stock.template.id]
            for waiting in (*stock.ready, *stock.prepared):
                self._drop(waiting)
            return IDLE
        if now < stock.not_before:
            return stock.not_before - now
        demand = len(stock.uses)
        want_ready = len(stock.ready) < min(demand, self._settings.ready) and self._memory_left(stock.template)
        if not want_ready and len(stock.prepared) >= min(demand, self._settings.prepared):
            return stock.uses[-1] + IDLE - now
        await self._quiet()
        try:
            if want_ready:
                stock.ready.append(await self._ready(stock))
            else:
                stock.prepared.append(await self._prepared(stock))
            stock.failures = 0
        except Exception as error:
            back_off = BACK_OFF[min(stock.failures, len(BACK_OFF) - 1)]
            stock.failures += 1
            stock.not_before = time.monotonic() + back_off
            log.warning("standby.failed", template=stock.template.id, error=repr(error), again_in=back_off)
        return 0.0

    def _memory_left(self, template: Template) -> bool:
        taken = sum(len(stock.ready) * stock.template.memory_mb for stock in self._stocks.values())
        return taken + template.memory_mb <= self._settings.memory_mb

    async def _prepared(self, stock: _Stock) -> Waiting:
        sandbox_id = self._new_id()
        run = self._launcher.new_run(sandbox_id, "ahead")
        try:
            await self._launcher.prepare(run, stock.template, EgressPolicy(), stock.source)
        except BaseException:
            self._tasks.create_task(self._release(sandbox_id, run), name=f"release {run.name}")
            raise
        return self._watched(stock, Waiting(sandbox_id, stock.template, stock.source, run))

    async def _ready(self, stock: _Stock) -> Waiting:
        waiting = (stock.prepared.popleft() if stock.prepared else await self._prepared(stock)).unwatched()
        try:
            await self._launcher.go_on(waiting.run, waiting.source)
            await self._launcher.warm_up(waiting.run, waiting.template, waiting.source)
        except BaseException:
            self._drop(waiting)
            raise
        waiting.ready = True
        return self._watched(stock, waiting)

    def _watched(self, stock: _Stock, waiting: Waiting) -> Waiting:
        waiting.watch = self._tasks.create_task(self._ended(stock, waiting), name=f"watch {waiting.run.name}")
        return waiting

    async def _ended(self, stock: _Stock, waiting: Waiting) -> None:
        """Take one that died out of the stock."""
        event = await self._launcher.ended(waiting.run)
        log.warning("standby.died", run=waiting.run.name, detail=event.detail)
        for kept in (stock.ready, stock.prepared):
            with suppress(ValueError):
                kept.remove(waiting)
        self._tasks.create_task(self._release(waiting.id, waiting.run), name=f"release {waiting.run.name}")
        self._wanted.set()

    def _drop(self, waiting: Waiting) -> None:
        waiting.unwatched()
        self._tasks.create_task(self._release(waiting.id, waiting.run), name=f"release {waiting.run.name}")

    async def _release(self, sandbox_id: str, run: Run) -> None:
        try:
            await self._launcher.release(run)
            await to_its_end(remove_folder, self._launcher.directory(sandbox_id))
        except Exception as error:
            log.warning("standby.not_released", run=run.name, error=repr(error))
