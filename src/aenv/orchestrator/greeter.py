"""What the node says to the guest of a run: when it begins, before it is captured, and to find out whether it lives."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from aenv.errors import DeadlineExceeded, GuestError, ImageError, InfrastructureError, VmmError
from aenv.guest.envd import ENVD_PORT, GuestClient, GuestInit
from aenv.guest.rehearsal import COMMANDS, Command, rehearse
from aenv.images.protocol import ImageStore
from aenv.lifecycle.events import DiskLost, VmmExited
from aenv.orchestrator.record import Record
from aenv.orchestrator.run import Run
from aenv.orchestrator.tokens import Tokens
from aenv.snapshots.checkpoint import Checkpoint
from aenv.templates.models import Template
from aenv.vmm.console import last_words

CLOCK_DEADLINE = 5.0
"""Seconds to tell a running guest the time; one that does not answer has other troubles."""
HOLD_DEADLINE = 0.15
"""Seconds for a guest to prepare for its capture: what an emulated one takes that has not talked to anybody yet."""
MAILBOX_DEADLINE = 10.0
"""Seconds for a guest that waits at its mailbox to answer; twenty milliseconds on an idle node."""
CONSOLE_LINES = 5
"""Of a guest that does not become ready, in the error."""
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Greeter:
    """Owns nothing. `deadline`: seconds for a guest to become ready, or to take its name."""

    def __init__(self, *, guest: GuestClient, images: ImageStore, tokens: Tokens, deadline: float) -> None:
        self._guest = guest
        self._images = images
        self._tokens = tokens
        self._deadline = deadline

    async def wait_ready(self, run: Run) -> None:
        """Return when the daemon of a run's guest answers; say in the error how far it came. Raises an
        InfrastructureError."""
        assert run.vm is not None
        assert run.slot is not None
        with run.timed("guest"):
            answer = self._guest.wait_ready(run.slot.address, self._deadline)
            try:
                await self._unless_ended(run, answer)
            except DeadlineExceeded as error:
                console = b""
                with suppress(InfrastructureError):
                    console = await run.vm.console()
                said = last_words(console, CONSOLE_LINES) or "its console says nothing"
                raise DeadlineExceeded(f"{error.message}; {said}") from error

    async def greet(self, run: Run, record: Record, guest: str | None) -> None:
        """Let the guest go on, if it does not run yet, and give it its identity. `guest` is the sandbox whose token its
        daemon wants, if it has one. Raises an InfrastructureError."""
        assert run.slot is not None
        assert run.vm is not None
        init = GuestInit(
            sandbox_id=record.id,
            template_id=record.template.id,
            generation=record.generation,
            hostname=record.id,
            access_token=self._tokens.envd(record.id) if record.spec.secure else None,
            env_vars={**record.template.env, **record.spec.env_vars},
            default_user=record.template.user,
            default_workdir=record.template.workdir,
        )
        if run.vm.frozen:
            with run.timed("greet"):
                # One that does not answer, because it plays with its mailbox, say, is asked over the network.
                try:
                    async with asyncio.timeout(MAILBOX_DEADLINE):
                        if await self._unless_ended(run, run.vm.greet(init.message())):
                            return
                except TimeoutError:
                    log.warning("guest.mailbox_silent", run=run.name)
        with run.timed("init"):
            await self._unless_ended(run, self._guest.greet(run.slot.address, init, self.token(guest), self._deadline))

    async def hold(self, run: Run, guest: str | None) -> None:
        """Have the daemon of a guest that is about to be captured wait for the name it will go on under. One that is
        slow to do so is captured all the same. `guest`: as for `greet`. Raises VmmError."""
        assert run.slot is not None
        assert run.vm is not None
        address, token = run.slot.address, self.token(guest)
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_DEADLINE):
                await run.vm.hold(lambda: self._guest.send_for(address, token))

    async def tell_time(self, run: Run, record: Record) -> None:
        """Set the clock of its guest. Raises GuestError, DeadlineExceeded."""
        assert run.slot is not None
        token = self.token(record.id if record.spec.secure else None)
        await self._guest.tell_time(run.slot.address, record.generation, token, CLOCK_DEADLINE)

    def token(self, guest: str | None) -> str | None:
        """What the daemon of this sandbox's guest wants to be told, if anything."""
        return None if guest is None else self._tokens.envd(guest)

    async def rehearse(self, run: Run, template: Template, commands: Sequence[Command] = COMMANDS) -> None:
        """Have a guest that nobody owns yet run what its copies, or its owner, will run first. It may be unable to.
        Raises VmmError if it ends."""
        assert run.slot is not None
        try:
            await self._unless_ended(run, rehearse(run.slot.address, ENVD_PORT, template.user, commands))
        except GuestError as error:
            log.warning("template.not_rehearsed", template=template.id, error=error.message)

    async def warm_up(self, run: Run, template: Template, source: Checkpoint) -> None:
        """Have the guest of `source`, which was loaded, do once what it will be asked for first, then freeze it again:
        under emulation the first time is the slow one. Raises an InfrastructureError."""
        assert run.vm is not None
        await run.vm.thaw()
        await self.wait_ready(run)
        if template.source is None:  # in a copy of somebody's sandbox nothing runs that its owner has not asked for
            await self.rehearse(run, template, COMMANDS[:1])
        await self.hold(run, source.manifest.guest)
        await run.vm.freeze()

    async def ended(self, run: Run) -> VmmExited | DiskLost:
        """Return when the guest cannot go on, with the event that says why."""
        assert run.vm is not None
        exiting = asyncio.ensure_future(run.vm.wait())
        losing = asyncio.ensure_future(self._images.lost(run.directory))
        try:
            await asyncio.wait((exiting, losing), return_when=asyncio.FIRST_COMPLETED)
            if exiting.done():
                return VmmExited(exiting.result().detail)
            return DiskLost(losing.result())
        except ImageError as error:
            return DiskLost(error.message)
        finally:
            await _cancelled(exiting, losing)

    async def _unless_ended(self, run: Run, work: Awaitable[T]) -> T:
        """The outcome of `work`, but raise VmmError as soon as the guest cannot go on."""
        working = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self.ended(run))
        try:
            await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                what = "VMM" if isinstance(ending.result(), VmmExited) else "disk"
                raise VmmError(f"the {what} ended before the guest was ready: {ending.result().detail}")
            return await working
        finally:
            await _cancelled(working, ending)


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
