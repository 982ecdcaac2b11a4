"""A real `aenv-blockd` in a scratch directory, to be killed and started again at will."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from aenv.config import load
from aenv.images.store import find_blockd

START = 10.0
"""Seconds the daemon may take to listen."""
REPLY = 60.0
"""Seconds an operation may take."""


class Refused(Exception):
    """The daemon's answer was an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Connection:
    """A control connection. Raises EOFError once the daemon is gone."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(REPLY)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rwb")
        self._ids = itertools.count(1)

    def send_raw(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def send(self, op: str, **args: Any) -> int:
        number = next(self._ids)
        self.send_raw(json.dumps({"id": number, "op": op, **args}).encode() + b"\n")
        return number

    def receive(self) -> dict[str, Any]:
        if not (line := self._file.readline()):
            raise EOFError
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def __call__(self, op: str, **args: Any) -> dict[str, Any]:
        number = self.send(op, **args)
        reply = self.receive()
        assert reply["id"] == number
        if (error := reply.get("error")) is not None:
            raise Refused(error["code"], error["message"])
        answer = reply["ok"]
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a killed daemon did not read is flushed to nobody
            self._file.close()
        self._socket.close()


class Blockd:
    """The daemon and its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "control.sock"
        self.mount = root / "images"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [str(find_blockd(load())), "--socket", str(self.socket), "--mount", str(self.mount)]
        command += ["--cache", str(self.root / "cache"), "--cache-bytes", str(16 << 20), "--no-ublk"]
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + START
        while True:
            try:
                self.call = Connection(self.socket)
                return
            except OSError:
                assert self.process.poll() is None, (self.root / "log").read_text()
                assert time.monotonic() < deadline, "the daemon does not listen"
                time.sleep(0.005)

    def connect(self) -> Connection:
        return Connection(self.socket)

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        self.call.close()
        return self.process.wait(START)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end()
        subprocess.run(["umount", "-l", self.mount], check=False, stderr=subprocess.DEVNULL)

    def status(self, field: str) -> int:
        """A number of the daemon's /proc status, e.g. VmRSS in KiB."""
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
        raise AssertionError(field)

    def layer(self, name: str, content: bytes) -> dict[str, str]:
        """A layer of raw content."""
        raw, path = self.root / f"{name}.raw", self.root / name
        raw.write_bytes(content)
        self.call("import", input=str(raw), output=str(path))
        raw.unlink()
        return {"path": str(path)}


def read(path: Path, offset: int = 0, length: int = -1) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read() if length < 0 else file.read(length)


def write(path: Path, offset: int, data: bytes, *, sync: bool = True) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
