"""The host's end of the mailbox, on memory of this process."""

import asyncio
import ctypes
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from aenv.errors import VmmError
from aenv.guest import mailbox
from aenv.guest.mailbox import Mailbox

HELD, TOLD, DONE, REFUSED = 1, 2, 3, 4


class Guest:
    """What a guest does at its end; its memory begins `mailbox.ADDRESS` before ours."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mailbox.BYTES)
        self.memory[:8] = b"aenvmbx1"
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) - mailbox.ADDRESS

    @property
    def state(self) -> int:
        return int(struct.unpack_from("<I", self.memory, 8)[0])

    @state.setter
    def state(self, value: int) -> None:
        struct.pack_into("<I", self.memory, 8, value)

    @property
    def words(self) -> bytes:
        (length,) = struct.unpack_from("<I", self.memory, 12)
        return bytes(self.memory[64 : 64 + length])

    @property
    def unix_ns(self) -> int:
        return int(struct.unpack_from("<Q", self.memory, 16)[0])


@pytest.fixture
def guest() -> Guest:
    return Guest()


@pytest.fixture
def box(guest: Guest) -> Iterator[Mailbox]:
    box = Mailbox(os.getpid(), guest.address)
    yield box
    box.close()


def test_a_waiting_guest_gets_its_words_and_the_time(guest: Guest, box: Mailbox) -> None:
    guest.state = HELD
    assert box.put(b'{"hostname": "h"}')
    assert (guest.state, guest.words) == (TOLD, b'{"hostname": "h"}')
    assert abs(guest.unix_ns - time.time_ns()) < 10**9


async def test_the_daemon_is_sent_for_until_it_waits(guest: Guest, box: Mailbox) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            guest.state = HELD

    async with asyncio.timeout(10):
        assert await box.held(call)
    assert calls == 3
    guest.memory[0] = 0
    assert not await box.held(call)


@pytest.mark.parametrize("state", [0, TOLD, DONE, REFUSED, 7])
def test_one_that_does_not_wait_gets_none(guest: Guest, box: Mailbox, state: int) -> None:
    guest.state = state
    before = bytes(guest.memory)
    assert not box.put(b"{}")
    assert bytes(guest.memory) == before


def test_nor_does_memory_that_is_no_mailbox(guest: Guest, box: Mailbox) -> None:
    guest.state = HELD
    guest.memory[0] = 0
    assert not box.put(b"{}")


def test_words_that_do_not_fit_are_not_put(guest: Guest, box: Mailbox) -> None:
    guest.state = HELD
    assert not box.put(bytes(mailbox.MAX_MESSAGE + 1))
    assert guest.state == HELD
    assert box.put(bytes(mailbox.MAX_MESSAGE))


@pytest.mark.parametrize(("answer", "done"), [(DONE, True), (REFUSED, False), (99, False)])
async def test_the_clock_runs_until_there_is_an_answer(guest: Guest, box: Mailbox, answer: int, done: bool) -> None:
    guest.state = HELD
    assert box.put(b"{}")
    first = guest.unix_ns
    waiting = asyncio.create_task(box.answered())
    async with asyncio.timeout(10):
        while guest.unix_ns == first:  # noqa: ASYNC110 (shared memory: there is no event)
            await asyncio.sleep(0)
    assert not waiting.done()
    guest.state = answer
    async with asyncio.timeout(10):
        assert await waiting is done


def test_the_end_of_the_process_is_an_error() -> None:
    program = "import mmap, sys; m = mmap.mmap(-1, 4096); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        box = Mailbox(process.pid, 0)  # nothing is mapped there
        with pytest.raises(VmmError, match="cannot be read"):
            box.put(b"{}")
        process.kill()
    with pytest.raises(VmmError, match="cannot be read"):
        asyncio.run(box.answered())
    box.close()
    with pytest.raises(VmmError, match="cannot be reached"):
        Mailbox(process.pid, 0)
