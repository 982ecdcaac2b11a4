"""Where the API key comes from. Standard library only: the command-line client on the same host reads it too."""

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from aenv.errors import ConfigError

VARIABLE = "AENV_API_KEY"
MOUNTED_SECRET = Path("/run/secrets/api-key")
"""Where Docker and Kubernetes mount a secret of that name."""
FILE_NAME = "api-key"


def load(secrets_dir: Path, environ: Mapping[str, str] | None = None, mounted: Path = MOUNTED_SECRET) -> str:
    """The key: of ``AENV_API_KEY``, else of the mounted secret, else of ``<secrets_dir>/api-key``, made when missing.

    Raises ConfigError naming the source when the key there is empty, malformed or readable by other users.
    """
    given = (os.environ if environ is None else environ).get(VARIABLE, "")
    if given:  # Empty means unset: compose files pass `AENV_API_KEY=${AENV_API_KEY:-}`.
        return _checked(given, VARIABLE)
    if mounted.exists():
        try:
            return _checked(mounted.read_text("ascii", "replace"), str(mounted))
        except OSError as error:
            raise ConfigError(f"cannot read the API key in {mounted}: {error.strerror}") from error
    return _own_file(secrets_dir / FILE_NAME)


def _own_file(path: Path) -> str:
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            return _read_private(path)
        _create(path)
        return _read_private(path)
    except OSError as error:
        raise ConfigError(f"cannot keep the API key in {path}: {error.strerror}") from error


def _create(path: Path) -> None:
    """Write a new key. Of several processes doing this at once one wins, and all then read the winner's."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            # `e2b_` and hex: what the key check of older SDKs and of third-party clients wants.
            file.write(f"e2b_{secrets.token_hex(20)}\n")
            file.flush()
            os.fsync(file.fileno())
        # A link, unlike a rename, never replaces a file that appeared meanwhile.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()


def _read_private(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} must be a regular file that holds the API key")
        if mode := stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"the API key in {path} is open to other users (mode has {mode:03o}); run: chmod 600 {path}"
            )
        return _checked(file.read(4096), str(path))


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not key:
        raise ConfigError(f"the API key in {source} is empty; write a key there, or remove it to have one made")
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"the API key in {source} must be printable ASCII without spaces, as it travels in a header")
    return key
