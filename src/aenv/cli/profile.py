"""Where the server is and with which key to speak to it.

In this order: ``AENV_API_URL``/``AENV_API_KEY``, ``E2B_API_URL``/``E2B_API_KEY``, the file that `aenv auth login`
writes (``$XDG_CONFIG_HOME/aenv/credentials.json``), and on the server's own machine its generated key.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from aenv.cli.errors import CliError
from aenv.config import Settings, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`sandbox_url` is the base of requests into sandboxes; `*_from` say where a value was found."""

    api_url: str
    api_url_from: str
    api_key: str
    api_key_from: str
    sandbox_url: str


def credentials_file() -> Path:
    """The file of `aenv auth login`."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "aenv" / "credentials.json"


def resolve() -> Profile:
    """The profile in force. Raises CliError when there is no key."""
    saved = _saved()
    node = load()
    url, url_from = _first(("AENV_API_URL", "E2B_API_URL"), saved.get("api_url"), (local_url(node), "this machine"))
    if not url.startswith(("http://", "https://")):
        raise CliError(f"{url!r} (from {url_from}) is no URL: it must begin with http:// or https://")
    key, key_from = _first(("AENV_API_KEY", "E2B_API_KEY"), saved.get("api_key"), _servers_own_key(node))
    if not key:
        raise CliError("no API key: set AENV_API_KEY (or E2B_API_KEY), or run `aenv auth login`")
    sandbox_url = os.environ.get("AENV_SANDBOX_URL") or os.environ.get("E2B_SANDBOX_URL") or url
    return Profile(
        api_url=url.rstrip("/"),
        api_url_from=url_from,
        api_key=key,
        api_key_from=key_from,
        sandbox_url=sandbox_url.rstrip("/"),
    )


def local_url(node: Settings) -> str:
    """Where a server of this machine's settings listens."""
    host = node.api.host if ":" not in node.api.host else f"[{node.api.host}]"
    return f"http://{host}:{node.api.port}"


def save(api_url: str, api_key: str) -> Path:
    """Write the credentials file, readable by its owner only."""
    path = credentials_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"api_url": api_url, "api_key": api_key}, file)
    return path


def _first(variables: tuple[str, ...], saved: str | None, last: tuple[str, str]) -> tuple[str, str]:
    for name in variables:
        if value := os.environ.get(name):
            return value, name
    return (saved, str(credentials_file())) if saved else last


def _saved() -> dict[str, str]:
    try:
        saved = json.loads(credentials_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CliError(f"{credentials_file()}: {error}; run `aenv auth login` again") from error
    return saved if isinstance(saved, dict) else {}


def _servers_own_key(node: Settings) -> tuple[str, str]:
    path = node.secrets_dir / "api-key"
    try:
        return path.read_text().strip(), str(path)
    except OSError:
        return "", ""
