"""The `aenv` command with a real microVM: commands with pipes, and shells on a pseudo-terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_server import KEY, RealServer, needs_node, real_server, until

pytestmark = [pytest.mark.vm, needs_node]

AENV = str(Path(sys.executable).with_name("aenv"))
DEADLINE = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def environ(server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the CLI knows: the server and its key."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_", "XDG_"))}
    return clean | {"AENV_API_URL": server.url, "AENV_API_KEY": KEY, "HOME": str(tmp_path_factory.mktemp("user"))}


def aenv(environ: dict[str, str], *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([AENV, *arguments], env=environ, input=stdin, capture_output=True, timeout=DEADLINE)


@pytest.fixture(scope="module")
def sandbox_id(server: RealServer, environ: dict[str, str]) -> str:
    """Started as people do: `aenv start -d`."""
    started = aenv(environ, "start", "-d", "-e", "FROM_START=yes", "-t", "600")
    assert started.returncode == 0, started.stderr
    made = started.stdout.decode().strip()
    assert server.ids() == {made}
    return made


class TestExec:
    def test_output_and_exit_code(self, environ: dict[str, str], sandbox_id: str) -> None:
        ran = aenv(environ, "exec", sandbox_id, "echo out; echo err >&2; exit 42")
        assert (ran.returncode, ran.stdout, ran.stderr) == (42, b"out\n", b"err\n")

    @pytest.mark.parametrize(
        ("command", "code"),
        [
            (["true"], 0),
            (["no-such-command"], 127),
            (["kill -9 $$"], 137),
            (["kill -TERM $$"], 143),
            (["exit 125"], 125),
        ],
        ids=str,
    )
    def test_exit_codes(self, environ: dict[str, str], sandbox_id: str, command: list[str], code: int) -> None:
        assert aenv(environ, "exec", sandbox_id, "--", *command).returncode == code

    def test_a_program_with_arguments_is_not_read_by_a_shell(self, environ: dict[str, str], sandbox_id: str) -> None:
        ran = aenv(environ, "exec", sandbox_id, "printf", "%s|", "a b", "$HOME", "-x", "*")
        assert ran.stdout == b"a b|$HOME|-x|*|"

    def test_stdin_is_piped(self, environ: dict[str, str], sandbox_id: str) -> None:
        data = bytes(range(256)) * 4000
        assert aenv(environ, "exec", sandbox_id, "cat", stdin=data).stdout == data

    def test_user_folder_and_variables(self, environ: dict[str, str], sandbox_id: str) -> None:
        script = "id -un; pwd; echo $FROM_START $A"
        ran = aenv(environ, "exec", "-u", "root", "-w", "/tmp", "-e", "A=b c", sandbox_id, script)
        assert ran.stdout == b"root\n/tmp\nyes b c\n"

    def test_what_the_platform_refuses_is_125(self, environ: dict[str, str], sandbox_id: str) -> None:
        for options in (["-w", "/missing"], ["-u", "nobody-here"]):
            ran = aenv(environ, "exec", *options, sandbox_id, "true")
            assert (ran.returncode, ran.stdout) == (125, b"")
            assert ran.stderr.startswith(b"error: ")
            assert ran.stderr.count(b"\n") == 1

    def test_ctrl_c_kills_the_command(self, environ: dict[str, str], sandbox_id: str) -> None:
        process = subprocess.Popen(
            [AENV, "exec", sandbox_id, "echo begun; exec sleep 7654"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, err) == (137, b"")
        assert b"sleep 7654" not in aenv(environ, "exec", sandbox_id, "ps -eo args").stdout

    def test_a_reader_that_leaves(self, environ: dict[str, str], sandbox_id: str) -> None:
        line = f"{AENV} exec {sandbox_id} 'yes' | head -n 1; echo ${{PIPESTATUS[0]}}"
        ran = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, timeout=DEADLINE)
        assert (ran.stdout, ran.stderr) == (b"y\n141\n", b"")
        assert b"yes" not in aenv(environ, "exec", sandbox_id, "ps -eo args").stdout


class Terminal:
    """`aenv` on a pseudo-terminal, as its user sees it."""

    def __init__(self, environ: dict[str, str], *arguments: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execve(AENV, [AENV, *arguments], environ | {"TERM": "xterm"})
        self.shown = ""
        self.status: int | None = None
        self.resize(30, 100)

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def await_text(self, pattern: str) -> str:
        end = time.monotonic() + DEADLINE
        while not (match := re.search(pattern, self.shown)):
            left = end - time.monotonic()
            if left <= 0 or not self._read(left):
                pytest.fail(f"{pattern} does not appear in {self.shown!r}")
        return match[1] if match.groups() else match[0]

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], seconds)
        try:
            piece = os.read(self.descriptor, 65536) if ready else b""
        except OSError:  # EIO: nobody holds the other side any more
            piece = b""
        self.shown += piece.decode(errors="replace")
        return bool(piece)

    def exit_code(self) -> int:
        while self._read(DEADLINE):
            pass
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(self.status)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.fixture
def terminal(environ: dict[str, str]) -> Iterator[list[Terminal]]:
    """To be filled by the test; what is in it ends with the test."""
    made: list[Terminal] = []
    yield made
    for one in made:
        one.close()


class TestShell:
    @pytest.mark.parametrize("command", ["connect", "cn"])
    def test_connect(self, environ: dict[str, str], sandbox_id: str, terminal: list[Terminal], command: str) -> None:
        shell = Terminal(environ, command, sandbox_id)
        terminal.append(shell)
        shell.await_text(r"\$ $")
        shell.type("stty size; echo at$((1))tached $FROM_START; tty\n")
        assert shell.await_text(r"(\d+ \d+)\r\nat1tached yes\r\n/dev/pts/") == "30 100"
        shell.type("exit 7\n")
        assert shell.exit_code() == 7

    def test_resize_and_interrupt(self, environ: dict[str, str], sandbox_id: str, terminal: list[Terminal]) -> None:
        shell = Terminal(environ, "connect", sandbox_id)
        terminal.append(shell)
        shell.await_text(r"\$ $")
        shell.type("bash -c 'trap \"stty size; exit\" WINCH; echo wait$((1))ing; while :; do sleep 0.1; done'\n")
        shell.await_text(r"wait1ing\r\n")
        shell.resize(41, 123)
        shell.await_text(r"41 123\r\n")
        shell.type("sed -u s/^/got-/\n")
        shell.type("ready\n")
        shell.await_text(r"got-ready\r\n")
        shell.type("\x03")  # to us it is a byte, to sed an interrupt
        shell.await_text(r"\^C\r\n")
        shell.type("echo code $?\n")
        shell.await_text(r"code 130\r\n")
        shell.type("\x04")
        shell.exit_code()

    def test_start_and_leave_nothing(
        self, server: RealServer, environ: dict[str, str], sandbox_id: str, terminal: list[Terminal]
    ) -> None:
        shell = Terminal(environ, "start", "--rm", "-t", "120")
        terminal.append(shell)
        new = shell.await_text(r"(i[a-z0-9]{20}): attached")
        shell.await_text(r"\$ $")
        assert new in server.ids()
        shell.type("exit\n")
        assert shell.exit_code() == 0
        until(lambda: server.ids() == {sandbox_id})

    def test_the_sandbox_ends_under_a_shell(
        self, server: RealServer, environ: dict[str, str], sandbox_id: str, terminal: list[Terminal]
    ) -> None:
        """Last here: it ends the module's sandbox."""
        shell = Terminal(environ, "connect", sandbox_id)
        terminal.append(shell)
        shell.await_text(r"\$ $")
        assert aenv(environ, "rm", sandbox_id).stdout.decode().strip() == sandbox_id
        assert shell.exit_code() == 1
        assert "the connection to the sandbox broke" in shell.shown
        assert server.ids() == set()
