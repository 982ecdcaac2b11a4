"""The official JavaScript SDK and CLI (tests/conformance/js, installed by scripts/test.sh) against a real server."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from real_server import RealServer, needs_node

JS = Path(__file__).with_name("js")
MIN_NODE = 20
DEADLINE = 240
"""Seconds for one run; it boots up to two guests."""


def why_not() -> str:
    node = shutil.which("node")
    if node is None:
        return f"needs node >= {MIN_NODE}, which is not installed"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < MIN_NODE:
        return f"needs node >= {MIN_NODE}; this is {version}"
    return "" if (JS / "node_modules" / "e2b").exists() else f"the packages are not installed; run: npm ci in {JS}"


pytestmark = [
    pytest.mark.vm,
    needs_node,
    pytest.mark.skipif(bool(reason := why_not()), reason=reason),
    pytest.mark.timeout(DEADLINE + 30),
]


@pytest.mark.parametrize("file", ["sdk.test.mjs", "states.test.mjs"])
def test_sdk(server: RealServer, file: str) -> None:
    command = ["node", "--test", "--test-reporter=spec", file]
    ran = subprocess.run(command, cwd=JS, env=server.e2b_environ, capture_output=True, text=True, timeout=DEADLINE)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Cli:
    """The `e2b` command."""

    def __init__(self, server: RealServer, home: Path) -> None:
        self.environ = server.e2b_environ | {"HOME": str(home), "NO_UPDATE_NOTIFIER": "1", "CI": "1"}

    def __call__(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        ran = subprocess.run(
            [JS / "node_modules" / ".bin" / "e2b", "sandbox", *arguments],
            env=self.environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert ran.returncode == code, f"{arguments}: {ran.returncode}\n{ran.stdout}{ran.stderr}"
        return ran.stdout


@pytest.fixture
def cli(server: RealServer, tmp_path: Path) -> Cli:
    return Cli(server, tmp_path)


def test_cli(server: RealServer, cli: Cli) -> None:
    made = cli("create", "base", "--detach")
    (sandbox_id,) = [word for word in made.split() if word in server.ids()]
    listed = json.loads(cli("list", "--format", "json"))
    assert sandbox_id in [row["sandboxId"] for row in listed]
    assert cli("exec", sandbox_id, "--", "echo", "from the CLI") == "from the CLI\n"
    assert cli("exec", sandbox_id, "--", "wc", "-c", stdin="12345").strip() == "5"
    cli("exec", sandbox_id, "--", "exit 3", code=3)
    cli("pause", sandbox_id)
    assert server.http.get(f"/sandboxes/{sandbox_id}").json()["state"] == "paused"
    cli("resume", sandbox_id)
    assert server.http.get(f"/sandboxes/{sandbox_id}").json()["state"] == "running"
    cli("snapshot", "create", sandbox_id)
    (snapshot,) = server.http.get("/snapshots", params={"sandboxID": sandbox_id}).json()
    assert snapshot["snapshotID"] in cli("snapshot", "list")
    cli("snapshot", "delete", snapshot["snapshotID"])
    assert server.http.get("/snapshots", params={"sandboxID": sandbox_id}).json() == []
    cli("kill", sandbox_id)
    assert sandbox_id not in server.ids()
