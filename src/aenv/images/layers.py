"""The layers of a node, by content, and what images are made of.

$AENV_HOME/layers/<sha256>.lsmt       sealed overlaybd layers; never changed once there
$AENV_HOME/templates/<id>/layers.json  {"version": 1, "size": bytes, "layers": ["<sha256>", …]}, the lowest first
"""

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import ImageError, NotFound
from aenv.images.client import BlockdClient, Layer

MANIFEST = "layers.json"
_VERSION = 1
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_NEW = ".new-"
_STALE = 24 * 3600
_SUFFIX = ".lsmt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What an image is made of: digests (hexadecimal SHA-256), the lowest first, and what a guest sees, in bytes."""

    layers: tuple[str, ...]
    size: int


class LayerStore:
    """Layer files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, digest: str) -> Path:
        """Where the layer of that digest is or would be."""
        return self.directory / f"{digest}{_SUFFIX}"

    def files(self, stack: Stack) -> list[Layer]:
        """The stack as the daemon opens it."""
        return [Layer(path=self.path(digest)) for digest in stack.layers]

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
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return match[1]

    async def import_raw(self, client: BlockdClient, raw: Path) -> str:
        """The digest of the layer with the content of a raw image, made if it is not there yet."""
        with self.staged() as staged:
            made = await client.import_(raw, staged, digest=True)
            return self.publish(staged, made.digest or "")

    def sweep(self) -> None:
        """Delete what interrupted work left: by its age, as a running server may be making a layer."""
        for left in self.directory.glob(_NEW + "*"):
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE:
                    left.unlink()


def digest_of_name(path: Path) -> str | None:
    """The digest that a layer file's name claims, if it claims one."""
    match = _DIGEST.fullmatch(path.stem)
    return match[1] if match and path.suffix == _SUFFIX else None


def read_stack(image: Path) -> Stack:
    """What the image in a template's folder is made of. Raises NotFound, ImageError."""
    path = image / MANIFEST
    try:
        given = json.loads(path.read_text())
        layers = tuple(given["layers"])
        if given["version"] != _VERSION or not layers or not all(_DIGEST.fullmatch(layer) for layer in layers):
            raise ValueError(f"it is no version {_VERSION} list of layers")
        return Stack(layers=layers, size=int(given["size"]))
    except FileNotFoundError as error:
        if not image.exists():
            raise NotFound(f"image '{image.name}' does not exist on this node") from error
        raise ImageError(
            f"image '{image.name}' has no layers yet, an earlier version made it: run `aenv setup`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageError(f"{path} is damaged ({error}); run `aenv setup`") from error


def write_stack(image: Path, stack: Stack) -> None:
    """Say what an image is made of. It appears at once or not at all; layers must be published before."""
    fresh = image / f"{MANIFEST}.new"
    value = {"version": _VERSION, "size": stack.size, "layers": list(stack.layers)}
    with fresh.open("w") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(image / MANIFEST)
