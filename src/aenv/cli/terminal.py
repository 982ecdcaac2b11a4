"""A shell in a sandbox on this terminal: raw mode, resizes, and the terminal as it was at the end."""

import asyncio
import base64
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from aenv.cli.errors import CliError
from aenv.cli.process import Command, Processes, exit_code
from aenv.guest.connect import ConnectError

SHELL = ["/bin/bash", "-i", "-l"]
MAX_TYPED = 64 * 1024
"""Bytes typed (pasted) ahead of what has been sent; more stays in the kernel's buffer."""


class Keyboard:
    """What was typed and not sent yet, and the terminal's newest size."""

    def __init__(self) -> None:
        self.typed = bytearray()
        self.size: tuple[int, int] | None = None
        self.changed = asyncio.Event()
        self._paused = False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Collect keys and size changes of this terminal, in raw mode, while the block runs."""
        loop = asyncio.get_running_loop()
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        tty.setraw(descriptor)
        loop.add_reader(descriptor, self._read, descriptor)
        loop.add_signal_handler(signal.SIGWINCH, self._resized)
        try:
            yield
        finally:
            self._paused = False
            loop.remove_reader(descriptor)
            loop.remove_signal_handler(signal.SIGWINCH)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _read(self, descriptor: int) -> None:
        try:
            typed = os.read(descriptor, 4096)
        except OSError:  # the terminal hung up
            typed = b""
        self.typed += typed
        self.changed.set()
        # At the end, and far ahead of what can be sent, the descriptor stays readable: the loop would spin on it.
        if not typed or len(self.typed) >= MAX_TYPED:
            asyncio.get_running_loop().remove_reader(descriptor)
            self._paused = bool(typed)

    def take(self) -> bytes:
        """What was typed, for sending; makes room for more."""
        typed = bytes(self.typed)
        self.typed.clear()
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read, sys.stdin.fileno())
        return typed

    def _resized(self) -> None:
        size = shutil.get_terminal_size()
        self.size = size.columns, size.lines
        self.changed.set()


async def attach(processes: Processes) -> int:
    """Run a login shell until it exits; return its exit code. Needs a terminal on standard input."""
    size = shutil.get_terminal_size()
    envs = {"TERM": os.environ.get("TERM", "xterm-256color"), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    events = processes.start(Command(argv=SHELL, envs=envs), stdin=True, pty=(size.columns, size.lines))
    keyboard = Keyboard()
    typing: asyncio.Task[None] | None = None
    try:
        with keyboard.listen():
            async for message in events:
                event = message.get("event", {})
                if "start" in event:
                    typing = asyncio.create_task(_send_keys(processes, int(event["start"]["pid"]), keyboard))
                elif "data" in event:
                    sys.stdout.buffer.write(base64.b64decode(event["data"].get("pty", "")))
                    sys.stdout.buffer.flush()
                elif "end" in event:
                    return exit_code(event["end"])
    finally:
        if typing is not None:
            typing.cancel()
            await asyncio.gather(typing, return_exceptions=True)
    raise CliError("the shell's end was not reported")


async def _send_keys(processes: Processes, pid: int, keyboard: Keyboard) -> None:
    """Send in the order typed; what piles up while a call is under way goes together in the next."""
    try:
        while await keyboard.changed.wait():
            keyboard.changed.clear()
            if keyboard.size is not None:
                size, keyboard.size = keyboard.size, None
                await processes.resize(pid, *size)
            while keyboard.typed:
                await processes.send(pid, keyboard.take(), pty=True)
    except ConnectError:
        pass  # the shell is gone; its end event follows
