"""The `aenv` command: puts the groups together and turns every error into one readable line."""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from aenv import __version__
from aenv.cli import auth, bench, doctor, image, node, sandboxes, snapshots, states
from aenv.cli.errors import CliError
from aenv.cli.output import err
from aenv.errors import AenvError

app = typer.Typer(
    name="aenv",
    help="Agent environments as microVMs: start, use and manage sandboxes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (sandboxes.app, states.app, node.app, doctor.app, bench.app):
    app.registered_commands += group.registered_commands
app.add_typer(snapshots.app, name="snapshot")
app.add_typer(auth.app, name="auth")
app.add_typer(image.app, name="image")


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"aenv {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console command."""
    try:
        app()
    except CliError as error:
        _fail(error.message, error.exit_code)
    except AenvError as error:
        _fail(error.message, 1)


def _fail(message: str, code: int) -> None:
    err.print(f"[bold red]error:[/bold red] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    sys.exit(code)
