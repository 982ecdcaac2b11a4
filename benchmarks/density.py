"""Many at once: creates per second, memory of an idle sandbox, and whether the guest's size matters."""

import asyncio
import time
from pathlib import Path

from benchmarks.client import Client, connected
from benchmarks.common import Result, rounds
from benchmarks.node import Node

CLIENTS = 10
EACH = 3
IDLE = 16
"""Sandboxes whose memory is measured; their forked siblings are as many."""
SETTLE = 5.0
"""Seconds until a sandbox that nobody uses counts as idle."""
SIZES = (512, 2048, 4096)
"""MiB of guest memory."""
MB = 1_000_000


async def _rate(node: Node, _client: Client, n: int) -> list[Result]:
    """Each round is three creates of each of ten clients, which are deleted before the next."""
    rates: list[float] = []
    latencies: list[float] = []
    for _ in rounds(n // (CLIENTS * EACH) + 2, seconds=50):
        began = time.perf_counter()
        made = await asyncio.gather(*(_creating(node) for _ in range(CLIENTS)))
        rates.append(CLIENTS * EACH / (time.perf_counter() - began))
        latencies += [ms for ids in made for _, ms in ids]
        async with connected(node.profile) as client:
            await asyncio.gather(*(client.delete(sandbox) for ids in made for sandbox, _ in ids))
    rate = Result.of("", rates, "1/s").p50
    return [
        Result.of(f"creates per second, {CLIENTS} clients", rates, "1/s", goal=">= 12", met=rate >= 12),
        Result.of("latency of a create then", latencies, "ms"),
    ]


async def _creating(node: Node) -> list[tuple[str, float]]:
    async with connected(node.profile) as client:
        made = [await client.create() for _ in range(EACH)]
        return [(created.body["sandboxID"], created.ms) for created in made]


async def _memory(node: Node, client: Client, _n: int) -> list[Result]:
    """Proportional set sizes, pages of files not counted: the VMM's, and its share of what our daemons grew."""
    results = []
    async with client.sandbox() as source:
        for what in ("sandbox of a template", "forked child"):
            ours = [node.pid, await node.blockd_pid()]
            before = sum(_own_bytes(pid) for pid in ours)
            if what == "forked child":
                names = (await client.fork(source["sandboxID"], IDLE)).body
            else:
                names = [(await client.create()).body["sandboxID"] for _ in range(IDLE)]
            try:
                await asyncio.sleep(SETTLE)
                grown = max(0, sum(_own_bytes(pid) for pid in ours) - before) / IDLE
                pids = node.vmm_pids()
                each = [(_own_bytes(pids[name]) + grown) / MB for name in names]
            finally:
                await asyncio.gather(*(client.delete(name) for name in names))
            middle = Result.of("", each, "MB").p50
            results += [
                Result.of(f"memory of an idle {what}", each, "MB", goal="<= 45 MB", met=middle <= 45),
                Result.of("of it, growth of server and aenv-blockd", [grown / MB], "MB"),
            ]
    return results


def _own_bytes(pid: int) -> int:
    """What a process has of its own or shares in memory, without pages of files on disk."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in rollup.splitlines()[1:])}
    return (kib["Pss_Anon"] + kib["Pss_Shmem"]) * 1024


async def _sizes(node: Node, client: Client, n: int) -> list[Result]:
    """A fifth of `n` for each size: the rows are there to be compared."""
    results = []
    for size in SIZES:
        name = await asyncio.to_thread(node.add_template, size)
        async with client.sandbox(name):
            pass  # boots it
        took: dict[str, list[float]] = {"create": [], "pause": [], "resume": []}
        for _ in rounds(n // 5, seconds=25):
            created = await client.create(name)
            sandbox = created.body["sandboxID"]
            took["create"].append(created.ms)
            took["pause"].append((await client.pause(sandbox)).ms)
            took["resume"].append((await client.resume(sandbox)).ms)
            await client.delete(sandbox)
        results += [Result.of(f"{what}, guest of {size} MiB", samples, "ms") for what, samples in took.items()]
    return results


SECTIONS = (_rate, _memory, _sizes)
