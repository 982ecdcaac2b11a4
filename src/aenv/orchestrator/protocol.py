"""The face that the API and the proxy see. Every method raises only `aenv.errors`."""

from typing import Protocol

from aenv.orchestrator.models import CreateSpec, ListQuery, Page, Route, Sandbox


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
