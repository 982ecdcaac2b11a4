"""Which scenario is which, and the table they end in."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

from aenv.cli.errors import CliError
from aenv.config import LogSettings
from aenv.observability import logs
from benchmarks import boot, proxy, states, storage
from benchmarks.common import Result, hardware, markdown

SCENARIOS: dict[str, Callable[[int], Awaitable[list[Result]]]] = {
    "boot": boot.run,
    "proxy": proxy.run,
    "states": states.run,
    "storage": storage.run,
    "storage-cold": storage.run_cold,
}
ALL = ("boot", "proxy")
"""Those that measure a running server; the others stand alone."""


def run(scenario: str, n: int) -> None:
    """Run one scenario, or all of a server; print a Markdown table for each. Raises CliError for an unknown name."""
    chosen = {
        name: measure for name, measure in SCENARIOS.items() if scenario == name or (scenario == "all" and name in ALL)
    }
    if not chosen:
        raise CliError(f"no scenario '{scenario}'; there are: all, {', '.join(SCENARIOS)}")
    logs.configure(LogSettings(level="warning"))
    sys.stdout.write(f"{hardware()}\n")
    for name, measure in chosen.items():
        try:
            results = asyncio.run(measure_one(measure, n))
        except asyncio.CancelledError:
            raise CliError(f"{name} was ended by SIGTERM") from None
        sys.stdout.write(f"\n### {name}\n\n{markdown(results)}\n")
        sys.stdout.flush()


async def measure_one(measure: Callable[[int], Awaitable[list[Result]]], n: int) -> list[Result]:
    """`measure(n)`; a SIGTERM ends it as a Ctrl-C does, with what it made cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measure(n)
