"""States of sandboxes: create, pause, resume, snapshot, fork, rollback of real microVMs, and what an idle one costs.

The server is one of the benchmark's own (`benchmarks.node`), at first without standbys, then as it is by default. Times
are those of a client whose connection stays open. Each measurement has a budget of time, so that a slow or busy machine
gives fewer samples (never under three), not a longer run: on two free cores, n = 100 takes under ten minutes.
"""

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable

from benchmarks import density, floor, moving
from benchmarks.client import Client, connected
from benchmarks.common import Result, rounds
from benchmarks.node import Node, scratch_node

STEPS = {
    "slot": "network slot",
    "disk": "disk",
    "memory": "memory image",
    "vmm": "start of the VMM",
    "load": "load of the state",
    "greet": "the guest takes its name",
}
"""Of a launch, as the server names and as the table calls them."""
LOGIN_SHELL = ["/bin/bash", "-l", "-c", "echo ready"]
"""How the SDKs run a command; `echo` alone shows what of it is bash."""
ECHO = ["/bin/echo", "ready"]
LULL = moving.LULL

Section = Callable[[Node, Client, int], Awaitable[list[Result]]]


async def run(n: int) -> list[Result]:
    """All of it. A part that fails is told on standard error; the others are measured all the same."""
    results: list[Result] = []
    async with scratch_node() as node:
        async with node.started(standby_ready=0, standby_prepared=0), connected(node.profile) as client:
            await _warm_up(client)
            for section in (_creates, _outputs, *moving.SECTIONS, *density.SECTIONS):
                results += await _measured(section, node, client, n)
        async with node.started(), connected(node.profile) as client:
            await _warm_up(client)
            for section in (_standbys, _outputs_ahead, *moving.AHEAD):
                results += await _measured(section, node, client, n)
    return results


async def _measured(section: Section, node: Node, client: Client, n: int) -> list[Result]:
    began = time.monotonic()
    try:
        return await section(node, client, n)
    except Exception:
        sys.stderr.write(f"{section.__name__.strip('_')} failed:\n{traceback.format_exc()}")
        return []
    finally:
        sys.stderr.write(f"{section.__name__.strip('_')}: {time.monotonic() - began:.0f} s\n")


async def _warm_up(client: Client) -> None:
    """The first sandbox of a template on a node may have to boot it."""
    for _ in range(2):
        async with client.sandbox():
            pass


async def _creates(node: Node, client: Client, n: int) -> list[Result]:
    """Creates and the floor in turns, so that both see the same machine."""
    creates: list[float] = []
    deletes: list[float] = []
    steps: dict[str, list[float]] = {step: [] for step in STEPS}
    floors: dict[str, list[float]] = {"running": [], "greet": []}
    async with floor.opened(node.settings, node.home) as by_hand:
        for _ in rounds(n, seconds=90):
            created = await client.create()
            deletes.append((await client.delete(created.body["sandboxID"])).ms)
            creates.append(created.ms)
            for step in STEPS:
                steps[step].append(created.steps[step])
            found = await by_hand.restore()
            for name, samples in floors.items():
                samples.append(found[name])
    ours = Result.goal_of("create to envd ready, no standby", creates, "ms", p50=60, p99=150)
    names = {
        "running": "floor, by hand: spawn QEMU, load the same state, virtual CPUs run",
        "greet": "floor, by hand: until the guest has taken its name, as our create tells it",
    }
    lows = {name: Result.of(names[name], samples, "ms") for name, samples in floors.items()}
    ratios = [
        Result.of(
            f"create over the floor ({name})",
            [ours.p50 / low.p50],
            "x",
            goal=None if name == "running" else "<= 1.8 x",
            met=None if name == "running" else ours.p50 <= 1.8 * low.p50,
        )
        for name, low in lows.items()
    ]
    parts = [Result.of(f"of it, {STEPS[step]}", steps[step], "ms") for step in STEPS]
    beside = [total - sum(each) for total, *each in zip(creates, *steps.values(), strict=True)]
    return [
        ours,
        *parts,
        Result.of("of it, all else, HTTP included", beside, "ms"),
        *lows.values(),
        *ratios,
        Result.of("delete", deletes, "ms"),
    ]


async def _outputs(_node: Node, client: Client, n: int) -> list[Result]:
    login, echo = await _first_outputs(client, n, 0)
    return [
        Result.of("create to first output, `bash -l -c` as the SDKs do, no standby", login, "ms"),
        Result.of("create to first output, `echo` without a shell, no standby", echo, "ms"),
    ]


async def _outputs_ahead(_node: Node, client: Client, n: int) -> list[Result]:
    login, echo = await _first_outputs(client, n, LULL)
    return [
        Result.goal_of("create to first output, `bash -l -c` as the SDKs do", login, "ms", p50=120, p99=300),
        Result.of("create to first output, `echo` without a shell", echo, "ms"),
    ]


async def _first_outputs(client: Client, n: int, pause: float) -> list[list[float]]:
    took: dict[str, list[float]] = {LOGIN_SHELL[0]: [], ECHO[0]: []}
    for _ in rounds(n, seconds=60):
        for argv in (LOGIN_SHELL, ECHO):
            await asyncio.sleep(pause)
            began = time.perf_counter()
            async with client.sandbox() as sandbox:
                await client.first_output(sandbox, argv)
                took[argv[0]].append((time.perf_counter() - began) * 1000)
    return [*took.values()]


async def _standbys(_node: Node, client: Client, n: int) -> list[Result]:
    """Two creates in a row: the first one meets the ready guest, the second the prepared VMM."""
    kinds: dict[str, list[float]] = {"ready": [], "prepared": [], "none": []}
    for _ in rounds(n, seconds=60):
        await asyncio.sleep(LULL)  # a server tells nobody that its stock is full again
        made = [await client.create() for _ in range(2)]
        for created in made:
            kind = "none" if "vmm" in created.steps else "prepared" if "load" in created.steps else "ready"
            kinds[kind].append(created.ms)
        for created in made:
            await client.delete(created.body["sandboxID"])
    results = []
    if kinds["ready"]:
        results.append(Result.goal_of("create with a standby, ready", kinds["ready"], "ms", p50=20, p99=60))
    if kinds["prepared"]:
        results.append(Result.of("create with a standby, a prepared VMM", kinds["prepared"], "ms"))
    shares = 100 * len(kinds["none"]) / sum(len(samples) for samples in kinds.values())
    return [*results, Result.of(f"creates that met no standby, of pairs {LULL:g} s apart", [shares], "%")]
