"""The Connect protocol, client side, JSON codec: unary calls and server streams over httpx.

Source: connectrpc.com/docs/protocol. A streamed message is one flag byte, a big-endian uint32 length, and JSON; flag 2
marks the end of the stream, whose JSON carries the error if there was one.
"""

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx

from aenv.errors import GuestError

Json = dict[str, Any]

END_STREAM = 2
MAX_MESSAGE = 16 << 20


class ConnectError(GuestError):
    """The daemon's own answer to a call: `code` is Connect's (``not_found``, ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ConnectClient:
    """Calls procedures (``/process.Process/List``) below `base_url` with `headers`."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, headers: dict[str, str]) -> None:
        self._http = http
        self._base = base_url
        self._headers = {"Connect-Protocol-Version": "1", **headers}

    async def unary(self, procedure: str, message: Json) -> Json:
        """One message each way. Raises ConnectError, or GuestError if the connection fails."""
        try:
            answer = await self._http.post(self._base + procedure, json=message, headers=self._headers, timeout=60.0)
        except httpx.HTTPError as error:
            raise GuestError(f"{procedure} failed: {error!r}") from error
        if not answer.is_success:
            raise _error(answer)
        return _object(answer.content)

    async def stream(self, procedure: str, message: Json) -> AsyncIterator[Json]:
        """The messages of a server stream, until its proper end. Raises ConnectError or GuestError; a stream that
        breaks is an error, never an end."""
        body = json.dumps(message).encode()
        headers = {**self._headers, "Content-Type": "application/connect+json", "Keepalive-Ping-Interval": "30"}
        timeout = httpx.Timeout(60.0, read=None)
        try:
            async with self._http.stream(
                "POST", self._base + procedure, content=struct.pack(">BI", 0, len(body)) + body, headers=headers,
                timeout=timeout,
            ) as answer:  # fmt: skip
                if not answer.is_success:
                    await answer.aread()
                    raise _error(answer)
                async for flags, payload in _envelopes(answer.aiter_raw()):
                    if flags & END_STREAM:
                        if error := payload.get("error"):
                            known = error if isinstance(error, dict) else {}
                            code, said = known.get("code", "unknown"), known.get("message", "unknown error")
                            raise ConnectError(str(code), str(said))
                        return
                    yield payload
        except httpx.HTTPError as error:
            raise GuestError(
                f"the connection to the sandbox broke ({error or type(error).__name__}): the sandbox or the server "
                "ended; if the sandbox goes on, so does the command"
            ) from error
        raise GuestError("the stream ended without its end: the sandbox was killed or its daemon died")


async def _envelopes(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, Json]]:
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        while len(buffer) >= 5:
            flags, length = struct.unpack_from(">BI", buffer)
            if length > MAX_MESSAGE:
                raise GuestError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE}")
            if len(buffer) < 5 + length:
                break
            yield flags, _object(bytes(buffer[5 : 5 + length]) or b"{}")
            del buffer[: 5 + length]


def _object(text: bytes) -> Json:
    """What the sandbox says, which may be anything."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GuestError(f"the sandbox sent a message that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise GuestError(f"the sandbox sent a message that is not an object: {text[:100]!r}")
    return message


def _error(answer: httpx.Response) -> ConnectError:
    try:
        body = answer.json()
        return ConnectError(str(body.get("code", answer.status_code)), str(body["message"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ConnectError(str(answer.status_code), f"the sandbox answered {answer.status_code}: {answer.text[:200]}")
