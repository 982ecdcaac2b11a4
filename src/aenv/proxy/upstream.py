"""Connections into sandboxes, keyed by sandbox and generation.

A generation is one life of a guest between two restores. Its connections end with it: the restored guest knows nothing
of them, and another sandbox may have its address. Nothing is ever looked up by address.
"""

import asyncio
import errno
from collections.abc import Callable
from typing import Protocol, TypeVar

from aenv.errors import GuestError, Unavailable
from aenv.orchestrator.models import Route
from aenv.proxy.connection import Connection, UpstreamError
from aenv.proxy.liveness import is_dead, keep_alive

CONNECT_DEADLINE = 10.0
IDLE_SECONDS = 60.0
IDLE_PER_PORT = 64
FRESH_SECONDS = 1.0
"""A request that must not run twice takes only a connection used this recently: servers close idle ones after seconds
(5 are usual), and a request that meets that close cannot be told from one that was carried out."""


ENDED = "this run of the sandbox ended (paused, restored or killed)"


class Ended(UpstreamError):
    """The generation ended before the request was carried out, or while one that may be repeated had no answer yet."""

    def __init__(self) -> None:
        super().__init__(ENDED, started=False)


class PortNotOpen(GuestError):
    """The guest runs and nothing listens there."""


class Unreachable(GuestError):
    """The guest did not accept the connection in time, or its network is gone."""


def closing() -> Unavailable:
    """Why nothing is carried into sandboxes any more."""
    return Unavailable("the server is shutting down; try again in a moment")


class Abortable(Protocol):
    """What a generation ends with itself."""

    def abort(self, why: str, /) -> None: ...


_P = TypeVar("_P", bound=asyncio.BaseProtocol)


class Generation:
    """Every connection into one generation of one sandbox."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.ended = False
        self._live: dict[Abortable, asyncio.Transport] = {}
        self._opening: set[asyncio.Timeout] = set()
        self._idle: dict[int, list[Connection]] = {}

    @property
    def unused(self) -> bool:
        return not self._live and not self._opening

    async def open(self, port: int, protocol: Callable[[], _P]) -> tuple[asyncio.Transport, _P]:
        """A new connection. Raises PortNotOpen, Unreachable, or Ended."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(CONNECT_DEADLINE)
        self._opening.add(limit)
        try:
            async with limit:
                transport, made = await loop.create_connection(protocol, self.route.address, port)
        except TimeoutError:
            if self.ended:
                raise Ended from None
            raise Unreachable(f"no connection was accepted within {CONNECT_DEADLINE:g} s") from None
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                raise PortNotOpen(f"nothing listens on port {port}") from error
            raise Unreachable(f"it cannot be reached: {error.strerror or error}") from error
        finally:
            self._opening.discard(limit)
        if self.ended:
            transport.abort()
            raise Ended
        keep_alive(transport)
        return transport, made

    async def connect(self, port: int) -> Connection:
        """As `open`, for HTTP; give it back with `give_back`."""
        transport, connection = await self.open(port, Connection)
        self._live[connection] = transport
        return connection

    def take_idle(self, port: int, *, fresh: bool) -> Connection | None:
        """The most recently used idle connection; with `fresh` only one used within FRESH_SECONDS."""
        idle = self._idle.get(port)
        while idle:
            connection = idle[-1]
            too_old = asyncio.get_running_loop().time() - connection.idle_since > FRESH_SECONDS
            if fresh and too_old and not connection.closed:
                return None
            idle.pop()
            if not connection.closed:
                return connection
            self._live.pop(connection, None)
        return None

    def give_back(self, port: int, connection: Connection) -> None:
        """The end of an exchange, whichever: the connection is kept if it can carry another one, else closed."""
        if connection.reusable and not self.ended:
            idle = self._idle.setdefault(port, [])
            if len(idle) < IDLE_PER_PORT:
                connection.rest()
                idle.append(connection)
                return
        connection.abort("the exchange was over")
        self._live.pop(connection, None)

    def track(self, connection: Abortable, transport: asyncio.Transport) -> None:
        """Have `connection` aborted when the generation ends or its path is dead, until `untrack`."""
        self._live[connection] = transport

    def untrack(self, connection: Abortable) -> None:
        self._live.pop(connection, None)

    def drop_idle(self, before: float) -> None:
        """Close connections that have been idle since before that loop time, and forget those the sandbox closed."""
        for port, idle in list(self._idle.items()):
            kept = [c for c in idle if c.idle_since >= before and not c.closed]
            for connection in set(idle).difference(kept):
                connection.abort("idle for too long")
                self._live.pop(connection, None)
            if kept:
                self._idle[port] = kept
            else:
                del self._idle[port]

    def drop_dead(self) -> None:
        """Abort connections whose path carries nothing any more."""
        for connection in [c for c, transport in self._live.items() if is_dead(transport)]:
            connection.abort("the sandbox has become unreachable")
            self._live.pop(connection, None)

    def end(self) -> None:
        """Abort everything, at once; what waits on it raises."""
        self.ended = True
        self._idle.clear()
        for limit in self._opening:
            limit.reschedule(0.0)
        live, self._live = self._live, {}
        for connection in live:
            connection.abort(ENDED)


class Upstream:
    """The generations in use, one per sandbox. Owns a timer that closes idle and dead connections; end with `close`."""

    def __init__(self) -> None:
        self.closed = False
        self._generations: dict[str, Generation] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def generation(self, route: Route) -> Generation:
        """That of `route`, which must be current: look it up and call this without awaiting in between.

        Connections of an earlier generation of the sandbox are aborted. Raises Unavailable after `close`.
        """
        if self.closed:
            raise closing()
        known = self._generations.get(route.sandbox_id)
        if known is not None:
            if known.route.generation == route.generation and known.route.address == route.address:
                return known
            known.end()
        new = self._generations[route.sandbox_id] = Generation(route)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_SECONDS / 2, self._sweep)
        return new

    def sandbox_gone(self, sandbox_id: str) -> None:
        """Abort every connection into this sandbox. Harmless when there is none."""
        if generation := self._generations.pop(sandbox_id, None):
            generation.end()

    def close(self) -> None:
        """Abort everything and accept nothing more."""
        self.closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for sandbox_id in list(self._generations):
            self.sandbox_gone(sandbox_id)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for sandbox_id, generation in list(self._generations.items()):
            generation.drop_idle(loop.time() - IDLE_SECONDS)
            generation.drop_dead()
            if generation.unused:
                del self._generations[sandbox_id]
        self._sweeper = loop.call_later(IDLE_SECONDS / 2, self._sweep) if self._generations else None
