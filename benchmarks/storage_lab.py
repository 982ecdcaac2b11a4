"""What the storage scenario measures with: one disk's content in three forms, served in three ways, and fio.

The content is the same everywhere: a raw file; a chain of overlaybd layers; a chain of qcow2 files as deep. Each
writable disk is fresh: an empty upper, an empty overlay. Servers run with their defaults, which means that all of them
read and write through the host's page cache. fio opens with O_DIRECT, so that no second cache sits in front of a
server; the raw file has no server, and is opened without.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aenv.cli.errors import CliError
from aenv.images.client import BlockdClient, Layer

SIZE = 512 << 20
CHUNK = 64 << 10
STRIDE = 4
"""A layer above the lowest holds every fourth chunk, each layer others: a read of more than a chunk crosses layers."""
RUN_SECONDS = 2
_PAUSE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of I/O. `block` in bytes."""

    what: str
    rw: str
    block: int
    depth: int

    @property
    def writes(self) -> bool:
        return "write" in self.rw


CASES = tuple(
    Case(what=f"{what}, depth {depth}", rw=rw, block=block, depth=depth)
    for what, rw, block in (
        ("128 KiB sequential read", "read", 128 << 10),
        ("128 KiB sequential write", "write", 128 << 10),
        ("4 KiB random read", "randread", 4 << 10),
        ("4 KiB random write", "randwrite", 4 << 10),
    )
    for depth in (1, 16)
)


@dataclass
class Lab:
    """A folder with the content in its forms, and the daemon under test."""

    root: Path
    client: BlockdClient
    layers: list[Layer] = field(default_factory=list)

    @property
    def raw(self) -> Path:
        return self.root / "raw"

    def qcow2(self, number: int) -> Path:
        return self.root / f"chain-{number}.qcow2"

    async def build(self, depth: int) -> None:
        """Make the raw file, and both chains `depth` deep."""
        await asyncio.to_thread(_random_file, self.raw)
        for number in range(depth):
            await self._qcow2(self.qcow2(number), self.qcow2(number - 1) if number else None)
            async with self.qemu(self.qcow2(number)) as theirs:
                await asyncio.to_thread(self._fill, theirs, number)
            await self.add_layer(number)
        await asyncio.to_thread(os.sync)

    async def add_layer(self, number: int) -> None:
        """One more sealed layer on top."""
        upper, layer = self.root / "upper-build", self.root / f"layer-{number}"
        attached = await self.client.attach("build", self.layers, upper=upper, size=SIZE)
        await asyncio.to_thread(self._fill, attached.path, number)
        await self.client.seal("build", layer, durable=True)
        await self.client.detach("build", discard_upper=True)
        self.layers.append(Layer(path=layer))

    def _fill(self, target: Path, number: int) -> None:
        """Write the chunks of layer `number`: all for the lowest, a share of them for the others."""
        step = STRIDE * CHUNK if number else CHUNK
        with self.raw.open("rb", buffering=0) as source, target.open("r+b", buffering=0) as file:
            for offset in range(number % STRIDE * CHUNK if number else 0, SIZE, step):
                data = os.pread(source.fileno(), CHUNK, offset)
                written = os.pwrite(file.fileno(), data, offset)
                assert written == len(data), f"a short write to {target}"

    async def _qcow2(self, path: Path, backing: Path | None) -> None:
        await asyncio.to_thread(path.unlink, missing_ok=True)
        under = [] if backing is None else ["-b", str(backing), "-F", "qcow2"]
        await run("qemu-img", "create", "-q", "-f", "qcow2", *under, str(path), str(SIZE))

    def layer_files(self) -> list[Path]:
        """The layers' files."""
        return [layer.path for layer in self.layers if layer.path is not None]

    def files(self, who: str, served: Path) -> list[Path]:
        """What a contender reads from."""
        chain = [self.qcow2(number) for number in range(len(self.layers))]
        return {"raw": [served], "qemu": chain, "blockd": self.layer_files()}[who]

    @asynccontextmanager
    async def serve(self, who: str, case: Case | None = None) -> AsyncIterator[Path]:
        """A fresh disk with the content, as a file: `raw`, `qemu` or `blockd`."""
        match who:
            case "raw":
                yield await asyncio.to_thread(self._raw, case is not None and case.writes)
            case "qemu":
                top = self.root / "top.qcow2"
                await self._qcow2(top, self.qcow2(len(self.layers) - 1))
                async with self.qemu(top) as path:
                    yield path
            case _:
                async with self.blockd(self.layers) as path:
                    yield path

    def _raw(self, writable: bool) -> Path:
        if not writable:
            return self.raw
        copy = self.root / "raw-writable"
        if not copy.exists():
            shutil.copyfile(self.raw, copy)
        return copy

    @asynccontextmanager
    async def blockd(self, layers: list[Layer], name: str = "disk") -> AsyncIterator[Path]:
        """The layers under an empty upper, as a sandbox has them."""
        attached = await self.client.attach(name, layers, upper=self.root / f"upper-{name}", target="fuse")
        try:
            yield attached.path
        finally:
            await self.client.detach(name, discard_upper=True)

    @asynccontextmanager
    async def qemu(self, image: Path) -> AsyncIterator[Path]:
        """A qcow2 file by qemu-storage-daemon's FUSE export."""
        point = self.root / "qemu-export"
        point.touch()
        node = {"driver": "qcow2", "node-name": "disk", "discard": "unmap"}
        process = await asyncio.create_subprocess_exec(
            "qemu-storage-daemon",
            *("--blockdev", json.dumps({**node, "file": {"driver": "file", "filename": str(image)}})),
            *("--export", f"fuse,id=export,node-name=disk,mountpoint={point},writable=on"),
        )
        try:
            async with asyncio.timeout(20):
                while point.stat().st_size != SIZE:
                    if process.returncode is not None:
                        raise CliError(f"qemu-storage-daemon ended with status {process.returncode}")
                    await asyncio.sleep(_PAUSE)
            yield point
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
            with contextlib.suppress(CliError):  # it did so itself, unless it was killed
                await run("umount", "-l", str(point))


async def fio(path: Path, case: Case, *, direct: bool, seconds: int = RUN_SECONDS) -> float:
    """Bytes per second. With `seconds` 0 the whole file once."""
    timed = ["--time_based", f"--runtime={seconds}"] if seconds else []
    output = await run(
        "fio",
        *("--name=bench", f"--filename={path}", f"--rw={case.rw}", f"--bs={case.block}", f"--iodepth={case.depth}"),
        *("--ioengine=libaio", f"--direct={int(direct)}", f"--size={SIZE}", "--randrepeat=0", "--norandommap"),
        # fio would empty the page cache of what it opens: for the raw file of all of it, for the others of nothing.
        *("--invalidate=0", "--output-format=json", *timed),
    )
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return float(job["write" if case.writes else "read"]["bw_bytes"])


def warm(*paths: Path) -> None:
    """Bring files into the page cache: some hosts empty it by themselves."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(*paths: Path) -> None:
    """Take files out of the page cache, so that reading them means the disk. They must be clean."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


async def resident(path: Path) -> int:
    """Bytes of a file in the page cache."""
    found = json.loads(await run("fincore", "--bytes", "--json", str(path)))
    return int(found["fincore"][0]["res"])


async def run(*argv: str) -> str:
    """Standard output of a tool. Raises CliError."""
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise CliError(f"{' '.join(argv)[:200]} failed: {errors.decode(errors='replace').strip()}")
    return output.decode()


def _random_file(path: Path) -> None:
    """Content that neither compresses nor repeats within a layer's reach."""
    block = os.urandom(32 << 20)
    with path.open("wb") as file:
        for turn in _turns(len(block)):
            file.write(block[turn:])
            file.write(block[:turn])


def _turns(length: int) -> Iterator[int]:
    return (number * 4096 for number in range(SIZE // length))
