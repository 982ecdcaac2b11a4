"""What the orchestrator asks of a virtual machine monitor, whichever it is.

A driver starts VMM processes and is the only owner of them while the server runs. Processes outlive the server:
`VmHandle` is what the store keeps so that the next server can adopt them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aenv.images.protocol import Disk


@dataclass(frozen=True, slots=True, kw_only=True)
class VmSpec:
    """Everything a VMM needs to boot one guest.

    `directory` is the sandbox's own folder (disk upper, serial log, control socket); the driver may create files in
    it. `uid` is the unprivileged user (and group) the VMM runs as; of the host's files it sees only those named here,
    and needs to read `kernel`, `initramfs` and the disk's backing file, and to write the disk. `netns` is a path
    (``/run/netns/<name>``), `tap` the name of a tap inside it, `address` where the host reaches the guest's ports.
    """

    sandbox_id: str
    directory: Path
    uid: int
    vcpus: int
    memory_mb: int
    kernel: Path
    initramfs: Path
    hostname: str
    disk: Disk
    netns: Path
    tap: str
    mac: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VmHandle:
    """A VMM process across server restarts: `pid` and its start time (clock ticks since boot,
    field 22 of /proc/<pid>/stat), which together are never reused."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class VmExit:
    """How a VMM ended: its exit status where known (negative: killed by that signal) and a sentence for people."""

    status: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class VmmInfo:
    """What runs guests here, recorded with whatever depends on it."""

    driver: str
    version: str
    accel: str


class Vm(Protocol):
    """One running guest."""

    @property
    def handle(self) -> VmHandle: ...

    async def wait(self) -> VmExit:
        """Return when the VMM has ended, for whatever reason. May be awaited by several tasks."""
        ...

    async def console(self) -> bytes:
        """What the guest wrote to its serial console since the last call, the newest 64 KiB at most; also appended to
        ``serial.log`` in the sandbox's directory. For the message when a guest does not become ready.

        Raises VmmError, DeadlineExceeded.
        """
        ...

    async def kill(self) -> None:
        """End the VMM at once and return when it is gone. Idempotent. Raises VmmError if it cannot be ended."""
        ...

    async def detach(self) -> None:
        """Let go of a VMM that keeps running (the server stops): close connections, end nothing.
        Tasks in `wait` are cancelled."""
        ...


class Vmm(Protocol):
    """A driver."""

    async def info(self) -> VmmInfo:
        """Driver, version and the acceleration proven to work here. Raises VmmError with the fix."""
        ...

    async def boot(self, spec: VmSpec) -> Vm:
        """Start a guest from its kernel; return when the VMM runs it (not when the guest is ready).

        On an error or cancellation nothing of it is left. Raises VmmError (with the end of the VMM's own output) or
        InsufficientStorage.
        """
        ...

    async def adopt(self, spec: VmSpec, handle: VmHandle) -> Vm:
        """Take over the VMM a previous server started. Raises VmmError if it is gone or does not answer."""
        ...

    async def sweep(self, keep: frozenset[VmHandle]) -> list[str]:
        """Kill every VMM of this home that is not in `keep`; return the sandbox ids of those killed."""
        ...

    async def aclose(self) -> None:
        """Release what the driver itself holds. Running VMMs keep running."""
        ...
