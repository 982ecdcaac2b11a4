"""The frequency of this host's time stamp counter, for guests under software emulation on x86_64.

Such a guest reads the host's counter and has no other clock to measure it with but an emulated one, for which it takes
50 ms of undisturbed running. On a busy host that fails, and a kernel on hardware-reduced ACPI (as `microvm` has) then
waits for ever for a tick: measured with a load of 6 on 2 CPUs, 8 boots out of 10 hung. So the guest is told.
"""

import ctypes
import mmap
import platform
import time

_SECONDS = 0.1
_READ_TSC = bytes.fromhex("0f31 48c1e220 4809d0 c3".replace(" ", ""))
"""``rdtsc; shl rdx, 32; or rax, rdx; ret``: no file and no call of Linux tells the frequency on every host."""


def kernel_arguments(khz: int | None) -> str:
    """What tells an emulated guest its clock. `tsc=reliable`: it must not judge the counter by ticks that a busy host
    delivers late, and fall back to counting those."""
    return "" if khz is None else f"tsc_early_khz={khz} tsc=reliable"


def measure_khz() -> int | None:
    """Count for 0.1 s (off the event loop, please); None where there is no such counter or it may not be read."""
    if platform.machine() != "x86_64":
        return None
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a host that forbids memory both writable and executable
        return None
    code.write(_READ_TSC)
    anchor = ctypes.c_char.from_buffer(code)
    read_tsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))
    first_time, first_count = _sample(read_tsc)
    time.sleep(_SECONDS)
    last_time, last_count = _sample(read_tsc)
    del read_tsc, anchor
    code.close()
    return round((last_count - first_count) * 1_000_000 / (last_time - first_time))


def _sample(read_tsc: "ctypes._CFunctionType") -> tuple[int, int]:
    """Time in ns and the count at the same moment: of 50 tries the one that was least disturbed."""
    best: tuple[int, int, int] | None = None
    for _ in range(50):
        before = time.monotonic_ns()
        count = read_tsc()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, count)
    assert best is not None, "there was at least one try"
    return best[1], best[2]
