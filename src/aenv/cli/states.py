"""Commands that hold, wake, branch and turn back a sandbox: pause, resume, fork, rollback."""

from typing import Annotated

import typer

from aenv.cli.client import ApiClient
from aenv.cli.errors import CliError
from aenv.cli.output import Format, Output, print_id, print_json
from aenv.cli.run import for_each, with_client
from aenv.cli.sandboxes import DEFAULT_TIMEOUT, SandboxId, SandboxIds, Timeout

app = typer.Typer()


@app.command()
def pause(
    sandbox_ids: SandboxIds,
    memory: Annotated[
        bool, typer.Option(help="Whether to keep memory and processes; else only the disk, from which a resume boots.")
    ] = True,
) -> None:
    """Pause sandboxes: their state is kept, and they use neither CPU nor memory."""
    for_each(sandbox_ids, lambda api, sandbox_id: api.pause(sandbox_id, memory=memory))


@app.command()
def resume(
    sandbox_ids: SandboxIds,
    timeout: Timeout = DEFAULT_TIMEOUT,
    reboot: Annotated[bool, typer.Option("--reboot", help="Drop the saved memory and boot from the disk.")] = False,
) -> None:
    """Resume paused sandboxes where they were (one that runs gets at least --timeout from now)."""

    async def work(api: ApiClient, sandbox_id: str) -> None:
        await api.connect(sandbox_id, timeout, memory=not reboot)

    for_each(sandbox_ids, work)


@app.command()
def fork(
    sandbox_id: SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many children.")] = 1,
    timeout: Timeout = DEFAULT_TIMEOUT,
    output: Output = None,
) -> None:
    """Make children of a sandbox's present state, disk, memory and processes, and print their ids."""
    results = with_client(lambda api: api.fork(sandbox_id, count, timeout))
    children = [result["sandbox"] for result in results if "sandbox" in result]
    if output is Format.JSON:
        print_json(children)
    else:
        for child in children:
            print_id(child["sandboxID"])
    if failures := [result["error"]["message"] for result in results if "error" in result]:
        whys = "; ".join(dict.fromkeys(failures))
        raise CliError(f"{len(failures)} of {len(results)} children could not be started: {whys}")


@app.command()
def rollback(
    sandbox_id: SandboxId,
    snapshot_id: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="One of its own: id, name or name:tag.")],
) -> None:
    """Put a sandbox back to one of its snapshots; it keeps its id. What it was since then is lost."""
    with_client(lambda api: api.rollback(sandbox_id, snapshot_id))
