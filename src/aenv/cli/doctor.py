"""`aenv doctor`: what this host can do and what is missing, with the fix."""

from dataclasses import asdict

import typer
from rich.markup import escape

from aenv.cli.errors import CliError
from aenv.cli.output import Output, out, print_json, wants_json
from aenv.config import load

app = typer.Typer()

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command()
def doctor(output: Output = None) -> None:
    """Examine this machine as a node. Exits with 1 if sandboxes cannot run here."""
    from aenv.doctor import Verdict, examine

    checks = examine(load())
    if wants_json(output):
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            colour = COLOURS[check.verdict]
            out.print(
                f"[{colour}]{check.verdict:4}[/{colour}]  {check.name:11} {escape(check.found)}",
                highlight=False,
                soft_wrap=True,
            )
            if check.fix:
                out.print(f"                  fix: {escape(check.fix)}", highlight=False, soft_wrap=True)
    if failed := [check.name for check in checks if check.verdict is Verdict.FAIL]:
        raise CliError(f"sandboxes cannot run on this host: {', '.join(failed)}")
