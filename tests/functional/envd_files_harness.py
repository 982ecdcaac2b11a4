"""A bare envd on loopback, and what its file tests ask of it."""

import base64
import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from envd_fixture import envd_binary

# A user that every system has, who owns nothing.
NOBODY = "nobody"


@dataclass(frozen=True)
class Envd:
    """A running envd."""

    url: str
    pid: int
    http: httpx.Client

    def rpc(self, method: str, user: str | None = None, **message: object) -> tuple[int, dict[str, object]]:
        """Calls a method of filesystem.Filesystem; returns the status and the decoded answer."""
        headers = {"authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()} if user else {}
        answer = self.http.post(f"/filesystem.Filesystem/{method}", json=message, headers=headers)
        assert answer.headers["content-type"] == "application/json"
        decoded = json.loads(answer.content)
        assert isinstance(decoded, dict)
        return answer.status_code, decoded

    def get(self, path: str | Path, headers: dict[str, str] | None = None, **query: str) -> httpx.Response:
        """Downloads a file, without httpx's own Accept-Encoding."""
        request = self.http.build_request("GET", "/files", params={"path": str(path), **query}, headers=headers)
        if "accept-encoding" not in (headers or {}):
            del request.headers["accept-encoding"]
        return self.http.send(request)

    def put(self, path: str | Path, data: bytes, headers: dict[str, str] | None = None, **query: str) -> httpx.Response:
        """Uploads bytes as they are."""
        headers = {"content-type": "application/octet-stream", **(headers or {})}
        return self.http.post("/files", params={"path": str(path), **query}, content=data, headers=headers)

    def peak_memory(self) -> int:
        """Highest resident size so far, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024


@contextlib.contextmanager
def running_envd(user: str = "root") -> Iterator[Envd]:
    """Runs envd on a free port with this default user until the block ends."""
    command = [str(envd_binary()), "--host", "127.0.0.1", "--port", "0", "--user", user]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            line = process.stderr.readline()
            found = re.search(r"serves (127\.0\.0\.1:\d+)", line)
            assert found, line
            url = f"http://{found[1]}"
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                yield Envd(url, process.pid, client)
        finally:
            process.terminate()


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory every user may reach and write, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o777)
        yield directory


@contextlib.contextmanager
def small_volume(path: Path) -> Iterator[Path]:
    """A file system of 1 MiB at this new directory. Needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def failed(answer: httpx.Response, status: int, part: str) -> bool:
    """Whether an HTTP answer is this error, in JSON."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    body = answer.json()
    assert body["code"] == status
    assert part in body["message"], body
    return True
