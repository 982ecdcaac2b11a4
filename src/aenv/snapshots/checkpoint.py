"""A checkpoint: one state of a sandbox at rest, in a folder of its own (docs/formats/checkpoint.md).

    checkpoint.json      what it is and what it needs to run (`Manifest`); a folder without it is no checkpoint
    state                the VMM's device state; only if memory was kept
    memory/NNN.lsmt      layers of memory, the lowest first; only if memory was kept
    disk/NNN.lsmt        layers of the disk, the lowest first

Layers are hard links: checkpoints share files and each owns its names, so the file system counts the references, and
deleting a checkpoint is deleting its folder. A checkpoint never changes once its manifest is there.

All of this blocks, and syncs nothing: `Checkpoint.files` are what has to be brought to stable storage.
"""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from aenv.errors import ImageError, NotFound
from aenv.images.protocol import Stack

MANIFEST = "checkpoint.json"
STATE = "state"
VERSION = 1
MAX_STATE = 64 << 20
"""Bytes of device state; QEMU's is 150 KB."""
MAX_MANIFEST = 64 << 10
"""Bytes; one that this version writes has 600."""
MAX_LAYERS = 255
"""Of one image: what the layer format allows."""
MAX_SIZE = 1 << 50
"""Bytes of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What memory and device state need to go on: the VMM that saved them, and the machine it emulated."""

    driver: str
    version: str
    accel: str
    cpu: str
    kernel: str
    """Digest of the guest bundle (kernel and initramfs) it was booted from."""
    vcpus: int


@dataclass(frozen=True, slots=True)
class Image:
    """The memory image `id`, of which others may have some: the lowest `layers` of a checkpoint's memory."""

    id: str
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """`id` names the content: checkpoints with the same one have the same memory. `size` in bytes. `base` is the image
    that the guest was mapping when it was captured."""

    id: str
    size: int
    layers: int
    requires: Requirements
    base: Image | None = None

    @property
    def image(self) -> Image:
        """All of it as an image of its own."""
        return Image(self.id, self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`guest` is the sandbox whose daemon token the saved guest knows, None if it knows none. `disk_size` in bytes."""

    id: str
    created_at: datetime
    disk_size: int
    disk_layers: int
    memory: Memory | None = None
    guest: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is there."""

    path: Path
    manifest: Manifest

    @property
    def disk(self) -> Stack:
        return Stack(layers=tuple(layers(self.path / "disk", self.manifest.disk_layers)), size=self.manifest.disk_size)

    @property
    def memory(self) -> Stack | None:
        """None if only the disk was kept."""
        memory = self.manifest.memory
        if memory is None:
            return None
        return Stack(layers=tuple(layers(self.path / "memory", memory.layers)), size=memory.size)

    @property
    def files(self) -> list[Path]:
        """All its files: what has to be on stable storage."""
        state = [self.path / STATE] if self.manifest.memory else []
        return [*self.disk.layers, *(self.memory.layers if self.memory else ()), *state, self.path / MANIFEST]

    def state(self) -> bytes:
        """The device state. Raises ImageError, also if only the disk was kept."""
        path = self.path / STATE
        try:
            with path.open("rb") as file:
                state = file.read(MAX_STATE + 1)
        except OSError as error:
            raise ImageError(f"the device state {path} cannot be read: {error.strerror}") from error
        if not 0 < len(state) <= MAX_STATE:
            raise ImageError(f"the device state {path} is damaged: it must have 1 to {MAX_STATE} bytes")
        return state


def layers(folder: Path, count: int) -> list[Path]:
    """The names of `count` layers in `folder`, the lowest first."""
    return [folder / f"{n:03}.lsmt" for n in range(count)]


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, whose files are all there. Raises NotFound if there is none, ImageError if it is
    damaged or of a later version."""
    file = path / MANIFEST
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_MANIFEST + 1)
        if len(text) > MAX_MANIFEST:
            raise ValueError(f"it has more than {MAX_MANIFEST} bytes")
        found = Checkpoint(path, _parse(json.loads(text)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no checkpoint in {path}") from error
    except OSError as error:
        raise ImageError(f"{file} cannot be read: {error.strerror}") from error
    except _LaterVersion as error:
        raise ImageError(f"{file} is of version {error}, this aenv reads {VERSION}: use a newer one") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ImageError(f"{file} is damaged ({error!r:.200}); delete {path}, or restore it from a copy") from error
    for needed in found.files:
        if not needed.is_file():
            raise ImageError(f"the checkpoint in {path} is damaged: {needed} is missing; delete {path}, or restore it")
    return found


def encode(manifest: Manifest) -> bytes:
    """The content of the manifest's file."""
    value = {
        "version": VERSION,
        "id": manifest.id,
        "created_at": manifest.created_at.isoformat(),
        "guest": manifest.guest,
        "disk": {"size": manifest.disk_size, "layers": manifest.disk_layers},
        "memory": asdict(manifest.memory) if manifest.memory else None,
    }
    return json.dumps(value, indent=2).encode() + b"\n"


class _LaterVersion(Exception):
    pass


def _parse(value: Any) -> Manifest:
    """A manifest of its JSON. Raises ValueError, TypeError or KeyError if it is not as `encode` makes it."""
    if _typed(value, "version", int) != VERSION:
        if value["version"] > VERSION:
            raise _LaterVersion(value["version"])
        raise ValueError(f"version {value['version']} never was")
    created_at = datetime.fromisoformat(_text(value, "created_at"))
    if created_at.tzinfo is None:
        raise ValueError("created_at has no zone")
    disk = _typed(value, "disk", dict)
    memory = value["memory"]
    return Manifest(
        id=_text(value, "id"),
        created_at=created_at,
        guest=None if value["guest"] is None else _text(value, "guest"),
        disk_size=_number(disk, "size", MAX_SIZE),
        disk_layers=_number(disk, "layers", MAX_LAYERS),
        memory=None if memory is None else _parse_memory(memory),
    )


def _parse_memory(value: Any) -> Memory:
    requires, base = _typed(value, "requires", dict), value.get("base")
    count = _number(value, "layers", MAX_LAYERS)
    return Memory(
        id=_text(value, "id"),
        size=_number(value, "size", MAX_SIZE),
        layers=count,
        base=None if base is None else Image(_text(base, "id"), _number(base, "layers", count)),
        requires=Requirements(
            **{name: _text(requires, name) for name in ("driver", "version", "accel", "cpu", "kernel")},
            vcpus=_number(requires, "vcpus", 1 << 16),
        ),
    )


def _typed(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, dict) or type(value[name]) is not kind:
        raise TypeError(f"{name} is no {kind.__name__}")
    return value[name]


def _text(value: Any, name: str) -> str:
    text: str = _typed(value, name, str)
    if not text:
        raise ValueError(f"{name} is empty")
    return text


def _number(value: Any, name: str, most: int) -> int:
    number: int = _typed(value, name, int)
    if not 1 <= number <= most:
        raise ValueError(f"{name} is {number}, not 1 to {most}")
    return number
