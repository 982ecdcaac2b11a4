"""VMM processes: who they are, waiting for their end, finding those that a previous server left.

Linux only: pidfds and /proc. Nothing here trusts what a process says of itself (its command line, its name): a VMM
that was broken into can change those. The mark is the source of the root mount that the jail gave it.
"""

import asyncio
import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import DeadlineExceeded, VmmError
from aenv.vmm.protocol import VmHandle

PROC = Path("/proc")


def mark(home: Path, sandbox_id: str) -> str:
    """The source of the root mount of this sandbox's VMM, as the jail makes it and /proc/<pid>/mountinfo shows it."""
    return f"{_mark_prefix(home)}{sandbox_id}"


def _mark_prefix(home: Path) -> str:
    # mountinfo escapes blanks and backslashes in octal; a plain alphabet avoids telling them apart.
    return f"aenv:{re.sub(rb'[^A-Za-z0-9/._-]', lambda m: b'%%%02x' % m[0][0], os.fsencode(home)).decode()}:"


def read_start_time(pid: int) -> int | None:
    """Clock ticks since boot at which `pid` started; None if there is no such process or only its zombie."""
    try:
        state, start_time = _read_stat(pid)
    except (OSError, IndexError, ValueError):
        return None
    return None if state in "ZX" else start_time


def _read_stat(pid: int) -> tuple[str, int]:
    """State and start time, also of a zombie (proc(5): fields 3 and 22)."""
    # The name, field 2, may hold blanks and parentheses: count after the last one.
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def read_mark(pid: int) -> str | None:
    """The source of the root mount of `pid`, if a jail of ours made it."""
    try:
        lines = (PROC / str(pid) / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        # "<id> <parent> <dev> <root> <mount point> <options> [tags] - <type> <source> <super options>" (proc(5))
        before, _, after = line.partition(" - ")
        if before.split(" ")[4:5] == ["/"] and after.startswith("tmpfs aenv:"):
            return after.split(" ")[1]
    return None


FIRST, SECOND, LAST = 0, 5, 15
"""How nice a VMM is: one that somebody waits for, one that runs, one that nobody has asked for yet."""


@dataclass(frozen=True, slots=True)
class Found:
    """A VMM of some home, found by scanning."""

    handle: VmHandle
    sandbox_id: str


def find(home: Path) -> list[Found]:
    """All VMMs of `home` on this machine. Reads /proc; milliseconds, so call it off the event loop."""
    prefix, host_root, found = _mark_prefix(home), _mount_namespace("self"), []
    for entry in (entry.name for entry in PROC.iterdir()):
        if not entry.isdigit() or _mount_namespace(entry) in (None, host_root):
            continue
        root = read_mark(int(entry))
        start_time = read_start_time(int(entry))
        if root is not None and start_time is not None and root.startswith(prefix):
            handle = VmHandle(pid=int(entry), start_time=start_time)
            found.append(Found(handle, root.removeprefix(prefix)))
    return found


def _mount_namespace(pid: str) -> str | None:
    try:
        return str((PROC / pid / "ns/mnt").readlink())
    except OSError:
        return None


class Process:
    """One process, by pidfd. It may be our child (its status is then known and it is reaped) or not.

    Made with `spawned` or `opened`; ended by `close`, which leaves the process alone.
    """

    def __init__(self, pid: int, start_time: int, pidfd: int) -> None:
        self.handle = VmHandle(pid=pid, start_time=start_time)
        self.status: int | None = None
        """Exit status once it ended (negative: killed by that signal); None also if it was not our child."""
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    @classmethod
    def spawned(cls, pid: int) -> "Process":
        """Take charge of a child that nobody else waits for. Raises VmmError, and then the child is ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise VmmError(f"the VMM process {pid} cannot be watched: {error}") from error
        # Until it is waited for even a dead child keeps its entry.
        return cls(pid, _read_stat(pid)[1], pidfd)

    @classmethod
    def opened(cls, handle: VmHandle) -> "Process":
        """Take charge of a running process. Raises VmmError if it is not there (any more)."""
        try:
            pidfd = os.pidfd_open(handle.pid)
        except OSError:
            raise VmmError(f"the VMM process {handle.pid} is gone") from None
        # With the pidfd held the pid cannot be reused, so what is read now is about the process we hold.
        if read_start_time(handle.pid) != handle.start_time:
            os.close(pidfd)
            raise VmmError(f"the VMM process {handle.pid} is gone (its pid is another process now)")
        return cls(handle.pid, handle.start_time, pidfd)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._ended.wait()

    def give_way(self, nice: int) -> None:
        """Let others come first when there is not CPU time for all. Needs root, who may also take it back."""
        if self.ended or self._pidfd < 0:
            return
        with contextlib.suppress(OSError):  # it may be ending
            for thread in (PROC / str(self.handle.pid) / "task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
            # Of its session, which is what counts where the kernel schedules by session (sched_autogroup).
            (PROC / str(self.handle.pid) / "autogroup").write_text(str(nice))

    async def kill(self, deadline: float) -> None:
        """SIGKILL, and wait for the end. Raises DeadlineExceeded."""
        if not self.ended and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        try:
            async with asyncio.timeout(deadline):
                await self.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the VMM process {self.handle.pid} did not end within {deadline:g} s") from None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.handle.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        self._ended.set()
