"""What the orchestrator asks of the network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GUEST_ADDRESS = "169.254.0.21"
"""The guest's own address, the same in every sandbox, so that a restored guest needs no reconfiguration."""
GATEWAY_ADDRESS = "169.254.0.22"
"""The tap's side of the guest's /30: gateway and resolver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressPolicy:
    """What a guest may reach. Order of decision: internal ranges (denied), `allow_out`, `deny_out`, then `internet`.

    `allow_out` holds IPv4 addresses, CIDRs and domains (``example.com``, ``*.example.com``); `deny_out` addresses
    and CIDRs.
    """

    internet: bool = True
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One guest's place in the network. `address` is the IPv4 address at which the host reaches the guest's ports."""

    index: int
    netns: Path
    tap: str
    mac: str
    address: str


class Network(Protocol):
    """The pool of slots of this node."""

    async def start(self, in_use: Mapping[int, EgressPolicy]) -> None:
        """Adopt the slots `in_use` (index -> policy), remove other leftovers of this home, begin to fill the pool."""
        ...

    async def acquire(self, policy: EgressPolicy) -> Slot:
        """A slot with `policy` in force. Raises TooManyRequests (all taken), BadRequest (bad policy), NetworkError."""
        ...

    def adopted(self, index: int) -> Slot:
        """The slot adopted at `start`. Raises NetworkError if it could not be adopted."""
        ...

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        """Replace the policy of a slot in use, at once, also for connections that are open."""
        ...

    async def release(self, slot: Slot) -> None:
        """Give a slot back; nothing of its previous user remains visible to the next. Idempotent.

        Slots are known by identity: pass the object that `acquire` or `adopted` returned, not an equal one.
        """
        ...

    async def aclose(self) -> None:
        """Remove the idle slots and stop the resolver. Slots in use stay."""
        ...
