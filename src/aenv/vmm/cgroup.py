"""One cgroup (version 2) per VMM: limits, and an end that nothing in it can escape.

``<cgroup2 mount>/aenv/<home>/<sandbox id>``, where <home> is a digest of its path. Where there is no cgroup2, or we
may not write to it, VMMs run without; `probe` says so for `aenv doctor`. On hybrid hosts the controllers may all be
with version 1: then there are no limits, but grouping and killing still work.
"""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")
_WANTED = ("memory", "pids")


@dataclass(frozen=True, slots=True)
class CgroupSupport:
    """`root` is where the groups of VMMs are made, None where that is impossible; `detail` a sentence for people."""

    root: Path | None
    controllers: frozenset[str]
    detail: str


def probe(home: Path, mountinfo: Path = _MOUNTINFO) -> CgroupSupport:
    """Find the cgroup2 mount, and make ``aenv`` in it with what controllers can be had."""
    mount = _find_mount(mountinfo)
    if mount is None:
        return CgroupSupport(None, frozenset(), "no cgroup2 mount: VMMs run without a cgroup of their own")
    base = mount / "aenv"
    try:
        base.mkdir(exist_ok=True)
        for group in (mount, base):
            _enable(group)
        controllers = frozenset((base / "cgroup.subtree_control").read_text().split()) & frozenset(_WANTED)
    except OSError as error:
        return CgroupSupport(None, frozenset(), f"{base} cannot be used ({error}): VMMs run without a cgroup")
    missing = [name for name in _WANTED if name not in controllers]
    detail = str(base) + (f"; no limits of {', '.join(missing)} (controller not in cgroup2)" if missing else "")
    return CgroupSupport(base / hashlib.sha256(bytes(home)).hexdigest()[:12], controllers, detail)


def create(support: CgroupSupport, name: str, *, memory_max: int, pids_max: int) -> Path | None:
    """Make the group `name` with these limits (bytes, tasks) as far as possible; None without support.

    Raises OSError if a supported group cannot be made.
    """
    if support.root is None:
        return None
    group = support.root / name
    _make(support, group)
    if "memory" in support.controllers:
        (group / "memory.max").write_text(str(memory_max))
        # The guest's memory may not be swapped away piecemeal by its own limit; absent without swap accounting.
        with contextlib.suppress(FileNotFoundError):
            (group / "memory.swap.max").write_text("0")
    if "pids" in support.controllers:
        (group / "pids.max").write_text(str(pids_max))
    return group


def remove(support: CgroupSupport, name: str) -> None:
    """Kill whatever is still in the group and remove it. Idempotent; a group that is still dying is left to `prune`.

    The home's group stays: another VMM may be about to start in it.
    """
    if support.root is None:
        return
    group = support.root / name
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    with contextlib.suppress(OSError):
        group.rmdir()


def leave(support: CgroupSupport) -> None:
    """Remove the home's group unless VMMs still run in it. When no more are started."""
    if support.root is not None:
        with contextlib.suppress(OSError):
            support.root.rmdir()


def prune(support: CgroupSupport) -> None:
    """Remove the empty groups that a killed server left. Not while VMMs are being started."""
    if support.root is None or not support.root.is_dir():
        return
    with contextlib.suppress(OSError):
        groups = [entry for entry in support.root.iterdir() if entry.is_dir()]
        for group in (*groups, support.root):
            with contextlib.suppress(OSError):
                group.rmdir()


def _make(support: CgroupSupport, group: Path) -> None:
    group.parent.mkdir(exist_ok=True)
    if support.controllers:
        _enable(group.parent)
    group.mkdir(exist_ok=True)


def _enable(group: Path) -> None:
    available = (group / "cgroup.controllers").read_text().split()
    for name in _WANTED:
        if name in available:
            # Refused where processes sit in the group itself (EBUSY): then that controller is not to be had.
            with contextlib.suppress(OSError):
                (group / "cgroup.subtree_control").write_text(f"+{name}")


def _find_mount(mountinfo: Path) -> Path | None:
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if after.split(" ")[0] == "cgroup2":
            return Path(before.split(" ")[4])
    return None
