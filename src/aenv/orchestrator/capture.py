"""Takes the state of a running sandbox: memory, device state and disk at one instant, as a checkpoint.

What was sealed of the disk is added to the run's own layers before anything else can fail, so a capture that fails
half-way costs nothing but its time: the guest goes on, and the next capture holds everything since.
"""

import asyncio
import time
from pathlib import Path

import structlog

from aenv.errors import AenvError, GuestError, InfrastructureError
from aenv.guest.envd import GuestClient
from aenv.images.protocol import Capture, ImageStore, Stack
from aenv.orchestrator.run import Run, requirements
from aenv.snapshots import making
from aenv.snapshots.checkpoint import Checkpoint
from aenv.threads import to_its_end
from aenv.vmm.protocol import Vm, Vmm

log = structlog.get_logger(__name__)

SYNC_DEADLINE = 20.0
"""Seconds a guest gets to bring its files to its disk before a pause that keeps the disk alone."""


class Capturer:
    """Owns nothing; works on the run it is given."""

    def __init__(self, *, vmm: Vmm, images: ImageStore, guest: GuestClient) -> None:
        self._vmm = vmm
        self._images = images
        self._guest = guest

    async def full(self, run: Run, vcpus: int, folder: Path, *, guest: str | None, thaw: bool) -> Checkpoint:
        """All of it, in `folder`; the guest goes on if `thaw`, and in any case after an error or a cancellation.

        `guest` is the sandbox whose token the guest's daemon wants. Raises an InfrastructureError.
        """
        vm = await self._prepared(run)
        memory = await vm.memory()
        layer = run.new_layer("memory")
        base = Stack(layers=tuple(run.memory), size=memory.size) if run.memory else None
        # A guest that goes on is not kept waiting for the writing of what was copied.
        capturing = await self._images.begin_capture(memory, base, run.mapped, layer, write_later=thaw)
        frozen_at = time.perf_counter()
        try:
            await vm.freeze()
            state = await self._take(run, vm, capturing)
            if thaw:
                await vm.thaw()
                run.note("stopped", frozen_at)
            found = await capturing.finish()
        except BaseException:
            await _undone(vm, capturing, layer)
            raise
        if not thaw:
            run.note("stopped", frozen_at)
        run.memory.append(layer)
        log.info(
            "capture.memory", run=run.name, dirty=found.dirty_pages, data=found.data_pages, bytes=found.layer_bytes
        )
        try:
            requires = requirements(await self._vmm.info(), run.kernel, vcpus)
            made = await to_its_end(
                making.of_layers,
                folder,
                disk=Stack(layers=tuple(run.disk), size=run.disk_size),
                memory=Stack(layers=tuple(run.memory), size=memory.size),
                state=state,
                requires=requires,
                base=run.mapping,
                guest=guest,
            )
        except BaseException:
            if not thaw:
                await going_on(vm)
            raise
        log.info("capture.taken", run=run.name, stopped_ms=round(run.timings["stopped"], 1))
        return made

    async def _take(self, run: Run, vm: Vm, capturing: Capture) -> bytes:
        """Device state, memory and disk of a frozen guest, side by side."""
        taking = (
            asyncio.ensure_future(vm.save()),
            asyncio.ensure_future(capturing.copy()),
            asyncio.ensure_future(self._seal(run)),
        )
        try:
            state, _, _ = await asyncio.gather(*taking)
        finally:
            # If one of them fails, what the others made is kept all the same.
            await asyncio.wait(taking)
        return state

    async def disk(self, run: Run, folder: Path, *, token: str | None, thaw: bool, forced: bool) -> Checkpoint:
        """Its files alone, once the guest has written out what it still held back; else as `full`.

        Raises GuestError if it does not do so. `forced`: one that does not loses that, as a machine that is switched
        off; or a hostile guest could put off its pause for ever.
        """
        vm = await self._prepared(run)
        assert run.slot is not None
        try:
            await self._guest.sync(run.slot.address, token, SYNC_DEADLINE)
        except AenvError as error:
            if not forced:
                raise GuestError(
                    f"the guest does not bring its files to its disk: {error.message}; pause it with its memory, which "
                    "needs nothing of the guest"
                ) from error
            log.warning("capture.not_synced", run=run.name, error=error.message)
        frozen_at = time.perf_counter()
        try:
            await vm.freeze()
            await self._seal(run)
            if thaw:
                await vm.thaw()
            run.note("stopped", frozen_at)
            return await to_its_end(
                making.of_layers, folder, disk=Stack(layers=tuple(run.disk), size=run.disk_size), guest=None
            )
        except BaseException:
            await going_on(vm)
            raise

    async def _prepared(self, run: Run) -> Vm:
        if run.vm is None:
            raise InfrastructureError(f"the run {run.name} has no VMM")
        # A seal of a capture that was given up may have happened since.
        run.disk = list(await self._images.layers(run.directory))
        return run.vm

    async def _seal(self, run: Run) -> None:
        layer = run.new_layer("disk")
        await self._images.seal(run.directory, layer)
        run.disk.append(layer)


async def _undone(vm: Vm, capturing: Capture, layer: Path) -> None:
    """Let a guest go on without what was taken of its memory: the next capture holds it, too."""
    try:
        await going_on(vm)
    finally:
        await capturing.abandon()
        await to_its_end(layer.unlink, missing_ok=True)


async def going_on(vm: Vm) -> None:
    """Let a guest go on after something failed. One that cannot is found out by whoever watches it."""
    thawing = asyncio.ensure_future(vm.thaw())
    try:
        await asyncio.shield(thawing)
    except asyncio.CancelledError:
        await asyncio.wait((thawing,))
        raise
    except AenvError as error:
        log.error("capture.not_thawed", pid=vm.handle.pid, error=error.message)
