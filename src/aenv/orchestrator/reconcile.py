"""The start of a server after any end of the previous one: the node is the truth, the rows follow it.

Every row that is not ended is adopted or ended with its reason; every VMM, slot, image and folder without one is
removed. What was in flight has not happened: a sandbox that was running runs on, one that was paused stays so.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from aenv.errors import AenvError, ConfigError, InfrastructureError
from aenv.images.protocol import ImageStore
from aenv.lifecycle.events import Adopted, HostRestarted, Orphaned, StateLost
from aenv.lifecycle.states import Stable
from aenv.network.protocol import Network
from aenv.orchestrator.host import host_boot_id
from aenv.orchestrator.launcher import place, remove_folder
from aenv.orchestrator.operations import Operations
from aenv.orchestrator.record import Record
from aenv.orchestrator.runner import Runner
from aenv.snapshots.checkpoint import read
from aenv.vmm.protocol import Vmm

log = structlog.get_logger(__name__)

ADOPTIONS = 16
"""At the same time: a VMM that does not answer takes its whole deadline."""


async def reconcile(
    records: list[Record],
    *,
    sandboxes_dir: Path,
    vmm: Vmm,
    network: Network,
    images: ImageStore,
    operations: Operations,
    make_runner: Callable[[Record], Runner],
) -> None:
    """Bring the node and `records` (all rows not ended) together. Raises only what makes the node unusable."""
    boot_id = host_boot_id()
    candidates = {
        r.id: r
        for r in records
        if r.life.position.stable is Stable.RUNNING and r.run is not None and r.run.boot_id == boot_id
    }
    runs = {r.id: r.run for r in candidates.values() if r.run is not None}
    await _sweep(vmm, candidates.values())
    await network.start({run.slot: candidates[sandbox_id].spec.egress for sandbox_id, run in runs.items()})
    await images.start(
        [place(sandboxes_dir, run.name) for run in runs.values()],
        {run.image for run in runs.values() if run.image is not None},
    )
    kept = {sandboxes_dir / r.id / r.rest.folder for r in records if r.rest is not None}
    kept |= {place(sandboxes_dir, r.run.name) for r in records if r.run is not None}
    await asyncio.to_thread(_remove_folders, sandboxes_dir, {sandboxes_dir / r.id for r in records}, kept)

    runners = {record.id: make_runner(record) for record in records}
    failures = await _adopt([runners[sandbox_id] for sandbox_id in candidates])
    if failures:  # such a VMM may still run; its slot is released only after it is dead
        await _sweep(vmm, [r for r in candidates.values() if r.id not in failures])

    for record in records:
        runner = runners[record.id]
        if record.life.position.stable is Stable.PAUSED:
            await _rest(runner, sandboxes_dir / record.id, boot_id, operations)
        elif record.id in failures:
            runner.post(Orphaned(f"its VMM could not be taken over: {failures[record.id]}"))
        elif record.id in candidates:
            runner.post(Adopted())
            runner.later(operations.tell_time(runner))  # the last server may have ended while it was stopped
        elif record.run is not None and record.run.boot_id != boot_id:
            runner.post(HostRestarted())
        else:
            runner.post(Orphaned(f"the server ended while it was {record.life.position.operation}"))


async def _rest(runner: Runner, folder: Path, boot_id: str, operations: Operations) -> None:
    """Judge a paused sandbox by what was kept of it."""
    rest = runner.record.rest
    try:
        if rest is None:
            raise InfrastructureError("the record names no state")
        if not rest.durable and rest.boot_id != boot_id:
            raise InfrastructureError("the host went down before it had reached stable storage")
        kept = await asyncio.to_thread(read, folder / rest.folder)
    except AenvError as error:
        runner.post(StateLost(error.message))
        return
    runner.post(Adopted())
    if not rest.durable:
        runner.later(operations.make_durable(runner, kept))


async def _adopt(runners: list[Runner]) -> dict[str, str]:
    """Take over VMMs; the ids and errors of those that could not be."""
    failures: dict[str, str] = {}
    turns = asyncio.Semaphore(ADOPTIONS)

    async def adopt(runner: Runner) -> None:
        async with turns:
            try:
                await runner.adopt()
            except AenvError as error:
                failures[runner.record.id] = error.message

    async with asyncio.TaskGroup() as tasks:
        for runner in runners:
            tasks.create_task(adopt(runner), name=f"adopt {runner.record.id}")
    return failures


async def _sweep(vmm: Vmm, keep: Iterable[Record]) -> None:
    killed = await vmm.sweep(frozenset(record.run.vm for record in keep if record.run))
    if killed:
        log.info("reconcile.swept", vmms=killed)


def _remove_folders(sandboxes_dir: Path, sandboxes: set[Path], kept: set[Path]) -> None:
    """Remove all folders but those of `sandboxes`, and all in them but those `kept`, which may also lie in others."""
    try:
        sandboxes_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {sandboxes_dir}: {error}") from error
    folders = sandboxes | {folder.parent for folder in kept}
    doomed = [folder for folder in sandboxes_dir.iterdir() if folder not in folders]
    doomed += [part for folder in folders if folder.is_dir() for part in folder.iterdir() if part not in kept]
    for folder in doomed:
        try:
            remove_folder(folder)
        except InfrastructureError as error:
            log.warning("reconcile.folder_stays", error=error.message)
