"""Checkpoints: written and read again, damaged on purpose, made of each other."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import Conflict, ImageError, InsufficientStorage, NotFound
from aenv.images.protocol import Stack
from aenv.snapshots import making
from aenv.snapshots.checkpoint import (
    MANIFEST,
    MAX_LAYERS,
    MAX_MANIFEST,
    MAX_SIZE,
    MAX_STATE,
    STATE,
    Checkpoint,
    Manifest,
    Memory,
    Requirements,
    encode,
    read,
)
from aenv.snapshots.making import copy, disk_only, of_layers

REQUIRES = Requirements(driver="qemu", version="10.0.2", accel="tcg", cpu="max", kernel="d" * 64, vcpus=2)


def stack(folder: Path, count: int, size: int = 1 << 20) -> Stack:
    """Layer files with contents of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{folder.name}{number}" for number in range(count)]
    for number, file in enumerate(files):
        file.write_text(f"{folder.name} {number}")
    return Stack(layers=tuple(files), size=size)


@pytest.fixture
def made(tmp_path: Path) -> Checkpoint:
    return of_layers(
        tmp_path / "made",
        disk=stack(tmp_path / "d", 2),
        memory=stack(tmp_path / "m", 3, 2 << 20),
        state=b"state",
        requires=REQUIRES,
        guest="isandbox",
    )


def contents(found: Checkpoint) -> tuple[list[str], list[str]]:
    memory = found.memory.layers if found.memory else ()
    return [file.read_text() for file in found.disk.layers], [file.read_text() for file in memory]


def test_what_was_made_is_read(made: Checkpoint) -> None:
    found = read(made.path)
    assert found == made
    assert contents(found) == (["d 0", "d 1"], ["m 0", "m 1", "m 2"])
    assert found.disk.size == 1 << 20
    assert found.memory is not None
    assert found.memory.size == 2 << 20
    assert found.state() == b"state"
    assert found.manifest.guest == "isandbox"
    assert found.manifest.memory is not None
    assert found.manifest.memory.requires == REQUIRES
    there = {path for path in made.path.rglob("*") if path.is_file()}
    assert set(found.files) == there
    assert all(path.stat().st_nlink == 2 for path in (*found.disk.layers, *found.memory.layers))


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
SIZES = st.integers(1, MAX_SIZE)
COUNTS = st.integers(1, MAX_LAYERS)
REQUIREMENTS = st.builds(
    Requirements, driver=TEXT, version=TEXT, accel=TEXT, cpu=TEXT, kernel=TEXT, vcpus=st.integers(1, 1024)
)
MANIFESTS = st.builds(
    Manifest,
    id=TEXT,
    created_at=st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))])),
    disk_size=SIZES,
    disk_layers=COUNTS,
    memory=st.none() | st.builds(Memory, id=TEXT, size=SIZES, layers=COUNTS, requires=REQUIREMENTS),
    guest=st.none() | TEXT,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with as many layers as there can be."""
    layers = tmp_path_factory.mktemp("layers")
    most = [stack(layers / kind, MAX_LAYERS) for kind in ("d", "m")]
    made = of_layers(layers / "made", disk=most[0], memory=most[1], state=b"s", requires=REQUIRES)
    assert read(made.path) == made
    return made.path


@given(MANIFESTS)
@settings(deadline=None, max_examples=60)
def test_manifests_are_read_as_they_were_written(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(encode(manifest))
    assert read(folder).manifest == manifest
    assert (folder / MANIFEST).stat().st_size < MAX_MANIFEST


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["version", "id", "created_at", "guest", "disk", "memory"]
INNER = ["size", "layers", "id", "requires"]


@given(st.sampled_from(NAMES), st.sampled_from([None, *INNER]), JSON, st.booleans())
@settings(deadline=None, max_examples=150)
def test_no_manifest_does_harm(folder: Path, name: str, inner: str | None, value: Any, drop: bool) -> None:
    """Whatever stands in it, it is a checkpoint whose files are all there, or an ImageError that names the file."""
    memory = Memory(id="m", size=1, layers=1, requires=REQUIRES)
    good = Manifest(id="x", created_at=datetime.now(UTC), disk_size=1, disk_layers=1, memory=memory, guest="g")
    document = json.loads(encode(good))
    place = document[name] if inner and isinstance(document[name], dict) else document
    key = inner if place is not document and inner else name
    if drop:
        place.pop(key, None)
    else:
        place[key] = value
    (folder / MANIFEST).write_text(json.dumps(document))
    refused = ""
    try:
        assert all(file.is_file() for file in read(folder).files)
    except ImageError as error:
        refused = error.message
    assert not refused or (str(folder / MANIFEST) in refused and ("damaged" in refused or "newer" in refused))


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=60)
def test_no_content_does_harm(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ImageError, match=MANIFEST):
        read(folder)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "5", "[" * 20_000, '{"a":' * 10_000, " " * (MAX_MANIFEST + 1), '{"version": 1}', "\ud800"],
    ids=range(10),
)
def test_odd_manifests_are_damaged(made: Checkpoint, content: str) -> None:
    (made.path / MANIFEST).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ImageError, match=rf"{MANIFEST} is damaged .*delete .*made, or restore it"):
        read(made.path)


def test_a_later_version_is_told(made: Checkpoint) -> None:
    document = json.loads((made.path / MANIFEST).read_bytes()) | {"version": 2}
    (made.path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(ImageError, match="is of version 2, this aenv reads 1: use a newer one"):
        read(made.path)


def test_every_file_must_be_there(made: Checkpoint, tmp_path: Path) -> None:
    for number, file in enumerate(made.files):
        damaged = copy(made, tmp_path / f"damaged{number}").path
        missing = damaged / file.relative_to(made.path)
        missing.unlink()
        if missing.name == MANIFEST:
            with pytest.raises(NotFound, match="no checkpoint"):
                read(damaged)
            continue
        with pytest.raises(ImageError, match=f"{missing} is missing"):
            read(damaged)
        missing.mkdir()
        with pytest.raises(ImageError, match=f"{missing} is missing"):
            read(damaged)
    for nothing in (tmp_path / "none", tmp_path, made.path / STATE):
        with pytest.raises(NotFound, match="no checkpoint"):
            read(nothing)


@pytest.mark.parametrize("size", [0, MAX_STATE + 1])
def test_a_state_has_a_size(made: Checkpoint, size: int) -> None:
    os.truncate(made.path / STATE, size)
    with pytest.raises(ImageError, match="is damaged: it must have 1 to"):
        made.state()
    (made.path / STATE).unlink()
    with pytest.raises(ImageError, match="cannot be read: No such file"):
        made.state()


def test_a_copy_is_the_same_and_lives_on(made: Checkpoint, tmp_path: Path) -> None:
    again = copy(made, tmp_path / "again")
    assert again.manifest == made.manifest
    before = contents(made)
    shutil.rmtree(made.path)
    assert contents(read(again.path)) == before
    assert again.state() == b"state"
    alone = disk_only(again, tmp_path / "alone")
    assert copy(alone, tmp_path / "more").memory is None


def test_a_disk_alone(made: Checkpoint, tmp_path: Path) -> None:
    alone = disk_only(made, tmp_path / "alone")
    assert read(alone.path) == alone
    assert contents(alone) == (contents(made)[0], [])
    assert alone.memory is None
    assert alone.manifest == replace(made.manifest, id=alone.manifest.id, memory=None, guest=None)
    assert alone.manifest.id != made.manifest.id
    assert not (alone.path / STATE).exists()
    with pytest.raises(ImageError, match="cannot be read"):
        alone.state()
    assert of_layers(tmp_path / "own", disk=made.disk).memory is None


def test_what_cannot_be_made(made: Checkpoint, tmp_path: Path) -> None:
    assert made.memory is not None
    gone = Stack(layers=(*made.disk.layers, tmp_path / "gone"), size=1)
    none, many = Stack(layers=(), size=1), Stack(layers=(made.disk.layers[0],) * (MAX_LAYERS + 1), size=1)
    place = tmp_path / "place"
    for arguments, complaint in [
        ({"disk": gone}, f"{tmp_path / 'gone'} is missing"),
        ({"disk": none}, "needs 1 to 255 layers of disk, not 0"),
        ({"disk": many}, "needs 1 to 255 layers of disk, not 256"),
        ({"memory": none, "state": b"s", "requires": REQUIRES}, "layers of memory, not 0"),
        ({"memory": made.memory, "requires": REQUIRES}, "0 bytes of device state"),
        ({"memory": made.memory, "state": b"s"}, "or none of them"),
        ({"state": b"s"}, "or none of them"),
        ({"requires": REQUIRES}, "or none of them"),
    ]:
        with pytest.raises(ImageError, match=complaint):
            of_layers(place, **{"disk": made.disk, **arguments})
        assert not place.exists()
    with pytest.raises(Conflict, match="there is a checkpoint in"):
        copy(made, made.path)
    assert read(made.path) == made


def test_what_a_killed_process_left_is_replaced(
    made: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "half"
    shutil.copytree(made.path, half)
    (half / MANIFEST).rename(half / f"{MANIFEST}.new")
    with pytest.raises(NotFound):
        read(half)
    copy(made, half)
    assert {path.name for path in half.iterdir()} == {"disk", "memory", STATE, MANIFEST}


def test_an_interruption_leaves_nothing(made: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        if target.name == "001.lsmt" and target.parent.name == "memory":
            raise KeyboardInterrupt
        os.link(source, target)

    monkeypatch.setattr(making, "_link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy(made, tmp_path / "half")
    assert not (tmp_path / "half").exists()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounts a small file system: needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(small: Path) -> None:
    disk = stack(small / "d", 1)
    with suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(InsufficientStorage, match="no space for the checkpoint"):
        of_layers(small / "made", disk=disk)
    assert not (small / "made").exists()
