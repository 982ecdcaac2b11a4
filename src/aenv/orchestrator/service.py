"""All sandboxes of one node: the public face of the orchestrator (`protocol.Sandboxes`)."""

import asyncio
import math
import secrets
import string
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

import structlog

from aenv.config import Settings
from aenv.errors import AenvError, BadRequest, Conflict, DeadlineExceeded, NotFound, TooManyRequests, Unavailable
from aenv.images.protocol import ImageStore
from aenv.lifecycle.events import (
    CreateRequested,
    DeleteRequested,
    ForkRequested,
    Orphaned,
    PauseRequested,
    ResumeRequested,
    RollbackRequested,
    SnapshotRequested,
)
from aenv.lifecycle.states import RUNNING, Operation, Stable
from aenv.network.protocol import Network
from aenv.orchestrator import listing, reconcile
from aenv.orchestrator.capture import Capturer
from aenv.orchestrator.keys import Keys
from aenv.orchestrator.launcher import Launcher, remove_folder
from aenv.orchestrator.models import (
    CreateSpec,
    ListQuery,
    Page,
    Route,
    Sandbox,
    Snapshot,
    SnapshotPage,
    SnapshotQuery,
)
from aenv.orchestrator.operations import Baking, Operations
from aenv.orchestrator.protocol import TokenTest
from aenv.orchestrator.record import Record
from aenv.orchestrator.runner import Job, Runner
from aenv.orchestrator.snapshots import Library, Snapshots
from aenv.orchestrator.standby import Standby
from aenv.orchestrator.store import Store
from aenv.orchestrator.tokens import Tokens
from aenv.orchestrator.unwritten import Rewriter
from aenv.snapshots.checkpoint import Checkpoint, read
from aenv.templates.models import Template
from aenv.threads import to_its_end
from aenv.vmm.protocol import Vmm

log = structlog.get_logger(__name__)

ALPHABET = string.ascii_lowercase + string.digits
REMEMBERED_ENDS = 10_000
"""How many ended sandboxes can still be told apart from unknown ones without asking the store."""
PRUNE_INTERVAL = 600.0
AUTO_RESUME_TIMEOUT = 300
"""Seconds that a sandbox resumed by a request lives at least (E2B's rule)."""
UNREACHABLE = (Operation.PAUSING, Operation.ROLLING_BACK)
"""While a running sandbox is in one of these, requests to it wait for its end."""


class Templates(Baking, Library, Protocol):
    """What the orchestrator needs of the template store."""


class Orchestrator:
    """Owns every runner and the task group they work in. Use as an async context manager."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        launcher: Launcher,
        capturer: Capturer,
        network: Network,
        vmm: Vmm,
        images: ImageStore,
        templates: Templates,
        tokens: Tokens,
        on_gone: Callable[[str], None] = lambda sandbox_id: None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._launcher = launcher
        self._standby = Standby(settings=settings.standby, launcher=launcher, new_id=_new_id, quiet=self._quiet)
        self._do = Operations(
            launcher=launcher, capturer=capturer, images=images, templates=templates, standby=self._standby
        )
        self._snapshots = Snapshots(library=templates, images=images)
        self._network = network
        self._vmm = vmm
        self._images = images
        self._templates = templates
        self._tokens = tokens
        self._on_gone = on_gone
        self._runners: dict[str, Runner] = {}
        self._ends: OrderedDict[str, Record] = OrderedDict()
        self._keys = Keys(store=store, alive=self._runners, ended=self._ends)
        self._tasks = asyncio.TaskGroup()
        self._rewriter = Rewriter()
        self._upkeep: list[asyncio.Task[None]] = []
        self._closing = False

    async def __aenter__(self) -> "Orchestrator":
        await self._tasks.__aenter__()
        try:
            for record in await self._store.recently_ended(REMEMBERED_ENDS):
                self._ends[record.id] = record
            await reconcile.reconcile(
                await self._store.live(),
                sandboxes_dir=self._settings.sandboxes_dir,
                vmm=self._vmm,
                network=self._network,
                images=self._images,
                operations=self._do,
                make_runner=self._make_runner,
            )
        except BaseException:
            await self.__aexit__()
            raise
        self._upkeep = [
            self._tasks.create_task(self._prune(), name="prune"),
            self._tasks.create_task(self._rewriter.run(), name="rewrite"),
        ]
        await self._standby.__aenter__()
        return self

    def stop_creating(self) -> None:
        """Refuse creations from now on and undo those under way: their callers are told to try again."""
        self._closing = True
        for runner in list(self._runners.values()):
            if runner.operation is Operation.CREATING:
                runner.post(Orphaned("the server stopped before the sandbox was ready"))

    async def __aexit__(self, *_: object) -> None:
        """Finish or undo what is in flight; running sandboxes keep running."""
        self.stop_creating()
        for task in self._upkeep:
            task.cancel()
        await self._standby.aclose()
        # What is in flight is done or undone; one that cannot be, the next start finds out about.
        settling = [r.gone() if r.operation is Operation.KILLING else r.settled() for r in self._runners.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.orchestrator.kill_deadline):
                await asyncio.gather(*settling)
        for runner in self._runners.values():
            await runner.detach()
        await self._tasks.__aexit__(None, None, None)
        await self._network.aclose()
        await self._vmm.aclose()
        await self._images.aclose()
        with suppress(AenvError):
            await self._rewriter.write()
        await self._store.aclose()

    async def create(self, spec: CreateSpec, *, idempotency_key: str | None = None) -> Sandbox:
        self._check_open()
        template = self._templates.resolve(spec.template)
        waiting = self._standby.take_for(template)
        sandbox_id = waiting.id if waiting else _new_id()
        try:
            if idempotency_key is not None:
                earlier = await self._keys.claim(idempotency_key, spec, sandbox_id)
                if earlier is not None:
                    await earlier.ready()
                    return earlier.record.sandbox(self._tokens)
            try:
                runner = self._begin(self._new_record(sandbox_id, spec, template), self._do.create(waiting))
                waiting = None
                await runner.ready()
            except AenvError:
                # A failed creation must not keep its key: the retry has to be able to succeed.
                if idempotency_key is not None:
                    await self._store.unclaim(idempotency_key, sandbox_id)
                raise
        finally:
            if waiting is not None:
                self._standby.give_back(waiting)
        return runner.record.sandbox(self._tokens)

    async def _quiet(self) -> None:
        """Return when nothing is being launched."""
        for runner in list(self._runners.values()):
            if runner.operation in (Operation.CREATING, Operation.RESUMING, Operation.ROLLING_BACK):
                await runner.settled()

    def _new_record(self, sandbox_id: str, spec: CreateSpec, template: Template, parent: str | None = None) -> Record:
        now = datetime.now(UTC)
        return Record(
            id=sandbox_id,
            spec=spec,
            template=template,
            generation=uuid.uuid4().hex,
            started_at=now,
            end_at=now + timedelta(seconds=spec.timeout),
            parent=parent or template.source,
        )

    def _begin(self, record: Record, job: Job) -> Runner:
        self._check_room()
        runner = self._make_runner(record)
        runner.begin(CreateRequested(), job)
        return runner

    def get(self, sandbox_id: str) -> Sandbox:
        return self._visible(sandbox_id).record.sandbox(self._tokens)

    def list(self, query: ListQuery) -> Page:
        template_id = None
        if query.template is not None:
            with suppress(NotFound, BadRequest):  # unknown, whatever it looks like: an empty listing
                template_id = self._templates.resolve(query.template).id
        shown = (r.record.sandbox(self._tokens) for r in self._runners.values() if r.record.life.visible)
        return listing.page(shown, query, template_id)

    async def delete(self, sandbox_id: str, *, detail: str = "") -> None:
        runner = self._runners.get(sandbox_id)
        if runner is None or runner.record.life.position.stable is Stable.ENDED:
            raise self._not_found(sandbox_id)
        runner.post(DeleteRequested(detail))
        deadline = 2 * self._settings.orchestrator.kill_deadline
        try:
            async with asyncio.timeout(deadline):
                await runner.gone()
        except TimeoutError:
            raise DeadlineExceeded(
                f"sandbox {sandbox_id} no longer answers, but the node could not release all it held "
                f"within {deadline:g} s; it goes on trying"
            ) from None

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> None:
        runner = await self._settled(sandbox_id)
        if runner.record.life.position != RUNNING:
            raise Conflict(f"sandbox {sandbox_id} is paused already")
        await runner.carry_out(PauseRequested("asked for"), self._do.pause(memory=memory))

    async def resume(self, sandbox_id: str, seconds: float, *, memory: bool = True) -> tuple[Sandbox, bool]:
        runner = await self._settled(sandbox_id)
        if runner.record.life.position == RUNNING:
            return await self.extend(sandbox_id, seconds), False
        self._check_open()
        self._check_room()
        await runner.carry_out(ResumeRequested(), self._do.resume(seconds, memory=memory))
        return runner.record.sandbox(self._tokens), True

    async def snapshot(self, sandbox_id: str, name: str | None, *, memory: bool = True) -> Snapshot:
        self._snapshots.check_name(name)
        self._visible(sandbox_id)
        async with self._snapshots.staged() as folder:
            runner = await self._settled(sandbox_id)
            job = self._do.capture(folder / "checkpoint", memory=memory)
            await runner.carry_out(SnapshotRequested(name or ""), job)
            return await self._snapshots.publish(folder, runner.record, name)

    def snapshots(self, query: SnapshotQuery) -> SnapshotPage:
        return self._snapshots.page(query)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        await self._snapshots.delete(snapshot_id)

    async def fork(self, sandbox_id: str, *, count: int, seconds: float) -> tuple[Sandbox | AenvError, ...]:
        most = self._settings.orchestrator.max_fork_count
        if not 1 <= count <= most:
            raise BadRequest(f"count must be 1 to {most} (orchestrator.max_fork_count), not {count}")
        self._check_open()
        runner = await self._settled(sandbox_id)
        # Beside the sandbox's own folder: it may end while its children start.
        source = self._settings.sandboxes_dir / f"fork-{uuid.uuid4().hex[:12]}"
        try:
            await runner.carry_out(ForkRequested(f"{count} children"), self._do.capture(source))
            checkpoint = await asyncio.to_thread(read, source)
            # A child has no name to be asked for again by: it ends as its own timeout says, from now on.
            spec = replace(runner.record.spec, timeout=math.ceil(seconds))
            children = [self._child(spec, runner.record, checkpoint) for _ in range(count)]
            return tuple(await asyncio.gather(*children))
        finally:
            await to_its_end(remove_folder, source)

    async def _child(self, spec: CreateSpec, parent: Record, checkpoint: Checkpoint) -> Sandbox | AenvError:
        record = self._new_record(_new_id(), spec, parent.template, parent.id)
        try:
            runner = self._begin(record, self._do.begin_with(checkpoint))
            await runner.ready()
        except AenvError as error:
            return error
        return runner.record.sandbox(self._tokens)

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        runner = await self._settled(sandbox_id)
        checkpoint = await self._snapshots.of(snapshot_id, sandbox_id)
        runner = await self._settled(sandbox_id)
        await runner.carry_out(RollbackRequested(snapshot_id), self._do.roll_back(checkpoint))
        return runner.record.sandbox(self._tokens)

    async def awaken(self, sandbox_id: str) -> Route | None:
        try:
            runner = await self._settled(sandbox_id)
            rest = runner.record.rest
            if rest is not None and rest.mode == "full" and runner.record.spec.auto_resume:
                await self.resume(sandbox_id, max(runner.record.spec.timeout, AUTO_RESUME_TIMEOUT))
        except NotFound:
            return None
        return self.route(sandbox_id)

    async def _settled(self, sandbox_id: str) -> Runner:
        """The runner of a visible sandbox, when nothing is in flight; what the caller begins at once then comes first.

        Raises NotFound, Conflict.
        """
        deadline = self._settings.orchestrator.create_deadline
        runner = self._visible(sandbox_id)
        try:
            async with asyncio.timeout(deadline):
                await runner.settled()
        except TimeoutError:
            raise Conflict(f"sandbox {sandbox_id} is still {runner.operation} after {deadline:g} s") from None
        return self._visible(sandbox_id)

    def _check_room(self) -> None:
        """Raises TooManyRequests. A paused sandbox takes no room until it is resumed."""
        limit = self._settings.orchestrator.max_sandboxes
        if sum(not runner.at_rest for runner in self._runners.values()) >= limit:
            raise TooManyRequests(
                f"this node runs at most {limit} sandboxes (orchestrator.max_sandboxes); pause or delete some"
            )

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("the server is shutting down; try again in a moment")

    async def set_timeout(self, sandbox_id: str, seconds: float) -> Sandbox:
        runner = self._visible(sandbox_id)
        if seconds <= 0 and runner.record.life.position == RUNNING:
            runner.time_out("its timeout was set to 0")
        else:
            await runner.set_end(datetime.now(UTC) + timedelta(seconds=max(seconds, 0)))
        return runner.record.sandbox(self._tokens)

    async def extend(self, sandbox_id: str, seconds: float) -> Sandbox:
        runner = self._visible(sandbox_id)
        end_at = datetime.now(UTC) + timedelta(seconds=seconds)
        if end_at > runner.record.end_at:
            await runner.set_end(end_at)
        return runner.record.sandbox(self._tokens)

    def route(self, sandbox_id: str) -> Route | None:
        runner = self._runners.get(sandbox_id)
        if runner is None or runner.run is None or runner.run.slot is None:
            return None
        life = runner.record.life
        if life.position.stable is not Stable.RUNNING or life.position.operation in UNREACHABLE:
            return None
        return runner.record.route(runner.run.slot.address, self._tokens)

    def find_by_envd_token(self, matches: TokenTest) -> str | None:
        for sandbox_id, runner in self._runners.items():
            if runner.record.life.visible and runner.record.spec.secure and matches(self._tokens.envd(sandbox_id)):
                return sandbox_id
        return None

    def _visible(self, sandbox_id: str) -> Runner:
        runner = self._runners.get(sandbox_id)
        if runner is None or not runner.record.life.visible:
            raise self._not_found(sandbox_id)
        return runner

    def _not_found(self, sandbox_id: str) -> NotFound:
        message = f"Sandbox \"{sandbox_id[:100]}\" doesn't exist or you don't have access to it"
        runner = self._runners.get(sandbox_id)
        record = runner.record if runner is not None else self._ends.get(sandbox_id)
        if record is not None and record.ended_at is not None and record.life.reason is not None:
            at = record.ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            message += f": it ended at {at}, reason {record.life.reason}"
            if record.life.detail:
                message += f" ({record.life.detail})"
        return NotFound(message)

    def _make_runner(self, record: Record) -> Runner:
        runner = Runner(
            record,
            launcher=self._launcher,
            store=self._store,
            tasks=self._tasks,
            at_timeout=self._do.pause(),
            deadline=self._settings.orchestrator.operation_deadline,
            on_change=self._changed,
            on_unwritten=self._rewriter.add,
        )
        self._runners[record.id] = runner
        return runner

    def _changed(self, runner: Runner) -> None:
        position = runner.record.life.position
        if position.stable is Stable.PAUSED or position.operation in UNREACHABLE:
            self._on_gone(runner.record.id)
        if position.stable is not Stable.ENDED:
            return
        self._on_gone(runner.record.id)
        if position.operation is None and self._runners.pop(runner.record.id, None) is not None:
            self._ends[runner.record.id] = runner.record
            if len(self._ends) > REMEMBERED_ENDS:
                self._ends.popitem(last=False)

    async def _prune(self) -> None:
        while True:
            kept_since = datetime.now(UTC) - timedelta(seconds=self._settings.orchestrator.ended_retention)
            try:
                for sandbox_id in await self._store.prune(kept_since):
                    self._ends.pop(sandbox_id, None)
            except Exception as error:
                log.warning("store.prune_failed", error=repr(error))
            await asyncio.sleep(PRUNE_INTERVAL)


def _new_id() -> str:
    return "i" + "".join(secrets.choice(ALPHABET) for _ in range(20))
