"""What happens to images when the daemon is killed, the disk is full, clients misbehave or there are very many."""

import contextlib
import errno
import os
import random
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from blockd_harness import Blockd, Connection, Refused, read, write

from aenv.config import load
from aenv.images.store import find_blockd

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")

MIB = 1 << 20
BLOCK = 4096


class Guest:
    """Writes blocks that say where they belong and how often they were written, and knows which must be there."""

    def __init__(self, path: Path, size: int, seed: int) -> None:
        self.path, self.size, self.rng = path, size, random.Random(seed)
        self.written: dict[int, int] = {}
        """Version each block was last written with; the write may not have returned."""
        self.flushed: dict[int, int] = {}
        """Version each block had at the last flush that returned."""
        self.version = 0

    @staticmethod
    def block(index: int, version: int) -> bytes:
        return b"".join(n.to_bytes(8, "little") for n in (index, version)) * (BLOCK // 16)

    def run(self) -> None:
        """Goes on until the daemon is gone."""
        fd = os.open(self.path, os.O_RDWR)
        with contextlib.suppress(OSError):
            while True:
                for _ in range(self.rng.randrange(1, 12)):
                    index = self.rng.randrange(self.size // BLOCK)
                    self.version += 1
                    self.written[index] = self.version
                    os.pwrite(fd, self.block(index, self.version), index * BLOCK)
                snapshot = dict(self.written)
                os.fsync(fd)
                self.flushed = snapshot
        with contextlib.suppress(OSError):
            os.close(fd)

    def check(self) -> None:
        """Every block is one that was written, not older than what was flushed. What is there is then the truth."""
        found = read(self.path)
        for index, written in self.written.items():
            block = found[index * BLOCK : (index + 1) * BLOCK]
            version = int.from_bytes(block[8:16], "little")
            least = self.flushed.get(index, 0)
            assert least <= version <= written, f"block {index}: version {version}, flushed {least}, written {written}"
            assert block == (self.block(index, version) if version else bytes(BLOCK))
            self.written[index] = version
        self.flushed = dict(self.written)


@pytest.mark.parametrize("mode", ["log", "sparse"])
def test_nothing_flushed_is_lost_when_the_daemon_is_killed(blockd: Blockd, tmp_path: Path, mode: str) -> None:
    rng = random.Random(99)
    layers = list[dict[str, str]]()
    upper = {"dir": str(tmp_path / "upper"), "mode": mode}
    guest = Guest(blockd.mount / "disk", 2 * MIB, seed=5)
    seals = 0
    for _ in range(25):
        blockd.call("attach", image="disk", layers=layers, upper=upper, size=2 * MIB)
        if guest.written:
            guest.check()
        thread = threading.Thread(target=guest.run)
        thread.start()
        killer = threading.Timer(rng.uniform(0.005, 0.2), blockd.process.kill)  # type: ignore[union-attr]
        killer.start()
        attempt: Path | None = None
        try:
            while True:
                attempt = tmp_path / f"layer{(seals := seals + 1)}"
                blockd.call("seal", image="disk", layer=str(attempt), durable=seals % 4 == 0)
                layers.append({"path": str(attempt)})
                if len(layers) >= 8:
                    target = tmp_path / f"folded{seals}"
                    blockd.call("compact", image="disk", **{"from": 0, "to": 5}, output=str(target))
                    layers[:5] = [{"path": str(target)}]
        except (EOFError, OSError):
            pass
        thread.join()
        blockd.kill()
        blockd.start()
        # The protocol's rule for a seal nobody heard the end of.
        try:
            blockd.call("attach", image="disk", layers=layers, upper=upper, size=2 * MIB)
        except Refused as refused:
            if refused.code != "corrupt" or attempt is None:
                raise
            layers.append({"path": str(attempt)})
        else:
            blockd.call("detach", image="disk")
    assert seals > 25
    assert guest.version > 100
    # Without a repair, and to the last one, the layers alone are sound.
    blockd.call("attach", image="disk", layers=layers, upper=upper, size=2 * MIB)
    guest.check()
    if layers:
        blockd.call("compact", layers=layers, base=True, output=str(tmp_path / "all"))


def test_a_folding_that_was_killed_leaves_nothing(blockd: Blockd, tmp_path: Path) -> None:
    layers = [blockd.layer(f"base{n}", random.Random(n).randbytes(24 * MIB)) for n in range(1)]
    before = sorted(path.name for path in tmp_path.iterdir())
    for delay in (0.0, 0.01, 0.03, 0.06):
        output = tmp_path / f"folded-{delay}"
        blockd.call.send("compact", layers=layers, output=str(output), zfile={"algorithm": "zstd"}, digest=True)
        threading.Event().wait(delay)
        blockd.kill()
        blockd.start()
        if output.exists():
            blockd.call("attach", image=f"x{delay}", layers=[{"path": str(output)}])
            output.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_disk_is_no_space_and_nothing_breaks(blockd: Blockd, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        blockd.call("attach", image="disk", layers=[], upper={"dir": str(small / "upper")}, size=16 * MIB)
        disk = blockd.mount / "disk"
        block, written = os.urandom(65536), 0
        try:
            while True:
                write(disk, written, block)
                written += len(block)
        except OSError as error:
            full = error.errno
        assert full == errno.ENOSPC
        assert written > 2 * MIB
        assert read(disk, 0, written) == block * (written // len(block))
        with pytest.raises(Refused) as refused:
            blockd.call("export", image="disk", output=str(small / "raw"), format="raw")
        assert refused.value.code == "no_space"
        assert not (small / "raw").exists()
        # With space again, it goes on where it was; also after a kill.
        subprocess.run(["mount", "-o", "remount,size=16m", small], check=True)
        write(disk, written, block)
        blockd.kill()
        blockd.start()
        blockd.call("attach", image="disk", layers=[], upper={"dir": str(small / "upper")})
        assert read(disk, 0, written + len(block)) == block * (written // len(block) + 1)
        blockd.call("detach", image="disk", discard_upper=True)
    finally:
        blockd.close()
        subprocess.run(["umount", "-l", small], check=True)


def test_five_hundred_images_in_little_memory(blockd: Blockd, tmp_path: Path) -> None:
    layers = [blockd.layer("base", random.Random(1).randbytes(MIB) + bytes(63 * MIB))]
    before = blockd.status("VmRSS")
    for n in range(500):
        upper = {"dir": str(tmp_path / "uppers" / str(n))}
        blockd.call("attach", image=f"disk-{n}", layers=layers, upper=upper, target="fuse")
    assert len(list(blockd.mount.iterdir())) == len(blockd.call("list")["images"]) == 500
    for n in range(0, 500, 7):
        write(blockd.mount / f"disk-{n}", 8192, n.to_bytes(4, "little") * 1024)
    for n in range(0, 500, 7):
        assert read(blockd.mount / f"disk-{n}", 8192, 4096) == n.to_bytes(4, "little") * 1024
    assert blockd.status("VmRSS") < 20 * 1024, (before, blockd.status("VmRSS"))
    for n in range(500):
        blockd.call("detach", image=f"disk-{n}", discard_upper=True)
    assert not any(blockd.mount.iterdir())


def test_memory_follows_the_extents(blockd: Blockd, tmp_path: Path) -> None:
    blockd.call("attach", image="disk", layers=[], upper={"dir": str(tmp_path / "upper")}, size=512 * MIB)
    fd = os.open(blockd.mount / "disk", os.O_RDWR)
    for n in range(50_000):
        os.pwrite(fd, b"\1" * 512, n * 8192)
    os.close(fd)
    extents = blockd.call("stat", image="disk")["upper"]["extents"]
    assert extents == 50_000
    assert blockd.status("VmRSS") * 1024 < 20 * MIB + 24 * extents
    started = time.monotonic()
    blockd.call("seal", image="disk", layer=str(tmp_path / "layer"))
    assert time.monotonic() - started < 5


def test_what_a_killed_daemon_left_is_cleaned(blockd: Blockd, tmp_path: Path) -> None:
    for _ in range(2):
        blockd.kill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            blockd.mount.stat()
        assert blockd.socket.exists()
        blockd.start()
    mounts = Path("/proc/self/mountinfo").read_text()
    assert mounts.count(f" {blockd.mount} ") == 1
    assert stat.S_IMODE(blockd.socket.stat().st_mode) == 0o600
    second = subprocess.run(
        [
            find_blockd(load()),
            "--socket",
            blockd.socket,
            "--mount",
            tmp_path / "m",
            "--cache",
            tmp_path / "c",
            "--cache-bytes",
            "1000000",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert second.returncode == 1
    assert "another daemon" in second.stderr
    assert blockd.end() == 0
    assert not blockd.socket.exists()
    assert not blockd.mount.is_mount()


def test_clients_that_misbehave_harm_only_themselves(blockd: Blockd) -> None:
    for line in [
        b"\n",
        b"{}\n",
        b"[]\n",
        b"nonsense\n",
        b'{"id":[],"op":"list"}\n',
        b'{"id":1}\n',
        b"\xff\xfe\n",
        b'{"id":1,"op":7}\n',
    ]:
        bad = blockd.connect()
        bad.send_raw(line)
        if line.strip():
            reply = bad.receive()
            assert reply["error"]["code"] == "invalid", line
        assert bad("list") == {"images": []}
        bad.close()
    deep = blockd.connect()
    deep.send_raw(b'{"id":1,"op":"list","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    assert deep.receive()["error"]["code"] == "invalid"
    long = blockd.connect()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        long.send_raw(b"x" * (2 * MIB))
    with contextlib.suppress(ConnectionResetError, EOFError):
        assert long.receive()["error"]["code"] == "invalid"
        long.receive()
    # Many requests that nobody reads the answers of, and half a line.
    rude = socket.socket(socket.AF_UNIX)
    rude.connect(str(blockd.socket))
    rude.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        for _ in range(100_000):
            rude.send(b'{"id":1,"op":"version"}\n')
    with pytest.raises(Refused, match="unsupported"):
        blockd.call("no-such-thing")
    assert blockd.call("list") == {"images": []}
    rude.close()


def test_an_origin_that_stalls_holds_up_nobody_else(blockd: Blockd, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/layer"
        waiting = list[Connection]()
        for n in range(40):
            connection = blockd.connect()
            connection.send("attach", image=f"remote-{n}", layers=[{"url": url, "size": 1 << 30}])
            waiting.append(connection)
        base = blockd.layer("base", os.urandom(MIB))
        for _ in range(20):
            blockd.call("attach", image="local", layers=[base], upper={"dir": str(tmp_path / "upper")})
            write(blockd.mount / "local", 0, b"x" * 4096)
            blockd.call("detach", image="local", discard_upper=True)
        with pytest.raises(Refused, match="busy"):
            blockd.call("detach", image="remote-0")
        for connection in waiting:
            connection.close()
