"""What can happen to a sandbox. Events are facts and wishes; they carry no behaviour."""

from dataclasses import dataclass
from typing import ClassVar

from aenv.lifecycle.states import EndReason


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. `reason` is what the record says if this event begins the end."""

    reason: ClassVar[EndReason | None] = None
    detail: str = ""


class CreateRequested(Event):
    """A validated create call."""


class Launched(Event):
    """The guest answers with environment and token applied."""


class LaunchFailed(Event):
    """It could not be made ready; `detail` says why."""

    reason = EndReason.CREATE_FAILED


class PauseRequested(Event):
    """A client wants it paused, or its TTL ran out and pausing is what it does then; `detail` says which."""


class Paused(Event):
    """Its state is kept; the VMM is of no more use."""


class PauseFailed(Event):
    """Its state could not be kept, and it runs on; `detail` says why."""


class ResumeRequested(Event):
    """A client, or a request to a sandbox with auto-resume, wants it to run."""


class Resumed(Event):
    """The guest goes on and has its new identity."""


class ResumeFailed(Event):
    """It could not be made to run and stays paused; `detail` says why."""


class SnapshotRequested(Event):
    """A client wants its state committed under a name."""


class ForkRequested(Event):
    """A client wants children of it."""


class Captured(Event):
    """Its state was taken; it goes on."""


class CaptureFailed(Event):
    """Its state could not be taken; it goes on all the same. `detail` says why."""


class RollbackRequested(Event):
    """A client wants it put back to one of its snapshots; `detail` names it."""


class RolledBack(Event):
    """It is what the snapshot was."""


class RollbackFailed(Event):
    """It is what it was before; `detail` says why."""


class DeleteRequested(Event):
    """A client wants it gone."""

    reason = EndReason.KILLED


class Expired(Event):
    """Its TTL ran out, and ending is what it does then."""

    reason = EndReason.TIMEOUT


class TtlChanged(Event):
    """Its end moved; `detail` has the new instant."""


class VmmExited(Event):
    """The VMM is gone without our doing; `detail` says how."""

    reason = EndReason.VMM_DIED


class DiskLost(Event):
    """The disk works no more; `detail` says why."""

    reason = EndReason.DISK_LOST


class StateLost(Event):
    """What was kept of a paused sandbox cannot be used; `detail` says why."""

    reason = EndReason.STATE_LOST


class Adopted(Event):
    """A new server took over its running VMM, or the state it was paused in. What was in flight has not happened."""


class HostRestarted(Event):
    """The host has booted since the sandbox started, so its VMM cannot exist."""

    reason = EndReason.HOST_RESTART


class Orphaned(Event):
    """The server stops while it is half made; or a new server found it half made, half gone, or beyond reach."""

    reason = EndReason.SERVER_RESTART


class Faulted(Event):
    """Our own code failed; `detail` names the error."""

    reason = EndReason.INTERNAL_ERROR


class TornDown(Event):
    """Nothing of it is left on the node."""


EVENTS: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}
"""By name, for replaying an event log."""
