"""The client of the jail server (`aenv.vmm.jail`): starts it, asks it, replaces it when it died."""

import contextlib
import os
import signal
import socket
import sys
import threading

from aenv.errors import VmmError
from aenv.vmm import jail

_DEADLINE = 10.0
"""Seconds for an answer; a fork takes one millisecond."""


class Jailer:
    """Starts jailed processes, which are children of this one. Calls block for milliseconds: off the event loop.

    The server is started with the first of them and ends with `close`, or with this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._pid = 0

    def spawn(self, request: bytes, *, output: int, listen: int | None) -> int:
        """Start what `request` (`jail.parameters`) says, with descriptors for its output and for QMP; return its pid.

        Raises VmmError.
        """
        descriptors = [output] if listen is None else [output, listen]
        with self._lock:
            # Whoever killed it may have done so before this call.
            answer = self._ask(request, descriptors) or self._ask(request, descriptors)
        if not answer:
            raise VmmError("the VMM could not be started: the jail server ends at once")
        (pid,) = jail.PID.unpack(answer)
        if pid < 0:
            raise VmmError(f"the VMM could not be started: {os.strerror(-pid)}")
        return int(pid)

    def close(self) -> None:
        """End the server. What it has started goes on. Idempotent."""
        with self._lock:
            self._stop()

    def _ask(self, request: bytes, descriptors: list[int]) -> bytes:
        """The answer; none if the server is dead."""
        try:
            channel = self._channel or self._start()
            socket.send_fds(channel, [request], descriptors)
            answer = channel.recv(jail.PID.size)
        except TimeoutError:
            self._stop()
            raise VmmError(f"the VMM could not be started: no answer of the jail server in {_DEADLINE:g} s") from None
        except ConnectionError:
            answer = b""
        except OSError as error:
            self._stop()
            raise VmmError(f"the VMM could not be started: {error}") from error
        if not answer:
            self._stop()
        return answer

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.settimeout(_DEADLINE)
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", jail.__file__],
                {"LC_ALL": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), jail.CHANNEL_FD),
                ],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = ours
        return ours

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
