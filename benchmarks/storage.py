"""The data plane's disks: aenv-blockd side by side with qemu-storage-daemon and the raw file, in one run.

All comparisons are interleaved: each repetition measures every contender, one after the other. Needs root (mounts),
fio and qemu-storage-daemon; no server. Everything is made in a folder of the node's home, so on the disk that
sandboxes use.
"""

import asyncio
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aenv.cli.errors import CliError
from aenv.config import load
from aenv.images.client import Layer
from aenv.images.store import scratch_daemon
from benchmarks.common import Result, rss_bytes
from benchmarks.storage_lab import CASES, Case, Lab, evict, fio, resident, warm

DEPTH = 4
DEEP = 32
EXTENTS = 100_000
MANY = 500
NAMES = {"raw": "raw file", "qemu": "qemu-storage-daemon", "blockd": "aenv-blockd"}
_BLOCK = 4096
_BASE_RSS = 20_000_000
_RSS_PER_EXTENT = 24


async def run(n: int) -> list[Result]:
    """Repetitions follow `n`, within 3 to 7 for what takes seconds each."""
    repetitions = _repetitions(n)
    async with _lab() as (lab, pid):
        idle = rss_bytes(pid)
        results = await metadata(lab, repetitions, pid, idle)
        await lab.build(DEPTH)
        await same_content(lab)
        results = [*await throughput(lab, repetitions), *await cold(lab, repetitions), *results]
        results += await sharing(lab)
        results += await depth(lab, repetitions)
        return results


async def run_cold(n: int) -> list[Result]:
    """Only what depends on the disk: a minute instead of six, for when the disk is quiet."""
    async with _lab() as (lab, _):
        await lab.build(DEPTH)
        return [*await cold(lab, _repetitions(n)), *await sharing(lab)]


def _repetitions(n: int) -> int:
    return max(3, min(7, n // 4)) | 1  # odd, so that a median is a sample


@asynccontextmanager
async def _lab() -> AsyncIterator[tuple[Lab, int]]:
    """A folder on the disk that sandboxes use, with a daemon of its own and that one's pid."""
    missing = [tool for tool in ("fio", "qemu-storage-daemon", "qemu-img", "fincore") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise CliError(f"needs root and {', '.join(missing) or 'nothing else'}; `make bench-storage` installs them")
    settings = load()
    settings.home.mkdir(mode=0o711, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=settings.home) as folder:
        async with scratch_daemon(settings) as client:
            yield Lab(Path(folder), client), (await client.version()).pid


async def same_content(lab: Lab) -> None:
    """What is compared must be the same."""
    digests = set()
    for who in NAMES:
        async with lab.serve(who) as path:
            digests.add(await asyncio.to_thread(_digest, path))
    if len(digests) != 1:
        raise CliError("the three forms of the content differ: nothing measured with them would mean anything")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def throughput(lab: Lab, repetitions: int) -> list[Result]:
    """Every kind of I/O, everything in the page cache: what the servers themselves cost."""
    results = []
    for case in CASES:
        samples: dict[str, list[float]] = {who: [] for who in NAMES}
        for repetition in range(repetitions):
            for who in _rotated(repetition):
                await asyncio.to_thread(os.sync)
                async with lab.serve(who, case) as path:
                    await asyncio.to_thread(warm, *lab.files(who, path))
                    samples[who].append(await fio(path, case, direct=who != "raw"))
        results += _compared(case.what, samples, against="qemu", least=1.0)
    return results


async def cold(lab: Lab, repetitions: int) -> list[Result]:
    """One sequential pass with nothing in the page cache: how much of the disk's own speed is left."""
    results = []
    for depth in (1, 16):
        case = Case(what=f"128 KiB sequential read from disk, depth {depth}", rw="read", block=128 << 10, depth=depth)
        samples: dict[str, list[float]] = {who: [] for who in NAMES}
        for repetition in range(repetitions):
            for who in _rotated(repetition):
                async with lab.serve(who) as path:
                    await asyncio.to_thread(evict, *lab.files(who, path))
                    samples[who].append(await fio(path, case, direct=who != "raw", seconds=0))
        results += _compared(case.what, samples, against="raw", least=0.8)
    return results


def _rotated(repetition: int) -> list[str]:
    """The contenders, each repetition another one first."""
    names = list(NAMES)
    first = repetition % len(names)
    return names[first:] + names[:first]


def _compared(what: str, samples: dict[str, list[float]], *, against: str, least: float) -> list[Result]:
    """A row for each contender; the goal, with the ratio of the medians, stands at blockd's."""
    medians = {who: statistics.median(values) for who, values in samples.items()}
    ratio = medians["blockd"] / medians[against]
    goal = f">= {least:g}x {NAMES[against]}: {ratio:.2f}x"
    rows = []
    for who, name in NAMES.items():
        is_ours = who == "blockd"
        rows.append(
            Result.of(
                f"{what}: {name}",
                [value / 1e6 for value in samples[who]],
                "MB/s",
                goal=goal if is_ours else None,
                met=ratio >= least if is_ours else None,
            )
        )
    return rows


async def metadata(lab: Lab, repetitions: int, pid: int, idle: int) -> list[Result]:
    """Attach and seal with many extents in the upper, and what extents and images cost in memory."""
    attaches, seals, base = [], [], lab.root / "base"
    raw = lab.root / "empty"
    with raw.open("wb") as file:
        file.truncate(2 * EXTENTS * _BLOCK)
    await lab.client.import_(raw, base)
    grown = 0
    for number in range(repetitions):
        upper = lab.root / "upper-extents"
        attached = await lab.client.attach("extents", [Layer(path=base)], upper=upper)
        await asyncio.to_thread(_scatter, attached.path)
        grown = max(grown, rss_bytes(pid))
        for _ in range(3):
            await lab.client.detach("extents")
            began = time.perf_counter()
            attached = await lab.client.attach("extents", [Layer(path=base)], upper=upper)
            attaches.append((time.perf_counter() - began) * 1000)
        if attached.extents < EXTENTS:
            raise CliError(f"the upper holds {attached.extents} extents, not {EXTENTS}")
        began = time.perf_counter()
        await lab.client.seal("extents", lab.root / f"sealed-{number}")
        seals.append((time.perf_counter() - began) * 1000)
        await lab.client.detach("extents", discard_upper=True)
    for number in range(MANY):
        await lab.client.attach(f"many-{number}", [Layer(path=base)], upper=lab.root / f"many/{number}")
    many = rss_bytes(pid)
    for number in range(MANY):
        await lab.client.detach(f"many-{number}", discard_upper=True)
    bound = _BASE_RSS + _RSS_PER_EXTENT * EXTENTS
    attach_met, seal_met = statistics.median(attaches) <= 2, statistics.median(seals) <= 5
    rss = f"<= {bound / 1e6:.1f} MB"
    return [
        Result.of(f"attach, {EXTENTS:,} extents in the upper", attaches, "ms", goal="p50 <= 2 ms", met=attach_met),
        Result.of(f"seal and continue, {EXTENTS:,} extents", seals, "ms", goal="p50 <= 5 ms", met=seal_met),
        Result.of("memory of the daemon, idle", [idle / 1e6], "MB", goal="<= 20 MB", met=idle <= _BASE_RSS),
        Result.of(f"memory, {EXTENTS:,} extents", [grown / 1e6], "MB", goal=rss, met=grown <= bound),
        Result.of(f"memory, {MANY} attached images", [many / 1e6], "MB"),
    ]


def _scatter(path: Path) -> None:
    """One block at every other place: as many extents, none next to another."""
    block = os.urandom(_BLOCK)
    with path.open("r+b", buffering=0) as file:
        for number in range(EXTENTS):
            os.pwrite(file.fileno(), block, 2 * number * _BLOCK)
        os.fsync(file.fileno())


async def sharing(lab: Lab) -> list[Result]:
    """Two sandboxes of one template read all of it: how often are the layers' bytes in memory?"""
    files = lab.layer_files()
    await asyncio.to_thread(evict, *files)
    async with lab.blockd(lab.layers, "one") as one, lab.blockd(lab.layers, "other") as other:
        await asyncio.to_thread(_digest, one)
        first = sum([await resident(path) for path in files])
        await asyncio.to_thread(_digest, other)
        both = sum([await resident(path) for path in [*files, one, other]])
    share = both / first
    return [
        Result.of("page cache after one disk was read whole", [first / 1e6], "MB"),
        Result.of("after a second of the same template", [both / 1e6], "MB", goal="<= 1.05x", met=share <= 1.05),
    ]


async def depth(lab: Lab, repetitions: int) -> list[Result]:
    """The same content in many layers and in one."""
    for number in range(DEPTH, DEEP):
        await lab.add_layer(number)
    flat = lab.root / "flat"
    await lab.client.compact(flat, layers=lab.layers, base=True)
    stacks = {f"{DEEP} layers": lab.layers, "1 layer": [Layer(path=flat)]}
    results = []
    for case in (case for case in CASES if not case.writes):
        samples: dict[str, list[float]] = {name: [] for name in stacks}
        for _ in range(repetitions):
            for name, layers in stacks.items():
                async with lab.blockd(layers) as path:
                    await asyncio.to_thread(warm, *(layer.path for layer in layers if layer.path is not None))
                    samples[name].append(await fio(path, case, direct=True) / 1e6)
        many, one = (statistics.median(values) for values in samples.values())
        goal = f">= 0.9x 1 layer: {many / one:.2f}x"
        deep, single = samples.values()
        results.append(Result.of(f"{case.what}: {DEEP} layers", deep, "MB/s", goal=goal, met=many / one >= 0.9))
        results.append(Result.of(f"{case.what}: 1 layer", single, "MB/s"))
    return results
