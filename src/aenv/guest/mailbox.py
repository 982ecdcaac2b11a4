"""The host's end of the mailbox: memory of a guest through which it is named when it goes on from a capture.

A daemon that was captured while it waited at its mailbox finds there who it is with its first instruction, and answers
in the same place. Nothing of a guest's kernel, network or programs is between, so this is the shortest way there is: an
emulated guest needs a fifth of the time of a call over TCP.

The layout is in docs/formats/mailbox.md. The guest is hostile: of what it writes only the state is read, and that
decides nothing but its own fate.
"""

import asyncio
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aenv.errors import VmmError

ADDRESS = 8 << 20
"""Physical address in the guest."""
BYTES = 32 << 10
MAX_MESSAGE = 16 << 10
"""Of its words, which are a guest's environment more than anything else."""

_HEAD = struct.Struct("<8sIIQ")
"""Magic, state, length of the message, unix time in nanoseconds."""
_MAGIC = b"aenvmbx1"
_STATE_AT, _TIME_AT, _WORDS_AT = 8, 16, 64
_STATE, _TIME = struct.Struct("<I"), struct.Struct("<Q")
_HELD, _TOLD, _DONE, _REFUSED = 1, 2, 3, 4

_LOOK_AGAIN = 0.001
"""Seconds between two looks: the grain of the event loop's timers. A guest needs some ten of them."""
_CALL_AGAIN = 50
"""Looks after which a call counts as lost."""
_PATIENT = 0.05
"""Seconds after which looks become rarer: then the host is busy, and looking makes it busier."""
_LOOK_RARELY = 0.005


class Mailbox:
    """That of the guest whose memory begins at `address` in the process `pid`. Made once it is known to be that process
    (whatever it becomes, this is about the memory it has now). Close it with `close`. Raises VmmError."""

    def __init__(self, pid: int, address: int) -> None:
        self._at = address + ADDRESS
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        try:
            self._memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise VmmError(f"the memory of the VMM {pid} cannot be reached: {error}") from error

    async def held(self, call: Callable[[], None]) -> bool:
        """Return when the daemon of a guest that runs waits for words, having been sent for with `call`: cancel it to
        give up. False if the guest has no mailbox. Raises VmmError when the VMM is gone."""
        await asyncio.to_thread(self._read, 0, _HEAD.size)  # the first look may have to wait for the memory's server
        while True:
            call()
            for _ in range(_CALL_AGAIN):
                magic, state, _, _ = _HEAD.unpack(self._read(0, _HEAD.size))
                if magic != _MAGIC:
                    return False
                if state == _HELD:
                    return True
                await asyncio.sleep(_LOOK_AGAIN)

    def put(self, message: bytes) -> bool:
        """Leave `message` to a frozen guest; False if its daemon does not wait for one, or it is too long. May wait for
        the guest's memory to be read: not for the event loop. Raises VmmError."""
        if len(message) > MAX_MESSAGE:
            return False
        magic, state, _, _ = _HEAD.unpack(self._read(0, _HEAD.size))
        if magic != _MAGIC or state != _HELD:
            return False
        self._write(_WORDS_AT, message)
        self._write(0, _HEAD.pack(_MAGIC, _TOLD, len(message), time.time_ns()))
        return True

    async def answered(self) -> bool:
        """Return when the guest, which runs, has acted on its message; False if it could not. Until then its clock is
        kept. Raises VmmError when the VMM is gone."""
        began = time.monotonic()
        while (state := _STATE.unpack(self._read(_STATE_AT, _STATE.size))[0]) == _TOLD:
            self._write(_TIME_AT, _TIME.pack(time.time_ns()))
            await asyncio.sleep(_LOOK_AGAIN if time.monotonic() - began < _PATIENT else _LOOK_RARELY)
        return bool(state == _DONE)

    def close(self) -> None:
        """Idempotent. What a thread has begun goes on."""
        with self._lock:
            self._closing = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closing and not self._users and self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The descriptor; it is not closed, nor its number another file's, during the block."""
        with self._lock:
            if self._closing:
                raise VmmError("the guest's mailbox is gone: its VMM has ended")
            self._users += 1
        try:
            yield self._memory
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _read(self, offset: int, size: int) -> bytes:
        try:
            with self._open() as memory:
                found = os.pread(memory, size, self._at + offset)
        except OSError as error:
            raise VmmError(f"the guest's mailbox cannot be read: {error}") from error
        if len(found) != size:
            raise VmmError("the guest's mailbox cannot be read: its VMM has ended")
        return found

    def _write(self, offset: int, content: bytes) -> None:
        try:
            with self._open() as memory:
                written = os.pwrite(memory, content, self._at + offset)
        except OSError as error:
            raise VmmError(f"the guest's mailbox cannot be written: {error}") from error
        if written != len(content):
            raise VmmError("the guest's mailbox cannot be written: its VMM has ended")
