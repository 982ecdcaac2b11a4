"""Runs inside the microVM of test_ublk.py, as root, with the standard library alone: `ublk_guest.py <aenv-blockd>`.

Serves an image as a block device, makes a file system on it, seals it under the mounted file system, and compares what
the device, an export and FUSE show. Prints one JSON object of facts; a fault is a traceback and a status.
"""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

HOME = pathlib.Path("/var/tmp/blockd")
MOUNT = pathlib.Path("/mnt/disk")
SIZE = 96 << 20
DEADLINE = 60


def run(*argv: object) -> str:
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


class Daemon:
    def __init__(self, binary: str, *options: str) -> None:
        self._socket = HOME / "sock"
        log = (HOME / "log").open("ab")
        argv = [binary, "--socket", self._socket, "--mount", HOME / "mnt", "--cache", HOME / "cache"]
        argv += ["--cache-bytes", "1000000", *options]
        self.process = subprocess.Popen([str(a) for a in argv], stderr=log, stdout=log)
        ends = time.monotonic() + DEADLINE
        while True:
            self._connection = socket.socket(socket.AF_UNIX)
            try:
                self._connection.connect(str(self._socket))
                break
            except OSError:
                self._connection.close()
                assert self.process.poll() is None, (HOME / "log").read_text()
                assert time.monotonic() < ends, (HOME / "log").read_text()
                time.sleep(0.05)
        self._connection.settimeout(DEADLINE)
        self._lines = self._connection.makefile("rb")

    def call(self, op: str, **arguments: object) -> dict:
        self._connection.sendall(json.dumps({"id": 1, "op": op, **arguments}).encode() + b"\n")
        answer = json.loads(self._lines.readline())
        assert "ok" in answer, f"{op}: {answer}\n{(HOME / 'log').read_text()[-3000:]}"
        return answer["ok"]

    def attach(self, image: str, layers: list, target: str, upper: str) -> pathlib.Path:
        stack = [{"path": str(HOME / layer)} for layer in layers]
        answer = self.call("attach", image=image, layers=stack, upper={"dir": str(HOME / upper)}, target=target)
        # Where the kernel has it, it is taken without being asked for.
        assert answer["target"] == ("ublk" if target == "auto" else target), answer
        return pathlib.Path(answer["path"])

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(DEADLINE) == 0, (HOME / "log").read_text()[-3000:]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE)


def digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_files(folder: pathlib.Path, seed: int) -> dict[str, str]:
    """Files of many sizes with content that does not compress; their digests as they must be."""
    folder.mkdir()
    wanted = {}
    for number, size in enumerate((1, 511, 4096, 100_000, 1_000_003, 6_000_000)):
        content = hashlib.shake_256(f"{seed} {number}".encode()).digest(size)
        (folder / str(number)).write_bytes(content)
        wanted[str(folder.relative_to(MOUNT) / str(number))] = hashlib.sha256(content).hexdigest()
    return wanted


def check_files(wanted: dict[str, str]) -> None:
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    found = {name: digest(MOUNT / name) for name in wanted}
    assert found == wanted, "files differ"


def gone(path: pathlib.Path) -> bool:
    ends = time.monotonic() + 10
    while path.exists():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def main() -> None:
    facts: dict[str, object] = {"kernel": os.uname().release}
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    MOUNT.mkdir(exist_ok=True)
    daemon = Daemon(sys.argv[1])
    version = daemon.call("version")
    assert version["targets"]["ublk"]["available"], f"{version}\n{(HOME / 'log').read_text()}"

    with (HOME / "base.raw").open("wb") as raw:
        raw.truncate(SIZE)
        raw.seek(SIZE - 4096)
        raw.write(b"\xa5" * 4096)
    daemon.call("import", input=str(HOME / "base.raw"), output=str(HOME / "base"))

    # A live block device: a file system on it, sealed while it is mounted and in use.
    device = daemon.attach("disk", ["base"], "ublk", "upper")
    facts["device"] = str(device)
    assert stat.S_ISBLK(device.stat().st_mode)
    assert int(run("blockdev", "--getsize64", device)) == SIZE
    with device.open("rb") as file:
        file.seek(SIZE - 4096)
        assert file.read() == b"\xa5" * 4096
    run("mkfs.ext4", "-q", "-F", device)
    run("mount", "-o", "discard", device, MOUNT)
    first = write_files(MOUNT / "first", 1)
    run("sync")
    check_files(first)
    began = time.monotonic()
    daemon.call("seal", image="disk", layer=str(HOME / "sealed"))
    facts["seal_ms"] = round((time.monotonic() - began) * 1000, 1)
    check_files(first)
    second = write_files(MOUNT / "second", 2)
    (MOUNT / "first/5").unlink()
    run("fstrim", MOUNT)
    after = {name: value for name, value in {**first, **second}.items() if name != "first/5"}
    check_files(after)
    run("umount", MOUNT)

    # Every byte: the device, an export of it, and the same layers as a file of the FUSE mount.
    facts["on_device"] = digest(device)
    daemon.call("export", image="disk", output=str(HOME / "export.raw"), format="raw")
    facts["exported"] = digest(HOME / "export.raw")
    run("e2fsck", "-f", "-n", HOME / "export.raw")
    run("cmp", device, HOME / "export.raw")
    daemon.call("detach", image="disk")
    assert gone(device), f"{device} is still there"
    file = daemon.attach("disk", ["base", "sealed"], "fuse", "upper")
    facts["on_fuse"] = digest(file)
    daemon.call("detach", image="disk")

    # What was sealed is a disk at that instant: its journal is replayed, and the files are there, the later ones not.
    device = daemon.attach("then", ["base", "sealed"], "auto", "upper2")
    run("mount", device, MOUNT)
    check_files(first)
    assert not (MOUNT / "second").exists()
    run("umount", MOUNT)
    daemon.call("detach", image="then")

    # A killed daemon: flushed writes are there again, as a device once more.
    device = daemon.attach("disk", ["base", "sealed"], "ublk", "upper")
    with device.open("r+b", buffering=0) as raw:
        raw.seek(SIZE - 8192)
        raw.write(b"\x5a" * 4096)
        os.fsync(raw.fileno())
    daemon.kill()
    daemon = Daemon(sys.argv[1])
    device = daemon.attach("disk", ["base", "sealed"], "ublk", "upper")
    with device.open("rb") as file:
        file.seek(SIZE - 8192)
        assert file.read(4096) == b"\x5a" * 4096
    daemon.call("detach", image="disk")
    assert gone(device), f"{device} is still there"
    daemon.end()

    # Without ublk the same call gives a file, and says why.
    daemon = Daemon(sys.argv[1], "--no-ublk")
    stack = [{"path": str(HOME / "base")}]
    facts["fallback"] = daemon.call("attach", image="file", layers=stack, upper={"dir": str(HOME / "upper3")})
    daemon.call("detach", image="file")
    daemon.end()
    facts["left"] = sorted(path.name for path in pathlib.Path("/dev").glob("ublk*"))
    sys.stdout.write(json.dumps(facts) + "\n")


main()
