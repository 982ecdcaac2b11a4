"""The process of the block daemon: started so that it outlives the server, found again, watched and ended."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import DeadlineExceeded, ImageError, InsufficientStorage

LOG_BYTES = 4 << 20
"""The log begins anew beyond this; what was is kept once, as ``<log>.1``."""
_OOM_SCORE = -500
"""Every sandbox of the node ends with it, so the kernel should take others first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process across restarts of the server: its pid, and its start time (clock ticks since boot)."""

    pid: int
    start_time: int


def identify(pid: int) -> Identity | None:
    """Who has this pid now; None if nobody, or only a zombie."""
    try:
        # proc(5), stat: the name, field 2, may hold blanks and parentheses; state is field 3, start time 22.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else Identity(pid=pid, start_time=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def _trust() -> dict[str, str]:
    """Which certificates of origins are trusted, where that is not what the system says."""
    return {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}


def spawn(argv: Sequence[str], log: Path) -> int:
    """Start `argv` in a session of its own, its output appended to `log`; return its pid. Raises ImageError,
    InsufficientStorage."""
    try:
        rotate(log)
        return os.posix_spawn(
            argv[0],
            list(argv),
            {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **_trust()},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            # Ours may be those of a tool that started us with some ignored.
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGHUP],
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorage(f"no space for {log}: free some on the host") from error
        raise ImageError(f"{argv[0]} could not be started: {error.strerror}") from error


def rotate(log: Path) -> None:
    """Begin the log anew if it is large. Its writer, who appends, need not know."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            os.truncate(log, 0)


def tail(log: Path, size: int = 2000) -> str:
    """The last `size` bytes of the log in one line, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-3:])


class Process:
    """A running process, by pidfd; reaped if it is our child. `close` leaves it running."""

    def __init__(self, pid: int) -> None:
        """Raises ImageError if there is no such process."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ImageError(f"process {pid} is gone: {error.strerror}") from error
        self.pid = pid
        self.status: int | None = None
        """Exit status once it ended (negative: killed by that signal); None also if it was not our child."""
        self._ended = asyncio.Event()
        _protect(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._ended.wait()

    async def end(self, signals: Sequence[tuple[signal.Signals, float]]) -> None:
        """Send each signal and wait so many seconds, until it has ended. Raises DeadlineExceeded."""
        for number, patience in signals:
            if self.ended or self._pidfd < 0:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.wait()
        if not self.ended:
            raise DeadlineExceeded(f"process {self.pid} did not end")

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        self._ended.set()

    def __str__(self) -> str:
        how = "ended" if self.ended else "runs"
        if self.status is not None:
            how = f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return f"aenv-blockd (pid {self.pid}) {how}"


def _protect(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_OOM_SCORE))
