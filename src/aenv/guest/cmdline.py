"""The kernel command line of a guest.

Measured under TCG (QEMU 10, Debian's 6.12 cloud kernel, 512 MiB, `-cpu max`, one of two otherwise idle cores): 2.8 s
from process start to a listening daemon with `quiet` alone, 1.8 s with the switches below. Alone, `cryptomgr.notests`
is worth 0.6 s, each of the others 0.1 to 0.25 s.
"""

import platform
import re
from typing import Literal

from aenv.errors import ProvisionError
from aenv.guest import mailbox

GUEST_ADDRESS = "169.254.0.21/30"
"""The guest's own address, the same in every sandbox, so that a restored guest needs no reconfiguration."""
GUEST_GATEWAY = "169.254.0.22"

# A panic ends the VMM (with `-no-reboot`), and so the sandbox, with a reason; it never hangs or silently reboots.
_BASE = "quiet reboot=t panic=-1"

_FAST = " ".join(
    (
        "cryptomgr.notests",  # self-tests of the kernel's ciphers
        "rcupdate.rcu_expedited=1",  # no waiting for grace periods while drivers register
        "lsm=landlock,capability,yama",  # no AppArmor, TOMOYO, IMA, EVM: an image brings no policy for them
        "audit=0",
        "nowatchdog",  # a stalled vCPU of a busy host is no lockup
        "psi=0",  # pressure statistics: work at every switch of tasks and every two seconds, for a file nobody reads
    )
)

_FAST_X86 = "8250.nr_uarts=1"

# Memory that the kernel leaves alone: below where it is loaded (16 MiB), above what firmware uses (1 MiB).
_MAILBOX_X86 = f"memmap={mailbox.BYTES >> 10}K${mailbox.ADDRESS:#x} aenv.mailbox={mailbox.ADDRESS:#x}"

# The string instructions that these two flags recommend for clearing and copying pages go byte by byte in QEMU.
# Measured: freeing 300 MB of memory that is cleared then 1.2 s with them, 0.3 s without; boot 2.95 and 2.7 s of CPU.
_FAST_TCG_X86 = "clearcpuid=erms,fsrm"

_ZERO_FREED = "init_on_free=1"

# What follows weakens only boundaries inside the guest, whose default user is allowed everything there by sudo.
_FAST_TCG = " ".join(
    (
        "mitigations=off",  # against speculation of a CPU that does not speculate
        "init_on_alloc=0",
        "no_timer_check",  # fails on a busy host: the emulated timer is late
    )
)

_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


def kernel_cmdline(
    *,
    hostname: str,
    accel: Literal["kvm", "tcg"],
    tsc_khz: int | None = None,
    machine: str | None = None,
    zero_freed: bool = False,
) -> str:
    """The command line envd and the kernel need (envd's half is the `aenv.*` parameters).

    `tsc_khz` is the host's TSC rate (`aenv.guest.tsc.host_tsc_khz`), which is what `rdtsc` returns under TCG. There
    it has to be given: an emulated machine has no reference to calibrate against that keeps its pace on a busy host,
    and a guest that cannot calibrate hangs or falls back to a clock of 4 ms grain. With it QEMU's microvm needs
    neither `pit` nor `pic`, and both are better off: an interrupt of the unused PIC at vector 0 panics the guest now
    and then. `machine` is the host's architecture as uname names it.

    `zero_freed` has the kernel clear the memory that programs give back, so that captures of this guest, and of all
    that start from them, do not carry it: after a process of 150 MB has ended, 12 MB more than before are not zero,
    instead of 155. Clearing then costs 1.6 µs a page when it is freed and saves the same when it is used again; but
    the boot clears all memory once (0.7 s for 512 MiB under emulation) and the host then holds all of it. For boots
    whose capture many guests start from.

    Raises ProvisionError if `hostname` is not a host name label, or the rate is needed and not known.
    """
    if not _HOSTNAME.fullmatch(hostname):
        raise ProvisionError(f"hostname {hostname!r} must be 1 to 63 letters, digits and inner hyphens")
    x86 = (machine or platform.machine()) == "x86_64"
    words = ["console=ttyS0", _BASE, _FAST, _FAST_X86, _MAILBOX_X86] if x86 else ["console=ttyAMA0", _BASE, _FAST]
    if accel == "tcg":
        words.append(_FAST_TCG)
        if x86:
            if tsc_khz is None:
                raise ProvisionError("the rate of this machine's TSC is not known; emulated guests have no other clock")
            words.append(f"{_FAST_TCG_X86} tsc_early_khz={tsc_khz} tsc=reliable")
    if zero_freed:
        words.append(_ZERO_FREED)
    words.append(f"aenv.root=/dev/vda aenv.ip={GUEST_ADDRESS} aenv.gw={GUEST_GATEWAY} aenv.dns={GUEST_GATEWAY}")
    words.append(f"aenv.hostname={hostname}")
    return " ".join(words)
