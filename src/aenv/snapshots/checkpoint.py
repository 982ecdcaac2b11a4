"""A checkpoint: one state of a sandbox at rest, in a folder of its own (docs/formats/checkpoint.md).

    checkpoint.json      what it is and what it needs to run (`Manifest`); a folder without it is no checkpoint
    state                the VMM's device state; only if memory was kept
    memory/NNN.lsmt      layers of memory, the lowest first; only if memory was kept
    disk/NNN.lsmt        layers of the disk, the lowest first

Layers are hard links: checkpoints share files and each owns its names, so the file system counts the references, and
deleting a checkpoint is deleting its folder. A checkpoint never changes once its manifest is there.
"""

import dataclasses
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aenv.errors import ImageError, NotFound
from aenv.images.protocol import Stack

MANIFEST = "checkpoint.json"
STATE = "state"
VERSION = 1
MAX_STATE = 64 << 20
"""Bytes of device state; QEMU's is 150 KB."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """`id` names the content: checkpoints with the same one have the same memory. `size` in bytes."""

    id: str
    size: int
    layers: int
    requires: Requirements


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
        """All files but the manifest: what has to be on stable storage."""
        state = [self.path / STATE] if self.manifest.memory else []
        return [*self.disk.layers, *(self.memory.layers if self.memory else ()), *state]

    def state(self) -> bytes:
        """The device state. Raises ImageError."""
        path = self.path / STATE
        try:
            with path.open("rb") as file:
                return file.read(MAX_STATE)
        except OSError as error:
            raise ImageError(f"the device state {path} cannot be read: {error.strerror}") from error


def layers(folder: Path, count: int) -> list[Path]:
    """The names of `count` layers in `folder`, the lowest first."""
    return [folder / f"{n:03}.lsmt" for n in range(count)]
