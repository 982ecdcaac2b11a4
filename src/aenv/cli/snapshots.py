"""Commands on snapshots: snapshot create, ls, rm."""

from typing import Annotated

import typer

from aenv.cli.output import Format, Output, print_id, print_json, print_rows, wants_json
from aenv.cli.run import for_each, with_client
from aenv.cli.sandboxes import SandboxId

app = typer.Typer(
    help="Snapshots of sandboxes; `aenv start` takes one in the place of a template.", no_args_is_help=True
)


@app.command()
def create(
    sandbox_id: SandboxId,
    name: Annotated[
        str | None, typer.Option("--name", help="name or name:tag; one that is in use moves to this snapshot.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Whether to take memory and processes too; else only the disk.")] = True,
    output: Output = None,
) -> None:
    """Take a snapshot of a sandbox, which goes on, and print the snapshot's id."""
    taken = with_client(lambda api: api.snapshot(sandbox_id, name, memory=memory))
    if output is Format.JSON:
        print_json(taken)
    else:
        print_id(taken["snapshotID"])


@app.command("ls")
def list_(
    sandbox_id: Annotated[str | None, typer.Option("--sandbox", help="Only those of this sandbox.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only with this name, or name:tag.")] = None,
    output: Output = None,
) -> None:
    """List snapshots, newest first."""
    rows = with_client(lambda api: api.snapshots(sandbox_id=sandbox_id, name=name))
    if not wants_json(output):
        for row in rows:
            row |= {"snapshot": row["snapshotID"], "sandbox": row["sandboxID"], "memory": f"{row['memoryMB']} MiB"}
            row |= {"names": " ".join(row["names"]), "created": row["createdAt"][:19].replace("T", " ") + " UTC"}
    print_rows(rows, ("snapshot", "sandbox", "created", "memory", "names"), output)


@app.command()
def rm(snapshot_ids: Annotated[list[str], typer.Argument(help="Ids or names of the snapshots to delete.")]) -> None:
    """Delete snapshots; sandboxes made of them live on."""
    for_each(snapshot_ids, lambda api, snapshot_id: api.delete_snapshot(snapshot_id))
