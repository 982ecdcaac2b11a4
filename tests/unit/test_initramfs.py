import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aenv.guest.initramfs import build_initramfs, write_cpio
from aenv.guest.modules import Module

MODULES = [Module("virtio_mmio", b"first"), Module("virtio_blk", b"second!")]


def extract(archive: bytes, directory: Path) -> None:
    """With an implementation not ours."""
    subprocess.run(
        ["cpio", "--extract", "--quiet", "--no-absolute-filenames"], input=archive, cwd=directory, check=True
    )


def test_layout_is_the_boot_contract(tmp_path: Path) -> None:
    extract(build_initramfs(b"daemon", MODULES), tmp_path)
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "init": b"daemon",
        "modules/000-virtio_mmio.ko": b"first",
        "modules/001-virtio_blk.ko": b"second!",
    }
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert all((tmp_path / name).is_dir() for name in ("dev", "proc", "sys", "newroot"))


@given(st.binary(max_size=9000))
def test_it_fills_whole_pages(init: bytes) -> None:
    """Else, depending on its size alone, QEMU's microvm hangs before the init runs."""
    assert len(build_initramfs(init, MODULES)) % 4096 == 0


def test_same_content_gives_the_same_bytes() -> None:
    assert build_initramfs(b"daemon", MODULES) == build_initramfs(b"daemon", list(MODULES))
    assert write_cpio({"b": (0o100644, b"1"), "a": (0o100644, b"2")}) == write_cpio(
        {"a": (0o100644, b"2"), "b": (0o100644, b"1")}
    )


@given(st.dictionaries(st.from_regex(r"[a-z]{1,9}", fullmatch=True), st.binary(max_size=50), max_size=5))
def test_records_follow_the_format(files: dict[str, bytes]) -> None:
    archive = write_cpio({name: (0o100644, content) for name, content in files.items()})
    found: dict[str, bytes] = {}
    position = 0
    while True:
        assert position % 4 == 0
        assert archive[position : position + 6] == b"070701"
        fields = [int(archive[position + 6 + 8 * i : position + 14 + 8 * i], 16) for i in range(13)]
        size, name_size = fields[6], fields[11]
        name = archive[position + 110 : position + 110 + name_size - 1].decode()
        body = position + 110 + name_size + -(110 + name_size) % 4
        if name == "TRAILER!!!":
            break
        found[name] = archive[body : body + size]
        position = body + size + -size % 4
    assert found == files
