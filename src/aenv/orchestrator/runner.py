"""One sandbox's runner: takes events, steps the machine, writes the record, carries out the instructions.

`post` is synchronous, so the transitions of a sandbox are serialised by the event loop itself. What takes time is a job
(see `operations`), run as a task of the orchestrator's task group, that reports back with an event.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import structlog

from aenv.errors import AenvError, Conflict, DeadlineExceeded, InfrastructureError, Unavailable
from aenv.lifecycle.events import (
    CaptureFailed,
    CreateRequested,
    DiskLost,
    Event,
    Expired,
    Faulted,
    Launched,
    LaunchFailed,
    Paused,
    PauseFailed,
    PauseRequested,
    Resumed,
    ResumeFailed,
    RollbackFailed,
    RolledBack,
    TornDown,
    TtlChanged,
    VmmExited,
)
from aenv.lifecycle.instructions import Instruction
from aenv.lifecycle.machine import IllegalTransition, step
from aenv.lifecycle.states import CREATING, RUNNING, EndReason, Operation, Stable
from aenv.orchestrator.launcher import Launcher, remove_folder
from aenv.orchestrator.record import Record
from aenv.orchestrator.run import Run
from aenv.orchestrator.store import LoggedEvent, Store
from aenv.threads import to_its_end

log = structlog.get_logger(__name__)

RELEASE_RETRIES = (0.1, 1.0, 5.0)
"""Seconds between tries to release what a sandbox holds; after the last, the next start of the server sweeps it."""
PAUSE_AGAIN = timedelta(seconds=30)
"""Until the next try, after a pause at the end of a TTL failed."""
JOBS: dict[Instruction, type[Event]] = {
    Instruction.LAUNCH: LaunchFailed,
    Instruction.PAUSE: PauseFailed,
    Instruction.RESUME: ResumeFailed,
    Instruction.CAPTURE: CaptureFailed,
    Instruction.ROLL_BACK: RollbackFailed,
}
"""The orders that take time, and what is reported when one fails."""

Job = Callable[["Runner"], Awaitable[Event]]
"""Does what was asked for and returns the event that says so. Raises AenvError if it could not and nothing changed."""


class Runner:
    """Owns one sandbox from its first event to its end. `run` is the launch it is on; jobs set it with `go_on`."""

    def __init__(
        self,
        record: Record,
        *,
        launcher: Launcher,
        store: Store,
        tasks: asyncio.TaskGroup,
        at_timeout: Job,
        deadline: float,
        on_change: Callable[["Runner"], None],
        on_unwritten: Callable[["Runner"], None],
    ) -> None:
        self.record = record
        self.run: Run | None = None
        self._launcher = launcher
        self._store = store
        self._tasks = tasks
        self._at_timeout = at_timeout
        self._deadline = deadline
        self._on_change = on_change
        self._on_unwritten = on_unwritten
        self._moved = asyncio.Event()
        self._job: tuple[Job, asyncio.Future[None]] | None = None
        self._working: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[str | None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._written: asyncio.Future[None] | None = None
        self._launch_error: AenvError | None = None

    @property
    def operation(self) -> Operation | None:
        """What is in flight."""
        return self.record.life.position.operation

    @property
    def at_rest(self) -> bool:
        """Whether it is paused, and so takes neither CPU time nor memory."""
        return self.record.life.position.stable is Stable.PAUSED and self.operation is not Operation.RESUMING

    def post(self, event: Event) -> None:
        """Take one event. Raises IllegalTransition for one that makes no sense now."""
        life, orders = step(self.record.life, event)
        ended_at = datetime.now(UTC) if life.position.stable is Stable.ENDED else None
        self.record = replace(self.record, life=life, ended_at=self.record.ended_at or ended_at)
        detail = {"detail": event.detail} if event.detail else {}
        log.info(f"sandbox.{type(event).__name__}", id=self.record.id, position=str(life.position), **detail)
        self._write(event)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        for order in orders:
            self._carry_out(order)
        self._on_change(self)

    async def carry_out(self, event: Event, job: Job) -> None:
        """Begin what `event` asks for and return when `job` has done it and that is written; raise why it has not.

        Raises Conflict at once if that makes no sense now. Once begun it goes on, also if the caller is cancelled.
        """
        try:
            done = self.begin(event, job)
        except IllegalTransition as error:
            raise Conflict(f"sandbox {self.record.id} is {self.record.life.position}: {error}") from error
        await asyncio.shield(done)
        await self._flushed()

    def begin(self, event: Event, job: Job) -> "asyncio.Future[None]":
        """Begin what `event` asks for; done when `job` has done it, or failed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may be waiting
        self._job = job, done
        self.post(event)
        return done

    async def settled(self) -> None:
        """Return when nothing is in flight, or the end has begun."""
        while self.operation not in (None, Operation.KILLING):
            await self._moved.wait()

    async def ready(self) -> None:
        """Return when it runs and that is written; raise why it does not."""
        while self.record.life.position == CREATING:
            await self._moved.wait()
        if self._launch_error is not None:
            raise self._launch_error
        self.check_alive("was created")
        await self._flushed()

    def check_alive(self, what: str) -> None:
        """Raise what tells a client that its sandbox ended while it `what`."""
        life = self.record.life
        if life.visible:
            return
        message = f"sandbox {self.record.id} ended while it {what}: {life.reason} {life.detail}".rstrip()
        match life.reason:
            case EndReason.KILLED:
                raise Conflict(message)
            case EndReason.SERVER_RESTART:
                raise Unavailable(f"{message}; try again in a moment")
            case _:
                raise InfrastructureError(message)

    async def gone(self) -> None:
        """Return when nothing of it is left."""
        while self.record.life.position.stable is not Stable.ENDED or self.operation is not None:
            await self._moved.wait()

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

    def go_on(self, run: Run) -> None:
        """`run` is what it is on from now on; the one before is released."""
        before, self.run = self.run, run
        self._stop_watching()
        self.record = replace(self.record, run=run.record(), timings=dict(run.timings))
        self._watch = self._tasks.create_task(self._watch_run(run), name=f"watch {run.name}")
        if before is not None and before is not run:
            self.let_go(before)

    def let_go(self, run: Run) -> None:
        """Release a run it is not on, or no longer. Goes on by itself."""
        if run is self.run:
            self._stop_watching()
            self.run = None
        release = self._tasks.create_task(self._release(run), name=f"release {run.name}")
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    def later(self, work: Coroutine[None, None, None]) -> None:
        """Do this beside everything else, as a task of the orchestrator's. It must raise nothing."""
        self._tasks.create_task(work, name=f"later {self.record.id}")

    async def adopt(self) -> None:
        """Take over its run after a restart of the server. Raises an InfrastructureError."""
        self.run = self._launcher.run_of(self.record)
        await self._launcher.adopt(self.run, self.record)
        self.go_on(self.run)

    async def detach(self) -> None:
        """The server stops: let go of a running VMM, and of what is in flight; the next start decides about it."""
        self._disarm()
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait((self._working,))
        self._stop_watching()
        if self.run is not None and self.run.vm is not None:
            await self.run.vm.detach()

    def write(self, record: Record) -> "asyncio.Future[None]":
        """Change the record beside the lifecycle; done when that is written."""
        self.record = record
        self._save(None)
        assert self._written is not None
        return self._written

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
        if self.record.life.position.stable is Stable.ENDED or isinstance(event, Paused | Resumed | RolledBack):
            self._on_unwritten(self)
        # A sandbox whose start is not recorded would be lost by a restart: it must not be handed out. Later rows of
        # one that runs may fail without harm: the next start finds out from the node itself.
        elif isinstance(event, CreateRequested | Launched):
            self._launch_error = error if isinstance(error, AenvError) else InfrastructureError(str(error))
            self.post(Faulted(f"its record could not be written: {error}"))

    async def _flushed(self) -> None:
        """Return when the newest row is written; raise if it could not be."""
        if self._written is not None:
            await asyncio.shield(self._written)

    def _carry_out(self, order: Instruction) -> None:
        match order:
            case Instruction.CANCEL:
                if self._working is not None:
                    self._working.cancel()
            case Instruction.ARM_TIMER:
                self._arm()
            case Instruction.DISARM_TIMER:
                self._disarm()
            case Instruction.RELEASE:
                if self.run is not None:
                    self.let_go(self.run)
            case Instruction.TEAR_DOWN:
                self._tasks.create_task(self._tear_down(), name=f"tear down {self.record.id}")
            case _:
                assert self._job is not None, f"{order} without a job"
                (job, done), self._job = self._job, None
                self._working = self._tasks.create_task(self._work(order, job, done), name=f"{order} {self.record.id}")

    async def _work(self, order: Instruction, job: Job, done: "asyncio.Future[None]") -> None:
        failed = JOBS[order]
        try:
            await self.settle_writes()
            # A launch has deadlines of its own.
            async with asyncio.timeout(None if order is Instruction.LAUNCH else self._deadline):
                event = await job(self)
        except TimeoutError:
            late = DeadlineExceeded(f"sandbox {self.record.id}: {order.name.lower()} took over {self._deadline:g} s")
            self._failed(order, late, failed(late.message), done)
        except asyncio.CancelledError:
            done.set_exception(Conflict(f"sandbox {self.record.id} was ended meanwhile"))
            raise
        except AenvError as error:
            self._failed(order, error, failed(error.message), done)
        except Exception as error:
            log.exception("sandbox.fault", id=self.record.id, order=order.name)
            fault = InfrastructureError(f"{order.name.lower()} of the sandbox failed inside the server: {error!r}")
            event = Faulted(repr(error)) if order is Instruction.LAUNCH else failed(repr(error))
            self._failed(order, fault, event, done)
        else:
            self.post(event)
            done.set_result(None)

    def _failed(self, order: Instruction, error: AenvError, event: Event, done: "asyncio.Future[None]") -> None:
        if order is Instruction.LAUNCH:
            self._launch_error = error
        elif order is Instruction.PAUSE and self.record.end_at < datetime.now(UTC) + PAUSE_AGAIN:
            self.record = replace(self.record, end_at=datetime.now(UTC) + PAUSE_AGAIN)
        self.post(event)
        done.set_exception(error)

    async def _watch_run(self, run: Run) -> None:
        event: VmmExited | DiskLost = await self._launcher.greeter.ended(run)
        if run is self.run:
            self.post(event)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _release(self, run: Run) -> str | None:
        await self.settle_writes()
        return await self._in_tries(run.name, lambda: self._launcher.release(run, self.record.id))

    async def _tear_down(self) -> None:
        if self._working is not None:
            await asyncio.wait((self._working,))
        self._stop_watching()
        run, self.run = self.run, None
        problems = [await self._release(run)] if run is not None else []
        if releases := [*self._releases]:
            problems += await asyncio.gather(*releases)
        await self.settle_writes()
        folder = self._launcher.directory(self.record.id)
        problems.append(await self._in_tries(folder.name, lambda: to_its_end(remove_folder, folder)))
        why = "; ".join(problem for problem in problems if problem)
        self.post(TornDown(f"not everything could be released: {why}; the next start tries again" if why else ""))

    async def _in_tries(self, what: str, release: Callable[[], Awaitable[None]]) -> str | None:
        """Release something, in several tries if need be; None, or why it could not be."""
        for pause in (*RELEASE_RETRIES, None):
            try:
                await release()
                return None
            except Exception as error:
                log.warning("sandbox.release_failed", what=what, error=repr(error), again_in=pause)
                if pause is None:
                    return error.message if isinstance(error, AenvError) else repr(error)
                await asyncio.sleep(pause)
        return None

    async def settle_writes(self) -> None:
        """Nothing is made or released before the row that explains it is written (or known not to be writable)."""
        if self._written is not None:
            await asyncio.wait((self._written,))

    def _arm(self) -> None:
        self._disarm()
        left = (self.record.end_at - datetime.now(UTC)).total_seconds()
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self.time_out)

    def time_out(self, detail: str = "") -> None:
        """Do what it does at the end of its TTL. Of no effect unless it runs and nothing is in flight."""
        if self.record.life.position != RUNNING:
            return
        if self.record.spec.on_timeout == "kill":
            self.post(Expired(detail))
        else:
            self.begin(PauseRequested(detail or "its time to live ran out"), self._at_timeout)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
