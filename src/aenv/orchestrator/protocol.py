"""The face that the API and the proxy see. Every method raises only `aenv.errors`."""

from typing import Protocol

from aenv.errors import AenvError
from aenv.orchestrator.models import (
    CreateSpec,
    ListQuery,
    Page,
    Route,
    Sandbox,
    Snapshot,
    SnapshotPage,
    SnapshotQuery,
)


class Sandboxes(Protocol):
    """All sandboxes of this node. Ids that are unknown, ended or still being created raise NotFound, whose message
    for an ended one gives the reason of its end."""

    async def create(self, spec: CreateSpec, *, idempotency_key: str | None = None) -> Sandbox:
        """Return when the guest's daemon answers with environment and token applied.

        The same key with an equal spec returns the same sandbox; with another spec raises Conflict.
        Raises NotFound (template), BadRequest, TooManyRequests, Unavailable, DeadlineExceeded, InfrastructureError.
        """
        ...

    def get(self, sandbox_id: str) -> Sandbox: ...

    def list(self, query: ListQuery) -> Page:
        """Raises BadRequest for a token that is not of this query."""
        ...

    async def delete(self, sandbox_id: str, *, detail: str = "") -> None:
        """End it from whatever state; return when it no longer answers. Raises NotFound."""
        ...

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> None:
        """Keep its state and give back all it held; return when that is so. Without `memory` only the disk is kept, and
        the next resume boots from it. An error leaves it running. Raises NotFound, Conflict if it is paused already or
        busy, InfrastructureError."""
        ...

    async def resume(self, sandbox_id: str, seconds: float, *, memory: bool = True) -> tuple[Sandbox, bool]:
        """Make sure it runs for at least `seconds` more; whether it had to be resumed. One that was paused gets exactly
        that time to live; without `memory` its saved memory is dropped and it boots from its disk. Waits for a pause
        or resume under way. An error leaves it paused. Raises NotFound, Conflict if busy otherwise, TooManyRequests,
        InfrastructureError."""
        ...

    async def snapshot(self, sandbox_id: str, name: str | None, *, memory: bool = True) -> Snapshot:
        """Commit its present state under `name` (``name`` or ``name:tag``; the tag moves here if it was used). It keeps
        running, or stays paused. Raises NotFound, BadRequest, Conflict, InfrastructureError."""
        ...

    def snapshots(self, query: SnapshotQuery) -> SnapshotPage:
        """Raises BadRequest for a token that is not of this query."""
        ...

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """By id or name. Sandboxes made of it live on. Raises NotFound; Forbidden for what is no snapshot."""
        ...

    async def fork(self, sandbox_id: str, *, count: int, seconds: float) -> tuple[Sandbox | AenvError, ...]:
        """Make `count` children of its present state, each with its own identity; one capture for all. For each the
        child or why there is none. The source keeps running, or stays paused. Raises NotFound, BadRequest for a count
        that is not allowed, Conflict, InfrastructureError."""
        ...

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        """Put it back to one of its own snapshots, in place: it keeps its id, its time to live and whether it runs. An
        error leaves it as it was. Raises NotFound (also for a snapshot of another sandbox), Conflict,
        InfrastructureError."""
        ...

    async def awaken(self, sandbox_id: str) -> Route | None:
        """What `route` says once a pause or resume under way has ended, after resuming the sandbox if it is paused and
        was created with auto-resume. None if it cannot be reached."""
        ...

    async def set_timeout(self, sandbox_id: str, seconds: float) -> Sandbox:
        """Expire `seconds` from now; 0 or less expires at once."""
        ...

    async def extend(self, sandbox_id: str, seconds: float) -> Sandbox:
        """Expire no earlier than `seconds` from now; never shortens."""
        ...

    def route(self, sandbox_id: str) -> Route | None:
        """Where the proxy sends requests; None unless the sandbox is running."""
        ...

    def find_by_envd_token(self, matches: "TokenTest") -> str | None:
        """The id of the running sandbox whose envd token satisfies `matches` (signed file URLs that carry no id)."""
        ...


class TokenTest(Protocol):
    """A pure predicate over an envd token."""

    def __call__(self, token: str, /) -> bool: ...
