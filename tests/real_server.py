"""A real server for tests: `aenv server` as its own process, in a home of its own.

Guest kernel and templates are those this machine was provisioned with (`aenv setup`, which `make test` runs first): a
symbolic link to the kernel, hard ones to the templates' files, which never change. Database, secrets, sandboxes, port,
addresses and user ids are its own, so a server that the machine's owner runs is not disturbed.
"""

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from aenv.config import NetworkSettings, Settings, VmmSettings, default_home
from aenv.errors import ProvisionError
from aenv.guest.provision import load_bundle
from aenv.images.daemon import Places
from aenv.network import nft
from aenv.network.layout import NETNS_DIRECTORY, Layout
from aenv.vmm import cgroup
from aenv.vmm.accel import AccelProver
from aenv.vmm.process import find
from disks import attached_disks, fsck_running

KEY = "e2b_" + "5e" * 20
CIDR = "10.215.0.0/20"
UID_BASE = "2600000"

needs_node = pytest.mark.skipif(
    os.geteuid() != 0 or platform.machine() != "x86_64", reason="runs a node with real microVMs: needs root on x86_64"
)


def until(condition: Callable[[], Any], deadline: float = 30.0, what: str = "") -> Any:
    """Wait until `condition()` is true, for what gives no event of its own; return its value."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {what or condition}"
        time.sleep(0.05)
    return value


class RealServer:
    """One home and the server process on it, which may be stopped, killed and started again."""

    def __init__(self, home: Path, source: Path | None = None, **settings: str) -> None:
        """`settings` are variables without their prefix: ``network_pool_size="2"``. `source` is the home whose
        templates it gets, if not the one this machine was provisioned with. Skips where nothing is set up."""
        provisioned = Path(os.environ.get("AENV_TEST_HOME") or default_home())
        try:
            bundle = load_bundle(provisioned)
        except ProvisionError as error:
            pytest.skip(f"this machine is not provisioned: {error.message}")
        self.home = home
        (home / "guest").symlink_to((provisioned / "guest").resolve())
        if (templates := (source or provisioned) / "templates").exists():
            shutil.copytree(templates, home / "templates", symlinks=True, copy_function=_link)
        # The KVM trial is made once on a machine; each home keeps a copy of its answer.
        asyncio.run(AccelProver(home=provisioned, settings=VmmSettings(), bundle=bundle).decide())
        (home / "cache").mkdir()
        if (answer := provisioned / "cache" / "accel.json").exists():
            shutil.copy(answer, home / "cache")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        own = {"home": str(home), "api_key": KEY, "api_port": str(port), "network_cidr": CIDR, "vmm_uid_base": UID_BASE}
        own |= {"network_pool_size": "2", "network_max_slots": "64", "orchestrator_max_sandboxes": "64"}
        own |= {"standby_ready": "0", "standby_prepared": "0"}  # so that all there is belongs to a sandbox
        own |= {"orchestrator_boot_deadline": "120"}  # another test run beside this one is no fault
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_"))}
        self.stands_by = "standby_ready" in settings
        self.environ = inherited | {f"AENV_{name.upper()}": value for name, value in (own | settings).items()}
        self.layout = Layout.of(Settings(home=home, network=NetworkSettings(cidr=CIDR)))
        self.log = home / "server.log"
        self.http = httpx.Client(base_url=self.url, headers={"X-API-Key": KEY}, timeout=150, trust_env=False)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def sdk(self) -> dict[str, Any]:
        """Where the official SDKs find this server; nothing is retried, so that a fault is seen."""
        return {"api_key": KEY, "api_url": self.url, "sandbox_url": self.url, "retries": 0}

    @property
    def e2b_environ(self) -> dict[str, str]:
        """The same as variables, for a child process."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_"))}
        return inherited | {"E2B_API_KEY": KEY, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and return when it answers."""
        command = [str(Path(sys.executable).with_name("aenv")), "server"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, 60, "the server's start")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"the server ended with {self._process.returncode}:\n{self.log.read_text()[-4000:]}")
        try:
            return self.http.get("/health").is_success
        except httpx.TransportError:
            return False

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self, deadline: float = 40.0) -> int:
        """Wait for the end of the process; its exit status."""
        assert self._process is not None
        process, self._process = self._process, None
        return process.wait(deadline)

    def stop(self) -> None:
        """Gracefully, as a service manager does."""
        self.signal(signal.SIGTERM)
        assert self.ended() in (0, -signal.SIGTERM), self.log.read_text()[-4000:]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ended()

    def close(self) -> None:
        """End everything, whatever state a failed test left, and check that nothing remains on the machine."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        for sandbox_id in self.ids():
            self.http.delete(f"/sandboxes/{sandbox_id}")
        if not self.stands_by:
            until(lambda: self.leftovers() == NOTHING, what="the release of everything that sandboxes held")
        self.stop()
        self.http.close()
        assert not self.slots()
        assert self.layout.table not in nft.tables()
        assert not Places.of_home(self.home).mount.is_mount()

    def ids(self) -> set[str]:
        answer = self.http.get("/v2/sandboxes")
        assert answer.status_code == 200, answer.text
        return {row["sandboxID"] for row in answer.json()}

    def create(self, **options: Any) -> Sandbox:
        return Sandbox.create("base", **({"timeout": 600} | options), **self.sdk)

    def connect(self, sandbox_id: str) -> Sandbox:
        return Sandbox.connect(sandbox_id, timeout=1, **self.sdk)

    def why_ended(self, sandbox_id: str) -> str:
        """What a GET says of a sandbox that has ended, once it has."""

        def message() -> str:
            answer = self.http.get(f"/sandboxes/{sandbox_id}")
            return str(answer.json()["message"]) if answer.status_code == 404 else ""

        return str(until(message, 30, f"the end of {sandbox_id}"))

    def vmm_pid(self, sandbox_id: str) -> int:
        return next(found.handle.pid for found in find(self.home) if found.sandbox_id.partition(".")[0] == sandbox_id)

    def fsck(self) -> None:
        """Check the file systems of all its sandboxes (only where the data plane serves them)."""
        fsck_running(self.home, {found.sandbox_id: found.handle.pid for found in find(self.home)})

    def leftovers(self) -> dict[str, list[str]]:
        """What sandboxes hold of the machine: their processes, folders, attached disks and cgroups. Each is named after
        its sandbox, and appears twice if there are two."""
        root = cgroup.probe(self.home).root
        folders = self.home / "sandboxes"
        return {
            "vmms": sorted(found.sandbox_id.partition(".")[0] for found in find(self.home)),
            "folders": sorted(path.name for path in folders.iterdir()) if folders.exists() else [],
            "disks": sorted(name.partition(".")[0] for name in attached_disks(self.home)),
            "cgroups": sorted(path.name.partition(".")[0] for path in root.iterdir() if path.is_dir())
            if root and root.exists()
            else [],
        }

    def slots(self) -> dict[str, list[str]]:
        """Network namespaces and host links of this home; those of the warm pool are among them."""
        found = {
            "namespaces": sorted(path.name for path in NETNS_DIRECTORY.glob(f"{self.layout.netns_prefix}*")),
            "links": sorted(p.name for p in Path("/sys/class/net").glob(f"{self.layout.link_prefix}*")),
        }
        return {kind: names for kind, names in found.items() if names}

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident(self) -> int:
        """MiB of the server process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) // 1024


NOTHING: dict[str, list[str]] = {"vmms": [], "folders": [], "disks": [], "cgroups": []}


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def _baked(folder: Path) -> Path:
    """A home in `folder` whose base template has been booted once: what all other homes of a test run begin with."""
    home = folder / "baked"
    if not home.exists():
        home.mkdir()
        server = RealServer(home)
        server.start()
        try:
            server.create().kill()
        finally:
            server.close()
    return home


@contextlib.contextmanager
def real_server(home: Path, *, baked: bool = True, **settings: str) -> Iterator[RealServer]:
    """A server that has answered. Unless `baked`, its first sandbox boots."""
    server = RealServer(home, _baked(home.parent) if baked else None, **settings)
    server.start()
    try:
        yield server
    finally:
        server.close()
