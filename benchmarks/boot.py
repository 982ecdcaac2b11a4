"""Cold boot on a running server: create to the first command's output, and what of it is our own control plane's.

A create answers with `Server-Timing`: milliseconds of each step of the launch. `vmm` is from the order to start the VMM
to its control socket's answer, `guest` from there to the daemon's first answer, `init` the daemon's first call, most of
it on the emulated CPU; all else of the create call, HTTP included, is our control plane.
"""

import asyncio
import re
import statistics
import time
from typing import Any

import httpx

from aenv.cli.client import ApiClient
from aenv.cli.process import Command, Processes
from aenv.cli.profile import resolve
from benchmarks.common import Result

GOAL_COLD_BOOT_S = 6.0
GOAL_CONTROL_PLANE_MS = 50.0


async def run(n: int) -> list[Result]:
    """`n` sandboxes one after the other; each is deleted before the next."""
    steps = ("output", "control", "vmm", "guest", "init", "delete")
    samples: dict[str, list[float]] = {step: [] for step in steps}
    async with httpx.AsyncClient() as http:
        api = ApiClient(resolve(), http)
        for _ in range(n):
            began = time.perf_counter()
            sandbox, timing = await _create(api)
            created = time.perf_counter()
            await _first_output(api, sandbox)
            samples["output"].append(time.perf_counter() - began)
            samples["control"].append((created - began) * 1000 - timing["vmm"] - timing["guest"] - timing["init"])
            for step in ("vmm", "guest", "init"):
                samples[step].append(timing[step])
            began = time.perf_counter()
            await api.delete(sandbox["sandboxID"])
            samples["delete"].append((time.perf_counter() - began) * 1000)
    boot_met = statistics.median(samples["output"]) <= GOAL_COLD_BOOT_S
    control_met = statistics.median(samples["control"]) <= GOAL_CONTROL_PLANE_MS
    return [
        Result.of("cold boot: create to first output", samples["output"], "s", goal="p50 <= 6 s", met=boot_met),
        Result.of("of it, our control plane", samples["control"], "ms", goal="p50 <= 50 ms", met=control_met),
        Result.of("of it, start of the VMM", samples["vmm"], "ms"),
        Result.of("of it, boot of the guest", samples["guest"], "ms"),
        Result.of("of it, first call of the guest's daemon", samples["init"], "ms"),
        Result.of("delete", samples["delete"], "ms"),
    ]


async def _create(api: ApiClient) -> tuple[dict[str, Any], dict[str, float]]:
    answer = await api.http.post(
        f"{api.profile.api_url}/v2/sandboxes",
        json={"templateID": "base", "timeout": 120},
        headers={"X-API-Key": api.profile.api_key},
        timeout=180.0,
    )
    answer.raise_for_status()
    timing = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}
    return answer.json(), timing


async def _first_output(api: ApiClient, sandbox: dict[str, Any]) -> None:
    command = Command(argv=["/bin/bash", "-l", "-c", "echo ready"], envs={})
    async with asyncio.timeout(60):
        async for message in Processes(api, sandbox, None).start(command, stdin=False):
            if "data" in message.get("event", {}):
                return
