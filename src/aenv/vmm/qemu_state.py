"""A guest's state outside its disk: the file it passes through, and where its memory is."""

import os
from pathlib import Path

from aenv.errors import VmmError
from aenv.images.protocol import GuestMemory, MemoryRange
from aenv.vmm.launch import STATE_BYTES
from aenv.vmm.process import PROC
from aenv.vmm.protocol import VmHandle
from aenv.vmm.qemu_command import MEMORY_ID, JailPath


def write_state(pid: int, state: bytes) -> None:
    """Put a device state where the VMM `pid` can read it. Raises VmmError."""
    if len(state) > STATE_BYTES:
        raise VmmError(f"a device state of {len(state)} bytes is no VMM's: at most {STATE_BYTES} are taken")
    try:
        with _state_file(pid).open("r+b") as file:  # it is there: nothing is ever made in a root
            file.truncate(0)
            file.write(state)
    except OSError as error:
        raise VmmError(f"the device state cannot be handed to the VMM: {error}") from error


def take_state(pid: int) -> bytes:
    """The device state that the VMM `pid` has written; empties the file. Raises VmmError."""
    try:
        with _state_file(pid).open("r+b") as file:
            state = file.read(STATE_BYTES + 1)
            file.truncate(0)
    except OSError as error:
        raise VmmError(f"the device state cannot be read from the VMM: {error}") from error
    if not 0 < len(state) <= STATE_BYTES:
        raise VmmError(f"the VMM saved a device state of {len(state)} bytes: expected 1 to {STATE_BYTES}")
    return state


def _state_file(pid: int) -> Path:
    # Through the VMM's root, which it cannot change. The file is in memory and goes with the VMM.
    return PROC / str(pid) / "root" / JailPath.STATE.lstrip("/")


def find_memory(handle: VmHandle, ramblocks: str, size: int) -> GuestMemory:
    """The guest's memory of `size` bytes, from what QEMU tells of its blocks: a table for people, whose rows are name,
    page size (two words), offset, used and total bytes, address in the VMM, and access. Raises VmmError."""
    for line in ramblocks.splitlines():
        words = line.split()
        if len(words) < 7 or words[0] != MEMORY_ID:
            continue
        try:
            used, address = int(words[4], 16), int(words[6], 16)
        except ValueError:
            break
        if used != size or address % os.sysconf("SC_PAGE_SIZE"):
            break
        ranges = (MemoryRange(address, size, 0),)
        return GuestMemory(pid=handle.pid, start_time=handle.start_time, ranges=ranges, size=size)
    raise VmmError(f"the VMM {handle.pid} does not tell where its guest's {size} bytes are: {ramblocks[:500]!r}")
