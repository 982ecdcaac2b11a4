"""Commands on sandboxes: start, connect, exec, ls, rm, timeout."""

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from aenv.cli import process, terminal
from aenv.cli.client import ApiClient, Json
from aenv.cli.errors import NOT_THE_COMMAND, CliError
from aenv.cli.output import Format, Output, err, left_until, print_id, print_json, print_rows, wants_json
from aenv.cli.run import for_each, with_client
from aenv.cli.tree import tree
from aenv.errors import AenvError

app = typer.Typer()

DEFAULT_TIMEOUT = 300
Timeout = Annotated[int, typer.Option("--timeout", "-t", min=1, help="Seconds until it is paused, or ended.")]
SandboxId = Annotated[str, typer.Argument(help="The sandbox's id.")]
SandboxIds = Annotated[list[str], typer.Argument(help="Ids of the sandboxes.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="User in the sandbox; default: the template's.")]
Pairs = list[str] | None


class OnTimeout(StrEnum):
    PAUSE = "pause"
    KILL = "kill"


@app.command()
def start(
    template: Annotated[str, typer.Argument(help="Template or snapshot: id, name or name:tag.")] = "base",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the id and return; do not attach.")] = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    on_timeout: Annotated[
        OnTimeout | None, typer.Option("--on-timeout", help="What happens then; default: the server's setting.")
    ] = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="When it is paused, let the next request to it resume it.")
    ] = False,
    env: Annotated[Pairs, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Environment variable.")] = None,
    metadata: Annotated[Pairs, typer.Option("--metadata", "-m", metavar="KEY=VALUE", help="Metadata.")] = None,
    internet: Annotated[bool, typer.Option(help="Whether the sandbox may reach the internet.")] = True,
    remove: Annotated[bool, typer.Option("--rm", help="Delete it when the attached shell exits.")] = False,
    output: Output = None,
) -> None:
    """Start a sandbox and attach a shell to it (or print its id with -d)."""
    attached = not detach and sys.stdin.isatty() and sys.stdout.isatty()
    if remove and not attached:
        raise CliError("--rm needs an attached shell, on a terminal and without -d")
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "envVars": _pairs(env, "--env"),
        "metadata": _pairs(metadata, "--metadata"),
        "allow_internet_access": internet,
    }
    if on_timeout is not None:
        body["autoPause"] = on_timeout is OnTimeout.PAUSE
    if auto_resume:
        body["autoResume"] = {"enabled": True}

    async def work(api: ApiClient) -> int:
        with err.status(f"Starting a sandbox from {template}…"):
            sandbox = await api.create(body)
        sandbox_id = sandbox["sandboxID"]
        if not attached:
            if output is Format.JSON:
                print_json(sandbox)
            else:
                print_id(sandbox_id)
            return 0
        err.print(f"[dim]{sandbox_id}: attached; `exit` or Ctrl-D leaves[/dim]")
        try:
            return await terminal.attach(process.Processes(api, sandbox, None))
        finally:
            if remove:
                await api.delete(sandbox_id)
            else:
                err.print(f"[dim]{sandbox_id} stays; delete it with: aenv rm {sandbox_id}[/dim]")

    raise typer.Exit(with_client(work))


@app.command()
def connect(sandbox_id: SandboxId, timeout: Timeout = DEFAULT_TIMEOUT, user: User = None) -> None:
    """Attach a shell to a sandbox (its end moves to --timeout from now, if that is later; a paused one is resumed)."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("connect needs a terminal; use `aenv exec` in scripts")

    async def work(api: ApiClient) -> int:
        sandbox = await api.connect(sandbox_id, timeout)
        return await terminal.attach(process.Processes(api, sandbox, user))

    raise typer.Exit(with_client(work))


app.command("cn", help="The same as connect.")(connect)


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def exec_(
    sandbox_id: SandboxId,
    command: Annotated[list[str], typer.Argument(help="The command and its arguments (after -- if in doubt).")],
    user: User = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Working directory.")] = None,
    env: Annotated[Pairs, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Environment variable.")] = None,
) -> None:
    """Run a command in a sandbox. Standard input is passed when piped; the exit code is the command's.

    One argument is a line for the shell, several are a program and its arguments. 125 is never the command's own: it
    did not run, or its end is not known.
    """
    if command[0] == "--":
        command = command[1:]
    if not command:
        raise CliError("name the command to run")
    argv = ["/bin/bash", "-l", "-c", command[0]] if len(command) == 1 else ["/usr/bin/env", "--", *command]
    wanted = process.Command(argv=argv, envs=_pairs(env, "--env"), cwd=cwd, user=user)
    stdin = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer

    async def work(api: ApiClient) -> int:
        sandbox = await api.get(sandbox_id)
        if sandbox["state"] == "paused" and not sandbox["lifecycle"]["autoResume"]:
            raise CliError(f"sandbox {sandbox_id} is paused; resume it first: aenv resume {sandbox_id}")
        return await process.run(process.Processes(api, sandbox, user), wanted, stdin)

    try:
        code = with_client(work)
    except (CliError, AenvError) as error:
        raise CliError(error.message, NOT_THE_COMMAND) from error
    raise typer.Exit(code)


@app.command("ls")
def list_(
    state: Annotated[list[str] | None, typer.Option("--state", "-s", help="running or paused; default: both.")] = None,
    metadata: Annotated[Pairs, typer.Option("--metadata", "-m", metavar="KEY=VALUE", help="Only with these.")] = None,
    template: Annotated[str | None, typer.Option("--template", help="Only from this template.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, newest first.")] = None,
    as_tree: Annotated[bool, typer.Option("--tree", help="In the table, children below their parents.")] = False,
    output: Output = None,
) -> None:
    """List sandboxes, newest first."""
    wanted = _pairs(metadata, "--metadata")
    states = state or ["running", "paused"]
    rows = with_client(lambda api: api.sandboxes(states=states, metadata=wanted, template=template, limit=limit))
    if not wants_json(output):
        lines = tree(rows) if as_tree else [("", row) for row in rows]
        rows = [row for _, row in lines]
        for branches, row in lines:
            row |= {"id": branches + row["sandboxID"], "template": row.get("alias") or row["templateID"]}
            row |= {"cpus": row["cpuCount"], "memory": f"{row['memoryMB']} MiB"}
            row |= {"ends in": left_until(row["endAt"]) if row["state"] == "running" else "-"}
            row |= {"metadata": " ".join(f"{k}={v}" for k, v in (row.get("metadata") or {}).items())}
    print_rows(rows, ("id", "template", "state", "cpus", "memory", "ends in", "metadata"), output)


@app.command()
def rm(
    sandbox_ids: Annotated[list[str] | None, typer.Argument(help="Ids of the sandboxes to delete.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every sandbox.")] = False,
) -> None:
    """Delete sandboxes."""
    if bool(sandbox_ids) == everything:
        raise CliError("name the sandboxes to delete, or say --all")
    if everything:
        sandbox_ids = [row["sandboxID"] for row in with_client(_all)]
        if not sandbox_ids:
            err.print("There are no sandboxes to delete.")
            return
    for_each(sandbox_ids or (), lambda api, sandbox_id: api.delete(sandbox_id))


async def _all(api: ApiClient) -> list[Json]:
    return await api.sandboxes(states=["running", "paused"], metadata={}, template=None, limit=None)


@app.command(context_settings={"ignore_unknown_options": True})  # a negative number is a bad number, no option
def timeout(
    sandbox_id: SandboxId,
    seconds: Annotated[int, typer.Argument(min=0, help="Seconds from now; 0: at once.")],
) -> None:
    """Set when a sandbox is paused, or ended."""
    with_client(lambda api: api.set_timeout(sandbox_id, seconds))


def _pairs(given: Pairs, option: str) -> dict[str, str]:
    pairs = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise CliError(f"{option} {item!r}: expected KEY=VALUE")
        pairs[key] = value
    return pairs
