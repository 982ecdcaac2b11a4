"""Layers that templates are built of, by content: ``$AENV_HOME/layers/<sha256>.lsmt``; never changed once there."""

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aenv.errors import ImageError
from aenv.images.client import BlockdClient
from aenv.images.durable import sync

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_NEW = ".new-"
_STALE = 24 * 3600
_SUFFIX = ".lsmt"


class LayerStore:
    """Layer files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, digest: str) -> Path:
        """Where the layer of that digest is or would be."""
        return self.directory / f"{digest}{_SUFFIX}"

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """A name for a layer that is being made, gone at the end of the block unless it was published."""
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        staged = self.directory / f"{_NEW}{uuid.uuid4().hex}"
        try:
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    def publish(self, staged: Path, digest: str) -> str:
        """Give a whole layer its name; return the digest in hexadecimal. The same content is kept once."""
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise ImageError(f"aenv-blockd told no digest of {staged} but {digest!r}; its version does not fit")
        target = self.path(match[1])
        if not target.exists():
            staged.rename(target)
            sync(self.directory)
        return match[1]

    async def import_raw(self, client: BlockdClient, raw: Path) -> str:
        """The digest of the layer with the content of a raw image, made if it is not there yet."""
        with self.staged() as staged:
            made = await client.import_(raw, staged, digest=True)
            return self.publish(staged, made.digest or "")

    def sweep(self) -> None:
        """Delete what interrupted work left, and layers that no checkpoint has: by their age, as either may be in the
        making."""
        for left in self.directory.glob("*"):
            with suppress(FileNotFoundError):
                found = left.stat()
                if found.st_nlink == 1 and time.time() - found.st_mtime > _STALE:
                    left.unlink()


def digest_of_name(path: Path) -> str | None:
    """The digest that a layer file's name claims, if it claims one."""
    match = _DIGEST.fullmatch(path.stem)
    return match[1] if match and path.suffix == _SUFFIX else None
