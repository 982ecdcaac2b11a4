"""Making checkpoints: of a live sandbox (`stage`), and of others (`copy`, `disk_only`, `replace_run`).

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
from typing import Literal

from aenv.errors import Conflict, ImageError, InsufficientStorage
from aenv.snapshots.checkpoint import (
    MANIFEST,
    MAX_LAYERS,
    STATE,
    Checkpoint,
    Manifest,
    Memory,
    Requirements,
    encode,
    layers,
)


class Draft:
    """A checkpoint that is being made, with the layers of its parent. Commit or discard it.

    `disk_layer`, `memory_layer` and `state` are files that its owner may make.
    """

    def __init__(self, path: Path, disk_below: int, memory_below: int, memory_id: str | None) -> None:
        """`disk_below` and `memory_below` are how many layers of the parent it has."""
        self.path = path
        self.disk_layer = layers(path / "disk", disk_below + 1)[-1]
        self.memory_layer = layers(path / "memory", memory_below + 1)[-1]
        self.state = path / STATE
        self._disk_below = disk_below
        self._memory_below = memory_below
        self._memory_id = memory_id

    def commit(
        self,
        *,
        disk_size: int,
        memory_size: int | None = None,
        requires: Requirements | None = None,
        guest: str | None = None,
    ) -> Checkpoint:
        """Make it a checkpoint; sizes in bytes. Memory is kept if `memory_size` and `requires` are given.

        Raises ImageError if files are missing, InsufficientStorage; it is still a draft then.
        """
        memory = None
        if memory_size is not None and requires is not None:
            fresh = self.memory_layer.exists()
            # Without a new layer it is the parent's memory.
            content = uuid.uuid4().hex if fresh or self._memory_id is None else self._memory_id
            memory = Memory(id=content, size=memory_size, layers=self._memory_below + fresh, requires=requires)
        manifest = Manifest(
            id=uuid.uuid4().hex,
            created_at=datetime.now(UTC),
            disk_size=disk_size,
            disk_layers=self._disk_below + self.disk_layer.exists(),
            memory=memory,
            guest=guest,
        )
        with _explained(self.path):
            if memory is None:
                shutil.rmtree(self.path / "memory", ignore_errors=True)
                self.state.unlink(missing_ok=True)
            return _finish(Checkpoint(self.path, manifest))

    def discard(self) -> None:
        """Delete it, unless it was committed. Idempotent."""
        if not (self.path / MANIFEST).exists():
            shutil.rmtree(self.path, ignore_errors=True)


def stage(folder: Path, parent: Checkpoint | None, *, memory: bool = True) -> Draft:
    """Begin a checkpoint in `folder`, which is made, on all layers of `parent`; without `memory`, on those of its disk.

    Raises Conflict if there is a checkpoint in it already, ImageError, InsufficientStorage.
    """
    disk = parent.disk.layers if parent else ()
    below = parent.memory.layers if parent and parent.memory and memory else ()
    if max(len(disk), len(below)) >= MAX_LAYERS:
        raise ImageError(f"an image in {folder} would have more than {MAX_LAYERS} layers; compact its parent first")
    with _new(folder):
        _link_layers(disk, folder / "disk")
        _link_layers(below, folder / "memory")
    known = parent.manifest.memory.id if parent and parent.manifest.memory and memory else None
    return Draft(folder, len(disk), len(below), known)


def copy(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The same checkpoint in `folder`, which is made, sharing all files. Errors are those of `stage`."""
    return _make(folder, checkpoint.manifest, checkpoint.disk.layers, checkpoint)


def disk_only(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """A checkpoint of another's disk alone in `folder`, which is made. Errors are those of `stage`."""
    manifest = replace(checkpoint.manifest, id=uuid.uuid4().hex, memory=None, guest=None)
    return _make(folder, manifest, checkpoint.disk.layers)


def of_disk(layer: Path, size: int, folder: Path) -> Checkpoint:
    """A checkpoint in `folder`, which is made, of a disk of `size` bytes in one layer. Errors are those of `stage`."""
    made = Manifest(id=uuid.uuid4().hex, created_at=datetime.now(UTC), disk_size=size, disk_layers=1)
    return _make(folder, made, (layer,))


def replace_run(
    checkpoint: Checkpoint, folder: Path, image: Literal["disk", "memory"], first: int, last: int, folded: Path
) -> Checkpoint:
    """The same checkpoint in `folder`, which is made, with the layers `first` to `last` (exclusive, from the lowest) of
    its disk or memory replaced by the file `folded`, which reads the same. Errors are those of `stage`."""
    manifest, memory = checkpoint.manifest, checkpoint.manifest.memory
    stack = checkpoint.disk if image == "disk" else checkpoint.memory
    if stack is None or not 0 <= first < last <= len(stack.layers):
        raise ImageError(f"the checkpoint in {checkpoint.path} has no layers {first} to {last} of its {image}")
    run = (*stack.layers[:first], folded, *stack.layers[last:])
    if image == "disk":
        return _make(folder, replace(manifest, disk_layers=len(run)), run, checkpoint)
    memory = memory and replace(memory, layers=len(run))
    return _make(folder, replace(manifest, memory=memory), checkpoint.disk.layers, checkpoint, run)


def _make(
    folder: Path,
    manifest: Manifest,
    disk: Iterable[Path],
    source: Checkpoint | None = None,
    memory: Iterable[Path] | None = None,
) -> Checkpoint:
    """A checkpoint of links to these layers; the device state, and if not given the memory, are those of `source`."""
    with _new(folder):
        _link_layers(disk, folder / "disk")
        if manifest.memory is not None and source is not None and source.memory is not None:
            _link_layers(source.memory.layers if memory is None else memory, folder / "memory")
            _link(source.path / STATE, folder / STATE)
        return _finish(Checkpoint(folder, manifest))


def _finish(made: Checkpoint) -> Checkpoint:
    """Write the manifest, if the rest is there."""
    *files, manifest = made.files
    if missing := next((file for file in files if not file.is_file()), None):
        raise ImageError(f"no checkpoint can be made in {made.path}: there is no {missing.relative_to(made.path)}")
    if not made.disk.layers or (made.memory and not made.memory.layers):
        raise ImageError(f"no checkpoint can be made in {made.path}: an image has no layers")
    fresh = manifest.with_suffix(".new")
    fresh.write_bytes(encode(made.manifest))
    fresh.replace(manifest)
    return made


def _link_layers(sources: Iterable[Path], folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for number, source in enumerate(sources):
        _link(source, folder / f"{number:03}.lsmt")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise ImageError(f"{source} is missing: the checkpoint it belongs to is damaged, or was deleted") from error


@contextmanager
def _new(folder: Path) -> Iterator[None]:
    """`folder`, made for the block; removed if that fails."""
    if (folder / MANIFEST).exists():
        raise Conflict(f"there is a checkpoint in {folder} already")
    with _explained(folder):
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted attempt left
        folder.mkdir(mode=0o700, parents=True)
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorage(f"no space for the checkpoint {folder}: free some on the host") from error
        raise ImageError(f"no checkpoint can be made in {folder}: {error}") from error
