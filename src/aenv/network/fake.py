"""A network in memory, for tests without privileges: slots are loopback addresses where stand-in guests listen."""

from collections.abc import Mapping
from pathlib import Path

from aenv.errors import NetworkError, TooManyRequests, Unavailable
from aenv.network.layout import GUEST_MAC, TAP
from aenv.network.policy import compile_policy
from aenv.network.protocol import EgressPolicy, Slot


class FakeNetwork:
    """Implements `Network`. `policies` shows what is in force (index -> policy).

    Slot `i` has the address 127.`net`.x.y; give each of several networks in one test its own `net` (1 to 254).
    """

    def __init__(self, max_slots: int = 1000, net: int = 77) -> None:
        self._max_slots = max_slots
        self._net = net
        self._closed = False
        self._slots: dict[int, Slot] = {}
        self.policies: dict[int, EgressPolicy] = {}

    async def start(self, in_use: Mapping[int, EgressPolicy]) -> None:
        for index, policy in in_use.items():
            compile_policy(policy)
            self._use(index, policy)

    async def acquire(self, policy: EgressPolicy) -> Slot:
        compile_policy(policy)
        if self._closed:
            raise Unavailable("the server is shutting down")
        if len(self._slots) >= self._max_slots:
            raise TooManyRequests(f"all {self._max_slots} network slots of this node are in use")
        return self._use(next(index for index in range(self._max_slots) if index not in self._slots), policy)

    def adopted(self, index: int) -> Slot:
        if index not in self._slots:
            raise NetworkError(f"network slot {index} could not be adopted")
        return self._slots[index]

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        compile_policy(policy)
        if self._slots.get(slot.index) is not slot:
            raise NetworkError(f"network slot {slot.index} is not in use")
        self.policies[slot.index] = policy

    async def release(self, slot: Slot) -> None:
        if self._slots.get(slot.index) is slot and not self._closed:
            del self._slots[slot.index], self.policies[slot.index]

    async def aclose(self) -> None:
        self._closed = True

    def _use(self, index: int, policy: EgressPolicy) -> Slot:
        high, low = divmod(index + 1, 256)
        address = f"127.{self._net}.{high}.{low}"
        slot = Slot(index=index, netns=Path("/proc/self/ns/net"), tap=TAP, mac=GUEST_MAC, address=address)
        self._slots[index], self.policies[index] = slot, policy
        return slot
