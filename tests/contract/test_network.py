"""What every `Network` does, the fake one and the real one alike."""

import os
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from aenv.config import NetworkSettings, Settings
from aenv.errors import BadRequest, NetworkError, TooManyRequests, Unavailable
from aenv.network.fake import FakeNetwork
from aenv.network.pool import SlotPool
from aenv.network.protocol import EgressPolicy, Network, Slot

Make = Callable[[], Network]
REAL = pytest.param("real", marks=pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root"))
LIMIT = 3


class Tracked:
    """Gives back at the end what a test took."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._network: Network | None = None
        self.slots: list[Slot] = []

    async def start(self, in_use: dict[int, EgressPolicy]) -> Network:
        self._network = self._make()
        await self._network.start(in_use)
        return self._network

    async def aclose(self) -> None:
        # A last server that adopts nothing sweeps what is left.
        if self._network is not None:
            await self._network.aclose()
        last = self._make()
        await last.start({})
        await last.aclose()


@pytest.fixture(params=["fake", REAL])
async def tracked(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tracked]:
    settings = Settings(home=tmp_path, network=NetworkSettings(cidr="10.215.0.0/24", pool_size=1, max_slots=LIMIT))
    made = Tracked((lambda: SlotPool(settings)) if request.param == "real" else (lambda: FakeNetwork(LIMIT)))
    yield made
    await made.aclose()


@pytest.fixture
async def network(tracked: Tracked) -> Network:
    return await tracked.start({})


async def test_slots_are_distinct(network: Network) -> None:
    slots = [await network.acquire(EgressPolicy()) for _ in range(LIMIT)]
    assert len({slot.index for slot in slots}) == len({slot.address for slot in slots}) == LIMIT
    assert all(IPv4Address(slot.address) and slot.index >= 0 for slot in slots)
    assert len({(slot.tap, slot.mac) for slot in slots}) == 1  # a restored guest finds the card it had


async def test_all_taken_and_given_back(network: Network) -> None:
    slots = [await network.acquire(EgressPolicy()) for _ in range(LIMIT)]
    with pytest.raises(TooManyRequests, match=str(LIMIT)):
        await network.acquire(EgressPolicy())
    await network.release(slots[0])
    await network.acquire(EgressPolicy(internet=False))


async def test_release_is_idempotent_and_never_hits_the_next_user(network: Network) -> None:
    slots = [await network.acquire(EgressPolicy()) for _ in range(LIMIT)]
    await network.release(slots[0])
    await network.release(slots[0])
    again = await network.acquire(EgressPolicy())
    await network.release(slots[0])
    with pytest.raises(NetworkError):
        await network.apply(slots[0], EgressPolicy())
    await network.apply(again, EgressPolicy(deny_out=("1.1.1.1",)))


async def test_a_bad_policy_takes_no_slot_and_changes_none(network: Network) -> None:
    bad = EgressPolicy(allow_out=("example.com",))
    for _ in range(LIMIT + 1):
        with pytest.raises(BadRequest, match="ALL_TRAFFIC"):
            await network.acquire(bad)
    slots = [await network.acquire(EgressPolicy()) for _ in range(LIMIT)]
    with pytest.raises(BadRequest):
        await network.apply(slots[0], bad)


async def test_unknown_slots(network: Network) -> None:
    with pytest.raises(NetworkError):
        network.adopted(1)


async def test_closed(network: Network) -> None:
    slot = await network.acquire(EgressPolicy())
    await network.aclose()
    with pytest.raises(Unavailable):
        await network.acquire(EgressPolicy())
    await network.release(slot)  # too late, and no error


async def test_slots_in_use_pass_to_the_next_server(tracked: Tracked) -> None:
    first = await tracked.start({})
    slot = await first.acquire(EgressPolicy())
    await first.aclose()
    second = await tracked.start({slot.index: EgressPolicy(internet=False)})
    adopted = second.adopted(slot.index)
    assert adopted == slot
    others = [await second.acquire(EgressPolicy()) for _ in range(LIMIT - 1)]
    assert adopted.index not in {other.index for other in others}
    await second.apply(adopted, EgressPolicy())
    await second.release(adopted)
