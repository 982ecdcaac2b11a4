"""Sudden deaths in the middle of every transition, and a full disk in the middle of a capture.

Whatever is killed, and whenever: each sandbox ends up running or paused with its data, or ended with a reason, and
nothing of what was under way is left on the machine.
"""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox
from witness import Witness

from aenv.images.daemon import Places
from aenv.vmm.process import find, read_start_time
from real_server import NOTHING, RealServer, needs_node, real_server, until

pytestmark = [pytest.mark.vm, needs_node, pytest.mark.timeout(240)]

LONGEST = 0.3
"""Seconds after the beginning of a transition until something is killed."""
FOLDED_FROM = 16
"""Layers of a disk or a memory at which they begin to be folded."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="module")
def seed(server: RealServer) -> str:
    """A snapshot of a sandbox with a witness."""
    sandbox = server.create()
    witness = Witness.start(server, sandbox, memory=2 << 20)
    witness.lasting()
    made = str(witness.api("snapshots", {"name": "seed"}, 201)["snapshotID"])
    sandbox.kill()
    return made


@pytest.fixture(autouse=True)
def alone(server: RealServer) -> None:
    """Nothing is there at the beginning, however the last test ended."""
    for sandbox_id in server.ids():
        server.http.delete(f"/sandboxes/{sandbox_id}")


def kill_server(server: RealServer, _: str) -> None:
    server.kill()


def kill_data_plane(server: RealServer, _: str) -> None:
    kill(json.loads(Places.of_home(server.home).pid_file.read_text())["pid"])


def kill_vmm(server: RealServer, sandbox_id: str) -> None:
    """The newest of its VMMs; of any sandbox, if it has none."""
    found = find(server.home)
    own = [one for one in found if one.sandbox_id.partition(".")[0] == sandbox_id] or found
    if own:
        kill(max(own, key=lambda one: one.handle.start_time).handle.pid)


def kill(pid: int) -> None:
    """Return when it is dead."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: read_start_time(pid) is None, what="the death")


@dataclass
class Case:
    """A sandbox at work, what it knew, and what it may know afterwards."""

    server: RealServer
    witness: Witness
    known: list[dict[str, Any]]
    snapshot: str = ""
    began: int = field(default=0)

    def post(self, path: str, body: Any) -> httpx.Response | None:
        with suppress(httpx.TransportError):
            return self.server.http.post(path, json=body)
        return None

    def verb(self, name: str, body: Any = None) -> httpx.Response | None:
        return self.post(f"/sandboxes/{self.witness.id}/{name}", body or {})

    def delete(self) -> httpx.Response | None:
        with suppress(httpx.TransportError):
            return self.server.http.delete(f"/sandboxes/{self.witness.id}")
        return None

    def await_event(self, name: str) -> None:
        """Return when the server has logged the event that begins the transition."""

        def logged() -> bool:
            with self.server.log.open("rb") as log:
                log.seek(self.began)
                return re.search(rb"sandbox\." + name.encode(), log.read()) is not None

        end = time.monotonic() + 60
        while not logged():
            assert time.monotonic() < end, f"no {name}"
            time.sleep(0.002)


def paused(case: Case) -> None:
    case.witness.pause()


def changed(case: Case) -> None:
    """It has a snapshot, and differs from it."""
    case.snapshot = case.witness.api("snapshots", {}, 201)["snapshotID"]
    case.known.append(case.witness.ask("change"))


def layered(case: Case) -> None:
    """The next capture begins to fold its layers."""
    folder = case.server.home / "sandboxes" / case.witness.id

    def layers() -> int:
        return max(len([*folder.glob(f"*/layers/{kind}-*.lsmt")]) for kind in ("disk", "memory"))

    while layers() < FOLDED_FROM - 1:
        for child in case.witness.fork(1):
            child.delete()


@dataclass(frozen=True)
class Transition:
    """`begins` is the event that is logged when it begins; `prepare` brings a running sandbox to where it can."""

    begins: str
    act: Callable[[Case], httpx.Response | None]
    prepare: Callable[[Case], None] = lambda case: None


TRANSITIONS = {
    "create": Transition("CreateRequested", lambda case: case.post("/v2/sandboxes", {"templateID": "seed"})),
    "pause": Transition("PauseRequested", lambda case: case.verb("pause")),
    "resume": Transition("ResumeRequested", lambda case: case.verb("resume", {"timeout": 600}), paused),
    "snapshot": Transition("SnapshotRequested", lambda case: case.verb("snapshots")),
    "fork": Transition("ForkRequested", lambda case: case.verb("fork", {"count": 3})),
    "rollback": Transition(
        "RollbackRequested", lambda case: case.verb("rollback", {"snapshotID": case.snapshot}), changed
    ),
    "delete": Transition("DeleteRequested", lambda case: case.delete()),
    "compaction": Transition("Captured", lambda case: case.verb("fork", {"count": 1}), layered),
}
VICTIMS = {"server": kill_server, "data plane": kill_data_plane, "vmm": kill_vmm}


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_death_in_the_middle(server: RealServer, seed: str, name: str, victim: str) -> None:
    transition = TRANSITIONS[name]
    sandbox = Sandbox.create(seed, timeout=600, **server.sdk)
    witness = Witness(server, sandbox.sandbox_id)
    case = Case(server, witness, [witness.lasting()])
    transition.prepare(case)
    delay = random.uniform(0, LONGEST)
    logging.getLogger(__name__).warning("killed %.0f ms after %s", delay * 1000, transition.begins)  # if it fails
    case.began = server.log.stat().st_size
    with ThreadPoolExecutor(1) as threads:
        acting = threads.submit(transition.act, case)
        case.await_event(transition.begins)
        time.sleep(delay)  # the moment of the death; there is nothing to wait for
        VICTIMS[victim](server, witness.id)
        if victim == "server":
            server.start()
        answer = acting.result()
    if answer is not None and answer.is_error:
        assert answer.status_code == answer.json()["code"], answer.text
        assert answer.json()["message"]

    states = settled(server)
    if name == "delete" and victim != "data plane":
        assert witness.id not in states
    for sandbox_id, state in states.items():
        one = witness.of(sandbox_id)
        if state == "paused":
            one.connect()
        assert one.lasting() in case.known
    if witness.id not in states:
        reason = server.why_ended(witness.id)
        expected = {"vmm": "vmm_died", "data plane": "disk_lost|vmm_died"}.get(victim, "killed")
        assert re.search(rf"reason ({expected}|{'killed' if name == 'delete' else expected})", reason), reason
    check_machine(server, set(states))
    for sandbox_id in states:
        server.http.delete(f"/sandboxes/{sandbox_id}")
    until(lambda: server.leftovers() == NOTHING, what="the release of everything")
    assert not [path for path in (server.home / "templates").iterdir() if path.name.startswith(".")]
    for listed in server.http.get("/snapshots").json():
        if not listed["names"]:
            server.http.delete(f"/templates/{listed['snapshotID']}")


def settled(server: RealServer) -> dict[str, str]:
    """The state of every sandbox, once nothing is under way and what has ended is gone."""

    def states() -> dict[str, str] | None:
        rows = server.http.get("/v2/sandboxes").json()
        found = {row["sandboxID"]: row["state"] for row in rows}
        left = server.leftovers()
        running = sorted(sandbox_id for sandbox_id, state in found.items() if state == "running")
        if left["vmms"] == left["disks"] == running and left["folders"] == sorted(found):
            return {"": ""} | found
        return None

    found: dict[str, str] = until(states, 60, "the end of what was under way")
    return {sandbox_id: state for sandbox_id, state in found.items() if sandbox_id}


def _mounts(server: RealServer) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(server.home) in line]


def check_machine(server: RealServer, alive: set[str]) -> None:
    """Nothing beyond what the living hold: slots (with those of the warm pool), mounts, processes."""
    spare = int(server.environ["AENV_NETWORK_POOL_SIZE"])
    until(lambda: len(server.slots().get("namespaces", [])) <= len(alive) + spare, what="the removal of slots")
    until(lambda: len(_mounts(server)) == 1, what="the data plane's mount, and no other")
    left = server.leftovers()
    assert left["cgroups"] in (left["vmms"], []), left


def test_a_full_disk_in_the_middle_of_a_capture(server: RealServer, seed: str, tmp_path: Path) -> None:
    templates = server.home / "templates"
    size = sum(path.stat().st_blocks * 512 for path in templates.rglob("*")) + (192 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "tmpfs", tmp_path], check=True)
    try:
        with real_server(tmp_path) as small:
            witness = Witness.start(small, small.create(), memory=24 << 20)
            witness.api("snapshots", {"name": "before"}, 201)
            before = witness.ask("change")
            free = shutil.disk_usage(tmp_path).free - (4 << 20)
            filler = tmp_path / "filler"
            subprocess.run(["fallocate", "-l", str(free), filler], check=True)
            folder = tmp_path / "sandboxes" / witness.id
            for verb, body in (("pause", {}), ("snapshots", {"name": "half"}), ("fork", {"count": 2})):
                refused = small.http.post(f"/sandboxes/{witness.id}/{verb}", json=body)
                assert refused.status_code == refused.json()["code"] == 507, (verb, refused.text)
                assert re.search("(?i)space", refused.json()["message"])
                assert witness.detail()["state"] == "running"
                assert witness.lasting() == before
                assert [part.name for part in folder.iterdir()] == [f"{witness.id}.0"]
            assert [one["names"] for one in small.http.get("/snapshots").json()] == [["before:default"]]
            assert small.ids() == {witness.id}

            filler.unlink()
            for child in witness.fork(2):
                assert child.lasting() == before
                child.delete()
            witness.pause()
            witness.connect()
            assert witness.lasting() == before
            assert small.http.delete(f"/sandboxes/{witness.id}").status_code == 204
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
