"""One running QEMU."""

import asyncio
import base64
import binascii
import contextlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from aenv.errors import AenvError, DeadlineExceeded, VmmError
from aenv.guest.mailbox import Mailbox
from aenv.images.protocol import GuestMemory
from aenv.vmm.console import last_words
from aenv.vmm.launch import QMP_SOCKET, Output
from aenv.vmm.process import FIRST, LAST, SECOND, Process, read_start_time
from aenv.vmm.protocol import VmExit, VmHandle, VmSpec
from aenv.vmm.qemu_command import CONSOLE_BYTES, CONSOLE_ID, JailPath
from aenv.vmm.qemu_state import find_memory, take_state, write_state
from aenv.vmm.qmp import DEFAULT_DEADLINE, QmpClient

SERIAL_LOG = "serial.log"
_LAST_WORDS_DEADLINE = 2.0
"""Seconds to fetch the console of a guest that ended, before its VMM is killed."""
_LAST_WORDS = 3
"""Lines."""
_HEAD_START = 2.0
"""Seconds for which a guest that has just begun to run competes with the server on equal terms: somebody waits for it.
After that, and as soon as it has been greeted, it comes second, so that busy guests never starve the server."""

Phase = Literal["waiting", "frozen", "running", "unsure"]
_PHASES: dict[str, Phase] = {"inmigrate": "waiting", "paused": "frozen", "running": "running"}
"""By QEMU's word for its state."""
_DEAD_STATES = {
    "shutdown": "the guest shut down",
    "guest-panicked": "the guest's kernel panicked",
    "internal-error": "the VMM met an internal error",
    "io-error": "the VMM stopped at an I/O error",
}


class QemuVm:
    """A VMM process and its control connection. The owner calls `kill` or `detach`.

    When the guest ends by itself, or the control connection breaks, the VMM is of no more use: a task of this
    object fetches the console, then kills it.
    """

    def __init__(
        self,
        *,
        process: Process,
        spec: VmSpec,
        output: Output | None,
        kill_deadline: float,
        on_gone: Callable[[], None],
    ) -> None:
        self._process = process
        self._spec = spec
        self._output = output
        self._kill_deadline = kill_deadline
        self._on_gone = on_gone
        self._qmp: QmpClient | None = None
        self._phase: Phase | None = None
        self._memory: GuestMemory | None = None
        self._mailbox: Mailbox | None = None
        self._loaded = asyncio.Event()
        self._reason: str | None = None
        self._giving_way: asyncio.TimerHandle | None = None
        self._attention = asyncio.Event()
        self._exit: asyncio.Future[VmExit] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] = asyncio.create_task(self._watch(), name=f"vmm-{process.handle.pid}")

    async def control(self, deadline: float) -> Phase:
        """Connect to the VMM; return what its guest does. Raises VmmError if there is no VMM or its guest ended."""
        await self._or_end(self._connect(deadline))
        status = await self._execute("query-status", deadline=deadline)
        state = str(status.get("status") if isinstance(status, dict) else None)
        self._phase = _PHASES.get(state)
        if self._phase is None:
            reason = _DEAD_STATES.get(state, f"the VMM is in the state {state[:40]!r}")
            self._die(reason)
            raise VmmError(reason)
        if self._phase == "running":
            self._give_way_later()
        if self._spec.ahead:
            self._process.give_way(LAST)
        return self._phase

    def claim(self) -> None:
        if self._spec.ahead:
            self._process.give_way(FIRST)
            self._spec = replace(self._spec, ahead=False)

    async def load(self, state: bytes) -> None:
        self._expect("waiting", to="take a state")
        await asyncio.to_thread(write_state, self.handle.pid, state)
        self._phase = None  # of no use if what follows fails
        try:
            await self._execute("migrate-incoming", {"uri": f"file:{JailPath.STATE}"})
            async with asyncio.timeout(DEFAULT_DEADLINE):
                await self._or_end(self._loaded.wait())
        except TimeoutError:
            raise DeadlineExceeded(f"the VMM did not load a state within {DEFAULT_DEADLINE:g} s") from None
        except VmmError as error:
            raise VmmError(f"the VMM did not load the state: {self.output or error.message}") from error
        self._phase = "frozen"

    async def hold(self, call: Callable[[], None]) -> None:
        self._expect("running", to="be held")
        await (await self._open_mailbox()).held(call)

    async def freeze(self) -> None:
        if self._phase != "frozen":
            self._expect("running", "unsure", to="freeze")
            self._phase = "unsure"  # and stays so if there is no answer, or nobody waits for it
            # Answered when the virtual CPUs have stopped and what they had asked of the disk is done.
            await self._execute("stop")
            if self._reason is not None:  # it ended before it could be stopped
                raise VmmError(self._reason)
            self._phase = "frozen"

    async def thaw(self) -> None:
        if self._phase != "running":
            self._expect("frozen", "unsure", to="thaw")
            if self._phase == "frozen":  # its daemon may wait to be told that nothing has changed but the time
                with contextlib.suppress(VmmError):
                    await self._put(b"{}")
            await self._go_on()

    async def greet(self, message: bytes) -> bool:
        self._expect("frozen", to="be greeted")
        told = await self._put(message)
        await self._go_on()
        done = told is not None and await told.answered()
        if done:  # those that are still to be greeted come first
            self._process.give_way(SECOND)
        return done

    async def save(self) -> bytes:
        self._expect("frozen", to="save")
        # Its name tells where it was first needed; it is QEMU's migration stream without the memory. Not `live`: that
        # would give up the disk, as if another VMM were to go on.
        await self._execute("xen-save-devices-state", {"filename": JailPath.STATE, "live": False})
        return await asyncio.to_thread(take_state, self.handle.pid)

    async def memory(self) -> GuestMemory:
        if self._memory is None:
            answer = await self._execute("x-query-ramblock")
            text = answer.get("human-readable-text") if isinstance(answer, dict) else None
            self._memory = find_memory(self.handle, str(text), self._spec.memory_mb << 20)
        return self._memory

    @property
    def handle(self) -> VmHandle:
        return self._process.handle

    @property
    def frozen(self) -> bool:
        return self._phase == "frozen"

    @property
    def output(self) -> str:
        """The end of what the VMM itself printed; empty if another server started it."""
        return "" if self._output is None else self._output.tail()

    async def wait(self) -> VmExit:
        return await asyncio.shield(self._exit)

    async def console(self, *, deadline: float = DEFAULT_DEADLINE) -> bytes:
        if self._qmp is None:
            return b""
        answer = await self._qmp.execute(
            "ringbuf-read",
            {"device": CONSOLE_ID, "size": CONSOLE_BYTES, "format": "base64"},
            deadline=deadline,
        )
        try:
            text = base64.b64decode(str(answer), validate=True)
        except (binascii.Error, ValueError):
            raise VmmError("the VMM's answer to 'ringbuf-read' is not base64") from None
        try:
            await asyncio.to_thread(_append_log, self._spec.directory / SERIAL_LOG, text)
        except OSError as error:
            raise VmmError(f"the guest's console cannot be logged: {error}") from error
        return text

    async def kill(self) -> None:
        self._reason = self._reason or "killed"
        await self._process.kill(self._kill_deadline)
        await self.wait()
        await self._release()  # again, for a connection that was made meanwhile

    async def detach(self) -> None:
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self._release()
        if not self._exit.done():
            self._exit.cancel()

    async def _put(self, message: bytes) -> Mailbox | None:
        """Leave a message to a frozen guest; the mailbox, if its daemon waits there."""
        mailbox = await self._open_mailbox()
        return mailbox if await asyncio.to_thread(mailbox.put, message) else None

    async def _open_mailbox(self) -> Mailbox:
        if self._mailbox is None:
            memory = await self.memory()
            self._mailbox = await asyncio.to_thread(Mailbox, memory.pid, memory.ranges[0].address)
            if read_start_time(memory.pid) != memory.start_time:
                raise VmmError(f"the VMM {memory.pid} is gone")
        return self._mailbox

    async def _go_on(self) -> None:
        self._phase = "unsure"
        await self._execute("cont")
        self._phase = "running"
        self._give_way_later()

    def _expect(self, *phases: Phase, to: str) -> None:
        if self._phase not in phases:
            raise VmmError(f"the VMM {self.handle.pid} cannot {to}: it is {self._phase or 'lost'}, not {phases[0]}")

    async def _connect(self, deadline: float) -> None:
        path = self._spec.directory / QMP_SOCKET
        self._qmp = await QmpClient.connect(path, deadline=deadline, on_event=self._on_event)
        self._qmp.closed.add_done_callback(lambda _: self._attention.set())

    async def _execute(
        self, command: str, arguments: dict[str, Any] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> Any:
        if self._qmp is None:
            raise VmmError(f"the VMM {self.handle.pid} is not connected")
        return await self._qmp.execute(command, arguments, deadline=deadline)

    async def _or_end(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for `work`. Raises VmmError if the VMM ends first."""
        working = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise VmmError("the VMM ended at once")
            working.result()
        finally:
            for task in (working, ending):
                task.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    def _on_event(self, event: str, data: dict[str, Any]) -> None:
        if event == "SHUTDOWN":
            self._die(f"the guest ended: {str(data.get('reason', 'unknown'))[:40]}")
        elif event == "GUEST_PANICKED":
            self._die(_DEAD_STATES["guest-panicked"])
        elif event == "STOP" and self._phase == "running":  # not by us
            self._attention.set()
        elif event == "MIGRATION" and data.get("status") == "completed":
            self._loaded.set()

    def _die(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._attention.set()

    async def _watch(self) -> None:
        """Until the process has ended: by itself, by `kill`, or by us because its guest did."""
        ended = asyncio.create_task(self._process.wait())
        try:
            while not ended.done() and self._reason is None:
                self._attention.clear()
                attention = asyncio.create_task(self._attention.wait())
                await asyncio.wait((ended, attention), return_when=asyncio.FIRST_COMPLETED)
                attention.cancel()
                if self._reason is None and not ended.done():
                    await self._check()
            if not ended.done():
                with contextlib.suppress(AenvError):
                    await self._note_last_words()
                with contextlib.suppress(DeadlineExceeded):
                    await self._process.kill(self._kill_deadline)
                await ended
        finally:
            ended.cancel()
        detail = self._reason or _described(self._process.status)
        if self.output:
            detail += f"; the VMM's last words: {self.output[-500:]}"
        await self._release()
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._on_gone)
        self._exit.set_result(VmExit(self._process.status, detail))

    async def _note_last_words(self) -> None:
        """Log the console; it often says why a guest ended."""
        last = last_words(await self.console(deadline=_LAST_WORDS_DEADLINE), _LAST_WORDS)
        if last and self._reason:
            self._reason += f"; {last}"

    async def _check(self) -> None:
        """The virtual CPUs have stopped: because somebody asked for it, or for good? Or the connection is gone."""
        assert self._qmp is not None, "events come from a connection"
        try:
            status = await self._qmp.execute("query-status")
        except AenvError as error:
            # The connection of a VMM that dies goes first; then its end says more.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_DEADLINE):
                    await self._process.wait()
                    return
            self._die(f"the VMM is out of control: {error}")
            return
        if isinstance(status, dict) and (reason := _DEAD_STATES.get(str(status.get("status")))):
            self._die(reason)

    def _give_way_later(self) -> None:
        if self._giving_way is None and not self._spec.ahead:
            self._giving_way = asyncio.get_running_loop().call_later(_HEAD_START, self._process.give_way, SECOND)

    async def _release(self) -> None:
        if self._giving_way is not None:
            self._giving_way.cancel()
        if self._qmp is not None:
            await self._qmp.aclose()
        if self._mailbox is not None:
            self._mailbox.close()
        self._process.close()
        if self._output is not None:
            self._output.close()


def _described(status: int | None) -> str:
    if status is None:
        return "the VMM ended"
    return f"the VMM was killed by signal {-status}" if status < 0 else f"the VMM exited with status {status}"


def _append_log(path: Path, text: bytes) -> None:
    """Append, keeping the file below two consoles: what is older gives way."""
    if not text:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        kept = os.pread(descriptor, 2 * CONSOLE_BYTES, 0)[-CONSOLE_BYTES:]
        os.pwrite(descriptor, kept + text, 0)
        os.ftruncate(descriptor, len(kept) + len(text))
    finally:
        os.close(descriptor)
