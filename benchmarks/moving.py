"""Pause, resume, snapshot, fork, rollback: how long the client waits and how long the guest stands still."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import pairwise

from benchmarks.agent import started
from benchmarks.client import Client
from benchmarks.common import Result, rounds
from benchmarks.node import Node

CYCLES = 50
LITTLE, MUCH, ON_DISK = 8, 100, 1024
"""MiB written before a pause. A guest that only answers dirties 1 to 2 MiB by itself."""
CHILDREN = 16
LULL = 0.7
"""Seconds in which the server makes ahead what was used, where a row is about that."""


async def _cycles(_node: Node, client: Client, n: int) -> list[Result]:
    """Sandboxes that are paused and resumed 50 times each."""
    pauses: list[list[float]] = []
    resumes: list[list[float]] = []
    for _ in rounds(max(1, n // CYCLES), seconds=120, least=1):
        async with client.sandbox() as sandbox:
            agent, name = await started(client, sandbox), sandbox["sandboxID"]
            pauses.append([])
            resumes.append([])
            for _ in range(CYCLES):
                await agent.write_memory(LITTLE)
                pauses[-1].append((await client.pause(name)).ms)
                resumes[-1].append((await client.resume(name)).ms)
    return [
        Result.goal_of("pause, up to 10 MB dirty", _flat(pauses), "ms", p50=30, p99=80),
        Result.of("resume to envd ready, no VMM prepared", _flat(resumes), "ms"),
        *(
            Result.of(
                f"{what}, cycles {first} to {last} of a sandbox", _flat(of[first - 1 : last] for of in all_), "ms"
            )
            for what, all_ in (("pause", pauses), ("resume", resumes))
            for first, last in ((1, 3), (9, 11), (CYCLES - 2, CYCLES))
        ),
    ]


def _flat(lists: Iterable[list[float]]) -> list[float]:
    return [sample for samples in lists for sample in samples]


async def _pauses_much(_node: Node, client: Client, n: int) -> list[Result]:
    """Half as many: to write 100 MB in an emulated guest takes as long as ten pauses."""
    pauses, resumes, stops = [], [], []
    async with client.sandbox() as sandbox:
        agent, name = await started(client, sandbox), sandbox["sandboxID"]
        for _ in rounds(n // 2, seconds=60):
            await agent.write_memory(MUCH)
            paused = await client.pause(name)
            pauses.append(paused.ms)
            stops.append(paused.steps["stopped"])
            resumes.append((await client.resume(name)).ms)
    return [
        Result.goal_of("pause, 100 MB dirty", pauses, "ms", p50=100, p99=200),
        Result.of("of it, capture of the stopped guest", stops, "ms"),
        Result.of("resume after 100 MB dirty", resumes, "ms"),
    ]


async def _pauses_disk(_node: Node, client: Client, n: int) -> list[Result]:
    """A tenth: each sample is a sandbox of its own that writes 1 GiB and syncs it, with 512 MiB of memory."""
    pauses, stops = [], []
    for _ in rounds(n // 10, seconds=70):
        async with client.sandbox() as sandbox:
            agent = await started(client, sandbox)
            await agent.write_disk(ON_DISK)
            paused = await client.pause(sandbox["sandboxID"])
            pauses.append(paused.ms)
            stops.append(paused.steps["stopped"])
    return [
        Result.goal_of("pause after writing 1 GiB to disk", pauses, "ms", p50=100, p99=200),
        Result.of("of it, capture of the stopped guest", stops, "ms"),
    ]


async def _stops(_node: Node, client: Client, n: int) -> list[Result]:
    """Snapshots and forks in turns, half of `n` of each. The guest sends a sign of life every millisecond or two; the
    longest silence is what somebody outside sees of the stop, the machine's own delays included."""
    stopped: dict[str, list[float]] = {"snapshot": [], "fork": []}
    calls: dict[str, list[float]] = {"snapshot": [], "fork": []}
    silences: dict[str, list[float]] = {"snapshot": [], "fork": []}
    async with client.sandbox() as sandbox:
        agent, name = await started(client, sandbox), sandbox["sandboxID"]
        for turn in rounds(n, seconds=80):
            await agent.write_memory(MUCH)
            what = ("snapshot", "fork")[turn % 2]
            async with agent.beats() as beats:
                taken = await (client.snapshot(name) if what == "snapshot" else client.fork(name, 1))
                until = len(beats)
                calls[what].append(taken.ms)
                stopped[what].append(taken.steps["stopped"])
                silences[what].append(_silence(beats[:until]))
            if what == "snapshot":
                await client.delete_snapshot(taken.body["snapshotID"])
            else:
                await client.delete(taken.body[0])
    return [
        row
        for what in stopped
        for row in (
            Result.goal_of(f"source stopped by a {what}, 100 MB dirty", stopped[what], "ms", p50=40, p99=100),
            Result.of("longest silence of the guest meanwhile, as a client sees it", silences[what], "ms"),
            Result.of(f"the whole {what}" + (" of one child" if what == "fork" else ""), calls[what], "ms"),
        )
    ]


def _silence(times: Sequence[float]) -> float:
    """The longest one between two of these, in milliseconds."""
    return max((after - before for before, after in pairwise(times)), default=0.0) * 1000


async def _forks(_node: Node, client: Client, n: int) -> list[Result]:
    """A fifth: each sample is 16 sandboxes."""
    calls: list[float] = []
    async with client.sandbox() as sandbox:
        agent, name = await started(client, sandbox), sandbox["sandboxID"]
        for _ in rounds(n // 5, seconds=70):
            await agent.write_memory(LITTLE)
            forked = await client.fork(name, CHILDREN)
            calls.append(forked.ms)
            for child in forked.body:
                await client.delete(child)
    return [Result.goal_of(f"fork {CHILDREN}, all children envd ready", calls, "ms", p50=600, p99=1000)]


async def _rollbacks(_node: Node, client: Client, n: int) -> list[Result]:
    calls: list[float] = []
    async with client.sandbox() as sandbox:
        agent, name = await started(client, sandbox), sandbox["sandboxID"]
        snapshot = (await client.snapshot(name)).body["snapshotID"]
        try:
            for _ in rounds(n, seconds=50):
                await agent.write_memory(LITTLE)
                calls.append((await client.rollback(name, snapshot)).ms)
        finally:
            await client.delete_snapshot(snapshot)
    return [Result.of("rollback, no VMM prepared", calls, "ms")]


async def _ahead(_node: Node, client: Client, n: int) -> list[Result]:
    """Resumes and rollbacks in turns, of a sandbox that is left alone for a moment in between."""
    resumes: list[float] = []
    rollbacks: list[float] = []
    async with client.sandbox() as sandbox:
        agent, name = await started(client, sandbox), sandbox["sandboxID"]
        snapshot = (await client.snapshot(name)).body["snapshotID"]
        try:
            for _ in rounds(n, seconds=120):
                await agent.write_memory(LITTLE)
                await client.pause(name)
                await asyncio.sleep(LULL)
                resumes.append((await client.resume(name)).ms)
                await agent.write_memory(LITTLE)
                await asyncio.sleep(LULL)
                rollbacks.append((await client.rollback(name, snapshot)).ms)
        finally:
            await client.delete_snapshot(snapshot)
    return [
        Result.goal_of("resume to envd ready", resumes, "ms", p50=50, p99=120),
        Result.goal_of("rollback", rollbacks, "ms", p50=60, p99=150),
    ]


AHEAD = (_ahead,)
SECTIONS = (_cycles, _pauses_much, _pauses_disk, _stops, _forks, _rollbacks)
