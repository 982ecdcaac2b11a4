"""Making checkpoints of layers, and of other checkpoints.

A checkpoint's folder is whole once its manifest is there, which comes last. What an interrupted process left has none:
the next attempt at that name replaces it. On an error nothing is left. All of this blocks, and syncs nothing.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from aenv.errors import Conflict, ImageError, InsufficientStorage
from aenv.images.protocol import Stack
from aenv.snapshots.checkpoint import (
    MANIFEST,
    MAX_LAYERS,
    MAX_STATE,
    STATE,
    Checkpoint,
    Image,
    Manifest,
    Memory,
    Requirements,
    encode,
    layers,
)


def of_layers(
    folder: Path,
    *,
    disk: Stack,
    memory: Stack | None = None,
    state: bytes = b"",
    requires: Requirements | None = None,
    base: Image | None = None,
    guest: str | None = None,
) -> Checkpoint:
    """A checkpoint in `folder`, which is made, of links to these layers. `memory`, `state` (the VMM's) and `requires`
    are given together, or none of them. `base`: see `Memory`.

    Raises Conflict if there is a checkpoint already, ImageError, InsufficientStorage.
    """
    kept = None
    if memory is not None and requires is not None:
        if not 0 < len(state) <= MAX_STATE:
            raise ImageError(f"{len(state)} bytes of device state are no state: 1 to {MAX_STATE} are")
        kept = Memory(id=uuid.uuid4().hex, size=memory.size, layers=len(memory.layers), requires=requires, base=base)
    elif memory is not None or requires is not None or state:
        raise ImageError(f"the checkpoint {folder} needs memory, state and requirements, or none of them")
    manifest = Manifest(
        id=uuid.uuid4().hex,
        created_at=datetime.now(UTC),
        disk_size=disk.size,
        disk_layers=len(disk.layers),
        memory=kept,
        guest=guest,
    )
    with _new(folder):
        if kept is not None:
            (folder / STATE).write_bytes(state)
        return _finished(folder, manifest, disk, memory)


def copy(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The same checkpoint in `folder`, which is made, sharing all files. Errors are those of `of_layers`."""
    with _new(folder):
        if checkpoint.manifest.memory is not None:
            _link(checkpoint.path / STATE, folder / STATE)
        return _finished(folder, checkpoint.manifest, checkpoint.disk, checkpoint.memory)


def disk_only(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """A checkpoint of another's disk alone in `folder`, which is made. Errors are those of `of_layers`."""
    with _new(folder):
        manifest = replace(checkpoint.manifest, id=uuid.uuid4().hex, memory=None, guest=None)
        return _finished(folder, manifest, checkpoint.disk, None)


def _finished(folder: Path, manifest: Manifest, disk: Stack, memory: Stack | None) -> Checkpoint:
    """Link the layers, then write the manifest."""
    for name, stack in (("disk", disk), ("memory", memory)):
        if stack is not None:
            if not 1 <= len(stack.layers) <= MAX_LAYERS:
                raise ImageError(f"a checkpoint needs 1 to {MAX_LAYERS} layers of {name}, not {len(stack.layers)}")
            _link_layers(stack.layers, folder / name)
    fresh = (folder / MANIFEST).with_suffix(".new")
    fresh.write_bytes(encode(manifest))
    fresh.replace(folder / MANIFEST)
    return Checkpoint(folder, manifest)


def _link_layers(sources: Iterable[Path], folder: Path) -> None:
    sources = list(sources)
    folder.mkdir(mode=0o700)
    for source, target in zip(sources, layers(folder, len(sources)), strict=True):
        _link(source, target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise ImageError(f"{source} is missing: what it belongs to is damaged, or was deleted") from error


@contextmanager
def _new(folder: Path) -> Iterator[None]:
    """`folder`, made for the block; removed if that fails."""
    if (folder / MANIFEST).exists():
        raise Conflict(f"there is a checkpoint in {folder} already")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted attempt left
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorage(f"no space for the checkpoint {folder}: free some on the host") from error
        raise ImageError(f"no checkpoint can be made in {folder}: {error}") from error
