"""One launch of a sandbox, and what it holds of the node right now.

A sandbox is launched again by every resume and rollback. Each launch has a folder and names of its own, so that the
next one never waits until the last one's are free.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aenv.images.protocol import Stack
from aenv.network.protocol import Slot
from aenv.orchestrator.record import RunRecord
from aenv.snapshots.checkpoint import Checkpoint, Image, Requirements
from aenv.vmm.protocol import Vm, VmmInfo

LAYERS = "layers"


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """`disk` and `memory` are its layer files, hard links in its own folder, the lowest first: those it began with and
    those captured since. The VMM maps the `mapped` lowest of `memory` as the memory image `image`."""

    name: str
    directory: Path
    boot_id: str
    kernel: str
    disk: list[Path] = field(default_factory=list)
    disk_size: int = 0
    memory: list[Path] = field(default_factory=list)
    mapped: int = 0
    image: str | None = None
    slot: Slot | None = None
    vm: Vm | None = None
    layers: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever adds to `disk` and `memory`, or folds them: a capture must not lose the files it builds on."""
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each step of the launch."""

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.note(step, began)

    def note(self, step: str, began: float) -> None:
        """Note how long a step has taken since `began` (time.perf_counter)."""
        self.timings[step] = round((time.perf_counter() - began) * 1000, 3)

    def make_folder(self) -> None:
        """System calls only. Raises OSError."""
        (self.directory / LAYERS).mkdir(mode=0o700, parents=True)

    def begin_with(self, checkpoint: Checkpoint, image: Image | None) -> None:
        """Fill its folder with links to the layers of `checkpoint`: of its disk, and if its VMM is to map `image` of
        its memory too. System calls only. Raises OSError."""
        self.disk, self.disk_size = self._linked("disk", checkpoint.disk), checkpoint.disk.size
        if image is not None and (stack := checkpoint.memory) is not None and checkpoint.manifest.memory is not None:
            self.memory = self._linked("memory", stack)
            self.mapped, self.image = image.layers, image.id
            self.kernel = checkpoint.manifest.memory.requires.kernel

    @property
    def mapping(self) -> Image | None:
        """The memory image that its VMM maps."""
        return None if self.image is None else Image(self.image, self.mapped)

    def _linked(self, kind: Literal["disk", "memory"], stack: Stack) -> list[Path]:
        links = [self.directory / LAYERS / f"{kind}-{n:03}.lsmt" for n in range(len(stack.layers))]
        for layer, link in zip(stack.layers, links, strict=True):
            os.link(layer, link)
        return links

    def new_layer(self, kind: Literal["disk", "memory"]) -> Path:
        """A name for one more."""
        return self.directory / LAYERS / f"{kind}-{uuid.uuid4().hex}.lsmt"

    def record(self) -> RunRecord:
        """What a new server needs of it."""
        assert self.slot is not None
        assert self.vm is not None
        return RunRecord(
            name=self.name,
            boot_id=self.boot_id,
            slot=self.slot.index,
            vm=self.vm.handle,
            kernel=self.kernel,
            disk=_names(self.disk),
            disk_size=self.disk_size,
            memory=_names(self.memory),
            mapped=self.mapped,
            image=self.image,
        )

    @classmethod
    def of_record(cls, record: RunRecord, directory: Path) -> "Run":
        """The run another server began; without slot and VMM until they are taken over."""
        return cls(
            name=record.name,
            directory=directory,
            boot_id=record.boot_id,
            kernel=record.kernel,
            disk=[directory / LAYERS / name for name in record.disk],
            disk_size=record.disk_size,
            memory=[directory / LAYERS / name for name in record.memory],
            mapped=record.mapped,
            image=record.image,
        )


def requirements(info: VmmInfo, kernel: str, vcpus: int) -> Requirements:
    """What a guest needs to go on that was booted from the bundle `kernel` and is saved by this VMM."""
    return Requirements(
        driver=info.driver, version=info.version, accel=info.accel, cpu=info.cpu, kernel=kernel, vcpus=vcpus
    )


def _names(layers: Sequence[Path]) -> tuple[str, ...]:
    return tuple(layer.name for layer in layers)
