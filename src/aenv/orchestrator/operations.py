"""What is done to a sandbox, one job for each operation: a launch, a pause, a resume, a capture, a rollback.

A job returns the event that says it is done, or raises with nothing changed: the sandbox is then what it was before.
"""

import asyncio
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import structlog

from aenv.errors import AenvError, DeadlineExceeded, ImageError, InfrastructureError, VmmError
from aenv.images.protocol import ImageStore
from aenv.lifecycle.events import Captured, Event, Launched, Paused, Resumed, RolledBack
from aenv.network.protocol import EgressPolicy
from aenv.orchestrator.capture import Capturer, going_on
from aenv.orchestrator.chains import shorten
from aenv.orchestrator.host import host_boot_id
from aenv.orchestrator.launcher import Launcher, image_for, remove_folder
from aenv.orchestrator.record import Record, Rest
from aenv.orchestrator.run import Run
from aenv.orchestrator.runner import Job, Runner
from aenv.orchestrator.standby import Standby, Waiting, kind_of
from aenv.snapshots import making
from aenv.snapshots.checkpoint import Checkpoint, Image, read
from aenv.templates.models import Template
from aenv.threads import to_its_end

log = structlog.get_logger(__name__)


class Baking(Protocol):
    """Where templates keep their checkpoints."""

    def checkpoint(self, template_id: str) -> Path: ...

    def bake(self, template_id: str, checkpoint: Path) -> None: ...


class Operations:
    """Makes jobs. Owns nothing but the turns in which templates are baked."""

    def __init__(
        self,
        *,
        launcher: Launcher,
        capturer: Capturer,
        images: ImageStore,
        templates: Baking,
        standby: Standby,
    ) -> None:
        self._launcher = launcher
        self._capturer = capturer
        self._images = images
        self._templates = templates
        self._standby = standby
        self._baking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def create(self, waiting: Waiting | None) -> Job:
        """A first launch, from the template's checkpoint: of the guest that waits for it, if there is one."""

        async def job(runner: Runner) -> Event:
            run = None
            if waiting is not None:
                source = waiting.source
                assert source is not None, "it was made for a template"
                image = image_for(source, alone=False)
                if image is not None and (run := await self._claim(runner, runner.record, source, image, waiting)):
                    self._created(runner.record.template, run, source)
            if run is None:
                run = self._launcher.new_run(runner.record.id, runner.record.launches)
                try:
                    guest = await self._start_template(runner, run)
                    await self._launcher.greeter.greet(run, runner.record, guest)
                except BaseException:
                    runner.let_go(run)
                    raise
            runner.go_on(run)
            return Launched()

        return job

    def begin_with(self, source: Checkpoint) -> Job:
        """A first launch, from the checkpoint of another sandbox."""

        async def job(runner: Runner) -> Event:
            image = image_for(source, alone=False)
            runner.go_on(await self._start(runner, runner.record, source, image))
            return Launched()

        return job

    def pause(self, *, memory: bool | None = None) -> Job:
        """Keep the state; without an answer to whether with memory, as the sandbox was created."""

        async def job(runner: Runner) -> Event:
            record, run = runner.record, _running(runner)
            keep = record.spec.keep_memory if memory is None else memory
            folder = self._launcher.directory(record.id) / f"paused-{uuid.uuid4().hex[:12]}"
            try:
                made = await self._capture(record, run, folder, memory=keep, thaw=False, forced=memory is None)
            except BaseException:
                runner.later(self.tell_time(runner))
                raise
            rest = Rest(folder=folder.name, mode="full" if keep else "filesystem", boot_id=host_boot_id())
            runner.record = replace(runner.record, run=None, rest=rest, timings=dict(run.timings))
            runner.later(self.make_durable(runner, made))
            return Paused()

        return job

    def resume(self, seconds: float, *, memory: bool) -> Job:
        """Go on from what was kept, for `seconds`; without `memory`, boot from the disk."""

        async def job(runner: Runner) -> Event:
            record = runner.record
            assert record.rest is not None
            folder = self._launcher.directory(record.id) / record.rest.folder
            source = await asyncio.to_thread(read, folder)
            fresh = _launched_again(runner)
            run = await self._go_on(runner, fresh, source, image_for(source, alone=True) if memory else None)
            runner.record = replace(
                runner.record,
                generation=fresh.generation,
                rest=None,
                end_at=datetime.now(UTC) + timedelta(seconds=seconds),
            )
            runner.go_on(run)
            runner.later(_removed(runner, folder))
            runner.later(self._shorten(runner, run))
            return Resumed()

        return job

    def capture(self, folder: Path, *, memory: bool = True) -> Job:
        """Make `folder` a checkpoint of the present state."""

        async def job(runner: Runner) -> Event:
            record = runner.record
            if record.rest is not None:
                kept = await asyncio.to_thread(read, self._launcher.directory(record.id) / record.rest.folder)
                await to_its_end(making.copy if memory else making.disk_only, kept, folder)
                runner.record = replace(runner.record, timings={})  # nothing was stopped
            else:
                run = _running(runner)
                try:
                    await self._capture(record, run, folder, memory=memory, thaw=True)
                finally:
                    runner.later(self.tell_time(runner))
                runner.record = replace(runner.record, run=run.record(), timings=dict(run.timings))
                runner.later(self._shorten(runner, run))
            return Captured()

        return job

    def roll_back(self, source: Checkpoint) -> Job:
        """Replace what it is by `source`."""

        async def job(runner: Runner) -> Event:
            record, fresh = runner.record, _launched_again(runner)
            if record.rest is not None:
                directory = self._launcher.directory(record.id)
                folder = directory / f"paused-{uuid.uuid4().hex[:12]}"
                kept = await to_its_end(making.copy, source, folder)
                mode = record.rest.mode if source.memory is None else "full"
                rest = replace(record.rest, folder=folder.name, mode=mode, durable=False, boot_id=host_boot_id())
                runner.record = replace(fresh, rest=rest)
                runner.later(self.make_durable(runner, kept))
                runner.later(_removed(runner, directory / record.rest.folder))
                return RolledBack()
            before = _running(runner)
            assert before.vm is not None
            try:
                await before.vm.freeze()
                run = await self._go_on(runner, fresh, source, image_for(source, alone=True))
            except BaseException:
                await going_on(before.vm)
                runner.later(self.tell_time(runner))
                raise
            runner.record = replace(runner.record, generation=fresh.generation)
            runner.go_on(run)
            runner.later(self._shorten(runner, run))
            return RolledBack()

        return job

    async def _go_on(self, runner: Runner, record: Record, source: Checkpoint, image: Image | None) -> Run:
        """As `_start`, of a sandbox that goes on from its own past; on a VMM that was prepared, if there is one."""
        if image is None:
            return await self._start(runner, record, source, None)
        kind = kind_of(record.template, source, image)
        waiting = self._standby.take(kind)
        run = await self._claim(runner, record, source, image, waiting) if waiting is not None else None
        run = run or await self._start(runner, record, source, image)
        assert source.manifest.memory is not None
        if record.rest is None or image.id != source.manifest.memory.id:  # what it was paused as is never used again
            self._standby.used(kind, record.template, run)
        return run

    async def _start(self, runner: Runner, record: Record, source: Checkpoint, image: Image | None) -> Run:
        """A new run of `record` on `source`, greeted; booted if there is no `image`. On an error it is released."""
        run = self._launcher.new_run(record.id, record.launches)
        try:
            await self._launcher.start(run, record.template, record.spec.egress, source, image=image)
            await self._launcher.greeter.greet(run, record, None if image is None else source.manifest.guest)
        except BaseException:
            runner.let_go(run)
            raise
        return run

    async def _claim(
        self, runner: Runner, record: Record, source: Checkpoint, image: Image, waiting: Waiting
    ) -> Run | None:
        """Make what was made ahead this sandbox's; None if it turns out to be of no use."""
        run = waiting.run
        run.timings.clear()
        try:
            await self._launcher.claim(run, record.spec.egress)
            if not waiting.ready:
                await self._launcher.fit(run, source, image)
            await self._launcher.greeter.greet(run, record, source.manifest.guest)
        except (VmmError, ImageError, DeadlineExceeded) as error:
            log.warning("standby.of_no_use", run=run.name, error=error.message)
            runner.let_go(run)
            return None
        except BaseException:
            runner.let_go(run)
            raise
        return run

    def _created(self, template: Template, run: Run, source: Checkpoint) -> None:
        """A sandbox was created on `source`, the checkpoint of its template."""
        if source.manifest.memory is not None:
            self._standby.used(kind_of(template, source, source.manifest.memory.image), template, run, source)

    async def _start_template(self, runner: Runner, run: Run) -> str | None:
        """Start on the template's checkpoint; the first create here has it baked, the others wait for that.

        Returns the sandbox whose token the guest's daemon wants, if any.
        """
        record = runner.record
        template = record.template
        if (source := await self._baked(template.id, any_kernel=template.source is not None)) is None:
            # Whoever waits for another's boot does so within its own time.
            async with self._launcher.in_time(), self._baking[template.id]:
                if (source := await self._baked(template.id, any_kernel=False)) is None:
                    with run.timed("bake"):
                        source = await self._bake(runner)
        image = image_for(source, alone=False)
        await self._launcher.start(run, template, record.spec.egress, source, image=image)
        self._created(template, run, source)
        return None if image is None else source.manifest.guest

    async def _baked(self, template_id: str, *, any_kernel: bool) -> Checkpoint | None:
        """The template's checkpoint, unless it has to be made (again) by a boot here."""
        found = await asyncio.to_thread(read, self._templates.checkpoint(template_id))
        memory = found.manifest.memory
        if any_kernel or (memory is not None and await self._launcher.can_restore(memory.requires)):
            return found
        return None

    async def _bake(self, runner: Runner) -> Checkpoint:
        """Boot the template's disk, and make what it is then, with its daemon ready, the template's checkpoint."""
        record = runner.record
        template = record.template
        run = self._launcher.new_run(record.id, "bake")
        try:
            cold = await asyncio.to_thread(read, self._templates.checkpoint(template.id))
            await self._launcher.start(run, template, EgressPolicy(), cold, baking=True)
            await self._launcher.greeter.rehearse(run, template)
            await self._launcher.greeter.hold(run, None)
            folder = run.directory / "baked"
            made = await self._capturer.full(run, template.cpu_count, folder, guest=None, thaw=False)
            await self._images.make_durable(made.files)
            await to_its_end(self._templates.bake, template.id, folder)
            # Before the sandbox itself is started: it may need the last slot.
            await self._launcher.release(run, record.id)
        except BaseException:
            runner.let_go(run)
            raise
        return await asyncio.to_thread(read, self._templates.checkpoint(template.id))

    async def _capture(
        self, record: Record, run: Run, folder: Path, *, memory: bool, thaw: bool, forced: bool = False
    ) -> Checkpoint:
        guest = record.id if record.spec.secure else None
        token = self._launcher.greeter.token(guest)
        async with run.layers:
            await shorten(self._images, run, at_most=True)
            if memory:
                await self._launcher.greeter.hold(run, guest)
                vcpus = record.template.cpu_count
                return await self._capturer.full(run, vcpus, folder, guest=guest, thaw=thaw)
            return await self._capturer.disk(run, folder, token=token, thaw=thaw, forced=forced)

    async def _shorten(self, runner: Runner, run: Run) -> None:
        """Fold a run's chains of layers once they are long, while it goes on."""
        try:
            async with run.layers:
                folded = await shorten(self._images, run)
                # Written first: a new server must find the files that the row names.
                if folded and runner.run is run:
                    await runner.write(replace(runner.record, run=run.record()))
            await asyncio.to_thread(_unlink, folded)
        except AenvError as error:
            log.warning("sandbox.not_shortened", run=run.name, error=error.message)

    async def tell_time(self, runner: Runner) -> None:
        """Set the clock of a guest that may have been stopped for a while and goes on as what it was."""
        if (run := runner.run) is None:
            return
        try:
            await self._launcher.greeter.tell_time(run, runner.record)
        except AenvError as error:
            if runner.run is run:
                log.warning("sandbox.clock_not_set", run=run.name, error=error.message)

    async def make_durable(self, runner: Runner, kept: Checkpoint) -> None:
        """Bring the state a sandbox is paused in to stable storage, and note that it is there."""
        rest = runner.record.rest
        try:
            await self._images.make_durable(kept.files)
        except AenvError as error:
            if runner.record.rest == rest:
                log.error("sandbox.not_durable", id=runner.record.id, error=error.message)
            return
        if rest is not None and runner.record.rest == rest:
            with suppress(InfrastructureError):
                await runner.write(replace(runner.record, rest=replace(rest, durable=True)))


def _launched_again(runner: Runner) -> Record:
    """The record of its next launch. One that fails counts: it may still hold its folder when the next one begins."""
    runner.record = replace(runner.record, launches=runner.record.launches + 1)
    return replace(runner.record, generation=uuid.uuid4().hex)


def _running(runner: Runner) -> Run:
    if runner.run is None:
        raise InfrastructureError(f"sandbox {runner.record.id} has no run")
    return runner.run


async def _removed(runner: Runner, folder: Path) -> None:
    """Delete a checkpoint that the record no longer names."""
    await runner.settle_writes()
    try:
        await to_its_end(remove_folder, folder)
    except InfrastructureError as error:
        log.warning("sandbox.folder_stays", id=runner.record.id, error=error.message)


def _unlink(layers: list[Path]) -> None:
    for layer in layers:
        layer.unlink(missing_ok=True)
