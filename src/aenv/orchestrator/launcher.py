"""Launches, adoption and release: the only code that makes and gives back what a run holds."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from aenv.config import Settings
from aenv.errors import (
    Conflict,
    DeadlineExceeded,
    GuestError,
    ImageError,
    InfrastructureError,
    InsufficientStorage,
    Unavailable,
    VmmError,
)
from aenv.guest.envd import ENVD_PORT, GuestClient, GuestInit
from aenv.guest.provision import GuestBundle
from aenv.guest.rehearsal import COMMANDS, Command, rehearse
from aenv.images.protocol import Disk, ImageStore, Stack
from aenv.lifecycle.events import DiskLost, VmmExited
from aenv.network.protocol import EgressPolicy, Network, Slot
from aenv.orchestrator.host import host_boot_id
from aenv.orchestrator.record import Record
from aenv.orchestrator.run import Run, requirements
from aenv.orchestrator.tokens import Tokens
from aenv.snapshots.checkpoint import Checkpoint, Requirements
from aenv.templates.models import Template
from aenv.threads import to_its_end
from aenv.vmm.console import last_words
from aenv.vmm.protocol import Vm, Vmm, VmSpec

CLOCK_DEADLINE = 5.0
"""Seconds to tell a running guest the time; one that does not answer has other troubles."""
T = TypeVar("T")

AHEAD = ".ahead"
"""Ends the name of a run that was made before anybody asked for it."""
HOLD_DEADLINE = 0.15
"""Seconds for a guest to prepare for its capture: what an emulated one takes that has not talked to anybody yet."""
log = structlog.get_logger(__name__)

CONSOLE_LINES = 5
"""Of a guest that does not become ready, in the error."""


class Launcher:
    """Owns no run; knows the order in which its parts come up and go down."""

    def __init__(
        self,
        *,
        settings: Settings,
        vmm: Vmm,
        network: Network,
        images: ImageStore,
        guest: GuestClient,
        bundle: GuestBundle,
        tokens: Tokens,
    ) -> None:
        self._settings = settings
        self._vmm = vmm
        self._network = network
        self._images = images
        self._guest = guest
        self._bundle = bundle
        self._tokens = tokens
        self._booting = asyncio.Semaphore(settings.orchestrator.boot_concurrency)

    def directory(self, sandbox_id: str) -> Path:
        """The sandbox's own folder."""
        return self._settings.sandboxes_dir / sandbox_id

    def new_run(self, sandbox_id: str, number: int | str) -> Run:
        """A run that holds nothing yet."""
        name = f"{sandbox_id}.{number}"
        directory = place(self._settings.sandboxes_dir, name)
        return Run(name=name, directory=directory, boot_id=host_boot_id(), kernel=self._bundle.digest)

    async def start(
        self,
        run: Run,
        template: Template,
        egress: EgressPolicy,
        source: Checkpoint,
        *,
        boot: bool = False,
        baking: bool = False,
    ) -> None:
        """Load the guest of `source`, which goes on with `greet`, or boot from its disk (with `boot`, and where only a
        disk was kept) and return when its daemon answers. `baking`: as what others will start from. Notes in `run`
        whatever now needs releasing.

        Raises Conflict if this node cannot run what was saved, and InfrastructureErrors. On an error or cancellation
        the caller releases.
        """
        if boot or source.manifest.memory is None:
            async with self.in_time():
                disk = await self._make_disk(run, egress, source, memory=False)
                async with self._booting:
                    await self._boot(run, template, disk, zero_freed=baking)
        else:
            await self.prepare(run, template, egress, source)
            await self.go_on(run, source)

    async def prepare(self, run: Run, template: Template, egress: EgressPolicy, source: Checkpoint) -> None:
        """The part of `start` that needs no guest: all that it will hold, and a VMM that waits. Errors are those of
        `start`."""
        assert source.manifest.memory is not None
        assert source.memory is not None
        await self._check(source.manifest.memory.requires)
        async with self.in_time():
            disk = await self._make_disk(run, egress, source, memory=True)
            assert run.image is not None
            with run.timed("memory"):
                stack = Stack(layers=tuple(run.memory), size=source.memory.size)
                memory = await self._images.open_memory(run.image, stack, run.name)
            with run.timed("vmm"):
                run.vm = await self._vmm.prepare(self._vm_spec(run, template, disk, memory))

    async def prepare_blank(self, run: Run, template: Template, disk_size: int) -> None:
        """A VMM of this template's size that waits for any guest's disk, memory and state. Errors are those of
        `start`."""
        async with self.in_time():
            run.image, size = run.name, template.memory_mb << 20
            run.slot = await self._network.acquire(EgressPolicy())
            await _on_disk(run, run.make_folder)
            disk = await self._images.attach_blank(disk_size, run.directory, self._uid(run.slot))
            memory = await self._images.open_blank_memory(run.image, size, run.name)
            run.vm = await self._vmm.prepare(self._vm_spec(run, template, disk, memory))

    async def fit(self, run: Run, egress: EgressPolicy, source: Checkpoint) -> None:
        """Make what was prepared ahead hold the guest of `source`, as `start` does. Raises Conflict, and
        InfrastructureErrors."""
        assert source.manifest.memory is not None
        assert source.memory is not None
        assert run.vm is not None
        run.vm.claim()
        if egress != EgressPolicy():
            with run.timed("egress"):
                await self.set_egress(run, egress)
        if run.is_blank:
            assert run.image is not None
            await self._check(source.manifest.memory.requires)
            with run.timed("bind"):
                await _on_disk(run, lambda: run.begin_with(source, memory=True))
                disk = Stack(layers=tuple(run.disk), size=run.disk_size)
                memory = Stack(layers=tuple(run.memory), size=source.memory.size)
                await asyncio.gather(
                    self._images.bind(disk, run.directory), self._images.bind_memory(run.image, memory)
                )
        if not run.vm.frozen:
            await self.go_on(run, source)

    async def go_on(self, run: Run, source: Checkpoint) -> None:
        """Have a run that is prepared for it hold the guest of `source`, frozen. Raises an InfrastructureError."""
        assert run.vm is not None
        async with self.in_time():
            with run.timed("load"):
                await run.vm.load(await asyncio.to_thread(source.state))

    async def wait_ready(self, run: Run) -> None:
        """Return when the daemon of a run's guest answers. Raises an InfrastructureError."""
        assert run.vm is not None
        assert run.slot is not None
        with run.timed("guest"):
            await self._wait_ready(run, run.vm, run.slot.address)

    async def rehearse(self, run: Run, template: Template, commands: Sequence[Command] = COMMANDS) -> None:
        """Have a guest that nobody owns yet run what its copies, or its owner, will run first. It may be unable to."""
        assert run.slot is not None
        try:
            await rehearse(run.slot.address, ENVD_PORT, template.user, commands)
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

    async def set_egress(self, run: Run, egress: EgressPolicy) -> None:
        """Replace the egress policy of a run. Raises NetworkError, BadRequest."""
        assert run.slot is not None
        await self._network.apply(run.slot, egress)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """The deadline of a launch, or of a step of it. Raises Unavailable."""
        deadline = self._settings.orchestrator.create_deadline
        try:
            async with asyncio.timeout(deadline):
                yield
        except TimeoutError:
            raise Unavailable(
                f"the sandbox was not ready within {deadline:g} s: the node is busy; try again, "
                "or raise orchestrator.create_deadline"
            ) from None

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
        deadline = self._settings.orchestrator.boot_deadline
        if run.vm.frozen:
            with run.timed("greet"):
                try:
                    async with asyncio.timeout(deadline):
                        if await self._unless_ended(run, run.vm.greet(init.message())):
                            return
                except TimeoutError:
                    raise DeadlineExceeded(f"the guest did not take its name within {deadline:g} s") from None
        with run.timed("init"):
            await self._unless_ended(run, self._guest.greet(run.slot.address, init, self.token(guest), deadline))

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
        await self._guest.tell_time(run.slot.address, token, CLOCK_DEADLINE)

    def token(self, guest: str | None) -> str | None:
        """What the daemon of this sandbox's guest wants to be told, if anything."""
        return None if guest is None else self._tokens.envd(guest)

    async def _boot(self, run: Run, template: Template, disk: Disk, *, zero_freed: bool) -> None:
        with run.timed("vmm"):
            spec = self._vm_spec(run, template, disk, None)
            run.vm = await self._vmm.boot(replace(spec, zero_freed=zero_freed))
        await self.wait_ready(run)

    async def can_restore(self, wanted: Requirements) -> bool:
        """Whether a guest saved with these requirements is what would be saved here now, kernel included."""
        return wanted == requirements(await self._vmm.info(), self._bundle.digest, wanted.vcpus)

    async def _check(self, wanted: Requirements) -> None:
        here = requirements(await self._vmm.info(), wanted.kernel, wanted.vcpus)
        for what in ("driver", "version", "accel", "cpu"):
            needs, has = getattr(wanted, what), getattr(here, what)
            if needs != has:
                raise Conflict(
                    f"the saved memory needs the VMM's {what} to be {needs!r}, this node has {has!r}: resume it with "
                    "memory: false, which boots from its disk, or on a node like the one it was saved on"
                )

    async def _wait_ready(self, run: Run, vm: Vm, address: str) -> None:
        """Return when the guest's daemon answers; say in the error how far the guest came."""
        answer = self._guest.wait_ready(address, self._settings.orchestrator.boot_deadline)
        try:
            await self._unless_ended(run, answer)
        except DeadlineExceeded as error:
            console = b""
            with suppress(InfrastructureError):
                console = await vm.console()
            said = last_words(console, CONSOLE_LINES) or "its console says nothing"
            raise DeadlineExceeded(f"{error.message}; {said}") from error

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

    def run_of(self, record: Record) -> Run:
        """The run a previous server began, to be adopted. Raises VmmError."""
        if record.run is None:
            raise VmmError("the record names no run")
        return Run.of_record(record.run, place(self._settings.sandboxes_dir, record.run.name))

    async def adopt(self, run: Run, record: Record) -> None:
        """Take it over. Raises an InfrastructureError; the caller then sweeps the VMM and releases the rest."""
        assert record.run is not None
        run.slot = self._network.adopted(record.run.slot)
        disk = await self._images.open(run.directory)
        # A seal that was under way when the server ended has happened or not: who serves the disk knows.
        run.disk = list(await self._images.layers(run.directory))
        memory = None
        if run.image is not None:
            mapped = Stack(layers=tuple(run.memory[: run.mapped]), size=record.template.memory_mb << 20)
            memory = await self._images.open_memory(run.image, mapped, run.name)
        spec = self._vm_spec(run, record.template, disk, memory)
        run.vm = await self._vmm.adopt(spec, record.run.vm)

    async def release(self, run: Run, owner: str | None) -> None:
        """Give back everything, in the order that makes it safe; but not the folder of the sandbox `owner`. Idempotent:
        a failed try is simply repeated."""
        async with asyncio.timeout(self._settings.orchestrator.kill_deadline):
            if run.vm is not None:
                await run.vm.kill()
                run.vm = None
            if run.slot is not None:
                await self._network.release(run.slot)
                run.slot = None
            await self._images.detach(run.directory)
            if run.image is not None:
                await self._images.close_memory(run.image, run.name)
            theirs = run.directory.parent
            doomed = run.directory if owner is not None and theirs == self.directory(owner) else theirs
            await to_its_end(remove_folder, doomed)

    async def _make_disk(self, run: Run, egress: EgressPolicy, source: Checkpoint, *, memory: bool) -> Disk:
        """A slot, and the disk of `source` for the user that goes with it."""
        with run.timed("slot"):
            run.slot = await self._network.acquire(egress)
        with run.timed("disk"):
            await _on_disk(run, run.make_folder, lambda: run.begin_with(source, memory=memory))
            stack = Stack(layers=tuple(run.disk), size=run.disk_size)
            return await self._images.attach(stack, run.directory, self._uid(run.slot))

    def _uid(self, slot: Slot) -> int:
        return self._settings.vmm.uid_base + slot.index

    def _vm_spec(self, run: Run, template: Template, disk: Disk, memory: Path | None) -> VmSpec:
        slot = run.slot
        assert slot is not None
        return VmSpec(
            sandbox_id=run.name,
            directory=run.directory,
            uid=self._uid(slot),
            vcpus=template.cpu_count,
            memory_mb=template.memory_mb,
            kernel=self._bundle.kernel,
            initramfs=self._bundle.initramfs,
            # A label of the guest until it gets its identity.
            hostname=run.name.partition(".")[0],
            disk=disk,
            netns=slot.netns,
            tap=slot.tap,
            mac=slot.mac,
            address=slot.address,
            memory=memory,
            ahead=run.name.endswith(AHEAD),
        )


def place(sandboxes_dir: Path, run: str) -> Path:
    """The folder of a run, by its name: in that of the sandbox it is named after. One that was made ahead is named
    after nobody, whoever it belongs to now."""
    return sandboxes_dir / run.partition(".")[0] / run


async def _on_disk(run: Run, *work: Callable[[], None]) -> None:
    """Do `work` in the run's folder. Raises InsufficientStorage, InfrastructureError."""
    try:
        for step in work:
            await to_its_end(step)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = InsufficientStorage if full else InfrastructureError
        raise kind(f"cannot make {run.directory}: {error}") from error


def remove_folder(folder: Path) -> None:
    """Remove it with all it holds; what is gone already is fine. Raises InfrastructureError if something stays."""

    def failed(_function: object, _path: str, problem: tuple[object, BaseException, object]) -> None:
        if not isinstance(problem[1], FileNotFoundError):
            raise problem[1]

    try:
        shutil.rmtree(folder, onerror=failed)
    except OSError as error:
        raise InfrastructureError(f"cannot remove {folder}: {error}") from error


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
