"""Disks of the real data plane daemon that are attached blank and get their layers later."""

import errno
import mmap
import os
import random
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blockd_harness import Blockd, Refused, read, write

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")

MIB = 1 << 20
SIZE = 4 * MIB
PAGE = 4096


def noise(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


CONTENT = noise(1, SIZE)


def upper(blockd: Blockd, mode: str = "log") -> dict[str, str]:
    return {"dir": str(blockd.root / "upper"), "mode": mode}


def blank_disk(blockd: Blockd, mode: str = "log", **options: Any) -> Path:
    reply = blockd.call("attach", image="disk", layers=[], upper=upper(blockd, mode), size=SIZE, blank=True, **options)
    assert (reply["size"], reply["layers"], reply["extents"], reply["target"]) == (SIZE, 0, 0, "fuse")
    return Path(reply["path"])


def stack(blockd: Blockd, count: int = 4) -> tuple[list[dict[str, str]], bytes]:
    """So many layers, each of which changes something of those beneath, and what they show together."""
    layers, want = [blockd.layer("base", CONTENT)], bytearray(CONTENT)
    blockd.call("attach", image="maker", layers=layers, upper={"dir": str(blockd.root / "maker")})
    for n in range(1, count):
        data = noise(100 + n, 3 * PAGE)
        write(blockd.mount / "maker", n * MIB // 2, data)
        want[n * MIB // 2 : n * MIB // 2 + len(data)] = data
        layers.append({"path": str(blockd.root / f"layer{n}")})
        blockd.call("seal", image="maker", layer=layers[-1]["path"])
    blockd.call("detach", image="maker", discard_upper=True)
    return layers, bytes(want)


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(Refused) as caught:
        yield
    assert caught.value.code == code, str(caught.value)


def fails(number: int, work: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        work()


@pytest.mark.parametrize("mode", ["log", "sparse"])
def test_a_disk_is_bound_and_then_like_any_other(blockd: Blockd, tmp_path: Path, mode: str) -> None:
    layers, want = stack(blockd)
    path = blank_disk(blockd, mode, owner={"uid": 1234, "gid": 4321})
    about = path.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode), about.st_size) == (1234, 4321, 0o600, SIZE)
    fd = os.open(path, os.O_RDWR)  # as a VMM has it, from before the binding to after
    try:
        assert os.pread(fd, SIZE + 1, 0) == bytes(SIZE)
        os.fsync(fd)
        assert (os.lseek(fd, 0, os.SEEK_HOLE), os.lseek(fd, PAGE, os.SEEK_HOLE)) == (0, PAGE)
        fails(errno.ENXIO, lambda: os.lseek(fd, 0, os.SEEK_DATA))
        fails(errno.EIO, lambda: os.pwrite(fd, b"x" * PAGE, 0))
        punch = ["fallocate", "-p", "-o", "0", "-l", "4096", str(path)]
        assert subprocess.run(punch, capture_output=True, check=False).returncode != 0
        assert (blockd.call("stat", image="disk")["blank"], blockd.call("list")["images"][0]["blank"]) == (True, True)

        reply = blockd.call("bind", image="disk", layers=layers, size=SIZE)
        assert (reply["path"], reply["size"], reply["layers"]) == (str(path), SIZE, 4)
        assert os.pread(fd, SIZE, 0) == want
        data = noise(7, 5000)
        os.pwrite(fd, data, MIB - 100)
        want = want[: MIB - 100] + data + want[MIB - 100 + len(data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    assert path.stat() == about
    about_disk = blockd.call("stat", image="disk")
    assert (about_disk["blank"], about_disk["upper"]["mode"]) == (False, mode)
    assert [layer["path"] for layer in about_disk["layers"]] == [layer["path"] for layer in layers]

    sealed, folded = str(tmp_path / "sealed"), str(tmp_path / "folded")
    blockd.call("seal", image="disk", layer=sealed)
    blockd.call("compact", **{"image": "disk", "from": 1, "to": 4, "output": folded})
    write(path, 0, b"more")
    want = b"more" + want[4:]
    blockd.kill()
    blockd.start()
    blockd.call(
        "attach", image="disk", layers=[layers[0], {"path": folded}, {"path": sealed}], upper=upper(blockd, mode)
    )
    assert read(path) == want
    blockd.call("detach", image="disk", discard_upper=True)
    assert not (tmp_path / "upper").exists()


def test_what_was_mapped_of_a_blank_disk_is_not_remembered(blockd: Blockd) -> None:
    layers, want = stack(blockd)
    path = blank_disk(blockd)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
        assert mapped[: 4 * PAGE] == bytes(4 * PAGE)
        blockd.call("bind", image="disk", layers=layers)
        assert mapped[:] == want


def test_layers_that_do_not_do_leave_it_blank(blockd: Blockd, tmp_path: Path) -> None:
    layers, want = stack(blockd)
    disk = blank_disk(blockd)
    damaged, large = tmp_path / "damaged", blockd.layer("large", bytes(2 * SIZE))
    damaged.write_bytes(Path(layers[0]["path"]).read_bytes()[:-100])
    missing = {"path": str(tmp_path / "missing")}
    wrong: list[list[dict[str, str]]] = [[missing], [{"path": str(damaged)}], [*layers[:3], missing], [large]]
    wrong += [[layers[0], layers[2]], [{"path": "relative"}]]
    for stacked in wrong:
        with refused("invalid"):
            blockd.call("bind", image="disk", layers=stacked)
    with refused("invalid"):
        blockd.call("bind", image="disk", layers=layers, size=2 * SIZE)
    assert blockd.call("stat", image="disk")["blank"]
    assert list((tmp_path / "upper").iterdir()) == []
    blockd.call("bind", image="disk", layers=layers)
    assert read(disk) == want


def test_what_cannot_be_done_with_or_without_layers(blockd: Blockd, tmp_path: Path) -> None:
    base = blockd.layer("base", CONTENT)
    blank_disk(blockd)
    output = str(tmp_path / "output")
    orders: list[tuple[str, dict[str, Any]]] = [
        ("seal", {"layer": output}),
        ("compact", {"from": 0, "to": 1, "output": output}),
        ("export", {"output": output, "format": "raw"}),
    ]
    for op, args in orders:
        with pytest.raises(Refused, match="image disk is blank"):
            blockd.call(op, image="disk", **args)
    other = {"upper": {"dir": str(tmp_path / "other")}}
    for args in (
        {"layers": [base], "size": SIZE, **other},
        {"layers": [], **other},
        {"layers": [], "size": 0, **other},
        {"layers": [], "size": 1000, **other},
        {"layers": [], "size": (1 << 64) - 512, **other},
        {"layers": [], "size": SIZE, "shared": True, **other},
        {"layers": [], "size": SIZE},
        {"layers": [], "size": SIZE, "shared": True},
    ):
        with refused("invalid"):
            blockd.call("attach", image="other", blank=True, **args)
    assert not (tmp_path / "other").exists()
    with refused("busy"):
        blockd.call("attach", image="other", blank=True, layers=[], size=SIZE, upper=upper(blockd))
    with refused("exists"):
        blockd.call("attach", image="disk", blank=True, layers=[], size=SIZE, **other)
    with refused("not_found"):
        blockd.call("bind", image="other", layers=[base])
    blockd.call("attach", image="other", layers=[base])
    for image in ("disk", "other"):
        if image == "disk":
            blockd.call("bind", image=image, layers=[base])
        with refused("exists"):
            blockd.call("bind", image=image, layers=[base])


@pytest.mark.parametrize("discard", [False, True])
def test_a_blank_disk_is_detached(blockd: Blockd, tmp_path: Path, discard: bool) -> None:
    base = blockd.layer("base", CONTENT)
    disk = blank_disk(blockd)
    blockd.call("detach", image="disk", discard_upper=discard)
    assert not disk.exists()
    assert (tmp_path / "upper").exists() is not discard
    # Its directory and its name are free again.
    blank_disk(blockd)
    blockd.call("bind", image="disk", layers=[base])
    write(disk, 0, b"new")
    blockd.call("detach", image="disk")
    # A blank disk over what is there goes on with it, and discards it like any other.
    blank_disk(blockd)
    blockd.call("bind", image="disk", layers=[base])
    assert read(disk, 0, 4) == b"new" + CONTENT[3:4]
    blockd.call("detach", image="disk")
    blank_disk(blockd)
    blockd.call("detach", image="disk", discard_upper=True)
    assert not (tmp_path / "upper").exists()


def test_a_killed_daemon_leaves_no_blank_disk(blockd: Blockd, tmp_path: Path) -> None:
    layers, want = stack(blockd)
    disk = blank_disk(blockd)
    blockd.kill()
    blockd.start()
    assert blockd.call("list")["images"] == []
    blank_disk(blockd)
    blockd.call("bind", image="disk", layers=layers)
    write(disk, 0, b"flushed")
    blockd.kill()
    blockd.start()
    blockd.call("attach", image="disk", layers=layers, upper=upper(blockd))
    assert read(disk) == b"flushed" + want[7:]


def test_a_kill_during_a_bind_leaves_a_directory_that_will_do(blockd: Blockd) -> None:
    layers, want = stack(blockd)
    for delay in (0, 0.0003, 0.0006, 0.001, 0.0015):
        disk = blank_disk(blockd)
        blockd.call.send("bind", image="disk", layers=layers)
        threading.Event().wait(delay)
        blockd.kill()
        blockd.start()
    disk = blank_disk(blockd)
    blockd.call("bind", image="disk", layers=layers)
    assert read(disk) == want


def test_of_those_who_bind_or_detach_at_once_one_wins(blockd: Blockd) -> None:
    layers, want = stack(blockd)
    connections = [blockd.connect() for _ in range(5)]
    ends = set()
    try:
        for turn in range(30):
            disk = blank_disk(blockd)
            for number, connection in enumerate(connections):
                if number == turn % 5:
                    connection.send("detach", image="disk", discard_upper=True)
                else:
                    connection.send("bind", image="disk", layers=layers)
            replies = [connection.receive() for connection in connections]
            codes = [reply["error"]["code"] if "error" in reply else "ok" for reply in replies]
            assert codes.pop(turn % 5) == "ok", replies
            ends.add(codes.count("ok"))
            assert codes.count("ok") <= 1, replies
            assert set(codes) <= {"ok", "exists", "not_found", "busy"}, replies
            assert not disk.exists()
            assert not (blockd.root / "upper").exists()
        disk = blank_disk(blockd)
        for connection in connections:
            connection.send("bind", image="disk", layers=layers)
        replies = [connection.receive() for connection in connections]
        assert sorted(reply.get("error", {}).get("code", "") for reply in replies) == ["", *["exists"] * 4]
        assert read(disk) == want
    finally:
        for connection in connections:
            connection.close()


def test_binding_to_an_origin_that_stalls_holds_up_nobody_else(blockd: Blockd) -> None:
    layers, want = stack(blockd)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        stalled = {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/layer", "size": 1 << 30}
        other = {"dir": str(blockd.root / "other")}
        path = blockd.call("attach", image="other", layers=[], upper=other, size=SIZE, blank=True)["path"]
        waiting = blockd.connect()
        waiting.send("bind", image="other", layers=[stalled])
        silent.accept()[0].close()  # it tries again
        disk = blank_disk(blockd)
        blockd.call("bind", image="disk", layers=layers)
        assert read(disk) == want
        # Nor who has better layers for the same image.
        assert blockd.call("stat", image="other")["blank"]
        blockd.call("bind", image="other", layers=layers)
        assert read(Path(path)) == want
        waiting.close()
