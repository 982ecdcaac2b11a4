"""What a guest may have found out about its processor, in a line: where it differs, a saved guest cannot go on."""

import contextlib
import hashlib
from pathlib import Path

from aenv.vmm.qemu_command import Machine, cpu_model

_CPUINFO = Path("/proc/cpuinfo")
_SAME_RATE = 500e-6
"""How far two measurements of one clock may be apart: NTP steers by at most 500 ppm, the error is a few ppm."""


def cpu_identity(machine: Machine, tsc_khz: int | None, remembered: Path, cpuinfo: Path = _CPUINFO) -> str:
    """Emulated: QEMU's model and the TSC rate, which is the host's, to 1 MHz. Else: the host's model and features.

    `tsc_khz` is measured anew by every server; `remembered` is a file that keeps a host whose rate is just between two
    whole MHz from being two hosts.
    """
    if machine.accel == "tcg":
        rate = "" if tsc_khz is None else f" tsc={round(_settled(tsc_khz, remembered) / 1000)}MHz"
        return cpu_model(machine) + rate
    facts: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    # aarch64 names neither a model nor flags, but implementer, part and features.
    name = facts.get("model name") or " ".join(facts.get(f"CPU {key}", "?") for key in ("implementer", "part"))
    features = sorted((facts.get("flags") or facts.get("Features", "")).split())
    return f"{name} {hashlib.sha256(' '.join(features).encode()).hexdigest()[:12]}"


def _settled(tsc_khz: int, remembered: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        before = int(remembered.read_text())
        if abs(before - tsc_khz) <= tsc_khz * _SAME_RATE:
            return before
    with contextlib.suppress(OSError):  # a host that cannot keep it measures again
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(f"{tsc_khz}\n")
    return tsc_khz
