"""The control socket of `aenv-blockd`: newline-delimited JSON over a Unix socket (docs/formats/blockd-control.md).

One connection carries all calls at once; answers come in any order and are told apart by their `id`. It is made by the
first call and again by the next one after it was lost. A call that was under way then fails, as nobody can tell whether
it was carried out; nothing is sent twice.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from aenv.errors import AenvError, DeadlineExceeded, ImageError, InsufficientStorage, NotFound
from aenv.images.protocol import Stack

MAX_LINE = 1 << 20
"""Bytes of a request or an answer, its newline included."""
QUICK = 15.0
"""Deadline in seconds of what only changes metadata."""
BULK = 3600.0
"""Deadline in seconds of what copies an image."""
_CONNECT = 5.0

Event = Mapping[str, Any]
T = TypeVar("T")


class ControlError(ImageError):
    """A call the daemon refused for a reason other than a missing image or a full disk; `code` is its word for it:
    exists, busy, invalid, io, unsupported, corrupt or origin."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the daemon opens it: a local file, or `url` (then `path` is a local file to prefer once complete)."""

    path: Path | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    digest: str | None = None

    def wire(self) -> dict[str, Any]:
        """Its form in a request."""
        values = {"path": _text(self.path), "url": self.url, "size": self.size, "digest": self.digest}
        return _given(values) | ({"headers": dict(self.headers)} if self.headers else {})


@dataclass(frozen=True, slots=True)
class Target:
    """Whether images can be served this way here, and if not, why."""

    available: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """The answer to `version`. `mount` is the folder in which images appear as files."""

    version: str
    pid: int
    mount: Path
    targets: Mapping[str, Target]


@dataclass(frozen=True, slots=True)
class Attached:
    """A served image: a VMM opens `path`. `size` in bytes, `extents` entries of its merged index; `fallback` says why
    it is not the target that was preferred."""

    path: Path
    target: str
    size: int
    layers: int
    extents: int
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A file that was written: bytes and index entries; its digest (``sha256:…``) if asked for."""

    bytes: int
    extents: int = 0
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore of memory wrote, and the milliseconds it took."""

    written_bytes: int
    milliseconds: float


class BlockdClient:
    """Calls of one daemon. Close with `aclose`, which leaves the daemon running.

    Every call raises NotFound, InsufficientStorage, ControlError, DeadlineExceeded, or a plain ImageError when the
    daemon cannot be reached or its answer is not one. `on_event` sees what the daemon says unasked.
    """

    def __init__(self, socket_path: Path, *, on_event: Callable[[Event], None] | None = None) -> None:
        self._socket = socket_path
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._stages: dict[int, asyncio.Queue[Event]] = {}
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def version(self, *, deadline: float = QUICK) -> DaemonInfo:
        """Who serves this socket."""
        answer = await self.call("version", deadline=deadline)
        targets = {name: _build(Target, value) for name, value in _build_dict(answer.get("targets")).items()}
        return _build(DaemonInfo, {**answer, "targets": targets})

    async def attach(
        self,
        image: str,
        layers: Sequence[Layer],
        *,
        upper: Path | None = None,
        sparse: bool = False,
        size: int | None = None,
        target: Literal["auto", "fuse", "ublk"] = "auto",
        owner: int | None = None,
        shared: bool = False,
        record: bool = False,
        blank: bool = False,
        deadline: float = QUICK,
    ) -> Attached:
        """Serve a stack of layers, the lowest first. With `upper`, a directory of its own, it is writable, going on
        with what an earlier attachment left there. `owner` is the user (and group) who may open it; one without upper
        may be `shared` with all. A `blank` disk has a `size` and no layers: these are for `bind`."""
        mode = "sparse" if sparse else "log"
        answer = await self.call(
            "attach",
            image=image,
            layers=[layer.wire() for layer in layers],
            upper=None if upper is None else {"dir": str(upper), "mode": mode},
            size=size,
            target=target,
            owner=None if owner is None else {"uid": owner, "gid": owner},
            shared=shared or None,
            record=record or None,
            blank=blank or None,
            deadline=deadline,
        )
        return _build(Attached, answer)

    async def bind(
        self, image: str, layers: Sequence[Layer], *, size: int | None = None, deadline: float = QUICK
    ) -> Attached:
        """Give a blank disk its layers, as if it had been attached with them; `size` is what it must have.
        ControlError with code invalid if they do not do (it stays blank), with code exists if it is not blank."""
        answer = await self.call(
            "bind", image=image, layers=[layer.wire() for layer in layers], size=size, deadline=deadline
        )
        return _build(Attached, answer)

    async def detach(self, image: str, *, discard_upper: bool = False, deadline: float = QUICK) -> None:
        """Serve it no longer. ControlError with code busy while somebody has it open."""
        await self.call("detach", image=image, discard_upper=discard_upper, deadline=deadline)

    async def seal(
        self, image: str, layer: Path, *, durable: bool = False, digest: bool = False, deadline: float = QUICK
    ) -> Made:
        """Turn the upper of a live image into the layer file `layer`; the image goes on with a new, empty one.

        With `durable` or `digest` the layer is on stable storage when this returns, otherwise soon after.
        """
        options = {"layer": str(layer), "durable": durable, "digest": digest}
        return _build(Made, await self.call("seal", image=image, deadline=deadline, **options))

    async def compact(
        self,
        output: Path,
        *,
        layers: Sequence[Layer] | None = None,
        image: str | None = None,
        run: tuple[int, int] | None = None,
        base: bool = False,
        zfile: Mapping[str, Any] | None = None,
        digest: bool = False,
        deadline: float = BULK,
    ) -> Made:
        """Fold `layers` into one (`base`: nothing will lie beneath it); or the layers `run` (from, to, the latter
        exclusive) of `image`, in whose stack the result then takes their place."""
        first, last = run or (None, None)
        stack = None if layers is None else [layer.wire() for layer in layers]
        options = {"layers": stack, "image": image, "from": first, "to": last, "zfile": zfile, "digest": digest}
        options["base"] = base or None
        return _build(Made, await self.call("compact", output=str(output), deadline=deadline, **options))

    async def import_(
        self,
        raw: Path,
        output: Path,
        *,
        zfile: Mapping[str, Any] | None = None,
        digest: bool = False,
        deadline: float = BULK,
    ) -> Made:
        """Turn a raw disk image into a layer, without its zeros and holes."""
        options = {"input": str(raw), "output": str(output), "zfile": zfile, "digest": digest}
        return _build(Made, await self.call("import", deadline=deadline, **options))

    async def export(
        self,
        output: Path,
        *,
        layers: Sequence[Layer] | None = None,
        image: str | None = None,
        format: Literal["raw", "layer", "zfile"] = "raw",
        zfile: Mapping[str, Any] | None = None,
        digest: bool = False,
        deadline: float = BULK,
    ) -> Made:
        """Write what a stack, or an attached image, shows as one file."""
        stack = None if layers is None else [layer.wire() for layer in layers]
        options = {"layers": stack, "image": image, "format": format, "zfile": zfile, "digest": digest}
        return _build(Made, await self.call("export", output=str(output), deadline=deadline, **options))

    async def working_set(self, image: str, output: Path, *, deadline: float = QUICK) -> None:
        """Save the order in which an image attached with `record` was read."""
        await self.call("working_set", image=image, output=str(output), deadline=deadline)

    async def prefetch(self, image: str, working_set: Path, *, deadline: float = BULK) -> None:
        """Read what a saved working set names, so that it is in the caches."""
        await self.call("prefetch", image=image, working_set=str(working_set), deadline=deadline)

    async def restore(
        self,
        pid: int,
        mappings: Sequence[Mapping[str, int]],
        layers: Sequence[Layer],
        *,
        size: int,
        start_time: int | None = None,
        deadline: float = BULK,
    ) -> Restored:
        """Write what `layers` hold into the memory of a process, `mappings` as for `capture`; the rest of it stays as
        it is. After an error a part may have been written."""
        options = {"pid": pid, "start_time": start_time, "mappings": [dict(m) for m in mappings], "size": size}
        options["layers"] = [layer.wire() for layer in layers]
        return _build(Restored, await self.call("restore", deadline=deadline, **options))

    async def subscribe(self, *, deadline: float = QUICK) -> None:
        """Have `on_event` called from now on. Ends with the connection: subscribe again after an ImageError."""
        await self.call("subscribe", deadline=deadline)

    async def credentials(self, url: str, headers: Mapping[str, str], *, deadline: float = QUICK) -> None:
        """New headers for every layer whose address starts with `url`: the answer to the event `credentials`."""
        await self.call("credentials", url=url, headers=dict(headers), deadline=deadline)

    async def cache_stat(self, *, deadline: float = QUICK) -> dict[str, Any]:
        """What the cache of remote blocks holds and did."""
        return await self.call("cache_stat", deadline=deadline)

    async def stat(self, image: str, *, deadline: float = QUICK) -> dict[str, Any]:
        """What is known of an attached image."""
        return await self.call("stat", image=image, deadline=deadline)

    async def list(self, *, deadline: float = QUICK) -> list[dict[str, Any]]:
        """All attached images."""
        images = (await self.call("list", deadline=deadline)).get("images")
        if not isinstance(images, list):
            raise ImageError("aenv-blockd answered a list without `images`; its version does not fit this one")
        return images

    async def call(self, op: str, *, deadline: float = QUICK, **arguments: Any) -> dict[str, Any]:
        """Any operation: what the daemon answers under `ok`. Arguments that are None are left out."""
        return await self.call_staged(op, arguments, None, deadline=deadline)

    async def call_staged(
        self, op: str, arguments: Mapping[str, Any], stages: asyncio.Queue[Event] | None, *, deadline: float
    ) -> dict[str, Any]:
        """The same; `stages` gets what an operation in stages says before it answers."""
        number = next(self._ids)
        line = json.dumps({"id": number, "op": op, **_given(arguments)}, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE:
            raise ImageError(f"the request `{op}` takes {len(line)} bytes; aenv-blockd accepts {MAX_LINE}")
        try:
            async with asyncio.timeout(deadline):
                writer = await self._connection()
                answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
                self._pending[number] = answer
                if stages is not None:
                    self._stages[number] = stages
                writer.write(line)
                with contextlib.suppress(ConnectionError):  # the reader says what became of it
                    await writer.drain()
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"aenv-blockd did not answer `{op}` within {deadline:g} s") from None
        finally:
            self._pending.pop(number, None)
            self._stages.pop(number, None)

    async def aclose(self) -> None:
        """Close the connection. Calls under way fail. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _connection(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                try:
                    async with asyncio.timeout(_CONNECT):
                        connected = await _connect(self._socket)
                        reader, writer = await asyncio.open_unix_connection(sock=connected, limit=MAX_LINE)
                except (OSError, TimeoutError) as error:
                    raise ImageError(f"aenv-blockd cannot be reached at {self._socket}: {error!r}") from error
                self._writer = writer
                self._reading = asyncio.create_task(self._read(reader, writer), name="blockd answers")
            return self._writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand out answers until the connection ends; then fail whoever still waits."""
        why = "it ended or closed the connection"
        try:
            while line := await reader.readline():
                self._take(line)
        except asyncio.CancelledError:
            why = "the connection was closed"
            raise
        except (OSError, ValueError, RecursionError) as error:
            # A line beyond the limit, or what is no JSON object.
            why = str(error)
        finally:
            self._writer = None
            writer.close()
            waiting, self._pending = self._pending, {}
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(ImageError(f"aenv-blockd did not answer: {why}"))

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"it sent {line[:100]!r}, which is no JSON object")
        if "event" in message:
            if self._on_event is not None:
                self._on_event(message)
            return
        if "stage" in message:
            if (stages := self._stages.get(message.get("id", 0))) is not None:
                stages.put_nowait(message)
            return
        answer = self._pending.get(message.get("id", 0))
        if answer is None or answer.done():  # its caller gave up
            return
        if isinstance(ok := message.get("ok"), dict):
            answer.set_result(ok)
        else:
            answer.set_exception(_error(message.get("error")))


async def carried_out(call: Coroutine[Any, Any, T]) -> T:
    """Await a call. The daemon does what it was told also when the caller is cancelled; known to be done, it can be
    undone."""
    calling = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        with contextlib.suppress(AenvError):
            await asyncio.shield(calling)
        raise


def layers_of(stack: Stack) -> list[Layer]:
    """The layers of a stack as the daemon opens them."""
    return [Layer(path=path) for path in stack.layers]


def _error(given: Any) -> ImageError | NotFound | InsufficientStorage:
    if not isinstance(given, dict):
        return ImageError("aenv-blockd sent an answer without result or error; its version does not fit this one")
    code, message = str(given.get("code")), str(given.get("message"))
    match code:
        case "not_found":
            return NotFound(message)
        case "no_space":
            return InsufficientStorage(message)
        case _:
            return ControlError(code, message)


async def _connect(path: Path) -> socket.socket:
    """A connected socket. Through a descriptor of the folder: an address holds only 107 bytes."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            await asyncio.get_running_loop().sock_connect(connecting, f"/proc/self/fd/{parent}/{path.name}")
        finally:
            os.close(parent)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _build(cls: type[T], answer: Any) -> T:
    """The dataclass from an answer's members of its names; others are of a newer daemon and left out."""
    known = dataclasses.fields(cls)  # type: ignore[arg-type]
    try:
        values = {f.name: answer[f.name] for f in known if f.name in answer}
        for name in {"path", "mount"} & values.keys():
            values[name] = Path(values[name])
        return cls(**values)
    except (TypeError, AttributeError) as error:
        raise ImageError(f"aenv-blockd's answer is no {cls.__name__} ({error}); its version does not fit") from error


def _build_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
