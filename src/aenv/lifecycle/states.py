"""Where a sandbox can be: the stable state, the operation in flight, and why it ended."""

from dataclasses import dataclass
from enum import StrEnum


class Stable(StrEnum):
    """What holds when nothing is in flight."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


class Operation(StrEnum):
    """What is being done to the sandbox. Each has a deadline, kept by the runner."""

    CREATING = "creating"
    PAUSING = "pausing"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    ROLLING_BACK = "rolling_back"
    KILLING = "killing"


class EndReason(StrEnum):
    """Why a sandbox is gone: recorded for every end and returned by the API."""

    KILLED = "killed"
    """A client deleted it."""
    TIMEOUT = "timeout"
    """Its TTL expired and its action at expiry is to delete."""
    CREATE_FAILED = "create_failed"
    """It never became ready; the creating call got the error."""
    VMM_DIED = "vmm_died"
    """Its VMM ended by itself, was killed from outside, or the guest powered off."""
    DISK_LOST = "disk_lost"
    """What served its disk died; the guest could not have gone on."""
    STATE_LOST = "state_lost"
    """It was paused, and what was kept of it cannot be used."""
    HOST_RESTART = "host_restart"
    """The host restarted under it."""
    SERVER_RESTART = "server_restart"
    """The server ended while the sandbox was half made, or its VMM could not be taken over afterwards."""
    INTERNAL_ERROR = "internal_error"
    """A fault of ours, logged with its trace."""


@dataclass(frozen=True, slots=True)
class Position:
    """One row heading of the transition table."""

    stable: Stable
    operation: Operation | None = None

    def __str__(self) -> str:
        return f"{self.stable}/{self.operation}" if self.operation else str(self.stable)


NEW = Position(Stable.NEW)
CREATING = Position(Stable.NEW, Operation.CREATING)
RUNNING = Position(Stable.RUNNING)
PAUSING = Position(Stable.RUNNING, Operation.PAUSING)
PAUSED = Position(Stable.PAUSED)
RESUMING = Position(Stable.PAUSED, Operation.RESUMING)
# A snapshot, a fork and a rollback end where they began: of a running sandbox or of a paused one.
AT_WORK = {
    stable: {
        operation: Position(stable, operation)
        for operation in (Operation.SNAPSHOTTING, Operation.FORKING, Operation.ROLLING_BACK)
    }
    for stable in (Stable.RUNNING, Stable.PAUSED)
}
# The end is certain from the moment killing begins, so its stable state is already ENDED: nothing shows it any more.
KILLING = Position(Stable.ENDED, Operation.KILLING)
ENDED = Position(Stable.ENDED)


@dataclass(frozen=True, slots=True)
class Life:
    """The whole state of the machine. `reason` and `detail` are set once, by what began the end."""

    position: Position = NEW
    reason: EndReason | None = None
    detail: str = ""

    @property
    def visible(self) -> bool:
        """Whether clients see it: created, and not ended or ending."""
        return self.position.stable in (Stable.RUNNING, Stable.PAUSED)
