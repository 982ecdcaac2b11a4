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


class DeleteRequested(Event):
    """A client wants it gone."""

    reason = EndReason.KILLED


class Expired(Event):
    """Its TTL ran out."""

    reason = EndReason.TIMEOUT


class TtlChanged(Event):
    """Its end moved; `detail` has the new instant."""


class VmmExited(Event):
    """The VMM is gone without our doing; `detail` says how."""

    reason = EndReason.VMM_DIED


class DiskLost(Event):
    """The disk works no more; `detail` says why."""

    reason = EndReason.DISK_LOST


class Adopted(Event):
    """A new server took over its running VMM."""


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
