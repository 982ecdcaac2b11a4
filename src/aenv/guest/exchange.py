"""One HTTP/1.1 request and its answer over a connection of its own, with a guest's daemon.

Plain sockets: a general client costs two to four milliseconds of CPU for each call, while a restored guest is to answer
within thirty. The other end is hostile: answers are bounded, never decompressed, and nothing of them is trusted.
"""

import asyncio
import socket

from aenv.errors import GuestError

MAX_ANSWER = 64 * 1024

CONNECT_INTERVAL = 0.02
"""Seconds after which another connection is tried beside the pending ones. The kernel repeats an unanswered SYN only
after a second, and one sent to a guest that is just coming up may be lost."""
MAX_PENDING = 3
"""Connections tried at the same time; a further one takes the place of the oldest."""


async def connect(address: str, port: int) -> socket.socket:
    """The first connection that opens, tried until one does: cancel it to give up."""
    pending: list[asyncio.Task[socket.socket]] = []
    try:
        while True:
            pending.append(asyncio.create_task(_connect_once(address, port)))
            if len(pending) > MAX_PENDING:
                await _dispose(pending.pop(0))
            # The newest attempt may be refused at once (nothing listens yet); that is no reason to hurry.
            tick = asyncio.create_task(asyncio.sleep(CONNECT_INTERVAL))
            try:
                while not tick.done():
                    await asyncio.wait((*pending, tick), return_when=asyncio.FIRST_COMPLETED)
                    for attempt in [attempt for attempt in pending if attempt.done()]:
                        pending.remove(attempt)
                        if attempt.exception() is None:
                            return attempt.result()
            finally:
                tick.cancel()
    finally:
        for attempt in pending:
            await _dispose(attempt)


async def _connect_once(address: str, port: int) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _dispose(attempt: asyncio.Task[socket.socket]) -> None:
    attempt.cancel()
    (outcome,) = await asyncio.gather(attempt, return_exceptions=True)
    if isinstance(outcome, socket.socket):
        outcome.close()


def request(method: str, path: str, host: str, body: bytes, token: str | None) -> bytes:
    """The bytes of a request that ends its connection, as the daemon's shortest way reads them."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"]
    if body:
        lines.append("Content-Type: application/json")
    if token:
        lines.append(f"X-Access-Token: {token}")
    return "\r\n".join((*lines, "", "")).encode() + body


async def exchange(connection: socket.socket, sent: bytes) -> tuple[int, bytes]:
    """Send a request; status and body of the answer. Raises OSError when the connection broke before the answer was
    whole, GuestError for an answer that is no HTTP or over MAX_ANSWER bytes."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, sent)
    got = bytearray()
    while len(got) <= MAX_ANSWER:
        piece = await loop.sock_recv(connection, MAX_ANSWER)
        got += piece
        head, end, body = bytes(got).partition(b"\r\n\r\n")
        if end:
            status, length = _parse(head)
            if length is None and not piece:
                length = len(body)
            if length is not None and len(body) >= length:
                return status, body[:length]
        if not piece:
            raise ConnectionResetError("the connection ended before the answer did")
    raise GuestError(f"the guest's answer is over {MAX_ANSWER} bytes")


def _parse(head: bytes) -> tuple[int, int | None]:
    """The status and the length of the body; None is until the end of the connection. Raises GuestError."""
    first, *fields = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or len(code) < 3 or not code.isdigit():
        raise GuestError(f"the guest's answer is no HTTP: {first[:100]!r}")
    status = int(code)
    if status == 204:
        return status, 0
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            return status, int(value[:20])
    return status, None
