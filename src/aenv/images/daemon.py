"""The node's `aenv-blockd`: started when there is none, adopted when there is one, restarted when it dies.

It is a process of its own and outlives the server, as the VMMs do whose disks it serves; it ends with the server only
when no image is attached. Whatever was attached to one that died is lost (`Run.ended` says so); the next
one starts empty.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from aenv.errors import AenvError, ConfigError, DeadlineExceeded, ImageError
from aenv.images import process
from aenv.images.client import BlockdClient, DaemonInfo
from aenv.images.process import Identity, Process

log = structlog.get_logger(__name__)

PROTOCOL = "0.1."
"""Versions of the daemon whose control protocol this client speaks begin so."""
START_DEADLINE = 15.0
"""Seconds from the start of the process to its first answer: it removes what a killed predecessor left."""
ADOPT_DEADLINE = 15.0
"""Seconds in which a daemon that is found running must answer."""
READY_DEADLINE = 20.0
"""Seconds a call waits for a daemon that is being restarted."""
_TIE = "/usr/bin/setpriv"
_CONNECT_PAUSES = (0.005, 0.01, 0.02, 0.05, 0.1)
_RESTART_PAUSES = (0.0, 0.5, 2.0, 10.0, 60.0)
"""Seconds before each restart in a row; one that lived longer than the last of them begins a new row."""
_CHECK = 15.0
_CHECK_DEADLINE = 15.0
_MISSED_CHECKS = 4
"""Every so many seconds it must answer within so many; after so many failures in a row it is killed, as VMMs that use
it hang in the kernel and could not even be killed themselves."""
_GENTLY = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
_AT_ONCE = ((signal.SIGKILL, 5.0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a daemon keeps what. `state` holds its socket, mount, log and pid."""

    state: Path
    cache: Path

    @classmethod
    def of_home(cls, home: Path) -> "Places":
        """Those of a node."""
        return cls(state=home / "run", cache=home / "cache" / "blocks")

    @property
    def socket(self) -> Path:
        return self.state / "blockd.sock"

    @property
    def mount(self) -> Path:
        return self.state / "images"

    @property
    def log(self) -> Path:
        return self.state / "blockd.log"

    @property
    def pid_file(self) -> Path:
        return self.state / "blockd.pid"


class Run:
    """One daemon from its start (or adoption) to its end."""

    def __init__(self, client: BlockdClient, info: DaemonInfo, watched: Process) -> None:
        self.client = client
        self.info = info
        self.process = watched

    async def ended(self) -> str:
        """Return when it has ended, with how. May be awaited by several tasks."""
        await self.process.wait()
        return str(self.process)

    async def aclose(self) -> None:
        await self.client.aclose()
        self.process.close()


class BlockDaemon:
    """Owns the daemon of `places` while the server runs. Only one owner per home: the server's lock sees to that."""

    def __init__(
        self, *, places: Places, binary: Path, cache_bytes: int, ublk: bool = True, tied: bool = False
    ) -> None:
        """`ublk`: whether images may be block devices. `tied`: it must end with this process, also when that is
        killed."""
        self.places = places
        self._argv = [_TIE, "--pdeathsig", "TERM"] if tied else []
        self._argv += [str(binary), "--socket", str(places.socket), "--mount", str(places.mount)]
        self._argv += ["--cache", str(places.cache), "--cache-bytes", str(cache_bytes)]
        self._argv += [] if ublk else ["--no-ublk"]
        self._run: Run | None = None
        self._changed = asyncio.Event()
        self._failure = "it has not been started"
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> Run:
        """Adopt the running daemon or start one, and keep one running from now on. Raises ImageError,
        InsufficientStorage, ConfigError, DeadlineExceeded."""
        run = await self._adopt() or await self._start()
        self._set(run)
        self._supervising = asyncio.create_task(self._supervise(run), name="blockd")
        return run

    @property
    def current(self) -> Run | None:
        """The daemon that runs now; None while there is none."""
        return self._run if self._run is not None and not self._run.process.ended else None

    async def running(self) -> Run:
        """The daemon, once there is one. Raises ImageError if none can be started for a while."""
        try:
            async with asyncio.timeout(READY_DEADLINE):
                while (run := self.current) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return run
        except TimeoutError:
            raise ImageError(f"there is no aenv-blockd: {self._failure}; its log is {self.places.log}") from None

    async def aclose(self) -> None:
        """Stop watching. The daemon ends if it serves nothing, otherwise it stays for the next server. Idempotent."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
            self._supervising = None
        run, self._run = self._run, None
        if run is not None:
            try:
                if not run.process.ended and not await run.client.list():
                    await run.process.end(_GENTLY)
                    self.places.pid_file.unlink(missing_ok=True)
            except AenvError as error:
                log.warning("blockd.left_running", error=error.message)
            finally:
                await run.aclose()

    def _set(self, run: Run | None) -> None:
        self._run = run
        self._changed.set()

    async def _adopt(self) -> Run | None:
        """The daemon that a previous server left, if it answers and fits. One that does not is ended."""
        client = BlockdClient(self.places.socket)
        identity = await asyncio.to_thread(_read_pid, self.places.pid_file)
        try:
            info = await client.version(deadline=ADOPT_DEADLINE)
        except AenvError as error:
            await client.aclose()
            if identity is not None and process.identify(identity.pid) == identity:
                log.warning("blockd.silent", pid=identity.pid, error=error.message)
                await _end(identity)
            return None
        watched = Process(info.pid)
        if info.version.startswith(PROTOCOL):
            await asyncio.to_thread(self._note, info.pid)
            log.info("blockd.adopted", pid=info.pid, version=info.version)
            return Run(client, info, watched)
        log.warning("blockd.replaced", pid=info.pid, version=info.version, wanted=f"{PROTOCOL}*")
        await client.aclose()
        await watched.end(_GENTLY)
        watched.close()
        return None

    async def _start(self) -> Run:
        try:
            await asyncio.to_thread(_make_folders, self.places)
        except OSError as error:
            raise ImageError(f"cannot make the folders of aenv-blockd: {error}") from error
        pid = await asyncio.to_thread(process.spawn, self._argv, self.places.log)
        watched = Process(pid)
        client = BlockdClient(self.places.socket)
        try:
            await asyncio.to_thread(self._note, pid)
            info = await self._first_answer(client, watched)
            if not info.version.startswith(PROTOCOL):
                raise ConfigError(f"aenv-blockd is version {info.version}; {PROTOCOL}* is needed: run `make build`")
        except BaseException:
            await client.aclose()
            await asyncio.shield(watched.end(_AT_ONCE))
            watched.close()
            raise
        log.info("blockd.started", pid=pid, version=info.version)
        return Run(client, info, watched)

    async def _first_answer(self, client: BlockdClient, watched: Process) -> DaemonInfo:
        pauses = iter(_CONNECT_PAUSES)
        try:
            async with asyncio.timeout(START_DEADLINE):
                while not watched.ended:
                    with contextlib.suppress(ImageError):
                        return await client.version()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(next(pauses, _CONNECT_PAUSES[-1])):
                            await watched.wait()
        except (TimeoutError, DeadlineExceeded):
            raise DeadlineExceeded(f"aenv-blockd did not come up within {START_DEADLINE:g} s") from None
        said = await asyncio.to_thread(process.tail, self.places.log)
        raise ImageError(f"aenv-blockd did not start ({watched}): {said or 'it said nothing'}")

    async def _supervise(self, run: Run) -> None:
        """Wait for the end of each daemon and start the next."""
        pauses = iter(_RESTART_PAUSES)
        while True:
            began = time.monotonic()
            await self._watch(run)
            self._failure = str(run.process)
            log.error("blockd.died", detail=self._failure, log=str(self.places.log))
            self._set(None)
            await run.aclose()
            if time.monotonic() - began > _RESTART_PAUSES[-1]:
                pauses = iter(_RESTART_PAUSES)
            while self._run is None:
                await asyncio.sleep(next(pauses, _RESTART_PAUSES[-1]))
                try:
                    run = await self._start()
                except AenvError as error:
                    self._failure = error.message
                    log.error("blockd.restart_failed", error=error.message)
                else:
                    self._set(run)

    async def _watch(self, run: Run) -> None:
        """Return when it has ended; end it when it hangs, as then every VMM hangs with it."""
        missed = 0
        while not run.process.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK):
                    await run.process.wait()
                    return
            await asyncio.to_thread(process.rotate, self.places.log)
            try:
                if missed >= _MISSED_CHECKS:
                    await run.process.end(_AT_ONCE)
                    return
                await run.client.version(deadline=_CHECK_DEADLINE)
                missed = 0
            except AenvError as error:
                missed += 1
                log.warning("blockd.no_answer", error=error.message, missed=missed)

    def _note(self, pid: int) -> None:
        """Write down who it is, for a server that finds it silent."""
        identity = process.identify(pid)
        if identity is not None:
            fresh = self.places.pid_file.with_suffix(".new")
            fresh.write_text(json.dumps(asdict(identity)))
            fresh.replace(self.places.pid_file)


def _read_pid(path: Path) -> Identity | None:
    try:
        return Identity(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


async def _end(identity: Identity) -> None:
    with contextlib.suppress(ImageError):
        watched = Process(identity.pid)
        try:
            await watched.end(_AT_ONCE)
        finally:
            watched.close()


def _make_folders(places: Places) -> None:
    # VMMs' users pass through the mount's parents to nothing but their own image.
    places.state.mkdir(mode=0o711, parents=True, exist_ok=True)
    places.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a dead mount answers with ENOTCONN; the daemon removes it
        if not os.path.lexists(places.mount):
            places.mount.mkdir(mode=0o711)
