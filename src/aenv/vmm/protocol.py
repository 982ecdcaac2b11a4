"""What the orchestrator asks of a virtual machine monitor, whichever it is.

A driver starts VMM processes and is the only owner of them while the server runs. Processes outlive the server:
`VmHandle` is what the store keeps so that the next server can adopt them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aenv.images.protocol import Disk, GuestMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class VmSpec:
    """Everything a VMM needs to run one guest.

    `sandbox_id` is what this launch goes by: no two at a time share it. `directory` is its own folder (disk upper,
    serial log, control socket); the driver may create files in it. `uid` is the unprivileged user (and group) the VMM
    runs as; of the host's files it sees only those named here, and needs to read `kernel` and `initramfs` (to boot) or
    `memory` (to go on from), and to write the disk. `netns` is a path (``/run/netns/<name>``), `tap` the name of a tap
    inside it, `address` where the host reaches the guest's ports.

    `zero_freed`: a guest that boots clears the memory its programs give back, so that captures do not carry it.
    `ahead`: nobody has asked for it yet, so it gives way to all others until it is claimed.
    `memory` is a file of `memory_mb` that a guest's memory was captured into: mapped privately, so nothing writes it.
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
    memory: Path | None = None
    zero_freed: bool = False
    ahead: bool = False


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
    """What runs guests here. A saved guest goes on only where all of it is the same: `cpu` stands for everything that a
    guest may have found out about its processor (model, features, rate of its clock)."""

    driver: str
    version: str
    accel: str
    cpu: str


class Vm(Protocol):
    """One guest: running, frozen, or (from `Vmm.prepare`) waiting for its state."""

    @property
    def handle(self) -> VmHandle: ...

    @property
    def frozen(self) -> bool:
        """Whether its guest was loaded or frozen, and does not run."""
        ...

    def claim(self) -> None:
        """Somebody waits for this VMM that was made ahead: it need not give way any longer. Idempotent."""
        ...

    async def load(self, state: bytes) -> None:
        """Give a prepared VMM the device state that `save` returned. The guest is frozen then. Raises VmmError."""
        ...

    async def hold(self, call: Callable[[], None]) -> None:
        """Return when the daemon of a running guest waits to be greeted, having been sent for with `call`, or at once
        if it never does. Cancel it to give up. Raises VmmError."""
        ...

    async def freeze(self) -> None:
        """Stop the virtual CPUs; return when nothing is under way to disk or network. Idempotent. Raises VmmError."""
        ...

    async def thaw(self) -> None:
        """Let the virtual CPUs go on. Idempotent. Raises VmmError."""
        ...

    async def greet(self, message: bytes) -> bool:
        """Let a frozen guest go on with `message` (the JSON of a `POST /init`) for its daemon, if that was captured
        while it waited for one; return whether it has acted on it. If not, it goes on without. Raises VmmError."""
        ...

    async def save(self) -> bytes:
        """The state of a frozen guest but for its memory and its disk. Raises VmmError."""
        ...

    async def memory(self) -> GuestMemory:
        """Where the guest's memory is in the VMM. Raises VmmError."""
        ...

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

    async def prepare(self, spec: VmSpec) -> Vm:
        """Start a VMM over `spec.memory` that waits for `Vm.load`. Errors are those of `boot`."""
        ...

    async def adopt(self, spec: VmSpec, handle: VmHandle) -> Vm:
        """Take over the VMM a previous server started; a guest that was left frozen goes on. Raises VmmError if it is
        gone, does not answer or never got its state."""
        ...

    async def sweep(self, keep: frozenset[VmHandle]) -> list[str]:
        """Kill every VMM of this home that is not in `keep`; return the sandbox ids of those killed."""
        ...

    async def aclose(self) -> None:
        """Release what the driver itself holds. Running VMMs keep running."""
        ...
