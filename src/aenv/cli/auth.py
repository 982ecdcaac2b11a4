"""Commands on the connection to the server: who am I, log in, and what the SDKs need."""

import asyncio
import shlex
import sys
from typing import Annotated

import typer

from aenv.cli import profile
from aenv.cli.client import client
from aenv.cli.errors import CliError
from aenv.cli.output import Output, err, out, print_json, wants_json
from aenv.cli.profile import Profile
from aenv.config import load

app = typer.Typer(help="The server and the key in use.", invoke_without_command=True)


@app.callback()
def show(context: typer.Context, output: Output = None) -> None:
    """Show the server and the key in use, and whether the server takes it."""
    if context.invoked_subcommand is not None:
        return
    found = profile.resolve()
    asyncio.run(_check(found))
    facts = {
        "api_url": found.api_url,
        "api_url_from": found.api_url_from,
        "api_key": _masked(found.api_key),
        "api_key_from": found.api_key_from,
        "sandbox_url": found.sandbox_url,
    }
    if wants_json(output):
        print_json(facts)
        return
    out.print(f"server  {facts['api_url']}  [dim]({facts['api_url_from']})[/dim]", highlight=False)
    out.print(f"key     {facts['api_key']}  [dim]({facts['api_key_from']})[/dim]", highlight=False)
    out.print("[green]The server takes this key.[/green]")


@app.command()
def login(
    api_url: Annotated[str | None, typer.Option("--url", help="The server; default: this machine's.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--key", help="The key; asked for, or read from standard input, when not given.")
    ] = None,
) -> None:
    """Remember a server and its key, once the server has taken it."""
    if api_url is not None and not api_url.startswith(("http://", "https://")):
        raise CliError(f"--url {api_url!r}: it must begin with http:// or https://")
    if api_key is None:
        api_key = typer.prompt("API key", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    url = (api_url or profile.local_url(load())).rstrip("/")
    asyncio.run(_check(Profile(api_url=url, api_url_from="", api_key=api_key, api_key_from="", sandbox_url=url)))
    err.print(f"Saved to {profile.save(url, api_key)}")


@app.command()
def export() -> None:
    """Print the variables the official E2B SDKs need: eval "$(aenv auth export)"."""
    found = profile.resolve()
    for name, value in (
        ("E2B_API_KEY", found.api_key),
        ("E2B_API_URL", found.api_url),
        ("E2B_SANDBOX_URL", found.sandbox_url),
    ):
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


async def _check(found: Profile) -> None:
    async with client(found) as api:
        await api.sandboxes(states=["running"], metadata={}, template=None, limit=1)


def _masked(key: str) -> str:
    return f"{key[:8]}…{key[-4:]}" if len(key) > 16 else "…"
