"""Bringing files to stable storage. Blocks for as long as the disk takes."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from aenv.errors import ImageError, InsufficientStorage


def sync(path: Path) -> None:
    """Return when a file's content, or a directory's entries, are on stable storage. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(files: Iterable[Path]) -> None:
    """The same for files, their names and those of their folders. Raises ImageError, InsufficientStorage."""
    files = list(files)
    folders = {file.parent: None for file in files}
    # The folders' own names are entries of theirs. Once the journal is written, the rest costs nothing.
    above = {folder.parent: None for folder in folders}
    for path in (*files, *folders, *above):
        try:
            sync(path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InsufficientStorage(f"no space to bring {path} to stable storage: free some") from error
            raise ImageError(f"{path} cannot be brought to stable storage: {error.strerror}") from error
