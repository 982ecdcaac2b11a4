"""Commands and terminals through the official Python SDK (protocol of process.Process)."""

import re
import threading
import time
from collections.abc import Iterator

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)

from real_server import needs_node, until

pytestmark = [pytest.mark.vm, needs_node]


class TestForeground:
    def test_output_and_exit_code(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("echo out; echo err >&2")
        assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)

    def test_a_failure_raises_with_everything(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandExitException) as failed:
            sandbox.commands.run("echo partial; echo why >&2; exit 42")
        error = failed.value
        assert (error.exit_code, error.stdout, error.stderr) == (42, "partial\n", "why\n")
        assert error.error == "exit status 42"

    @pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/etc/passwd", 126), ("kill -9 $$", -1)])
    def test_exit_codes(self, sandbox: Sandbox, command: str, code: int) -> None:
        with pytest.raises(CommandExitException) as failed:
            sandbox.commands.run(command)
        assert failed.value.exit_code == code
        if code == -1:
            assert failed.value.error == "signal: killed"

    def test_callbacks_get_the_output_as_it_comes(self, sandbox: Sandbox) -> None:
        out: list[str] = []
        err: list[str] = []
        sandbox.commands.run(
            "for i in 1 2 3; do echo $i; echo e$i >&2; done", on_stdout=out.append, on_stderr=err.append
        )
        assert ("".join(out), "".join(err)) == ("1\n2\n3\n", "e1\ne2\ne3\n")

    def test_large_output(self, sandbox: Sandbox) -> None:
        result = sandbox.commands.run("seq 1 100000; head -c 150000 /dev/zero | tr '\\0' e >&2")
        assert result.stdout == "".join(f"{i}\n" for i in range(1, 100001))
        assert result.stderr == "e" * 150000

    def test_utf8_across_chunks(self, sandbox: Sandbox) -> None:
        script = "python3 -c \"import sys; sys.stdout.write('x' + 'žluťoučký 🐎 日本' * 20000)\""
        assert sandbox.commands.run(script).stdout == "x" + "žluťoučký 🐎 日本" * 20000

    def test_lines_quotes_and_heredocs(self, sandbox: Sandbox) -> None:
        command = "cat <<'X'\n\"a\" 'b' $c `d`\nX\necho last"
        assert sandbox.commands.run(command).stdout == "\"a\" 'b' $c `d`\nlast\n"

    def test_a_timeout_kills_the_command(self, sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutException):
            sandbox.commands.run("exec sleep 98765", timeout=1)
        until(lambda: "sleep 98765" not in sandbox.commands.run("ps -eo args").stdout, what="the command's end")

    def test_without_stdin_there_is_nothing_to_read(self, sandbox: Sandbox) -> None:
        assert sandbox.commands.run("cat; echo end").stdout == "end\n"


class TestEnvironment:
    def test_variables_are_scoped(self, sandbox: Sandbox) -> None:
        show = "echo ${FROM_CREATE-} ${BOTH-} ${ONLY_HERE-}"
        assert sandbox.commands.run(show).stdout.split() == ["created", "create"]
        here = sandbox.commands.run(show, envs={"BOTH": "command", "ONLY_HERE": "yes, 'quoted' \n"}).stdout
        assert here.split() == ["created", "command", "yes,", "'quoted'"]
        assert sandbox.commands.run(show).stdout.split() == ["created", "create"]

    def test_what_a_sandbox_knows_of_itself(self, sandbox: Sandbox) -> None:
        out = sandbox.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID $HOME $USER $LOGNAME; hostname; pwd").stdout
        identity = sandbox.sandbox_id
        assert out.split() == ["true", identity, "/home/user", "user", "user", identity, "/home/user"]

    def test_users(self, sandbox: Sandbox) -> None:
        assert sandbox.commands.run("id -un; id -gn; echo $HOME").stdout.split() == ["user", "user", "/home/user"]
        root = sandbox.commands.run("id -u; echo $HOME $USER; groups", user="root").stdout
        assert root.split() == ["0", "/root", "root", "root"]
        assert sandbox.commands.run("sudo id -u").stdout == "0\n"
        with pytest.raises(AuthenticationException, match="nobody-here"):
            sandbox.commands.run("true", user="nobody-here")

    def test_working_directory(self, sandbox: Sandbox) -> None:
        assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
        sandbox.files.make_dir("relative/dir")
        assert sandbox.commands.run("pwd", cwd="relative/dir").stdout == "/home/user/relative/dir\n"
        with pytest.raises(InvalidArgumentException, match="'/missing' does not exist"):
            sandbox.commands.run("pwd", cwd="/missing")


class TestBackground:
    def test_wait_for_the_end(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("echo begun; sleep 0.2; echo done", background=True)
        assert handle.pid > 1
        assert handle.wait().stdout == "begun\ndone\n"

    def test_iterate_over_the_output(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("echo out; sleep 0.3; echo err >&2", background=True)
        assert [(out, err) for out, err, _ in handle] == [("out\n", None), (None, "err\n")]

    def test_stdin(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("cat; echo closed", background=True, stdin=True)
        for text in ("first\n", "žluť\n", "x" * 200_000 + "\n"):
            handle.send_stdin(text)
        handle.close_stdin()
        assert handle.wait().stdout == "first\nžluť\n" + "x" * 200_000 + "\nclosed\n"

    def test_stdin_as_a_stream(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("wc -c", background=True, stdin=True)
        sandbox.commands.stream_input(handle.pid, (b"y" * 10_000 for _ in range(30)))
        sandbox.commands.close_stdin(handle.pid)
        assert handle.wait().stdout.strip() == "300000"

    def test_stdin_that_is_not_there(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("exec sleep 100", background=True)
        with pytest.raises(SandboxException):
            handle.send_stdin("x")
        handle.kill()

    def test_kill_and_list(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("exec sleep 4321", background=True, envs={"MARK": "1"}, cwd="/tmp")
        (listed,) = [process for process in sandbox.commands.list() if process.pid == handle.pid]
        assert (listed.cmd, listed.args) == ("/bin/bash", ["-l", "-c", "exec sleep 4321"])
        assert (listed.envs, listed.cwd) == ({"MARK": "1"}, "/tmp")
        assert sandbox.commands.run(f"ps -o args= -p {handle.pid}").stdout == "sleep 4321\n"
        assert sandbox.commands.kill(handle.pid)
        with pytest.raises(CommandExitException) as killed:
            handle.wait()
        assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
        assert not sandbox.commands.kill(handle.pid)
        assert handle.pid not in [process.pid for process in sandbox.commands.list()]

    def test_disconnect_and_connect(self, sandbox: Sandbox) -> None:
        first = sandbox.commands.run("read line; echo got $line; read line; exit 7", background=True, stdin=True)
        first.disconnect()
        again = sandbox.commands.connect(first.pid)
        also = sandbox.commands.connect(first.pid)
        sandbox.commands.send_stdin(first.pid, "something\n")
        sandbox.commands.send_stdin(first.pid, "\n")
        for handle in (again, also):
            with pytest.raises(CommandExitException) as ended:
                handle.wait()
            assert (ended.value.stdout, ended.value.exit_code) == ("got something\n", 7)

    def test_the_timeout_of_a_connection_leaves_the_command_alone(self, sandbox: Sandbox) -> None:
        handle = sandbox.commands.run("exec sleep 100", background=True, timeout=0)
        with pytest.raises(TimeoutException):
            sandbox.commands.connect(handle.pid, timeout=1).wait()
        assert handle.kill()

    def test_an_unknown_process(self, sandbox: Sandbox) -> None:
        with pytest.raises(NotFoundException, match="999999"):
            sandbox.commands.connect(999999)
        with pytest.raises(NotFoundException):
            sandbox.commands.send_stdin(999999, "x")

    def test_children_outlive_their_shell(self, sandbox: Sandbox) -> None:
        out = sandbox.commands.run("(sleep 300 > /dev/null 2>&1 & echo $!)", timeout=10).stdout
        assert sandbox.commands.run(f"ps -o ppid= -p {int(out)}").stdout.strip() == "1"
        sandbox.commands.run(f"kill {int(out)}")


class Terminal:
    """A PTY and what has appeared on it."""

    def __init__(self, sandbox: Sandbox, **options: object) -> None:
        self.sandbox = sandbox
        self.handle = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60, **options)  # type: ignore[arg-type]
        self.shown = ""
        self.code: int | None = None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            self.code = self.handle.wait(on_pty=self._show).exit_code
        except CommandExitException as error:
            self.code = error.exit_code

    def _show(self, data: bytes) -> None:
        self.shown += data.decode(errors="replace")

    def type(self, text: str) -> None:
        self.sandbox.pty.send_stdin(self.handle.pid, text.encode())

    def await_text(self, pattern: str) -> None:
        try:
            until(lambda: re.search(pattern, self.shown))
        except AssertionError:
            pytest.fail(f"{pattern} does not appear in {self.shown!r}")


@pytest.fixture
def terminal(sandbox: Sandbox) -> Iterator[Terminal]:
    made = Terminal(sandbox, envs={"MINE": "pty"}, cwd="/tmp")
    yield made
    sandbox.pty.kill(made.handle.pid)
    made.thread.join(30)


class TestPty:
    def test_a_shell_from_prompt_to_exit(self, terminal: Terminal) -> None:
        terminal.type("tty; echo $((40 + 2)) $MINE $TERM $LANG $PWD; tput cols\n")
        terminal.await_text(r"/dev/pts/\d+\r\n42 pty xterm-256color C.UTF-8 /tmp\r\n80\r\n")
        terminal.type("exit 3\n")
        until(lambda: terminal.code is not None)
        assert terminal.code == 3

    def test_resize(self, sandbox: Sandbox, terminal: Terminal) -> None:
        sandbox.pty.resize(terminal.handle.pid, PtySize(rows=50, cols=132))
        terminal.type("stty size\n")
        terminal.await_text(r"\r50 132\r\n")

    def test_interrupt_and_end_of_input(self, terminal: Terminal) -> None:
        terminal.await_text(r"\$ $")
        terminal.type("sed -u s/^/got-/; echo after $((1 + 1))\n")
        terminal.type("once\n")
        terminal.await_text(r"got-once\r\n")
        terminal.type("\x04")
        terminal.await_text(r"after 2\r\n")
        terminal.type("sed -u s/^/got-/\n")
        terminal.type("twice\n")
        terminal.await_text(r"got-twice\r\n")
        terminal.type("\x03")
        terminal.await_text(r"\^C\r\n(.|\n)*\$ $")
        terminal.type("echo code $?\n")
        terminal.await_text(r"code 130\r\n")
        terminal.type("\x04")
        until(lambda: terminal.code is not None)

    def test_reconnect(self, sandbox: Sandbox) -> None:
        handle = sandbox.pty.create(PtySize(rows=24, cols=80))
        handle.disconnect()
        again = sandbox.pty.connect(handle.pid)
        sandbox.pty.send_stdin(handle.pid, b"echo to$((1))gether; exit\n")
        seen: list[bytes] = []
        assert again.wait(on_pty=seen.append).exit_code == 0
        assert b"to1gether" in b"".join(seen)

    def test_kill(self, sandbox: Sandbox, terminal: Terminal) -> None:
        assert sandbox.pty.kill(terminal.handle.pid)
        until(lambda: terminal.code is not None)
        assert terminal.code in (-1, 137)
        assert not sandbox.pty.kill(terminal.handle.pid)

    def test_as_root(self, sandbox: Sandbox) -> None:
        made = Terminal(sandbox, user="root")
        made.type("id -u; exit\n")
        made.await_text(r"\r0\r\n")
        made.thread.join(30)
        assert made.code == 0


def test_a_broken_stream_is_no_success(server, sandbox: Sandbox) -> None:  # type: ignore[no-untyped-def]
    other = server.create()
    handle = other.commands.run("sleep 100", background=True)
    began = time.monotonic()
    assert other.kill()
    with pytest.raises(SandboxException, match="killed or reached its end of life"):
        handle.wait()
    assert time.monotonic() - began < 20  # at once, not by some timeout
    assert not other.is_running()
    assert not other.kill()
