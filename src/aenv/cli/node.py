"""Commands that make this machine a node: setup, server. They need the extra `aenv[server]`."""

import asyncio
from dataclasses import replace

import typer

from aenv.cli.errors import CliError
from aenv.cli.output import err
from aenv.config import load

app = typer.Typer()


@app.command()
def setup() -> None:
    """Provision this machine: guest kernel, initramfs and the `base` template. Does only what is missing."""
    _need_server_extra()
    from aenv.observability import logs
    from aenv.setup import setup as provision

    settings = load()
    logs.configure(replace(settings.log, level="warning"))
    with err.status("Provisioning…") as status:

        def progress(step: str) -> None:
            if err.is_terminal:
                status.update(step)
            else:
                err.print(step, highlight=False)

        template = asyncio.run(provision(settings, progress))
    err.print(f"Ready: template {template.names[0]} ({template.id}) in {settings.home}", highlight=False)


@app.command()
def server() -> None:
    """Run the server in the foreground: API, orchestrator and proxy on one port."""
    _need_server_extra()
    from aenv.server import run

    run(load())


def _need_server_extra() -> None:
    try:
        import fastapi  # noqa: F401
    except ModuleNotFoundError:
        raise CliError(
            "this is the client alone; on a node run `make quickstart` in a checkout, or: pip install '.[server]'"
        ) from None
