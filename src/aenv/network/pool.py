"""The network of a node: a warm pool of slots, and the resolver that serves their guests.

A slot is used once. Giving it back removes it and a new one is made in the background: nothing of a user (connections,
opened addresses, counters, a process that stayed) can reach the next, and there is no scrubbing to get wrong.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import TypeVar

import structlog

from aenv.config import Settings
from aenv.errors import AenvError, DeadlineExceeded, NetworkError, TooManyRequests, Unavailable
from aenv.network.layout import Layout, internal_ranges
from aenv.network.policy import CompiledPolicy, compile_policy
from aenv.network.protocol import EgressPolicy, Slot
from aenv.network.resolver import Resolver
from aenv.network.slots import IndexTaken, Slots
from aenv.network.upstream import Upstream

ACQUIRE_SECONDS = 30.0
RELEASE_SECONDS = 5.0
GUARD_SECONDS = 5.0
LULL_SECONDS = 0.3
"""Without an acquire, before spare slots are made: a launch that has just got its own is not slowed down by that."""
AT_LEAST = 2
"""Spare slots (or all, if fewer are kept) that are made at once all the same."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.5, 30.0

T = TypeVar("T")
log = structlog.get_logger(__name__)

_OPEN = compile_policy(EgressPolicy())
"""What a slot in the pool is made with; the most frequent policy, which then costs nothing to put in force."""


@dataclass(eq=False)
class _Lease:
    """A slot in use and the policy in force."""

    slot: Slot
    policy: CompiledPolicy


class SlotPool:
    """Implements `Network`. One per home; a second process on the same home must be kept out by the caller."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError for a wrong [network] setting."""
        self._layout = Layout.of(settings)
        internal = internal_ranges(self._layout.cidr, settings.network.allow_internal)
        self._slots = Slots(self._layout, internal)
        self._limit = min(settings.network.max_slots, self._layout.size)
        self._spare = settings.network.pool_size
        self._resolver = Resolver(
            Upstream(settings.network.dns_upstream), lambda address: any(address in net for net in internal), self._open
        )
        # Two threads, each first in, first out. Changes of a slot run in order with the making of its successor at the
        # same index, so that one which is late (its caller cancelled) meets no later slot; removals, which wait for
        # the kernel, hold up nobody.
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="aenv-net-change")
        self._removals = ThreadPoolExecutor(1, thread_name_prefix="aenv-net-remove")
        self._used: dict[int, _Lease] = {}
        self._idle: deque[int] = deque()
        self._waiters: deque[asyncio.Future[_Lease]] = deque()
        self._doomed: dict[int, asyncio.Event] = {}
        self._foreign: dict[int, None] = {}
        """Indexes other homes hold, the one tried longest ago first."""
        self._wanted = asyncio.Event()
        self._returned = asyncio.Event()
        self._closing = asyncio.Event()
        self._last_take = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, in_use: Mapping[int, EgressPolicy]) -> None:
        policies = {index: compile_policy(policy) for index, policy in in_use.items() if index < self._layout.size}
        for index in in_use.keys() - policies.keys():
            log.error("a network slot in use is outside network.cidr and removed", slot=index, slots=self._layout.size)
        found = await self._in(self._changes, self._slots.prepare, frozenset(policies))
        self._foreign = dict.fromkeys(sorted(found.foreign))
        if found.removed:
            log.info("removed network slots left behind by an earlier server", slots=len(found.removed))
        for index, policy in policies.items():
            try:
                sockets = await self._in(self._changes, self._slots.adopt, index, policy)
                await self._resolver.serve(index, sockets, policy)
                self._used[index] = _Lease(self._layout.slot(index), policy)
            except NetworkError as error:
                log.error("a network slot in use could not be adopted", slot=index, error=error.message)
                self._doom(index)
        self._tasks = [
            asyncio.create_task(self._fill(), name="network-fill"),
            asyncio.create_task(self._reap(), name="network-reap"),
            asyncio.create_task(self._guard(), name="network-guard"),
        ]

    async def acquire(self, policy: EgressPolicy) -> Slot:
        compiled = compile_policy(policy)
        lease = await self._take()
        try:
            if compiled != lease.policy:
                await self._change(lease, compiled)
        except BaseException:
            self._give_up(lease)
            raise
        return lease.slot

    def adopted(self, index: int) -> Slot:
        if lease := self._used.get(index):
            return lease.slot
        raise NetworkError(f"network slot {index} could not be adopted; see the log of this server's start")

    async def apply(self, slot: Slot, policy: EgressPolicy) -> None:
        compiled = compile_policy(policy)
        lease = self._used.get(slot.index)
        if lease is None or lease.slot is not slot:
            raise NetworkError(f"network slot {slot.index} is not in use")
        await self._change(lease, compiled)

    async def release(self, slot: Slot) -> None:
        lease = self._used.get(slot.index)
        # By identity: an equal slot may be the next user's.
        if lease is None or lease.slot is not slot or self._closing.is_set():
            return
        gone = self._give_up(lease)
        # The removal goes on without this caller. Should the kernel refuse it, it is tried again and logged there.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await gone.wait()

    async def aclose(self) -> None:
        self._closing.set()
        self._wanted.set()
        self._returned.set()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable("the server is shutting down"))
        await asyncio.gather(*self._tasks)
        await self._resolver.aclose()
        rest = {*self._idle, *self._doomed}
        self._idle.clear()
        try:
            if rest:
                await self._in(self._removals, self._slots.remove, rest)
            if not self._used and self._tasks:
                await self._in(self._removals, self._slots.remove_table)
        except NetworkError as error:
            log.warning("network slots are left for the next start to remove", error=error.message)
        self._tasks.clear()
        self._changes.shutdown(wait=False)
        self._removals.shutdown(wait=False)

    async def _take(self) -> "_Lease":
        if self._closing.is_set():
            raise Unavailable("the server is shutting down")
        if len(self._used) + len(self._waiters) >= self._limit:
            raise TooManyRequests(
                f"all {self._limit} network slots of this node are in use; end a sandbox or raise network.max_slots"
            )
        self._last_take = asyncio.get_running_loop().time()
        self._wanted.set()
        if self._idle:
            return self._lease(self._idle.popleft())
        waiter: asyncio.Future[_Lease] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(ACQUIRE_SECONDS):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_up(waiter.result())  # cancelled in the moment of success
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no network slot became ready within {ACQUIRE_SECONDS:g} s") from None
            raise
        finally:
            with contextlib.suppress(ValueError):  # taken off by _offer
                self._waiters.remove(waiter)

    async def _change(self, lease: "_Lease", policy: CompiledPolicy) -> None:
        # The resolver first: what the new policy denies is asked of nobody from here on.
        index, before = lease.slot.index, lease.policy
        self._resolver.update(index, policy)
        try:
            await self._in(self._changes, self._slots.apply, index, policy)
        except NetworkError:
            if self._used.get(index) is lease:
                self._resolver.update(index, before)
            raise
        lease.policy = policy

    async def _open(
        self, index: int, addresses: dict[IPv4Address, int], known: frozenset[IPv4Address], mark: int
    ) -> None:
        await self._in(self._changes, self._slots.open, index, addresses, known, mark)

    def _lease(self, index: int) -> "_Lease":
        lease = self._used[index] = _Lease(self._layout.slot(index), _OPEN)
        return lease

    def _give_up(self, lease: "_Lease") -> asyncio.Event:
        del self._used[lease.slot.index]
        return self._doom(lease.slot.index)

    def _doom(self, index: int) -> asyncio.Event:
        gone = self._doomed[index] = asyncio.Event()
        self._returned.set()
        return gone

    async def _fill(self) -> None:
        """Keep the pool full. After a failure those who wait are told, and the next try waits, longer each time, or
        until somebody wants a slot."""
        trouble = _Trouble("network slots cannot be made")
        while not self._closing.is_set():
            self._wanted.clear()
            room = self._limit - len(self._used)
            index = self._next_index()
            if index is None or len(self._idle) >= min(self._spare + len(self._waiters), room):
                await self._wanted.wait()
                continue
            lull = self._last_take + LULL_SECONDS - asyncio.get_running_loop().time()
            if lull > 0 and not self._waiters and len(self._idle) >= min(AT_LEAST, self._spare):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(lull):
                        await self._wanted.wait()
                continue
            try:
                sockets = await self._in(self._changes, self._slots.create, index, _OPEN)
                try:
                    await self._resolver.serve(index, sockets, _OPEN)
                except NetworkError:
                    self._doom(index)
                    raise
            except NetworkError as error:
                if isinstance(error, IndexTaken):
                    tried_before = index in self._foreign
                    self._foreign.pop(index, None)
                    self._foreign[index] = None
                    if not tried_before:
                        continue
                for waiter in self._waiters:
                    if not waiter.done():
                        waiter.set_exception(NetworkError(error.message))
                await trouble.met(error, self._wanted)
            else:
                trouble.over()
                self._foreign.pop(index, None)
                self._offer(index)

    def _offer(self, index: int) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(self._lease(index))
                return
        self._idle.append(index)

    def _next_index(self) -> int | None:
        taken = {*self._used, *self._idle, *self._doomed, *self._foreign}
        free = next((index for index in range(self._layout.size) if index not in taken), None)
        if free is None and self._foreign:
            # Other homes may have given theirs back since: the one that was tried longest ago.
            return next(iter(self._foreign))
        return free

    async def _reap(self) -> None:
        """Remove the slots given back, all there are at a time."""
        trouble = _Trouble("network slots cannot be removed")
        while self._doomed or not self._closing.is_set():
            self._returned.clear()
            batch = list(self._doomed)
            if not batch:
                await self._returned.wait()
                continue
            for index in batch:
                await self._resolver.stop(index)
            try:
                await self._in(self._removals, self._slots.remove, batch)
            except NetworkError as error:
                if self._closing.is_set():
                    return
                await trouble.met(error, self._returned)
                continue
            trouble.over()
            for index in batch:
                self._doomed.pop(index).set()
            self._wanted.set()

    async def _guard(self) -> None:
        """Put the host's table back when somebody has flushed all rules (a restart of the host's firewall does)."""
        trouble = _Trouble("the host's nftables table cannot be restored")
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GUARD_SECONDS):
                    await self._closing.wait()
            try:
                if not self._closing.is_set() and await self._in(self._changes, self._slots.restore_table):
                    log.warning("the host's nftables table was gone and has been restored", table=self._layout.table)
            except NetworkError as error:
                await trouble.met(error, self._closing)
            else:
                trouble.over()

    async def _in(self, thread: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
        """`function` in `thread`. Raises nothing but AenvError: what nobody foresaw must not end the pool's tasks."""
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
        except AenvError:
            raise
        except Exception as error:
            log.exception("unforeseen error in the network")
            raise NetworkError(f"unforeseen error in the network: {error!r}") from error


class _Trouble:
    """Back-off, and one log line when failing begins and one when it ends."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._delay = 0.0

    async def met(self, error: NetworkError, cut_short: asyncio.Event) -> None:
        if not self._delay:
            log.error(self._what, error=error.message)
        self._delay = min(2 * self._delay or FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._delay):
                await cut_short.wait()

    def over(self) -> None:
        if self._delay:
            log.info(self._what + ": over")
        self._delay = 0.0
