"""Layers of a node: made once for each content, and made again when they are gone."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from aenv.config import ImageSettings, Settings, load
from aenv.errors import ImageError, ProvisionError
from aenv.images.layers import LayerStore, digest_of_name
from aenv.images.store import find_blockd, import_layer


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    try:
        binary = find_blockd(load())
    except ProvisionError as error:
        pytest.skip(error.message)
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounts: needs root and /dev/fuse")
    return Settings(home=tmp_path, images=ImageSettings(blockd=str(binary)))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    made = tmp_path / "raw"
    with made.open("wb") as file:
        file.write(b"content")
        file.truncate(2 << 20)
    return made


async def test_a_layer_is_named_by_its_content(settings: Settings, raw: Path) -> None:
    path = await import_layer(settings, raw)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest_of_name(path) == path.stem


async def test_what_interrupted_work_left_and_nobody_uses_goes_with_time(settings: Settings, raw: Path) -> None:
    layers = LayerStore(settings.layers_dir)
    layers.directory.mkdir()
    left = {name: layers.directory / name for name in (".new-old", ".new-young", "unused.lsmt", "used.lsmt")}
    for path in left.values():
        path.touch()
    os.link(left["used.lsmt"], settings.home / "checkpoint")
    a_week_ago = time.time() - 7 * 24 * 3600
    for name in (".new-old", "unused.lsmt", "used.lsmt"):
        os.utime(left[name], (a_week_ago, a_week_ago))
    made = await import_layer(settings, raw)
    assert {path.name for path in layers.directory.iterdir()} == {".new-young", "used.lsmt", made.name}


def test_content_is_kept_once(tmp_path: Path) -> None:
    layers = LayerStore(tmp_path)
    digest = hashlib.sha256(b"x").hexdigest()
    for _ in range(2):
        with layers.staged() as staged:
            staged.write_bytes(b"x")
            assert layers.publish(staged, f"sha256:{digest}") == digest
    assert [path.name for path in tmp_path.iterdir()] == [f"{digest}.lsmt"]
    with layers.staged() as staged, pytest.raises(ImageError, match="no digest"):
        layers.publish(staged, "")
