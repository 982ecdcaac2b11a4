"""`process.Process` of the real daemon, over raw Connect calls."""

import asyncio
import ctypes
import os
import platform
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from envd_fixture import Envd, b64, running_envd, start_message

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture
async def envd() -> AsyncIterator[Envd]:
    async with running_envd() as daemon:
        yield daemon


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    """Waits for a process that is not ours to wait for."""
    async with asyncio.timeout(10):
        while alive(pid):  # noqa: ASYNC110 (not our child: there is no event)
            await asyncio.sleep(0.02)


async def test_events_come_in_order_with_output_and_exit_code(envd: Envd) -> None:
    result = await envd.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert result.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert result.error is None


async def test_a_clean_exit_has_no_error(envd: Envd) -> None:
    result = await envd.run(["/bin/true"])
    assert (result.exit_code, result.end and "error" in result.end) == (0, False)


async def test_a_killed_process_says_which_signal(envd: Envd) -> None:
    result = await envd.run("kill -9 $$")
    killed = "signal: killed"
    assert result.end == {"exitCode": -1, "exited": False, "status": killed, "error": killed}
    assert (await envd.run("bash -c 'kill -9 $$'; exit $?")).exit_code == 137
    assert (await envd.run("no-such-command-here")).exit_code == 127


async def test_large_output_arrives_whole_before_the_end(envd: Envd) -> None:
    result = await envd.run("head -c 3000000 /dev/zero | tr '\\0' x; echo done >&2")
    assert result.stdout == b"x" * 3_000_000
    assert result.stderr == b"done\n"
    assert max(result.chunks) <= 32 * 1024


async def test_bytes_are_passed_as_they_are(envd: Envd) -> None:
    text = "äöü€🙂" * 20_000
    data = text.encode() + b"\xff\x00\xfe"
    async with envd.stream("Start", start_message(["/bin/cat"], stdin=True)) as stream:
        await stream.step()
        process = {"pid": stream.result.pid}
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(stream.finish())
            for at in range(0, len(data), 9_999):
                piece = {"process": process, "input": {"stdin": b64(data[at : at + 9_999])}}
                assert (await envd.unary("SendInput", piece)).status_code == 200
            assert (await envd.unary("CloseStdin", {"process": process})).status_code == 200
        assert reading.result().stdout == data


@pytest.mark.parametrize("stdin", [False, True, None])
async def test_stdin_is_closed_or_open_as_asked(envd: Envd, stdin: bool | None) -> None:
    async with envd.stream("Start", start_message("cat; echo over", stdin=stdin)) as stream:
        if stdin is not False:
            await stream.step()
            closed = await envd.unary("CloseStdin", {"process": {"pid": stream.result.pid}})
            assert closed.status_code == 200
            refused = await envd.unary(
                "SendInput", {"process": {"pid": stream.result.pid}, "input": {"stdin": b64(b"x")}}
            )
            assert refused.status_code in (400, 404)
        assert (await stream.finish()).stdout == b"over\n"


async def test_the_environment_is_the_users_and_the_requests(envd: Envd) -> None:
    os.environ["SECRET_OF_THE_DAEMON"] = "x"
    try:
        async with running_envd() as other:
            first = (await other.run(["/usr/bin/env"], envs={"A": "1", "HOME": "/h"})).stdout.decode().splitlines()
            second = (await other.run(["/usr/bin/env"])).stdout.decode().splitlines()
    finally:
        del os.environ["SECRET_OF_THE_DAEMON"]
    names = {line.split("=")[0] for line in second}
    assert names == {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "E2B_SANDBOX"}
    assert {"A=1", "HOME=/h"} <= set(first)
    assert not any(line.startswith("A=") for line in second)


async def test_a_process_gets_clean_descriptors_signals_and_its_own_session(envd: Envd) -> None:
    result = await envd.run(
        "ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status; umask; ps -o pid=,pgid=,sid= $$", stdin=True
    )
    lines = result.stdout.decode().split("\n")
    # 3 is the directory ls itself reads.
    assert lines[:4] == ["0", "1", "2", "3"]
    assert lines[4:6] == ["SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000"]
    assert lines[6] == "0022"
    assert lines[7].split() == [str(result.pid)] * 3


async def test_what_started_the_daemon_ignores_nothing_for_its_processes() -> None:
    """Not even the signals that the C library keeps for itself, which it changes for nobody."""
    number = {"x86_64": 13, "aarch64": 134}[platform.machine()]  # rt_sigaction
    kept_by_libc, size, library = 32, 8, ctypes.CDLL(None)
    before, ignored = ctypes.create_string_buffer(32), ctypes.create_string_buffer(struct.pack("=QQQQ", 1, 0, 0, 0), 32)
    library.syscall(number, kept_by_libc, ignored, before, size)
    try:
        async with running_envd() as envd:
            result = await envd.run("grep SigIgn /proc/self/status")
    finally:
        library.syscall(number, kept_by_libc, before, None, size)
    assert result.stdout.decode() == "SigIgn:\t0000000000000000\n"


async def test_working_directory(envd: Envd, tmp_path: Path) -> None:
    assert (await envd.run("pwd", cwd=str(tmp_path))).stdout.decode().strip() == str(tmp_path)
    assert (await envd.run("pwd", cwd="~")).stdout.decode().strip() == str(Path.home())
    missing = await envd.run("pwd", cwd="/no/such/dir")
    assert missing.error == {"code": "invalid_argument", "message": "cwd '/no/such/dir' does not exist"}
    a_file = await envd.run("pwd", cwd="/etc/passwd")
    assert a_file.error == {"code": "invalid_argument", "message": "cwd '/etc/passwd' is not a directory"}


async def test_users(envd: Envd) -> None:
    unknown = await envd.run("id", headers={"authorization": "Basic " + b64(b"ghost:")})
    assert unknown.error == {"code": "unauthenticated", "message": "invalid username: 'ghost'"}
    if os.geteuid() != 0:
        pytest.skip("running as another user needs root")
    result = await envd.run(
        "id -u; id -g; echo $HOME; echo reopened > /dev/stdout",
        headers={"authorization": "Basic " + b64(b"nobody:")},
        cwd="/",
    )
    assert result.stdout.decode().split() == ["65534", "65534", "/nonexistent", "reopened"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (
            ["/no/such/program"],
            "invalid_argument",
            "error starting process '/no/such/program': No such file or directory",
        ),
        (["/etc/passwd"], "invalid_argument", "Permission denied"),
        ([""], "invalid_argument", "process.cmd"),
        (["a\0b"], "invalid_argument", "NUL"),
    ],
)
async def test_a_program_that_cannot_start(envd: Envd, words: list[str], code: str, text: str) -> None:
    result = await envd.run(words)
    assert result.error is not None
    assert result.error["code"] == code
    assert text in result.error["message"]
    assert result.pid == 0
    assert result.end is None
    async with asyncio.timeout(5):  # the answer may be there a moment before the child is reaped
        while envd.children():  # noqa: ASYNC110 (the child of another: there is no event)
            await asyncio.sleep(0.002)


async def test_a_program_is_looked_up_in_path(envd: Envd) -> None:
    assert (await envd.run(["echo", "found"])).stdout == b"found\n"
    assert (await envd.run(["echo"], envs={"PATH": "/nowhere"})).error is not None


async def test_two_hundred_commands_at_once(envd: Envd) -> None:
    limit = asyncio.Semaphore(50)

    async def one(number: int) -> None:
        async with limit:
            result = await envd.run(f"echo {number}; exit {number % 7}")
        assert (result.stdout, result.exit_code) == (f"{number}\n".encode(), number % 7)

    async with asyncio.TaskGroup() as tasks:
        for number in range(200):
            tasks.create_task(one(number))
    assert await envd.pids() == set()
    assert envd.children() == set()


async def test_fast_failures_always_end(envd: Envd) -> None:
    for _ in range(50):
        assert (await envd.run(["/bin/false"])).exit_code == 1


async def test_timeout_kills_the_whole_process_group(envd: Envd) -> None:
    command = "sleep 300 & echo $!; sleep 300 & echo $!; wait"
    result = await envd.run(command, headers={"connect-timeout-ms": "700"})
    assert result.error is not None
    assert result.error["code"] == "deadline_exceeded"
    assert result.end is None
    for pid in [result.pid, *map(int, result.stdout.split())]:
        await gone(pid)
    assert (await envd.connect(result.pid)).end is not None


async def test_timeout_holds_after_the_client_has_gone(envd: Envd) -> None:
    async with envd.stream("Start", start_message("sleep 300"), {"connect-timeout-ms": "700"}) as stream:
        await stream.step()
    pid = stream.result.pid
    assert alive(pid)
    assert (await envd.connect(pid)).end == {
        "exitCode": -1,
        "exited": False,
        "status": "signal: killed",
        "error": "signal: killed",
    }


async def test_timeout_of_connect_ends_only_the_stream(envd: Envd) -> None:
    async with envd.stream("Start", start_message("read line", stdin=True)) as stream:
        await stream.step()
        pid = stream.result.pid
        attached = await envd.connect(pid, {"connect-timeout-ms": "300"})
        assert attached.error is not None
        assert attached.error["code"] == "deadline_exceeded"
        assert alive(pid)
        assert pid in await envd.pids()
        await envd.unary("CloseStdin", {"process": {"pid": pid}})
        assert (await stream.finish()).exit_code == 1


async def test_a_process_outlives_its_connection_and_can_be_waited_for_again(envd: Envd, tmp_path: Path) -> None:
    # Two, because the shell could open one again before its first writer has closed it, and read nothing.
    first, second = tmp_path / "first", tmp_path / "second"
    os.mkfifo(first)
    os.mkfifo(second)
    command = f"echo one; read line < {first}; echo two; read line < {second}; echo three; exit 5"
    async with envd.stream("Start", start_message(command)) as stream:
        await stream.until(b"one\n")
    pid = stream.result.pid
    first.write_text("go\n")
    async with envd.stream("Connect", {"process": {"pid": pid}}) as again:
        # What was printed while nobody listened, then live output.
        await again.until(b"two\n")
        assert again.result.stdout == b"two\n"
        second.write_text("go\n")
        assert (await again.finish()).exit_code == 5
    late = await envd.connect(pid)
    assert (late.pid, late.stdout, late.exit_code) == (pid, b"one\ntwo\nthree\n", 5)
    assert pid not in await envd.pids()


async def test_output_nobody_reads_is_bounded_and_does_not_stop_the_process(envd: Envd) -> None:
    command = "head -c 50000000 /dev/zero; echo finished"
    async with envd.stream("Start", start_message(command)) as stream:
        await stream.step()
    await gone(stream.result.pid)
    late = await envd.connect(stream.result.pid)
    assert late.exit_code == 0
    assert late.stdout.endswith(b"finished\n")
    assert 100_000 < len(late.stdout) < 300_000
    assert envd.resident_bytes() < 32 << 20


async def test_a_slow_reader_slows_the_process_and_loses_nothing(envd: Envd, tmp_path: Path) -> None:
    marker = tmp_path / "written"
    command = f"head -c 30000000 /dev/zero; touch {marker}"
    async with envd.stream("Start", start_message(command)) as stream:
        await stream.until(b"\0")
        # Nothing is read here while other calls are served; pipe, log and sockets hold a few megabytes at most.
        for _ in range(20):
            await envd.run(["/bin/true"])
        assert not marker.exists()
        assert envd.resident_bytes() < 32 << 20
        assert (await stream.finish()).stdout == b"\0" * 30_000_000


async def test_several_readers_see_live_output_and_the_end(envd: Envd) -> None:
    async with envd.stream("Start", start_message("cat", stdin=True)) as first:
        await first.step()
        process = {"pid": first.result.pid}
        async with envd.stream("Connect", {"process": process}) as second:
            await second.step()
            await envd.unary("SendInput", {"process": process, "input": {"stdin": b64(b"hello\n")}})
            await first.until(b"hello\n")
            await second.until(b"hello\n")
            await envd.unary("CloseStdin", {"process": process})
            assert (await first.finish()).exit_code == 0
            assert (await second.finish()).exit_code == 0


async def test_a_child_that_keeps_the_pipe_does_not_hold_up_the_end(envd: Envd) -> None:
    result = await envd.run("sleep 300 & echo $!")
    child = int(result.stdout)
    assert result.exit_code == 0
    assert alive(child)
    os.kill(child, signal.SIGKILL)


async def test_orphans_are_reaped(envd: Envd) -> None:
    result = await envd.run("sleep 300 & echo $!; (true &) ; exit 0")
    orphan = int(result.stdout)
    # envd adopts it, as PID 1 does in a guest, and collects it once it ends.
    assert envd.children() == {orphan}
    os.kill(orphan, signal.SIGKILL)
    async with asyncio.timeout(10):
        while envd.children():  # noqa: ASYNC110 (not our child: there is no event)
            await asyncio.sleep(0.02)


async def test_list_shows_running_processes(envd: Envd) -> None:
    async with envd.stream("Start", start_message(["cat", "-u"], stdin=True, tag="job", cwd="/")) as stream:
        await stream.step()
        pid = stream.result.pid
        listed = (await envd.unary("List", {})).json()["processes"]
        config = {"cmd": "cat", "args": ["-u"], "envs": {}, "cwd": "/"}
        assert listed == [{"config": config, "pid": pid, "tag": "job"}]
        killed = await envd.unary("SendSignal", {"process": {"tag": "job"}, "signal": "SIGNAL_SIGKILL"})
        assert killed.status_code == 200
        assert (await stream.finish()).exit_code == -1
    assert await envd.pids() == set()
    again = await envd.unary("SendSignal", {"process": {"pid": pid}, "signal": 9})
    assert again.status_code == 404
    assert again.json() == {"code": "not_found", "message": f"process with pid {pid} not found"}


async def test_signals_reach_the_process_group(envd: Envd) -> None:
    async with envd.stream("Start", start_message("sleep 300 & echo $!; wait")) as stream:
        await stream.until(b"\n")
        child = int(stream.result.stdout)
        await envd.unary("SendSignal", {"process": {"pid": stream.result.pid}, "signal": "SIGNAL_SIGTERM"})
        result = await stream.finish()
    assert result.end is not None
    assert result.end["status"] == "signal: terminated"
    await gone(child)


async def test_terminal(envd: Envd) -> None:
    message = start_message(["/bin/bash", "--norc", "-i"], pty={"size": {"cols": 91, "rows": 31}}, envs={"PS1": "$ "})
    async with envd.stream("Start", message) as stream:
        await stream.step()
        process = {"pid": stream.result.pid}

        async def type_line(text: bytes) -> None:
            sent = await envd.unary("SendInput", {"process": process, "input": {"pty": b64(text + b"\n")}})
            assert sent.status_code == 200

        await type_line(b"tty; stty size")
        await stream.until(b"31 91\r\n", "pty")
        assert b"/dev/pts/" in stream.result.output["pty"]
        resized = await envd.unary("Update", {"process": process, "pty": {"size": {"cols": 120, "rows": 40}}})
        assert resized.status_code == 200
        await type_line(b"stty size")
        await stream.until(b"40 120\r\n", "pty")
        refused = await envd.unary("CloseStdin", {"process": process})
        assert refused.status_code == 400
        assert refused.json()["message"] == "cannot close stdin for PTY process — send Ctrl+D (0x04) instead"
        wrong = await envd.unary("SendInput", {"process": process, "input": {"stdin": b64(b"x")}})
        assert wrong.json()["code"] == "failed_precondition"
        await type_line(b"exit 7")
        assert (await stream.finish()).exit_code == 7


async def test_a_killed_terminal_ends(envd: Envd) -> None:
    message = start_message(["/bin/bash", "--norc", "-i"], pty={"size": {"cols": 80, "rows": 24}})
    async with envd.stream("Start", message) as stream:
        await stream.step()
        await envd.unary("SendSignal", {"process": {"pid": stream.result.pid}, "signal": "SIGNAL_SIGKILL"})
        assert (await stream.finish()).exit_code == -1


async def test_resizing_needs_a_terminal(envd: Envd) -> None:
    async with envd.stream("Start", start_message("cat", stdin=True)) as stream:
        await stream.step()
        process = {"pid": stream.result.pid}
        refused = await envd.unary("Update", {"process": process, "pty": {"size": {"cols": 1, "rows": 1}}})
        assert (refused.status_code, refused.json()["code"]) == (400, "failed_precondition")
        await envd.unary("CloseStdin", {"process": process})
        await stream.finish()


async def test_blocked_input_ends_with_the_process(envd: Envd) -> None:
    async with envd.stream("Start", start_message("read x; echo $x; read y", stdin=True)) as stream:
        await stream.step()
        process = {"pid": stream.result.pid}
        async with asyncio.TaskGroup() as tasks:
            # More than a pipe holds, and the process reads only its first line.
            data = b"first\n" + b"x" * 1_000_000
            sending = tasks.create_task(envd.unary("SendInput", {"process": process, "input": {"stdin": b64(data)}}))
            await stream.until(b"first\n")
            await envd.unary("SendSignal", {"process": process, "signal": "SIGNAL_SIGKILL"})
        assert sending.result().json()["code"] == "failed_precondition"


async def test_keepalives_flow(envd: Envd) -> None:
    async with envd.stream("Start", start_message("read x", stdin=True), {"keepalive-ping-interval": "1"}) as stream:
        while stream.result.keepalives < 2:
            assert await stream.step()
        await envd.unary("CloseStdin", {"process": {"pid": stream.result.pid}})
        await stream.finish()


async def test_unknown_processes_are_not_found(envd: Envd) -> None:
    process = {"pid": 4_000_000}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("SendInput", {"input": {"stdin": ""}}),
        ("SendSignal", {"signal": 9}),
        ("Update", {}),
        ("CloseStdin", {}),
    ]
    for method, extra in calls:
        response = await envd.unary(method, {"process": process} | extra)
        assert (response.status_code, response.json()["code"]) == (404, "not_found"), method
    connected = await envd.connect(4_000_000)
    assert connected.error == {"code": "not_found", "message": "process with pid 4000000 not found"}
