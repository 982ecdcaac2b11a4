"""Launches, adoption and release: the only code that makes and gives back what a run holds."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from aenv.config import Settings
from aenv.errors import (
    Conflict,
    InfrastructureError,
    InsufficientStorage,
    Unavailable,
    VmmError,
)
from aenv.guest.provision import GuestBundle
from aenv.images.protocol import Disk, ImageStore, Stack
from aenv.network.protocol import EgressPolicy, Network, Slot
from aenv.orchestrator.greeter import Greeter
from aenv.orchestrator.host import host_boot_id
from aenv.orchestrator.record import Record
from aenv.orchestrator.run import Run, requirements
from aenv.snapshots.checkpoint import Checkpoint, Image, Requirements
from aenv.templates.models import Template
from aenv.threads import to_its_end
from aenv.vmm.protocol import Vmm, VmSpec

MOST_CHANGED = 32 << 20
"""Bytes that are written over a shared memory image rather than having an image of its own made of them: writing takes
0.5 ms for each MB, while of a new image each page that is used comes from its server first."""
AHEAD = ".ahead"
"""Ends the name of a run that was made before anybody asked for it."""


class Launcher:
    """Owns no run; knows the order in which its parts come up and go down."""

    def __init__(
        self,
        *,
        settings: Settings,
        vmm: Vmm,
        network: Network,
        images: ImageStore,
        greeter: Greeter,
        bundle: GuestBundle,
    ) -> None:
        self._settings = settings
        self._vmm = vmm
        self._network = network
        self._images = images
        self.greeter = greeter
        self._bundle = bundle
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
        image: Image | None = None,
        baking: bool = False,
    ) -> None:
        """Load the guest of `source`, which goes on with `greet`, over the memory image `image`; or without one boot
        from its disk, and return when its daemon answers. `baking`: as what others will start from. Notes in `run`
        whatever now needs releasing.

        Raises Conflict if this node cannot run what was saved, and InfrastructureErrors. On an error or cancellation
        the caller releases.
        """
        if image is None:
            async with self.in_time():
                disk = await self._make_disk(run, egress, source, None)
                async with self._booting:
                    await self._boot(run, template, disk, zero_freed=baking)
            return
        assert source.memory is not None
        await self._check(source)
        async with self.in_time():
            disk = await self._make_disk(run, egress, source, image)
            with run.timed("memory"):
                stack = Stack(layers=tuple(run.memory[: image.layers]), size=source.memory.size)
                memory = await self._images.open_memory(image.id, stack, run.name)
            with run.timed("vmm"):
                run.vm = await self._vmm.prepare(self._vm_spec(run, template, disk, memory))
        await self._load(run, source)

    async def prepare(self, run: Run, template: Template, disk_size: int, image: Image, stack: Stack) -> None:
        """A VMM of this template's size over the memory image `image`, made of `stack`, that waits for any guest of it.
        Errors are those of `start`."""
        async with self.in_time():
            run.slot = await self._network.acquire(EgressPolicy())
            await _on_disk(run, run.make_folder)
            disk = await self._images.attach_blank(disk_size, run.directory, self._uid(run.slot))
            run.image = image.id
            memory = await self._images.open_memory(image.id, stack, run.name)
            run.vm = await self._vmm.prepare(self._vm_spec(run, template, disk, memory))
            await run.vm.memory()  # it remembers, so that nobody has to wait for the answer later

    async def fit(self, run: Run, source: Checkpoint, image: Image) -> None:
        """Make a run that was prepared for the memory image `image` hold the guest of `source`, as `start` does. Raises
        Conflict, and InfrastructureErrors."""
        await self._check(source)
        async with self.in_time():
            with run.timed("disk"):
                await _on_disk(run, lambda: run.begin_with(source, image))
                await self._images.bind(Stack(layers=tuple(run.disk), size=run.disk_size), run.directory)
        await self._load(run, source)

    async def claim(self, run: Run, egress: EgressPolicy) -> None:
        """Somebody waits for a run that was made ahead. Raises NetworkError, BadRequest."""
        assert run.vm is not None
        run.vm.claim()
        if egress != EgressPolicy():
            with run.timed("egress"):
                await self.set_egress(run, egress)

    async def _load(self, run: Run, source: Checkpoint) -> None:
        """Have a VMM that waits hold the guest of `source`, frozen."""
        assert run.vm is not None
        async with self.in_time():
            if changed := run.memory[run.mapped :]:
                with run.timed("changed"):
                    await self._images.restore(await run.vm.memory(), changed)
            with run.timed("load"):
                await run.vm.load(await asyncio.to_thread(source.state))

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

    async def _boot(self, run: Run, template: Template, disk: Disk, *, zero_freed: bool) -> None:
        with run.timed("vmm"):
            spec = self._vm_spec(run, template, disk, None)
            run.vm = await self._vmm.boot(replace(spec, zero_freed=zero_freed))
        await self.greeter.wait_ready(run)

    async def can_restore(self, wanted: Requirements) -> bool:
        """Whether a guest saved with these requirements is what would be saved here now, kernel included."""
        return wanted == requirements(await self._vmm.info(), self._bundle.digest, wanted.vcpus)

    async def _check(self, source: Checkpoint) -> None:
        assert source.manifest.memory is not None
        wanted = source.manifest.memory.requires
        here = requirements(await self._vmm.info(), wanted.kernel, wanted.vcpus)
        for what in ("driver", "version", "accel", "cpu"):
            needs, has = getattr(wanted, what), getattr(here, what)
            if needs != has:
                raise Conflict(
                    f"the saved memory needs the VMM's {what} to be {needs!r}, this node has {has!r}: resume it with "
                    "memory: false, which boots from its disk, or on a node like the one it was saved on"
                )

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

    async def _make_disk(self, run: Run, egress: EgressPolicy, source: Checkpoint, image: Image | None) -> Disk:
        """A slot, and the disk of `source` for the user that goes with it."""
        with run.timed("slot"):
            run.slot = await self._network.acquire(egress)
        with run.timed("disk"):
            await _on_disk(run, run.make_folder, lambda: run.begin_with(source, image))
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


def image_for(source: Checkpoint, *, alone: bool) -> Image | None:
    """The memory image over which a VMM best goes on from `source`, if that has memory. `alone`: few others do so; what
    the guest changed is then written over the image it was mapping, unless it is much."""
    memory = source.manifest.memory
    if memory is None or source.memory is None:
        return None
    if alone and memory.base is not None:
        changed = source.memory.layers[memory.base.layers :]
        if sum(layer.stat().st_size for layer in changed) <= MOST_CHANGED:
            return memory.base
    return memory.image


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
