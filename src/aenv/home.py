"""The node's folder on disk: made when missing, and held by one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv.errors import ConfigError


@contextmanager
def held(lock: Path, busy: str) -> Iterator[None]:
    """Hold the file `lock`, making its folder; it names our pid meanwhile.

    Raises ConfigError with `busy`, its ``{pid}`` replaced, when another process holds it; and when it cannot be made.
    """
    try:
        lock.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        file = lock.open("ab+", buffering=0)
    except OSError as error:
        raise _unusable(lock, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(file.fileno(), 20, 0).decode("ascii", "replace").strip()
            raise ConfigError(busy.replace("{pid}", pid or "unknown")) from None
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        except OSError as error:
            raise _unusable(lock, error) from error
        try:
            yield
        finally:
            file.truncate(0)


def _unusable(lock: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {lock}: {error.strerror}; make its folder writable, or set AENV_HOME to another one"
    )
