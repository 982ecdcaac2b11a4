"""One fake VMM: a guest without a processor, whose memory is real.

A freeze writes all that the guest remembers to the start of its memory (8 bytes, little-endian: the length of the
JSON that follows), a restored guest remembers what it finds there. So what a capture of that memory kept decides,
not an object of ours that lived on.
"""

import asyncio
import ctypes
import itertools
import json
import mmap
import os
import struct
import zlib
from typing import Literal

from aenv.errors import VmmError
from aenv.images.protocol import GuestMemory, MemoryRange
from aenv.vmm.fake_guest import FakeGuest
from aenv.vmm.process import read_start_time
from aenv.vmm.protocol import VmExit, VmHandle, VmSpec

_PIDS = itertools.count(10_000_000)
"""Above any real pid (at most 4 Mi)."""
_LENGTH = struct.Struct("<Q")

Phase = Literal["waiting", "frozen", "running", "gone"]


class FakeMachine:
    """Running from the start if `spec.memory` is None, else waiting for a state. `silent`: its guest never listens."""

    def __init__(self, spec: VmSpec, *, silent: bool = False) -> None:
        self.spec = spec
        self.handle = VmHandle(pid=next(_PIDS), start_time=1)
        self.guest = FakeGuest(spec.address)
        self.exit: asyncio.Future[VmExit] = asyncio.get_running_loop().create_future()
        self.console = [b"fake guest\n"]
        self.phase: Phase = "running" if spec.memory is None else "waiting"
        self._silent = silent
        self._memory = _mapping(spec)

    async def start_guest(self) -> None:
        """Make the guest listen. Raises VmmError."""
        if self._silent:
            return
        try:
            await self.guest.start()
        except OSError as error:
            raise VmmError(f"the fake guest cannot listen at {self.spec.address}: {error}") from error

    async def load(self, state: bytes) -> None:
        """Find the guest in its memory, frozen. Raises VmmError if it is not the one that `state` was saved of."""
        self._expect("waiting", to="take a state")
        (length,) = _LENGTH.unpack_from(self._memory)
        content = self._memory[_LENGTH.size : _LENGTH.size + length]
        if state != self._device_state(content):
            raise VmmError(f"the VMM did not load the state: {state[:100]!r} is not of a guest with this memory")
        self.guest.restore(json.loads(content))
        await self.start_guest()
        self.phase = "frozen"

    def freeze(self) -> None:
        """Idempotent. Raises VmmError."""
        if self.phase == "frozen":
            return
        self._expect("running", to="freeze")
        content = json.dumps(self.guest.dump()).encode()
        if len(content) + _LENGTH.size > len(self._memory):
            raise VmmError(f"the fake guest remembers {len(content)} bytes, its memory holds {len(self._memory)}")
        self._memory[: _LENGTH.size + len(content)] = _LENGTH.pack(len(content)) + content
        self.guest.freeze()
        self.phase = "frozen"

    def thaw(self) -> None:
        """Idempotent. Raises VmmError."""
        if self.phase != "running":
            self._expect("frozen", to="thaw")
        self.guest.thaw()
        self.phase = "running"

    def save(self) -> bytes:
        """Its device state. Raises VmmError."""
        self._expect("frozen", to="save")
        (length,) = _LENGTH.unpack_from(self._memory)
        return self._device_state(self._memory[_LENGTH.size : _LENGTH.size + length])

    def memory(self) -> GuestMemory:
        """In this process. Raises VmmError."""
        if self.phase == "gone":
            raise VmmError(f"the VMM process {self.handle.pid} is gone")
        pid = os.getpid()
        start_time = read_start_time(pid)
        assert start_time is not None, "we are alive"
        size = len(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return GuestMemory(pid=pid, start_time=start_time, ranges=(MemoryRange(address, size, 0),), size=size)

    async def end(self, result: VmExit) -> None:
        """As by `kill -9`. Idempotent."""
        if self.phase != "gone":
            self.phase = "gone"
            self.exit.set_result(result)
            self._memory.close()
        await self.guest.stop()

    def _device_state(self, content: bytes) -> bytes:
        """The likes of a CPU's registers: they fit one content of the memory only."""
        shape = {"fake": 1, "vcpus": self.spec.vcpus, "memory_mb": self.spec.memory_mb}
        return json.dumps({**shape, "registers": zlib.crc32(content)}).encode()

    def _expect(self, phase: Phase, *, to: str) -> None:
        if self.phase != phase:
            raise VmmError(f"the VMM {self.handle.pid} cannot {to}: it is {self.phase}, not {phase}")


def _mapping(spec: VmSpec) -> mmap.mmap:
    """What nobody else sees the writes to. Raises VmmError."""
    size = spec.memory_mb << 20
    if spec.memory is None:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        file = os.open(spec.memory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(file, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:  # ValueError: the file is smaller
        raise VmmError(f"the VMM of {spec.sandbox_id} did not start: mapping {spec.memory}: {error}") from error
