import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from aenv.errors import ProvisionError
from aenv.images.rootfs import build, ext4
from aenv.images.rootfs.build import RootfsManifest, RootfsSpec, build_rootfs

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    (directory / "etc").mkdir(parents=True)
    (directory / "etc/hostname").write_text("localhost\n")
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o4755)
    return directory


def debugfs(image: Path, command: str) -> str:
    return subprocess.run(["debugfs", "-R", command, image], check=True, capture_output=True, text=True).stdout


def is_clean(image: Path) -> bool:
    return subprocess.run(["e2fsck", "-fn", image], check=False, capture_output=True).returncode == 0


def contents(directory: Path) -> dict[str, int]:
    """Names and sizes."""
    return {path.name: path.stat().st_size for path in directory.iterdir()}


async def test_image_holds_the_tree_and_is_sparse(tree: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    await ext4.make(tree, image, 512, seed="a")
    assert image.stat().st_size == 512 * MIB
    assert image.stat().st_blocks * 512 < 8 * MIB
    assert debugfs(image, "cat /etc/hostname") == "localhost\n"
    assert "Mode:  04755" in debugfs(image, "stat /run.sh")
    assert is_clean(image)


async def test_identity_follows_the_seed(tree: Path, tmp_path: Path) -> None:
    uuids = []
    for name, seed in (("one", "a"), ("two", "a"), ("three", "b")):
        await ext4.make(tree, tmp_path / name, 64, seed=seed)
        lines = debugfs(tmp_path / name, "show_super_stats -h").splitlines()
        uuids.append(next(line for line in lines if line.startswith("Filesystem UUID")))
    assert uuids[0] == uuids[1] != uuids[2]


async def test_tree_that_does_not_fit_is_an_error(tree: Path, tmp_path: Path) -> None:
    (tree / "big").write_bytes(os.urandom(80 * MIB))
    with pytest.raises(ProvisionError, match="mke2fs"):
        await ext4.make(tree, tmp_path / "image", 64, seed="a")


def test_digest_depends_on_content_not_on_holes(tmp_path: Path) -> None:
    sparse, full, other = tmp_path / "sparse", tmp_path / "full", tmp_path / "other"
    with sparse.open("wb") as file:
        file.seek(5 * MIB + 4096)
        file.write(b"data")
        file.truncate(9 * MIB)
    full.write_bytes(bytes(5 * MIB + 4096) + b"data" + bytes(4 * MIB - 4100))
    other.write_bytes(bytes(5 * MIB + 4097) + b"data" + bytes(4 * MIB - 4101))
    assert full.stat().st_size == sparse.stat().st_size
    assert ext4.image_digest(sparse) == ext4.image_digest(full) != ext4.image_digest(other)


async def test_same_inputs_build_nothing_and_other_inputs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is made by hand here; everything after it is real."""
    installs: list[tuple[str, ...]] = []

    async def install(
        spec: RootfsSpec, release: object, stanzas: object, scratch: object, tree: Path, _: object
    ) -> None:
        installs.append(spec.packages)
        await asyncio.to_thread((tree / "var/lib/dpkg").mkdir, parents=True)
        await asyncio.to_thread((tree / "var/lib/dpkg/status").write_text, STATUS)

    monkeypatch.setattr(build, "_install", install)
    dest = tmp_path / "rootfs.ext4"
    spec = RootfsSpec(packages=("less",), disk_mb=64)
    first = await build_rootfs(spec, dest, lambda _: None)
    assert first.packages == ("less=590",)
    assert first.size == 64 * MIB
    assert first.digest == ext4.image_digest(dest)
    assert await build_rootfs(spec, dest, lambda _: None) == first
    assert installs == [("less",)]

    second = await build_rootfs(RootfsSpec(packages=("less", "vim"), disk_mb=64), dest, lambda _: None)
    assert second.inputs != first.inputs
    assert len(installs) == 2
    assert sorted(contents(tmp_path)) == ["rootfs.ext4", "rootfs.ext4.json"]

    dest.write_bytes(b"cut short")
    await build_rootfs(RootfsSpec(packages=("less", "vim"), disk_mb=64), dest, lambda _: None)
    assert len(installs) == 3


async def test_failed_build_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def install(*_: object) -> None:
        raise ProvisionError("mmdebstrap failed")

    monkeypatch.setattr(build, "_install", install)
    dest = tmp_path / "rootfs.ext4"
    dest.write_bytes(b"the old one")
    with pytest.raises(ProvisionError, match="mmdebstrap failed"):
        await build_rootfs(RootfsSpec(packages=(), disk_mb=64), dest, lambda _: None)
    assert contents(tmp_path) == {"rootfs.ext4": len(b"the old one")}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"packages": 1}', "[" * 10**5])
def test_broken_manifest_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert build._load_manifest(tmp_path / "a") is None


def test_manifest_of_another_file_counts_as_none(tmp_path: Path) -> None:
    manifest = RootfsManifest(distribution="d", size=7, used=7, inputs="i", digest="d", packages=())
    (tmp_path / "a.json").write_text(json.dumps(build.asdict(manifest)))
    (tmp_path / "a").write_bytes(b"1234567")
    assert build._load_manifest(tmp_path / "a") == manifest
    (tmp_path / "a").write_bytes(b"12345678")
    assert build._load_manifest(tmp_path / "a") is None


STATUS = """\
Package: less
Status: install ok installed
Maintainer: nobody <nobody@example.com>
Architecture: all
Version: 590
Description: pager
"""
