"""The real data plane daemon over its socket: images as files, and what can be done with them."""

import errno
import mmap
import os
import random
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from blockd_harness import Blockd, Refused, read, write

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts: needs root")

MIB = 1 << 20


def noise(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def content() -> bytearray:
    """8 MiB with holes."""
    return bytearray(noise(1, MIB) + bytes(2 * MIB) + noise(2, MIB) + bytes(4 * MIB))


@pytest.mark.parametrize("mode", ["log", "sparse"])
def test_a_disk_through_its_life(blockd: Blockd, tmp_path: Path, mode: str) -> None:
    want = content()
    base = blockd.layer("base", bytes(want))
    disk, upper = blockd.mount / "disk", {"dir": str(tmp_path / "upper"), "mode": mode}
    reply = blockd.call("attach", image="disk", layers=[base], upper=upper, target="fuse")
    assert (reply["path"], reply["size"], reply["layers"]) == (str(disk), len(want), 1)
    assert read(disk) == want

    layers = [base]
    for n, (offset, length) in enumerate([(4096, 8192), (3 * MIB - 100, 300_001), (0, 1), (8 * MIB - 5, 5)]):
        data = noise(10 + n, length)
        write(disk, offset, data)
        want[offset : offset + length] = data
        assert read(disk) == want
        sealed = blockd.call("seal", image="disk", layer=str(tmp_path / f"layer{n}"), digest=n % 2 == 0)
        assert sealed["bytes"] == (tmp_path / f"layer{n}").stat().st_size
        layers.append({"path": sealed["layer"]})
        assert read(disk) == want

    # Punched holes and zeroed ranges read as zeroes exactly, over lower layers too.
    for option, offset, length in [("-p", 100, 70_000), ("-z", 3 * MIB + 1, 4095), ("-p", 5 * MIB, 3 * MIB)]:
        subprocess.run(["fallocate", option, "-n", "-o", str(offset), "-l", str(length), str(disk)], check=True)
        want[offset : offset + length] = bytes(length)
        assert read(disk) == want
    about = blockd.call("stat", image="disk")
    assert (len(about["layers"]), about["upper"]["mode"], about["counters"]["errors"]) == (5, mode, 0)

    blockd.call("detach", image="disk")
    assert not disk.exists()
    blockd.call("attach", image="disk", layers=layers, upper=upper)
    assert read(disk) == want
    blockd.call("detach", image="disk", discard_upper=True)
    assert not (tmp_path / "upper").exists()


def test_what_a_read_only_image_is(blockd: Blockd) -> None:
    want = content()
    blockd.call("attach", image="memory", layers=[blockd.layer("base", bytes(want))], owner={"uid": 1234, "gid": 4321})
    path = blockd.mount / "memory"
    about = path.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode), about.st_size) == (1234, 4321, 0o400, len(want))
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        os.open(path, os.O_RDWR)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private,
    ):
        private[:4096] = bytes(4096)
        assert private[4096:] == want[4096:]
        with pytest.raises(Refused) as refused:
            blockd.call("seal", image="memory", layer="/nowhere")
        assert refused.value.code == "invalid"
    assert read(path) == want

    # As its owner may, and others may not.
    def readable(user: int) -> bool:
        command = ["head", "-c1", "memory"]
        return (
            subprocess.run(command, cwd=blockd.mount, user=user, group=1, capture_output=True, check=False).returncode
            == 0
        )

    assert readable(1234)
    assert not readable(1235)


def test_a_shared_image_is_everybodys_to_read(blockd: Blockd) -> None:
    base = blockd.layer("base", bytes(MIB))
    alone = Path(blockd.call("attach", image="alone", layers=[base])["path"])
    shared = Path(blockd.call("attach", image="shared", layers=[base], shared=True)["path"])
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (alone, shared)]
    assert modes == [0o400, 0o444]
    with pytest.raises(Refused, match="for images without an upper") as refused:
        blockd.call("attach", image="disk", layers=[base], upper={"dir": str(blockd.root / "upper")}, shared=True)
    assert refused.value.code == "invalid"


def test_the_files_of_layers_are_known(blockd: Blockd, tmp_path: Path) -> None:
    def files() -> list[str]:
        return [layer["path"] for layer in blockd.call("stat", image="disk")["layers"]]

    base = blockd.layer("base", noise(1, MIB))
    blockd.call("attach", image="other", layers=[base])
    link = tmp_path / "link"  # the same layer by another name, of this image
    os.link(base["path"], link)
    blockd.call("attach", image="disk", layers=[{"path": str(link)}], upper={"dir": str(tmp_path / "upper")})
    names = [str(tmp_path / f"layer{n}") for n in range(4)]
    for n, name in enumerate(names[:3]):
        write(blockd.mount / "disk", n * 4096, noise(n, 4096))
        blockd.call("seal", image="disk", layer=name)
    assert files() == [str(link), *names[:3]]
    blockd.call("compact", **{"image": "disk", "from": 1, "to": 3, "output": names[3]})
    assert files() == [str(link), names[3], names[2]]
    assert blockd.call("stat", image="other")["layers"][0]["path"] == base["path"]


def test_seeking_shows_the_holes(blockd: Blockd, tmp_path: Path) -> None:
    base = blockd.layer("base", bytes(content()))
    blockd.call("attach", image="disk", layers=[base], upper={"dir": str(tmp_path / "upper")}, size=16 * MIB)
    fd = os.open(blockd.mount / "disk", os.O_RDONLY)
    found = [os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 0, os.SEEK_HOLE), os.lseek(fd, MIB, os.SEEK_DATA)]
    assert found == [0, MIB, 3 * MIB]
    assert os.lseek(fd, 5 * MIB, os.SEEK_HOLE) == 5 * MIB
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        os.lseek(fd, 5 * MIB, os.SEEK_DATA)
    assert os.fstat(fd).st_size == 16 * MIB
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        os.pwrite(os.open(blockd.mount / "disk", os.O_RDWR), b"x", 16 * MIB)
    os.close(fd)


def test_layers_are_made_folded_and_exported(blockd: Blockd, tmp_path: Path) -> None:
    want = content()
    base = blockd.layer("base", bytes(want))
    blockd.call("attach", image="disk", layers=[base], upper={"dir": str(tmp_path / "upper")})
    for n in range(4):
        write(blockd.mount / "disk", n * MIB // 2, data := noise(n, 3 * MIB // 4))
        want[n * MIB // 2 : n * MIB // 2 + len(data)] = data
        blockd.call("seal", image="disk", layer=str(tmp_path / f"layer{n}"))
    stack = [base, *({"path": str(tmp_path / f"layer{n}")} for n in range(4))]
    outputs: list[tuple[str, dict[str, object]]] = [
        ("plain", {}),
        ("lz4", {"zfile": {"algorithm": "lz4"}}),
        ("zstd", {"zfile": {"algorithm": "zstd", "block_size": 65536}}),
    ]
    for name, options in outputs:
        made = blockd.call("compact", layers=stack, base=True, output=str(tmp_path / name), digest=True, **options)
        found = subprocess.run(["sha256sum", tmp_path / name], check=True, capture_output=True, text=True).stdout
        assert made["digest"] == "sha256:" + found.split()[0]
        blockd.call("attach", image=name, layers=[{"path": str(tmp_path / name)}])
        assert read(blockd.mount / name) == want
    for image, output, form in [("disk", "raw", "raw"), ("lz4", "layer", "layer"), ("plain", "z", "zfile")]:
        blockd.call("export", image=image, output=str(tmp_path / output), format=form)
    assert (tmp_path / "raw").read_bytes() == want
    assert (tmp_path / "raw").stat().st_blocks * 512 < len(want)
    blockd.call("export", layers=[{"path": str(tmp_path / "z")}], output=str(tmp_path / "raw2"), format="raw")
    assert (tmp_path / "raw2").read_bytes() == want
    with pytest.raises(Refused) as refused:
        blockd.call("export", image="disk", output=str(tmp_path / "raw"), format="raw")
    assert refused.value.code == "exists"


def test_a_live_disk_is_compacted_and_sealed_under_load(blockd: Blockd, tmp_path: Path) -> None:
    want = content()
    blockd.call("attach", image="disk", layers=[blockd.layer("base", bytes(want))], upper={"dir": str(tmp_path / "up")})
    stop, failures = threading.Event(), list[str]()

    def guest() -> None:
        rng = random.Random(7)
        fd = os.open(blockd.mount / "disk", os.O_RDWR)
        while not stop.is_set():
            at, data = rng.randrange(0, len(want) - 9000), rng.randbytes(rng.randrange(1, 9000))
            os.pwrite(fd, data, at)
            want[at : at + len(data)] = data
            at = rng.randrange(0, len(want) - 9000)
            if os.pread(fd, 9000, at) != want[at : at + 9000]:
                failures.append(f"wrong bytes at {at}")
                break
        os.close(fd)

    thread = threading.Thread(target=guest)
    thread.start()
    try:
        for n in range(12):
            blockd.call("seal", image="disk", layer=str(tmp_path / f"layer{n}"))
            if n % 3 == 2:
                count = len(blockd.call("stat", image="disk")["layers"])
                blockd.call("compact", image="disk", **{"from": count - 3, "to": count}, output=str(tmp_path / f"c{n}"))
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert read(blockd.mount / "disk") == want
    assert len(blockd.call("stat", image="disk")["layers"]) == 5


def test_a_working_set_is_recorded_and_read_ahead(blockd: Blockd, tmp_path: Path) -> None:
    blockd.call("attach", image="memory", layers=[blockd.layer("base", bytes(content()))], record=True)
    fd = os.open(blockd.mount / "memory", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for at in (3 * MIB, 0, 3 * MIB):
        os.pread(fd, 4096, at)
    os.close(fd)
    saved = blockd.call("working_set", image="memory", output=str(tmp_path / "set"))
    assert saved["chunks"] == 2
    fetched = blockd.call("prefetch", image="memory", working_set=str(tmp_path / "set"))
    assert (fetched["chunks"], fetched["bytes"]) == (2, 2 * 65536)
    (tmp_path / "hostile").write_text('{"version":1,"chunk":65536,"runs":[[0,18446744073709551615]]}')
    assert blockd.call("prefetch", image="memory", working_set=str(tmp_path / "hostile"))["bytes"] == 8 * MIB


def test_names_files_and_orders_that_are_refused(blockd: Blockd, tmp_path: Path) -> None:
    base = blockd.layer("base", bytes(content()))
    upper = {"dir": str(tmp_path / "upper")}
    (tmp_path / "junk").write_bytes(noise(3, 20_000))
    blockd.call("attach", image="disk", layers=[base], upper=upper)
    blockd.call("seal", image="disk", layer=str(tmp_path / "layer"))
    cases: list[tuple[str, dict[str, object]]] = [
        ("exists", {"image": "disk", "layers": [base]}),
        ("busy", {"image": "other", "layers": [base], "upper": upper}),
        ("invalid", {"image": "../x", "layers": [base]}),
        ("invalid", {"image": "other", "layers": []}),
        ("invalid", {"image": "other", "layers": [{"path": "base"}]}),
        ("invalid", {"image": "other", "layers": [{"path": str(tmp_path)}]}),
        ("invalid", {"image": "other", "layers": [base], "size": 4096}),
        ("invalid", {"image": "other", "layers": [base], "upper": {"dir": str(tmp_path / "u2")}, "size": 4096}),
        ("invalid", {"image": "other", "layers": [base], "what": 1}),
        ("not_found", {"image": "other", "layers": [{"path": str(tmp_path / "missing")}]}),
        ("corrupt", {"image": "other", "layers": [{"path": str(tmp_path / "junk")}]}),
        (
            "corrupt",
            {
                "image": "other",
                "layers": [{"path": str(tmp_path / "layer")}, base, {"path": str(tmp_path / "layer")}] * 2,
            },
        ),
        ("unsupported", {"image": "other", "layers": [base], "target": "ublk"}),
    ]
    for code, args in cases:
        with pytest.raises(Refused) as refused:
            blockd.call("attach", **args)
        assert refused.value.code == code, (args, str(refused.value))
    with (blockd.mount / "disk").open("rb"):
        taken = blockd.connect()
        number = taken.send("detach", image="disk")
        assert blockd.call("list")["images"][0]["image"] == "disk"
        reply = taken.receive()
        assert (reply["id"], reply["error"]["code"]) == (number, "busy")
    blockd.call("detach", image="disk")
    with pytest.raises(Refused, match="not_found"):
        blockd.call("detach", image="disk")
