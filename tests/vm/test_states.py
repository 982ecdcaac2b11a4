"""Pauses, resumes, snapshots, forks and rollbacks of real guests: nothing in them may notice, nothing may be lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from witness import Witness

from real_server import RealServer, needs_node, real_server, until

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(300)]

MOST_LAYERS = 32
TIMER = 8.0
"""Seconds; a pause must have begun within."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def seed(server: RealServer) -> Iterator[str]:
    """A snapshot of a sandbox with a witness in it: tests begin with it, since starting one takes seconds."""
    sandbox = server.create()
    witness = Witness.start(server, sandbox, timer=TIMER)
    witness.lasting()
    yield str(witness.api("snapshots", {"name": "seed"}, 201)["snapshotID"])
    sandbox.kill()


@contextmanager
def started(server: RealServer, template: str, **options: Any) -> Iterator[Witness]:
    sandbox = Sandbox.create(template, **({"timeout": 600} | options), **server.sdk)
    yield Witness(server, sandbox.sandbox_id)
    server.http.delete(f"/sandboxes/{sandbox.sandbox_id}")


@pytest.fixture
def witness(server: RealServer, seed: str) -> Iterator[Witness]:
    with started(server, seed) as made:
        yield made


def run(witness: Witness, command: str, user: str = "user") -> str:
    sandbox = witness.server.connect(witness.id)
    return str(sandbox.commands.run(command, user=user, timeout=120).stdout.strip())


def folder(witness: Witness) -> Path:
    return witness.server.home / "sandboxes" / witness.id


def rest(witness: Witness) -> Path:
    """The checkpoint of a paused sandbox; it is all there is of it."""

    def alone() -> Path | None:
        parts = [*folder(witness).iterdir()]
        return parts[0] if len(parts) == 1 else None

    found: Path = until(alone, what="the release of all but the state")
    assert found.name.startswith("paused-")
    return found


def newest(checkpoint: Path, kind: str) -> int:
    """Bytes of the layer that was captured last."""
    return sorted((checkpoint / kind).iterdir())[-1].stat().st_size


class TestPause:
    def test_nothing_in_the_guest_notices(self, witness: Witness) -> None:
        before = witness.lasting()
        for _ in range(2):
            witness.pause()
            assert witness.detail()["state"] == "paused"
            witness.connect()
            assert witness.lasting() == before

    def test_it_goes_on_by_its_mailbox(self, server: RealServer, witness: Witness) -> None:
        """A guest that was slow to prepare for its pause, as on a busy host, is greeted over its network instead."""

        def greeted() -> bool:
            witness.pause()
            answer = server.http.post(f"/sandboxes/{witness.id}/connect", json={"timeout": 600})
            assert answer.status_code == 201, answer.text
            steps = {step.partition(";")[0].strip() for step in answer.headers["server-timing"].split(",")}
            return "greet" in steps and "init" not in steps

        assert any(greeted() for _ in range(5))

    def test_a_timer_fires_after_the_pause_it_was_armed_before(self, witness: Witness) -> None:
        generation = witness.fresh()["generation"]
        witness.ask("arm")
        witness.pause()
        witness.connect()
        fired = until(lambda: timer if (timer := witness.ask("timer"))["fired"] else None, 60, "the timer")
        assert fired["fired"] - fired["armed"] >= TIMER
        assert fired["generation"] not in (generation, None)

    def test_a_paused_sandbox_holds_nothing_but_its_state(self, server: RealServer, witness: Witness) -> None:
        witness.pause()
        until(lambda: witness.id not in server.leftovers()["vmms"], what="the end of its VMM")
        rest(witness)
        left = server.leftovers()
        assert witness.id not in left["disks"] + left["cgroups"]
        assert witness.id in left["folders"]
        listed = server.http.get("/v2/sandboxes", params={"state": "paused"}).json()
        assert witness.id in [row["sandboxID"] for row in listed]
        witness.delete()
        assert witness.id not in server.leftovers()["folders"]
        assert "reason killed" in server.why_ended(witness.id)

    @pytest.mark.parametrize("how", ["pause", "connect"])
    def test_without_memory_files_are_kept_and_it_boots(self, witness: Witness, how: str) -> None:
        before = witness.lasting()
        # Nobody syncs: a pause that keeps the disk alone asks the guest to; one with memory keeps what is not written.
        run(
            witness,
            "head -c 3000000 /dev/urandom > data; sha256sum data > sum" + ("; sync" if how == "connect" else ""),
        )
        witness.pause(**({"memory": False} if how == "pause" else {}))
        assert witness.detail()["pauseMode"] == ("filesystem" if how == "pause" else "full")
        witness.connect(**({"memory": False} if how == "connect" else {}))
        assert run(witness, "sha256sum -c sum") == "data: OK"
        assert run(witness, "cat /proc/sys/kernel/random/boot_id") != before["boot_id"]
        assert run(witness, "pgrep -f [w]itness.py || echo none") == "none"

    def test_it_lives_through_the_death_of_the_server(self, server: RealServer, witness: Witness) -> None:
        before = witness.lasting()
        witness.pause()
        server.kill()
        server.start()
        assert witness.detail()["state"] == "paused"
        witness.connect()
        assert witness.lasting() == before

    def test_its_time_runs_out_and_a_request_wakes_it(self, server: RealServer, seed: str) -> None:
        lifecycle = {"on_timeout": "pause", "auto_resume": True}
        with started(server, seed, lifecycle=lifecycle) as witness:
            before = witness.lasting()
            witness.api("timeout", {"timeout": 1}, 204)
            until(lambda: witness.detail()["state"] == "paused", what="the pause at the end of its time")
            with ThreadPoolExecutor(4) as threads:
                woken = list(threads.map(lambda _: witness.lasting(), range(4)))
            assert woken == [before] * 4
            assert witness.detail()["state"] == "running"


class TestCycles:
    @pytest.mark.timeout(900)
    def test_fifty_of_them(self, server: RealServer) -> None:
        """64 MiB of memory and a file, both changed in part in every cycle; their sums are kept in the guest."""
        sandbox = server.create(timeout=3600)
        witness = Witness(server, sandbox.sandbox_id)
        sandbox.files.write("keeper.py", KEEPER)
        sandbox.commands.run("exec python3 keeper.py", background=True, timeout=0, user="root", cwd="/home/user")
        until(lambda: server.http.get("/check", headers=witness._headers).status_code == 200, 60, "the keeper")
        for cycle in range(50):
            told = witness.ask("change")
            witness.pause()
            kept = rest(witness)
            for kind in ("memory", "disk"):
                assert 1 <= len([*(kept / kind).iterdir()]) <= MOST_LAYERS
            witness.connect(3600)
            assert witness.ask("check") == told | {"ok": True}, cycle
        server.fsck()
        witness.delete()


KEEPER = r"""
import hashlib, http.server, json, os, random

MIB = 1 << 20
MEMORY = bytearray(os.urandom(MIB) * 64)
with open("kept", "wb") as made:
    for _ in range(64):
        made.write(os.urandom(MIB))
FILE = open("kept", "r+b", buffering=0)
CHUNKS = {"memory": {}, "disk": {}}
NUMBER = 0

def digest(data):
    return hashlib.md5(data).hexdigest()

def chunk(kind, index):
    if kind == "memory":
        return MEMORY[index * MIB : (index + 1) * MIB]
    return os.pread(FILE.fileno(), MIB, index * MIB)

def change():
    # Two chunks of each, and the sums of all.
    global NUMBER
    NUMBER += 1
    for _ in range(2):
        index, data = random.randrange(64), os.urandom(MIB)
        MEMORY[index * MIB : (index + 1) * MIB] = data
        CHUNKS["memory"][index] = digest(data)
        index, data = random.randrange(64), os.urandom(MIB)
        os.pwrite(FILE.fileno(), data, index * MIB)
        CHUNKS["disk"][index] = digest(data)
    if NUMBER % 2:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as drop:
            drop.write("1")
    return told()

def told():
    return {"number": NUMBER, "sums": digest(json.dumps(CHUNKS, sort_keys=True).encode())}

def check():
    good = all(digest(chunk(kind, i)) == CHUNKS[kind][i] for kind in CHUNKS for i in CHUNKS[kind])
    return told() | {"ok": good}

for kind in CHUNKS:
    CHUNKS[kind] = {i: digest(chunk(kind, i)) for i in range(64)}

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = json.dumps({"/change": change, "/check": check}[self.path]()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

http.server.HTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


class TestSnapshots:
    def test_of_a_sandbox_that_writes(self, server: RealServer, witness: Witness) -> None:
        """Memory and disk are of one instant: a copy reads from its disk what its memory knows to be there."""
        witness.ask("count")
        for _ in range(3):
            before = until(lambda: witness.ask("counted")["memory"], what="the count to begin")
            snapshot = witness.api("snapshots", {}, 201)["snapshotID"]
            with started(server, snapshot) as copy:
                told = copy.ask("counted")
                assert told["memory"] == told["disk"] >= before
                run(copy, "sync; echo 3 > /proc/sys/vm/drop_caches", user="root")
                told = copy.ask("counted")
                assert told["memory"] == told["disk"]
                server.fsck()
            assert witness.ask("counted")["memory"] > before

    def test_its_disk_alone_is_of_the_same_instant(self, witness: Witness) -> None:
        """Each count is on the disk before the next one begins, so a boot finds the last one, or the one before."""
        witness.ask("count")
        before = until(lambda: witness.ask("counted")["memory"], what="the count to begin")
        witness.pause()
        (copy,) = witness.fork(1)
        witness.connect(memory=False)
        assert before - 1 <= int(run(witness, "cat count")) <= copy.ask("counted")["memory"]
        copy.delete()


class TestForks:
    def test_sixteen_of_a_sandbox_at_work(self, server: RealServer, witness: Witness) -> None:
        """The source's processes and its clients see a pause and no error."""
        witness.ask("count")
        errors: list[str] = []
        answers = 0
        done = threading.Event()

        def visit() -> None:
            nonlocal answers
            with httpx.Client(base_url=server.url, headers=witness._headers, timeout=120) as client:
                while not done.is_set():
                    answer = client.get("/counted")
                    if answer.status_code == 200:
                        answers += 1
                    else:
                        errors.append(f"{answer.status_code}: {answer.text}")

        with ThreadPoolExecutor(2) as threads:
            visits = [threads.submit(visit) for _ in range(2)]
            until(lambda: answers > 4, what="visits")
            before = witness.ask("counted")["memory"]
            children = witness.fork(16)
            told = [child.ask("counted") for child in children]
            during = answers
            until(lambda: answers > during + 4, what="more visits")
            done.set()
            for visited in visits:
                visited.result()
        assert errors == []
        assert witness.ask("counted")["memory"] > before
        for one in told:
            assert one["memory"] == one["disk"] >= before
        assert len({child.fresh()["uuid"] for child in children}) == 16
        for child in children:
            child.delete()

    def test_forks_of_forks(self, witness: Witness) -> None:
        lineage, states = [witness], [witness.lasting()]
        for generation in range(3):
            run(lineage[-1], f"echo {generation} >> lineage")
            (child,) = lineage[-1].fork(1)
            assert child.lasting() == states[-1]
            states.append(child.ask("change"))  # every generation changes its memory
            lineage.append(child)
        for one, state in zip(lineage, states, strict=True):
            assert one.lasting() == state
        assert run(lineage[-1], "cat lineage").split() == ["0", "1", "2"]
        assert run(witness, "cat lineage").split() == ["0"]
        lineage[1].delete()  # an ancestor may go
        assert lineage[2].lasting() == states[2]
        lineage[3].pause()
        lineage[3].connect()
        assert lineage[3].lasting() == states[3]
        for one in lineage[2:]:
            one.delete()


class TestRollback:
    def test_it_restores_memory_disk_and_processes(self, witness: Witness) -> None:
        run(witness, "echo good > state")
        before = witness.lasting()
        snapshot = witness.api("snapshots", {}, 201)["snapshotID"]
        run(witness, "echo bad > state; echo more > other")
        assert witness.ask("change")["memory"] != before["memory"]
        run(witness, "pkill -f [w]itness.py", user="root")
        for _ in range(2):
            back = witness.api("rollback", {"snapshotID": snapshot})
            assert back["sandboxID"] == witness.id
            assert witness.lasting() == before
            assert run(witness, "cat state; ls other 2>/dev/null || echo gone").split() == ["good", "gone"]
            assert witness.ask("change")["memory"] != before["memory"]


class TestSize:
    def test_freed_memory_does_not_travel(self, witness: Witness) -> None:
        """What a process had touched is free when it has ended, and is no part of the next capture."""
        witness.pause()
        witness.connect()
        run(witness, "python3 -c 'import os; x = bytearray(os.urandom(1 << 20) * 200); print(len(x))'")
        witness.pause()
        size = newest(rest(witness), "memory")
        assert size < 100 << 20, f"{size >> 20} MiB"

    def test_a_capture_holds_what_has_changed(self, witness: Witness) -> None:
        for _ in range(2):
            witness.pause()
            witness.connect()
            witness.lasting()
        witness.pause()
        size = newest(rest(witness), "memory")
        assert size < 48 << 20, f"{size >> 20} MiB"
