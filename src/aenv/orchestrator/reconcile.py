"""The start of a server after any end of the previous one: the node is the truth, the rows follow it.

Every row that is not ended is adopted or ended with its reason; every VMM, slot and folder without one is removed.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from aenv.errors import AenvError, ConfigError, InfrastructureError
from aenv.images.protocol import ImageStore
from aenv.lifecycle.events import Adopted, HostRestarted, Orphaned
from aenv.lifecycle.states import RUNNING
from aenv.network.protocol import Network
from aenv.orchestrator.launcher import remove_folder
from aenv.orchestrator.record import Record
from aenv.orchestrator.runner import Runner
from aenv.vmm.protocol import Vmm

log = structlog.get_logger(__name__)

ADOPTIONS = 16
"""At the same time: a VMM that does not answer takes its whole deadline."""


def host_boot_id() -> str:
    """Changes at every boot of the host: what ran under another one cannot run any more."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def reconcile(
    records: list[Record],
    *,
    sandboxes_dir: Path,
    vmm: Vmm,
    network: Network,
    images: ImageStore,
    make_runner: Callable[[Record], Runner],
) -> None:
    """Bring the node and `records` (all rows not ended) together. Raises only what makes the node unusable."""
    boot_id = host_boot_id()
    candidates = {
        r.id: r for r in records if r.life.position == RUNNING and r.boot_id == boot_id and r.vm and r.slot is not None
    }
    await _sweep(vmm, candidates.values())
    await network.start({r.slot: r.spec.egress for r in candidates.values() if r.slot is not None})
    await images.start([sandboxes_dir / sandbox_id for sandbox_id in candidates])
    await asyncio.to_thread(_remove_folders, sandboxes_dir, {record.id for record in records})

    runners = {record.id: make_runner(record) for record in records}
    failures = await _adopt([runners[sandbox_id] for sandbox_id in candidates])
    if failures:  # such a VMM may still run; its slot is released only after it is dead
        await _sweep(vmm, [r for r in candidates.values() if r.id not in failures])

    for record in records:
        runner = runners[record.id]
        if record.boot_id != boot_id:
            runner.post(HostRestarted())
        elif record.id in failures:
            runner.post(Orphaned(f"its VMM could not be taken over: {failures[record.id]}"))
        elif record.id in candidates:
            runner.post(Adopted())
        else:
            runner.post(Orphaned(f"the server ended while it was {record.life.position.operation}"))


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
    killed = await vmm.sweep(frozenset(record.vm for record in keep if record.vm))
    if killed:
        log.info("reconcile.swept", vmms=killed)


def _remove_folders(sandboxes_dir: Path, known: set[str]) -> None:
    try:
        sandboxes_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {sandboxes_dir}: {error}") from error
    for folder in sandboxes_dir.iterdir():
        if folder.name not in known:
            try:
                remove_folder(folder)
            except InfrastructureError as error:
                log.warning("reconcile.folder_stays", error=error.message)
