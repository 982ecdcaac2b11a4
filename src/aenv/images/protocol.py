"""What is asked of the image store: disks, memory images, and the layers both are made of.

A layer is an immutable file; an image is a stack of them, the lowest first, and a size. The store never decides
where layer files live or how long: callers name them and own them. All files of a node are on one file system.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A writable disk as a VMM opens it: a file, or a block device. `size` is what the guest sees, in bytes."""

    path: Path
    size: int

    @property
    def is_device(self) -> bool:
        """Whether it is a block device rather than a file."""
        return self.path.parent == Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What an image is made of: its layer files, the lowest first, and what a guest sees, in bytes."""

    layers: tuple[Path, ...]
    size: int


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """`length` bytes at `address` of a VMM that hold the guest's memory from `offset` on, all in bytes, whole pages."""

    address: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestMemory:
    """The memory of a guest in its VMM; `start_time` (field 22 of /proc/<pid>/stat) tells the process from others."""

    pid: int
    start_time: int
    ranges: tuple[MemoryRange, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture of memory found, in pages of 4 KiB, and how many bytes the layer has."""

    dirty_pages: int
    data_pages: int
    zero_pages: int
    equal_pages: int
    layer_bytes: int


class Capture(Protocol):
    """A capture that is prepared: freeze the guest and `copy`, or `abandon`; then thaw it and `finish`. Calls raise as
    those of `ImageStore`; an error leaves no layer."""

    async def copy(self) -> None:
        """Read what is needed of the frozen guest, which need not stay frozen for the rest."""
        ...

    async def finish(self) -> Captured:
        """Wait until the layer is there; a cancellation waits, too."""
        ...

    async def abandon(self) -> None:
        """Give it up, if `copy` was not called; else the layer may come to be. Idempotent, raises nothing of ours."""
        ...


class ImageStore(Protocol):
    """Serves images. A disk belongs to a sandbox's folder, whose name is the sandbox's id.

    Every call raises ImageError, InsufficientStorage and DeadlineExceeded, and leaves nothing half-made behind.
    """

    async def start(self, in_use: Iterable[Path], memory_in_use: Iterable[str]) -> None:
        """Make ready; whatever an earlier server attached, but the disks of these folders and the memory images of
        these names, is given up, and blank disks in any case. Called once, first."""
        ...

    async def attach(self, stack: Stack, directory: Path, uid: int) -> Disk:
        """Make a fresh writable disk over `stack` in `directory`, owned by `uid`."""
        ...

    async def attach_blank(self, size: int, directory: Path, uid: int) -> Disk:
        """Make a disk of `size` bytes in `directory`, owned by `uid`, whose content is not known yet: for a VMM that is
        started ahead. Until it is bound it reads as zeros and refuses writes; of the other calls only `lost`, `bind`
        and `detach` are for it."""
        ...

    async def bind(self, stack: Stack, directory: Path) -> None:
        """Make the blank disk in `directory` what `attach` would have made of `stack`; who has it open goes on with it.
        Once only. Raises ImageError if the layers or their size do not do: it is blank as before."""
        ...

    async def open(self, directory: Path) -> Disk:
        """The disk `attach` made earlier in `directory` (after a server restart). Raises ImageError if it is gone."""
        ...

    async def layers(self, directory: Path) -> tuple[Path, ...]:
        """The layer files under the live disk in `directory`, the lowest first: those it was attached with and those
        sealed since."""
        ...

    async def seal(self, directory: Path, layer: Path) -> None:
        """Turn what was written to the live disk in `directory` into the file `layer`, on top of its stack; the disk
        goes on. Everything written before the call is in the layer; it is on stable storage soon, not yet on return."""
        ...

    async def lost(self, directory: Path) -> str:
        """Return, with a sentence that says why, when the attached disk in `directory` works no more; else never."""
        ...

    async def detach(self, directory: Path) -> None:
        """Give up the disk in `directory` and what was written to it since it was attached or sealed. Idempotent, also
        after a cancelled `attach`. Layers stay."""
        ...

    async def open_memory(self, name: str, stack: Stack, user: str) -> Path:
        """The file that shows the memory image `name`, readable by every VMM, the same for all its users; served until
        `user` and every other one has closed it. What `name` stands for never changes."""
        ...

    async def close_memory(self, name: str, user: str) -> None:
        """`user` does not need it any more. Idempotent."""
        ...

    async def begin_capture(
        self, memory: GuestMemory, base: Stack | None, mapped: int, output: Path, *, write_later: bool
    ) -> Capture:
        """Prepare to write what a guest has changed of its memory as the layer `output`, to lie on `base`.

        `mapped` is how many layers of `base`, from the lowest, the guest maps; those above were captured from it since.
        With `write_later` the guest stands still only while its pages are copied, as far as there is room for copies.
        """
        ...

    async def restore(self, memory: GuestMemory, layers: Sequence[Path]) -> None:
        """Write what `layers` (the lowest first, as captures made them) hold over the memory of a frozen guest that
        maps the image beneath them, so that its memory is what it was at the last capture.

        The exception to leaving nothing half-made: after an error, or when cancelled, the VMM must be given up.
        """
        ...

    async def compact(self, layers: Sequence[Path], output: Path, *, base: bool) -> None:
        """Fold a run of layers into one that reads the same; `base`: nothing lies beneath them. For images at rest."""
        ...

    async def compact_disk(self, directory: Path, first: int, last: int, output: Path) -> None:
        """Fold the layers `first` to `last` (exclusive, from the lowest) of the live disk in `directory` into one."""
        ...

    async def make_durable(self, files: Sequence[Path]) -> None:
        """Return when these files, and their names, are on stable storage."""
        ...

    async def aclose(self) -> None:
        """Release what the store itself holds. Disks in use stay."""
        ...
