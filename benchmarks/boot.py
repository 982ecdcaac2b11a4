"""Cold boot on a running server: from the disk to the first command's output, and what of it is our control plane's.

Creates restore a template that was booted once. What still boots is a sandbox that was paused without its memory, so
that is resumed here. The answer's `Server-Timing` has the milliseconds of each step: `vmm` is from the order to start
the VMM to its control socket's answer, `guest` from there to the daemon's first answer, `init` the daemon's first call,
most of it on the emulated CPU; all else of the call, HTTP included, is our control plane.
"""

import statistics
import time

from aenv.cli.profile import resolve
from benchmarks.client import connected
from benchmarks.common import Result

GOAL_COLD_BOOT_S = 6.0
GOAL_CONTROL_PLANE_MS = 50.0
_GUEST_STEPS = ("vmm", "guest", "init")


async def run(n: int) -> list[Result]:
    """`n` boots of one sandbox, one after the other."""
    samples: dict[str, list[float]] = {step: [] for step in ("output", "control", *_GUEST_STEPS)}
    async with connected(resolve()) as client, client.sandbox() as sandbox:
        for _ in range(n):
            await client.pause(sandbox["sandboxID"], memory=False)
            began = time.perf_counter()
            booted = await client.resume(sandbox["sandboxID"])
            await client.first_output(sandbox, ["/bin/bash", "-l", "-c", "echo ready"])
            samples["output"].append(time.perf_counter() - began)
            samples["control"].append(booted.ms - sum(booted.steps[step] for step in _GUEST_STEPS))
            for step in _GUEST_STEPS:
                samples[step].append(booted.steps[step])
    boot_met = statistics.median(samples["output"]) <= GOAL_COLD_BOOT_S
    control_met = statistics.median(samples["control"]) <= GOAL_CONTROL_PLANE_MS
    return [
        Result.of("cold boot: disk to first output", samples["output"], "s", goal="p50 <= 6 s", met=boot_met),
        Result.of("of it, our control plane", samples["control"], "ms", goal="p50 <= 50 ms", met=control_met),
        Result.of("of it, start of the VMM", samples["vmm"], "ms"),
        Result.of("of it, boot of the guest", samples["guest"], "ms"),
        Result.of("of it, first call of the guest's daemon", samples["init"], "ms"),
    ]
