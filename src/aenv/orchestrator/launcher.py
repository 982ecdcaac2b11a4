"""Carries out LAUNCH, adoption and TEAR_DOWN: the only code that makes and releases what a sandbox holds."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aenv.config import Settings
from aenv.errors import DeadlineExceeded, ImageError, InfrastructureError, InsufficientStorage, Unavailable, VmmError
from aenv.guest.envd import GuestClient, GuestInit
from aenv.guest.provision import GuestBundle
from aenv.images.protocol import Disk, ImageStore
from aenv.lifecycle.events import DiskLost, VmmExited
from aenv.network.protocol import Network, Slot
from aenv.orchestrator.record import Record
from aenv.orchestrator.tokens import Tokens
from aenv.threads import to_its_end
from aenv.vmm.console import last_words
from aenv.vmm.protocol import Vm, Vmm, VmSpec

CONSOLE_LINES = 5
"""Of a guest that does not become ready, in the error."""


@dataclass(slots=True)
class Held:
    """What one sandbox holds of the node right now."""

    slot: Slot | None = None
    vm: Vm | None = None
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each step of the launch."""

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timings[step] = round((time.perf_counter() - began) * 1000, 3)


class Launcher:
    """Owns no sandbox; knows the order in which its parts come up and go down."""

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

    async def launch(self, record: Record, held: Held) -> None:
        """Boot the guest and make it ready, noting in `held` whatever now needs releasing.

        Raises an InfrastructureError. On an error or cancellation the caller tears down.
        """
        limits = self._settings.orchestrator
        try:
            async with asyncio.timeout(limits.create_deadline), self._booting:
                with held.timed("slot"):
                    held.slot = await self._network.acquire(record.spec.egress)
                with held.timed("disk"):
                    disk = await self._make_disk(record, held.slot)
                with held.timed("vmm"):
                    held.vm = await self._vmm.boot(self._vm_spec(record, held.slot, disk))
                with held.timed("guest"):
                    await self._wait_ready(record, held, held.vm, held.slot.address)
                with held.timed("init"):
                    greeting = self._guest.init(held.slot.address, self._guest_init(record))
                    await self._unless_ended(record, held, greeting)
        except TimeoutError:
            raise Unavailable(
                f"the sandbox was not ready within {limits.create_deadline:g} s: the node is busy; try again, "
                "or raise orchestrator.create_deadline"
            ) from None

    async def _wait_ready(self, record: Record, held: Held, vm: Vm, address: str) -> None:
        """Return when the guest's daemon answers; say in the error how far the guest came."""
        answer = self._guest.wait_ready(address, self._settings.orchestrator.boot_deadline)
        try:
            await self._unless_ended(record, held, answer)
        except DeadlineExceeded as error:
            console = b""
            with suppress(InfrastructureError):
                console = await vm.console()
            said = last_words(console, CONSOLE_LINES) or "its console says nothing"
            raise DeadlineExceeded(f"{error.message}; {said}") from error

    async def ended(self, record: Record, held: Held) -> VmmExited | DiskLost:
        """Return when the guest cannot go on, with the event that says why."""
        assert held.vm is not None
        exiting = asyncio.ensure_future(held.vm.wait())
        losing = asyncio.ensure_future(self._images.lost(self.directory(record.id)))
        try:
            await asyncio.wait((exiting, losing), return_when=asyncio.FIRST_COMPLETED)
            if exiting.done():
                return VmmExited(exiting.result().detail)
            return DiskLost(losing.result())
        except ImageError as error:
            return DiskLost(error.message)
        finally:
            await _cancelled(exiting, losing)

    async def _unless_ended(self, record: Record, held: Held, work: Awaitable[None]) -> None:
        """Await `work`, but raise VmmError as soon as the guest cannot go on."""
        working = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self.ended(record, held))
        try:
            await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                what = "VMM" if isinstance(ending.result(), VmmExited) else "disk"
                raise VmmError(f"the {what} ended before the guest was ready: {ending.result().detail}")
            await working
        finally:
            await _cancelled(working, ending)

    async def adopt(self, record: Record, held: Held) -> None:
        """Take over the VMM a previous server started. Raises an InfrastructureError; the caller then tears down."""
        if record.slot is None or record.vm is None:
            raise VmmError("the record names no VMM")
        held.slot = self._network.adopted(record.slot)
        disk = await self._images.open(record.template.id, self.directory(record.id))
        held.vm = await self._vmm.adopt(self._vm_spec(record, held.slot, disk), record.vm)

    async def tear_down(self, record: Record, held: Held) -> None:
        """Release everything, in the order that makes it safe. Idempotent: a failed try is simply repeated."""
        async with asyncio.timeout(self._settings.orchestrator.kill_deadline):
            if held.vm is not None:
                await held.vm.kill()
                held.vm = None
            if held.slot is not None:
                await self._network.release(held.slot)
                held.slot = None
            await self._images.detach(self.directory(record.id))
            await to_its_end(remove_folder, self.directory(record.id))

    async def _make_disk(self, record: Record, slot: Slot) -> Disk:
        directory = self.directory(record.id)
        try:
            await to_its_end(directory.mkdir, mode=0o700, parents=True)
        except OSError as error:
            raise InsufficientStorage(f"cannot make {directory}: {error}") from error
        return await self._images.attach(record.template.id, directory, self._uid(slot))

    def _uid(self, slot: Slot) -> int:
        return self._settings.vmm.uid_base + slot.index

    def _vm_spec(self, record: Record, slot: Slot, disk: Disk) -> VmSpec:
        return VmSpec(
            sandbox_id=record.id,
            directory=self.directory(record.id),
            uid=self._uid(slot),
            vcpus=record.template.cpu_count,
            memory_mb=record.template.memory_mb,
            kernel=self._bundle.kernel,
            initramfs=self._bundle.initramfs,
            hostname=record.id,
            disk=disk,
            netns=slot.netns,
            tap=slot.tap,
            mac=slot.mac,
            address=slot.address,
        )

    def _guest_init(self, record: Record) -> GuestInit:
        return GuestInit(
            sandbox_id=record.id,
            template_id=record.template.id,
            generation=record.generation,
            hostname=record.id,
            access_token=self._tokens.envd(record.id) if record.spec.secure else None,
            env_vars={**record.template.env, **record.spec.env_vars},
            default_user=record.template.user,
            default_workdir=record.template.workdir,
        )


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
