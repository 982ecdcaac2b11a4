"""One sandbox's runner: takes events, steps the machine, writes the record, carries out the instructions.

`post` is synchronous, so the transitions of a sandbox are serialised by the event loop itself. What takes time runs as
tasks of the orchestrator's task group; every task reports back with an event.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from aenv.errors import AenvError, Conflict, InfrastructureError, Unavailable
from aenv.lifecycle.events import (
    CreateRequested,
    Event,
    Expired,
    Faulted,
    Launched,
    LaunchFailed,
    TornDown,
    TtlChanged,
)
from aenv.lifecycle.instructions import Instruction
from aenv.lifecycle.machine import step
from aenv.lifecycle.states import CREATING, EndReason, Stable
from aenv.orchestrator.launcher import Held, Launcher
from aenv.orchestrator.record import Record
from aenv.orchestrator.store import LoggedEvent, Store

log = structlog.get_logger(__name__)

TEAR_DOWN_RETRIES = (0.1, 1.0, 5.0)
"""Seconds between tries to release what a sandbox holds; after the last, the next start of the server sweeps it."""


class Runner:
    """Owns one sandbox from its first event to its end."""

    def __init__(
        self,
        record: Record,
        *,
        launcher: Launcher,
        store: Store,
        tasks: asyncio.TaskGroup,
        on_change: Callable[["Runner"], None],
        on_unwritten: Callable[["Runner"], None],
    ) -> None:
        self.record = record
        self.held = Held()
        self._launcher = launcher
        self._store = store
        self._tasks = tasks
        self._on_change = on_change
        self._on_unwritten = on_unwritten
        self._settled = asyncio.Event()
        self._gone = asyncio.Event()
        self._error: AenvError | None = None
        self._launch: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._written: asyncio.Future[None] | None = None

    def post(self, event: Event) -> None:
        """Take one event. Raises IllegalTransition for one that makes no sense now."""
        life, orders = step(self.record.life, event)
        ended_at = datetime.now(UTC) if life.position.stable is Stable.ENDED else None
        self.record = replace(self.record, life=life, ended_at=self.record.ended_at or ended_at)
        detail = {"detail": event.detail} if event.detail else {}
        log.info(f"sandbox.{type(event).__name__}", id=self.record.id, position=str(life.position), **detail)
        self._write(event)
        if life.position != CREATING:
            self._settled.set()
        if life.position.stable is Stable.ENDED and life.position.operation is None:
            self._gone.set()
        for order in orders:
            self._carry_out(order)
        self._on_change(self)

    async def ready(self) -> None:
        """Return when it runs and that is written; raise why it does not."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        life = self.record.life
        if not life.visible:
            message = f"sandbox {self.record.id} ended while it was created: {life.reason} {life.detail}".rstrip()
            match life.reason:
                case EndReason.KILLED:
                    raise Conflict(message)
                case EndReason.SERVER_RESTART:
                    raise Unavailable(f"{message}; try again in a moment")
                case _:
                    raise InfrastructureError(message)
        await self._flushed()

    async def gone(self) -> None:
        """Return when nothing of it is left."""
        await self._gone.wait()

    async def set_end(self, end_at: datetime) -> None:
        """Move the TTL's end and return when that is written. On an error the end is what it was."""
        before = self.record.end_at
        self._move_end(end_at)
        try:
            await self._flushed()
        except AenvError:
            if self.record.life.visible:
                self._move_end(before)
            raise

    def _move_end(self, end_at: datetime) -> None:
        self.record = replace(self.record, end_at=end_at)
        self.post(TtlChanged(end_at.isoformat()))

    async def adopt(self) -> None:
        """Take over its VMM after a restart of the server. Raises an InfrastructureError."""
        await self._launcher.adopt(self.record, self.held)
        self._watch = self._tasks.create_task(self._watch_vmm(), name=f"watch {self.record.id}")

    async def detach(self) -> None:
        """The server stops: let go of a running VMM."""
        self._disarm()
        if self._watch is not None:
            self._watch.cancel()
        if self.held.vm is not None:
            await self.held.vm.detach()

    def _write(self, event: Event) -> None:
        """Queue the row; the store keeps the order."""
        at, position = datetime.now(UTC).isoformat(), str(self.record.life.position)
        self._save(event, LoggedEvent(at, type(event).__name__, event.detail, position))

    async def write_again(self) -> None:
        """Write the row that could not be. Raises an InfrastructureError."""
        self._save(None)
        await self._flushed()

    def _save(self, event: Event | None, *lines: LoggedEvent) -> None:
        self._written = self._store.save(self.record, *lines)
        self._written.add_done_callback(lambda written: self._check_write(event, written))

    def _check_write(self, event: Event | None, written: "asyncio.Future[None]") -> None:
        if written.cancelled() or (error := written.exception()) is None:
            return
        log.error("sandbox.write_failed", id=self.record.id, what=type(event).__name__, error=str(error))
        if self.record.life.position.stable is Stable.ENDED:
            self._on_unwritten(self)
        # A sandbox whose start is not recorded would be lost by a restart: it must not be handed out. Later rows of
        # one that runs may fail without harm: the next start finds out from the node itself.
        elif isinstance(event, CreateRequested | Launched):
            self._error = error if isinstance(error, AenvError) else InfrastructureError(str(error))
            self.post(Faulted(f"its record could not be written: {error}"))

    async def _flushed(self) -> None:
        """Return when the newest row is written; raise if it could not be."""
        if self._written is not None:
            await asyncio.shield(self._written)

    def _carry_out(self, order: Instruction) -> None:
        match order:
            case Instruction.LAUNCH:
                self._launch = self._tasks.create_task(self._run_launch(), name=f"launch {self.record.id}")
            case Instruction.CANCEL_LAUNCH:
                if self._launch is not None:
                    self._launch.cancel()
            case Instruction.ARM_TIMER:
                self._arm()
            case Instruction.DISARM_TIMER:
                self._disarm()
            case Instruction.TEAR_DOWN:
                self._tasks.create_task(self._run_tear_down(), name=f"tear down {self.record.id}")

    async def _run_launch(self) -> None:
        try:
            await self._settle_writes()
            await self._launcher.launch(self.record, self.held)
        except AenvError as error:
            self._error = error
            self.post(LaunchFailed(error.message))
        except Exception as error:
            log.exception("sandbox.launch_fault", id=self.record.id)
            self._error = InfrastructureError(f"creating the sandbox failed inside the server: {error!r}")
            self.post(Faulted(repr(error)))
        else:
            assert self.held.vm is not None
            assert self.held.slot is not None
            self.record = replace(
                self.record, slot=self.held.slot.index, vm=self.held.vm.handle, timings=self.held.timings
            )
            self._watch = self._tasks.create_task(self._watch_vmm(), name=f"watch {self.record.id}")
            self.post(Launched())

    async def _watch_vmm(self) -> None:
        self.post(await self._launcher.ended(self.record, self.held))

    async def _run_tear_down(self) -> None:
        if self._launch is not None:
            await asyncio.wait((self._launch,))
        await self._settle_writes()
        if self._watch is not None:
            self._watch.cancel()
        for pause in (*TEAR_DOWN_RETRIES, None):
            try:
                await self._launcher.tear_down(self.record, self.held)
                break
            except Exception as error:
                log.warning("sandbox.tear_down_failed", id=self.record.id, error=repr(error), again_in=pause)
                if pause is None:
                    why = error.message if isinstance(error, AenvError) else repr(error)
                    self.post(TornDown(f"not everything could be released: {why}; the next start tries again"))
                    return
                await asyncio.sleep(pause)
        self.post(TornDown())

    async def _settle_writes(self) -> None:
        """Nothing is made or released before the row that explains it is written (or known not to be writable)."""
        if self._written is not None:
            await asyncio.wait((self._written,))

    def _arm(self) -> None:
        self._disarm()
        left = (self.record.end_at - datetime.now(UTC)).total_seconds()
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self.post, Expired())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
