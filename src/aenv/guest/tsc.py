"""The rate of the host's time stamp counter, which an emulated x86 guest reads as its own.

The kernel knows it and tells nobody without privileges, so it is measured: two readings of the counter, each
bracketed by the monotonic clock. Over 50 ms that is right to a few parts per million.
"""

import ctypes
import functools
import mmap
import platform
import time
from collections.abc import Callable
from pathlib import Path

_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx,32; or rax,rdx; ret
_INTERVAL = 0.05


@functools.cache
def host_tsc_khz() -> int | None:
    """The TSC rate in kHz; None on other architectures. Takes 50 ms, once per process: not for the event loop
    (`asyncio.to_thread`)."""
    if platform.machine() != "x86_64":
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a policy of the host forbids writable code
        return _nominal_khz()
    page.write(_RDTSC)
    anchor = ctypes.c_char.from_buffer(page)
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))
    ticks, nanoseconds = _sample(rdtsc)
    time.sleep(_INTERVAL)
    later_ticks, later_nanoseconds = _sample(rdtsc)
    del rdtsc, anchor
    page.close()
    return round((later_ticks - ticks) * 1_000_000 / (later_nanoseconds - nanoseconds))


def _nominal_khz() -> int | None:
    """What the kernel shows as the CPU's frequency: on most virtual machines the TSC's rate, elsewhere near it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return round(float(line.partition(":")[2]) * 1000)
    return None


def _sample(rdtsc: Callable[[], int]) -> tuple[int, int]:
    """A counter value and the monotonic time of it, in nanoseconds: the tightest of a few tries."""
    best: tuple[int, int, int] | None = None
    for _ in range(16):
        before = time.monotonic_ns()
        ticks = rdtsc()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, ticks, (before + after) // 2)
    assert best is not None
    return best[1], best[2]
