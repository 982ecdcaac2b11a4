"""Pausing, resuming, forks and snapshots through the official Python SDK, against real microVMs."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import httpx
import pytest
from e2b import NotFoundException, Sandbox, SandboxException, SandboxNotFoundException, SandboxQuery, SandboxState

from real_server import RealServer, needs_node, until

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(240)]

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.05; done"
"""A process whose state is in memory alone."""


@contextmanager
def created(server: RealServer, **options: object) -> Iterator[Sandbox]:
    sandbox = server.create(**options)
    try:
        yield sandbox
    finally:
        sandbox.kill()


def output(sandbox: Sandbox, command: str) -> str:
    return sandbox.commands.run(command).stdout.strip()


def boot_id(sandbox: Sandbox) -> str:
    return output(sandbox, "cat /proc/sys/kernel/random/boot_id")


def count(sandbox: Sandbox) -> int:
    # The counter truncates its file before it writes.
    return int(until(lambda: output(sandbox, "cat /dev/shm/count"), what="the counter"))


def state(server: RealServer, sandbox: Sandbox) -> SandboxState:
    return Sandbox.get_info(sandbox.sandbox_id, **server.sdk).state


def test_pause_keeps_memory_processes_and_files(server: RealServer) -> None:
    with created(server, metadata={"a": "b"}, envs={"FROM": "create"}) as sandbox:
        process = sandbox.commands.run(COUNTER, background=True, timeout=0)
        sandbox.files.write("kept", "on disk")
        booted, before = boot_id(sandbox), count(sandbox)

        assert sandbox.pause() is True
        assert sandbox.pause() is False
        assert Sandbox.pause(sandbox.sandbox_id, **server.sdk) is False
        info = sandbox.get_info()
        assert (info.state, info.metadata) == (SandboxState.PAUSED, {"a": "b"})
        assert not sandbox.is_running()
        with pytest.raises(SandboxException, match="not found"):
            sandbox.commands.run("true")
        with pytest.raises(SandboxException):
            process.wait()

        again = Sandbox.connect(sandbox.sandbox_id, timeout=300, **server.sdk)
        assert again.is_running()
        assert boot_id(again) == booted
        assert count(again) >= before
        assert process.pid in [running.pid for running in again.commands.list()]
        assert again.files.read("kept") == "on disk"
        assert output(again, "echo $FROM") == "create"
        assert 250 < (again.get_info().end_at - datetime.now(UTC)).total_seconds() <= 300
        before = count(again)
        until(lambda: count(again) > before, what="the process to go on")
        assert again.commands.kill(process.pid)


def test_the_clock_is_right_after_a_pause(server: RealServer) -> None:
    with created(server) as sandbox:
        assert sandbox.pause(strict=True) is True
        time.sleep(3)  # what a clock that went on from where it was would be late by
        sandbox.connect(timeout=60)
        before = time.time()
        inside = float(output(sandbox, "date +%s.%N"))
        assert before - 1 < inside < time.time() + 1


def test_a_pause_of_the_disk_alone(server: RealServer) -> None:
    with created(server) as sandbox:
        sandbox.commands.run(COUNTER, background=True, timeout=0)
        sandbox.files.write("kept", "on disk")
        booted = boot_id(sandbox)
        assert sandbox.pause(mode="filesystem") is True
        sandbox.connect(timeout=60)
        assert boot_id(sandbox) != booted
        assert sandbox.files.read("kept") == "on disk"
        assert sandbox.commands.run("test -e /dev/shm/count; echo $?").stdout == "1\n"


def test_a_reboot_from_the_disk_of_a_full_pause(server: RealServer) -> None:
    with created(server) as sandbox:
        sandbox.files.write("kept", "on disk")
        sandbox.commands.run("sync")
        booted = boot_id(sandbox)
        assert sandbox.pause() is True
        Sandbox.connect(sandbox.sandbox_id, timeout=60, on_resume="reboot", **server.sdk)
        assert boot_id(sandbox) != booted
        assert sandbox.files.read("kept") == "on disk"


@pytest.mark.parametrize("lifecycle", [None, {"on_timeout": "pause"}], ids=["default", "asked"])
def test_a_timeout_pauses_and_loses_nothing(server: RealServer, lifecycle: dict[str, str] | None) -> None:
    with created(server, lifecycle=lifecycle) as sandbox:
        sandbox.commands.run(COUNTER, background=True, timeout=0)
        before = count(sandbox)
        booted = boot_id(sandbox)
        sandbox.files.write("last", "written just before")
        sandbox.set_timeout(1)
        until(lambda: state(server, sandbox) is SandboxState.PAUSED, what="the pause at the timeout")
        assert sandbox.get_info().lifecycle["on_timeout"] == "pause"
        sandbox.connect(timeout=60)
        assert boot_id(sandbox) == booted
        assert sandbox.files.read("last") == "written just before"
        assert count(sandbox) >= before
        assert sandbox.get_info().lifecycle["on_timeout"] == "pause"


def test_a_timeout_that_kills(server: RealServer) -> None:
    with created(server, lifecycle={"on_timeout": "kill"}) as sandbox:
        sandbox.set_timeout(0)
        assert "reason timeout" in server.why_ended(sandbox.sandbox_id)
        with pytest.raises(NotFoundException):
            sandbox.connect(timeout=60)


def test_a_request_wakes_what_is_to_be_woken(server: RealServer) -> None:
    with created(server, lifecycle={"on_timeout": "pause", "auto_resume": True}) as sandbox:
        sandbox.files.write("/srv/www/index.html", "served", user="root")
        sandbox.commands.run("python3 -m http.server 8000 -d /srv/www", background=True, timeout=0)
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
        until(lambda: httpx.get(server.url, headers=headers).status_code == 200, what="the server in the guest")
        booted = boot_id(sandbox)
        for _ in range(2):
            assert sandbox.pause() is True
            answer = httpx.get(server.url, headers=headers, timeout=60)
            assert (answer.status_code, answer.text) == (200, "served")
            info = sandbox.get_info()
            assert info.state is SandboxState.RUNNING
            assert (info.end_at - datetime.now(UTC)).total_seconds() > 250
        assert sandbox.pause() is True
        assert boot_id(sandbox) == booted  # a command wakes it just as well


def test_a_request_wakes_nothing_else(server: RealServer) -> None:
    with created(server) as sandbox:
        assert sandbox.pause() is True
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"}
        answer = httpx.get(server.url, headers=headers)
        assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
        assert state(server, sandbox) is SandboxState.PAUSED


def test_cycles_keep_the_newest_state(server: RealServer) -> None:
    with created(server) as sandbox:
        sandbox.commands.run(COUNTER, background=True, timeout=0)
        booted, before = boot_id(sandbox), count(sandbox)
        for cycle in range(6):
            output(sandbox, f"echo {cycle} >> log; echo {cycle} >> /dev/shm/log; echo {cycle} > newest")
            assert sandbox.pause() is True
            sandbox.connect(timeout=60)
            expected = "\n".join(map(str, range(cycle + 1)))
            assert output(sandbox, "cat log") == output(sandbox, "cat /dev/shm/log") == expected
            assert sandbox.files.read("newest") == f"{cycle}\n"
            now = count(sandbox)
            assert now >= before
            before = now
        assert boot_id(sandbox) == booted


def test_children_of_a_fork_are_independent(server: RealServer) -> None:
    with created(server, metadata={"a": "b"}, envs={"FROM": "create"}) as source:
        process = source.commands.run(COUNTER, background=True, timeout=0)
        source.files.write("shared", "of the source")
        booted, before = boot_id(source), count(source)
        children = source.fork(count=3, timeout=120)
        assert all(isinstance(child, Sandbox) for child in children)
        everybody = [source, *children]
        assert len({sandbox.sandbox_id for sandbox in everybody}) == 4

        for number, child in enumerate(children):
            assert child.files.read("shared") == "of the source"
            assert boot_id(child) == booted
            assert process.pid in [running.pid for running in child.commands.list()]
            assert count(child) >= before
            info = child.get_info()
            assert info.metadata == {"a": "b"}
            assert 60 < (info.end_at - datetime.now(UTC)).total_seconds() <= 120
            assert output(child, "echo $FROM") == "create"
            child.files.write("own", str(number))
        for number, child in enumerate(children):
            assert child.files.read("own") == str(number)
        assert not source.files.exists("own")
        for command in ("cat /proc/sys/kernel/random/uuid", "hostname", "cat /run/aenv/generation"):
            assert len({output(sandbox, command) for sandbox in everybody}) == 4, command
        details = [server.http.get(f"/sandboxes/{made.sandbox_id}").json() for made in everybody]
        assert len({detail["envdAccessToken"] for detail in details}) == 4
        assert [detail.get("parentID") for detail in details] == [None, *[source.sandbox_id] * 3]

        assert count(source) >= before
        assert source.kill()
        assert [child.is_running() for child in children] == [True] * 3
        for child in children:
            assert child.kill()


def test_a_fork_of_a_paused_sandbox(server: RealServer) -> None:
    with created(server) as source:
        source.files.write("shared", "of the source")
        booted = boot_id(source)
        assert source.pause() is True
        [child] = Sandbox.fork(source.sandbox_id, timeout=60, **server.sdk)
        assert isinstance(child, Sandbox)
        assert (child.files.read("shared"), boot_id(child)) == ("of the source", booted)
        assert state(server, source) is SandboxState.PAUSED
        assert child.kill()
        source.connect(timeout=60)
        assert boot_id(source) == booted


def test_forks_that_are_refused(server: RealServer, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="400: count must be 1 to 16"):
        sandbox.fork(count=17)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.fork("i" + "0" * 20, **server.sdk)


def test_snapshots(server: RealServer) -> None:
    name = f"state-{uuid.uuid4().hex[:8]}"
    with created(server) as source:
        source.files.write("when", "first")
        process = source.commands.run(COUNTER, background=True, timeout=0)
        before = count(source)
        booted = boot_id(source)
        first = source.create_snapshot(name=f"{name}:v1")
        source.files.write("when", "second")
        second = Sandbox.create_snapshot(source.sandbox_id, name=name, **server.sdk)
        unnamed = source.create_snapshot()
        assert first.names == [first.snapshot_id]
        assert (first.snapshot_id, second.snapshot_id) == (f"{name}:v1", f"{name}:default")
        assert source.is_running()

        def listed(**query: str) -> list[str]:
            pages, found = Sandbox.list_snapshots(**query, limit=1, **server.sdk), []
            while pages.has_next:
                found += [item.snapshot_id for item in pages.next_items()]
            return found

        ids = [unnamed.snapshot_id, second.snapshot_id, first.snapshot_id]
        assert listed(sandbox_id=source.sandbox_id) == ids
        assert listed(name=name) == ids[1:]
        assert listed(name=f"{name}:v1") == ids[2:]
        assert source.kill()

    for snapshot, text in ((first, "first"), (second, "second"), (unnamed, "second")):
        made = Sandbox.create(snapshot.snapshot_id, timeout=60, **server.sdk)
        assert made.files.read("when") == text
        assert boot_id(made) == booted
        assert process.pid in [running.pid for running in made.commands.list()]
        assert count(made) >= before
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.sdk) is True
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.sdk) is False
        assert made.files.read("when") == text  # it lives on
        assert made.kill()
        with pytest.raises(SandboxException, match="404"):
            Sandbox.create(snapshot.snapshot_id, **server.sdk)
    assert listed(sandbox_id=source.sandbox_id) == []


def test_a_name_that_is_used_again_moves(server: RealServer) -> None:
    name = f"moves-{uuid.uuid4().hex[:8]}"
    with created(server) as source:
        for text in ("first", "second"):
            source.files.write("when", text)
            snapshot = source.create_snapshot(name=name)
        made = Sandbox.create(name, timeout=60, **server.sdk)
        assert made.files.read("when") == "second"
        assert made.kill()
        with pytest.raises(SandboxException, match="400"):
            source.create_snapshot(name="no name")
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.sdk)


def test_rollback(server: RealServer) -> None:
    with created(server) as sandbox:
        process = sandbox.commands.run(COUNTER, background=True, timeout=0)
        sandbox.files.write("when", "before")
        booted = boot_id(sandbox)
        snapshot = sandbox.create_snapshot()
        before = count(sandbox)
        sandbox.files.write("when", "after")
        assert process.kill()
        sandbox.commands.run("rm /dev/shm/count")
        body = {"snapshotID": snapshot.snapshot_id}
        answer = server.http.post(f"/sandboxes/{sandbox.sandbox_id}/rollback", json=body)
        assert answer.status_code == 200, answer.text
        again = Sandbox.connect(sandbox.sandbox_id, timeout=60, **server.sdk)
        assert (again.files.read("when"), boot_id(again)) == ("before", booted)
        until(lambda: count(again) > before, what="the process to be back")
        assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.sdk)
        assert server.http.post(f"/sandboxes/{sandbox.sandbox_id}/rollback", json=body).status_code == 404
        assert again.is_running()


def test_lists_by_state(server: RealServer) -> None:
    metadata = {"purpose": "states"}
    with created(server, metadata=metadata) as one, created(server, metadata=metadata) as two:
        assert two.pause() is True

        def ids(*states: SandboxState) -> list[str]:
            query = SandboxQuery(metadata=metadata, state=list(states) or None)
            return [info.sandbox_id for info in Sandbox.list(query=query, **server.sdk).next_items()]

        assert ids() == ids(SandboxState.PAUSED, SandboxState.RUNNING) == [two.sandbox_id, one.sandbox_id]
        assert ids(SandboxState.RUNNING) == [one.sandbox_id]
        assert ids(SandboxState.PAUSED) == [two.sandbox_id]
        assert two.kill() is True  # paused as it is
        assert ids() == [one.sandbox_id]
