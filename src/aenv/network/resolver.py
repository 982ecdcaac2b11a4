"""The node's own resolver: one listener per sandbox, at 169.254.0.22 port 53 inside its namespace.

Whoever asks is known by the socket the question came in through, so nothing a guest writes can change whose policy
applies. Everything is bounded per sandbox (questions per second, in flight, TCP connections, bytes) and per node.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from typing import Any

import structlog
from dns.exception import DNSException
from dns.message import Message

from aenv.errors import NetworkError
from aenv.network import names
from aenv.network.policy import CompiledPolicy
from aenv.network.rules import MAX_NAME_ADDRESSES
from aenv.network.slots import SlotSockets
from aenv.network.upstream import Upstream

QUESTIONS_PER_SECOND, BURST = 100, 200
MAX_IN_FLIGHT = 32
"""Questions of one sandbox being answered at one time; further ones over UDP are dropped."""
MAX_IN_FLIGHT_NODE = 1024
MAX_CONNECTIONS = 8
GRACE_SECONDS = 60
"""An address stays open this much longer than its TTL: programs connect a little after they have asked, and an answer
repeated within it needs no change of the rules."""
TCP_IDLE_SECONDS = 10.0
ANSWER_SECONDS = 10.0

log = structlog.get_logger(__name__)

Opener = Callable[[int, dict[IPv4Address, int], frozenset[IPv4Address], int], Awaitable[None]]
"""(slot, address -> seconds, those already open, mark): open addresses in the slot's rules."""


class Resolver:
    """Serves the slots given to it. `opener` is called before an answer under a domain rule is sent."""

    def __init__(self, upstream: Upstream, is_internal: Callable[[IPv4Address], bool], opener: Opener) -> None:
        self._upstream = upstream
        self._is_internal = is_internal
        self._opener = opener
        self._services: dict[int, _Service] = {}
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT_NODE)

    async def serve(self, index: int, sockets: SlotSockets, policy: CompiledPolicy) -> None:
        """Answer the guest of slot `index` until `stop`. Raises NetworkError. Owns the sockets, also then."""
        service = _Service(index, policy, self._answer)
        self._services[index] = service
        try:
            await service.start(sockets)
        except BaseException as error:
            await self.stop(index)
            sockets.close()
            if isinstance(error, OSError):
                raise NetworkError(f"the resolver could not serve network slot {index}: {error}") from error
            raise

    def update(self, index: int, policy: CompiledPolicy) -> None:
        """From now on answer by `policy`, also the questions in flight."""
        if service := self._services.get(index):
            service.policy = policy

    async def stop(self, index: int) -> None:
        """Idempotent."""
        if service := self._services.pop(index, None):
            await service.aclose()

    async def aclose(self) -> None:
        for index in list(self._services):
            await self.stop(index)

    async def _answer(self, service: "_Service", wire: bytes) -> Message | None:
        verdict = names.judge(wire, service.policy)
        if not isinstance(verdict, names.Forward):
            return verdict
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._in_flight:
                response = await self._upstream.ask(verdict.query)
                result = names.answer(verdict, response, service.policy, self._is_internal)
                if result.addresses and result.mark:
                    await service.open(result.addresses, result.mark, self._opener)
                return result.reply
        except (NetworkError, DNSException, TimeoutError) as error:
            log.debug("sandbox DNS question failed", slot=service.index, name=verdict.name, error=str(error))
            return names.failure(verdict).reply


class _Service(asyncio.DatagramProtocol):
    """The listener of one slot and what it has opened."""

    def __init__(
        self,
        index: int,
        policy: CompiledPolicy,
        answer: Callable[["_Service", bytes], Awaitable[Message | None]],
    ) -> None:
        self.index = index
        self.policy = policy
        self._answer = answer
        self._budget = _Budget()
        self._questions: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._opened: dict[IPv4Address, tuple[int, float]] = {}
        self._opening = asyncio.Lock()
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    async def start(self, sockets: SlotSockets) -> None:
        loop = asyncio.get_running_loop()
        self._udp, _ = await loop.create_datagram_endpoint(lambda: self, sock=sockets.udp)
        self._tcp = await asyncio.start_server(self._connected, sock=sockets.tcp, limit=names.MAX_QUERY_BYTES)

    async def aclose(self) -> None:
        if self._udp is not None:
            self._udp.abort()
        if self._tcp is not None:
            self._tcp.close()
        tasks = [*self._questions, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def open(self, addresses: dict[IPv4Address, int], mark: int, opener: Opener) -> None:
        """Open `addresses` (with their TTLs) as far as they are not open that long. Raises NetworkError."""
        async with self._opening:
            now = time.monotonic()
            self._opened = {address: entry for address, entry in self._opened.items() if entry[1] > now}
            wanted = {
                address: ttl + GRACE_SECONDS
                for address, ttl in addresses.items()
                if (entry := self._opened.get(address)) is None or entry[0] != mark or entry[1] < now + ttl
            }
            if len(self._opened) + len(wanted) > MAX_NAME_ADDRESSES:
                raise NetworkError(f"more than {MAX_NAME_ADDRESSES} addresses opened by names at one time")
            if wanted:
                await opener(self.index, wanted, frozenset(wanted.keys() & self._opened.keys()), mark)
                self._opened |= {address: (mark, now + seconds) for address, seconds in wanted.items()}

    # Over UDP.

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        if len(self._questions) < MAX_IN_FLIGHT and self._budget.take():
            task = asyncio.get_running_loop().create_task(self._datagram(data, addr))
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)

    async def _datagram(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        reply = await self._answer(self, data)
        if reply is not None and self._udp is not None and not self._udp.is_closing():
            self._udp.sendto(names.encode(reply, udp=True), addr)

    # Over TCP: two bytes of length before each message, one question at a time.

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a stream callback runs in a task of its own
        self._connections.add(task)
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                await self._converse(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass  # the guest went away or fell silent
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(TCP_IDLE_SECONDS):
                length = int.from_bytes(await reader.readexactly(2))
                if length > names.MAX_QUERY_BYTES or not self._budget.take():
                    return
                data = await reader.readexactly(length)
            reply = await self._answer(self, data)
            if reply is None:
                return
            wire = names.encode(reply, udp=False)
            async with asyncio.timeout(TCP_IDLE_SECONDS):
                writer.write(len(wire).to_bytes(2) + wire)
                await writer.drain()


class _Budget:
    """A token bucket: questions one sandbox may ask."""

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._at = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._at) * QUESTIONS_PER_SECOND)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
