"""`aenv bench`: measure the service levels of docs/SPECIFICATION.md. Runs from a source checkout."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from aenv.cli.errors import CliError

app = typer.Typer()


@app.command()
def bench(
    scenario: Annotated[str, typer.Argument(help="boot, proxy, all (both), states, storage, storage-cold.")] = "all",
    n: Annotated[int, typer.Option("--n", "-n", min=3, help="Repetitions of each measurement.")] = 20,
) -> None:
    """Measure latency and throughput; prints Markdown tables with n, p50, p95, p99 and the hardware."""
    sys.path.insert(0, str(Path(__file__).parents[3]))  # the checkout
    try:
        from benchmarks.main import run
    except ModuleNotFoundError as error:
        raise CliError(f"the benchmarks are in the source checkout, with the extra aenv[server] ({error})") from error
    run(scenario, n)
