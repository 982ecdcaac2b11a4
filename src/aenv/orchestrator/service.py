"""All sandboxes of one node: the public face of the orchestrator (`protocol.Sandboxes`)."""

import asyncio
import hashlib
import json
import secrets
import string
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Protocol

import structlog

from aenv.config import Settings
from aenv.errors import AenvError, BadRequest, Conflict, DeadlineExceeded, NotFound, TooManyRequests, Unavailable
from aenv.images.protocol import ImageStore
from aenv.lifecycle.events import CreateRequested, DeleteRequested, Expired, Orphaned
from aenv.lifecycle.states import Operation, Stable
from aenv.network.protocol import Network
from aenv.orchestrator import listing, reconcile
from aenv.orchestrator.launcher import Launcher
from aenv.orchestrator.models import CreateSpec, ListQuery, Page, Route, Sandbox
from aenv.orchestrator.protocol import TokenTest
from aenv.orchestrator.record import Record
from aenv.orchestrator.runner import Runner
from aenv.orchestrator.store import IdempotencyKey, LoggedEvent, Store
from aenv.orchestrator.tokens import Tokens
from aenv.orchestrator.unwritten import Rewriter
from aenv.templates.models import Template
from aenv.vmm.protocol import Vmm

log = structlog.get_logger(__name__)

ALPHABET = string.ascii_lowercase + string.digits
REMEMBERED_ENDS = 10_000
"""How many ended sandboxes can still be told apart from unknown ones without asking the store."""
PRUNE_INTERVAL = 600.0


class Templates(Protocol):
    """What the orchestrator needs of the template store."""

    def resolve(self, reference: str) -> Template: ...


class Orchestrator:
    """Owns every runner and the task group they work in. Use as an async context manager."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        launcher: Launcher,
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
        self._network = network
        self._vmm = vmm
        self._images = images
        self._templates = templates
        self._tokens = tokens
        self._on_gone = on_gone
        self._runners: dict[str, Runner] = {}
        self._ends: OrderedDict[str, Record] = OrderedDict()
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
                make_runner=self._make_runner,
            )
        except BaseException:
            await self.__aexit__()
            raise
        self._upkeep = [
            self._tasks.create_task(self._prune(), name="prune"),
            self._tasks.create_task(self._rewriter.run(), name="rewrite"),
        ]
        return self

    def stop_creating(self) -> None:
        """Refuse creations from now on and undo those under way: their callers are told to try again."""
        self._closing = True
        for runner in list(self._runners.values()):
            if runner.record.life.position.operation is Operation.CREATING:
                runner.post(Orphaned("the server stopped before the sandbox was ready"))

    async def __aexit__(self, *_: object) -> None:
        """Finish or undo what is in flight; running sandboxes keep running."""
        self.stop_creating()
        for task in self._upkeep:
            task.cancel()
        ending = [r.gone() for r in self._runners.values() if r.record.life.position.operation is Operation.KILLING]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.orchestrator.kill_deadline):
                await asyncio.gather(*ending)
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
        if self._closing:
            raise Unavailable("the server is shutting down; try again in a moment")
        template = self._templates.resolve(spec.template)
        sandbox_id = "i" + "".join(secrets.choice(ALPHABET) for _ in range(20))
        if idempotency_key is not None:
            claim = IdempotencyKey(idempotency_key, _digest(spec), sandbox_id)
            if (earlier := await self._claim(claim)) is not None:
                await earlier.ready()
                return earlier.record.sandbox(self._tokens)
        try:
            runner = self._begin(sandbox_id, spec, template)
            await runner.ready()
        except AenvError:
            # A failed creation must not keep its key: the retry has to be able to succeed.
            if idempotency_key is not None:
                await self._store.unclaim(idempotency_key, sandbox_id)
            raise
        return runner.record.sandbox(self._tokens)

    async def _claim(self, claim: IdempotencyKey) -> Runner | None:
        """None if the key is now this creation's; else the runner of the sandbox it already made. Raises Conflict."""
        bound = await self._store.claim(claim)
        if bound.sandbox_id == claim.sandbox_id:
            return None
        if bound.digest != claim.digest:
            raise Conflict(f"Idempotency-Key '{claim.key}' was used for another request; use a new key")
        if runner := self._runners.get(bound.sandbox_id):
            return runner
        ended = self._ends.get(bound.sandbox_id)
        if ended is not None and ended.slot is not None:
            raise Conflict(f"sandbox {ended.id}, made under Idempotency-Key '{claim.key}', has ended; use a new key")
        # The server ended before that creation did: nobody has seen the sandbox, so the key is free again.
        await self._store.unclaim(claim.key, bound.sandbox_id)
        return await self._claim(claim)

    def _begin(self, sandbox_id: str, spec: CreateSpec, template: Template) -> Runner:
        limit = self._settings.orchestrator.max_sandboxes
        if len(self._runners) >= limit:
            raise TooManyRequests(f"this node runs at most {limit} sandboxes (orchestrator.max_sandboxes); delete some")
        now = datetime.now(UTC)
        runner = self._make_runner(
            Record(
                id=sandbox_id,
                spec=spec,
                template=template,
                generation=uuid.uuid4().hex,
                started_at=now,
                end_at=now + timedelta(seconds=spec.timeout),
                boot_id=reconcile.host_boot_id(),
            )
        )
        runner.post(CreateRequested())
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

    async def set_timeout(self, sandbox_id: str, seconds: float) -> Sandbox:
        runner = self._visible(sandbox_id)
        if seconds <= 0:
            runner.post(Expired("its timeout was set to 0"))
        else:
            await runner.set_end(datetime.now(UTC) + timedelta(seconds=seconds))
        return runner.record.sandbox(self._tokens)

    async def extend(self, sandbox_id: str, seconds: float) -> Sandbox:
        runner = self._visible(sandbox_id)
        end_at = datetime.now(UTC) + timedelta(seconds=seconds)
        if end_at > runner.record.end_at:
            await runner.set_end(end_at)
        return runner.record.sandbox(self._tokens)

    def route(self, sandbox_id: str) -> Route | None:
        runner = self._runners.get(sandbox_id)
        if runner is None or not runner.record.life.visible or runner.held.slot is None:
            return None
        return runner.record.route(runner.held.slot.address, self._tokens)

    def find_by_envd_token(self, matches: TokenTest) -> str | None:
        for sandbox_id, runner in self._runners.items():
            if runner.record.life.visible and runner.record.spec.secure and matches(self._tokens.envd(sandbox_id)):
                return sandbox_id
        return None

    async def story(self, sandbox_id: str) -> tuple[LoggedEvent, ...]:
        """What happened to a sandbox, oldest first; also for one that has ended. Raises NotFound."""
        events = await self._store.events(sandbox_id)
        if not events:
            raise self._not_found(sandbox_id)
        return tuple(events)

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
            on_change=self._changed,
            on_unwritten=self._rewriter.add,
        )
        self._runners[record.id] = runner
        return runner

    def _changed(self, runner: Runner) -> None:
        position = runner.record.life.position
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


def _digest(spec: CreateSpec) -> str:
    """Equal specs have equal digests, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()
