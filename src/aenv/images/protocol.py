"""What the orchestrator asks of the image store."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A writable disk as a VMM opens it. `size` is what the guest sees, in bytes.

    With format `qcow2` the file is an overlay over `backing`, which is shared and only ever read.
    """

    path: Path
    format: Literal["raw", "qcow2"]
    size: int
    backing: Path | None = None

    @property
    def is_device(self) -> bool:
        """Whether it is a block device rather than a file."""
        return self.path.parent == Path("/dev")


class ImageStore(Protocol):
    """Gives every sandbox its own writable view of a template's image.

    A disk belongs to a sandbox's folder, whose name is the sandbox's id.
    """

    async def start(self, in_use: Iterable[Path]) -> None:
        """Make ready; the disks of an earlier server in all folders but these are given up. Called once, first.

        Raises ImageError and what else makes the node unusable.
        """
        ...

    async def attach(self, image: str, directory: Path, uid: int) -> Disk:
        """Make a fresh writable disk over `image` (a template id) in `directory`, owned by `uid`.

        Raises NotFound for an unknown image, InsufficientStorage, ImageError. Leaves nothing behind on an error.
        """
        ...

    async def open(self, image: str, directory: Path) -> Disk:
        """The disk `attach` made earlier in `directory` (after a server restart). Raises ImageError if it is gone."""
        ...

    async def lost(self, directory: Path) -> str:
        """Return, with a sentence that says why, when the attached disk in `directory` works no more; else never.

        Raises ImageError if none is attached there.
        """
        ...

    async def detach(self, directory: Path) -> None:
        """Give up and delete the disk in `directory`. Idempotent, also after a cancelled `attach`."""
        ...

    async def aclose(self) -> None:
        """Release what the store itself holds. Disks in use stay."""
        ...
