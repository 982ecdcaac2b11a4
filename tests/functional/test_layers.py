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


async def test_a_layer_is_named_by_its_content_and_made_once(settings: Settings, raw: Path) -> None:
    path = await import_layer(settings, raw)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest_of_name(path) == path.stem
    made = path.stat()
    assert await import_layer(settings, raw) == path
    assert path.stat() == made
    path.unlink()
    assert (await import_layer(settings, raw)).exists()


async def test_what_interrupted_work_left_goes_with_time(settings: Settings, raw: Path) -> None:
    layers = LayerStore(settings.layers_dir)
    layers.directory.mkdir()
    old, young = layers.directory / ".new-old", layers.directory / ".new-young"
    old.touch()
    young.touch()
    a_week_ago = time.time() - 7 * 24 * 3600
    os.utime(old, (a_week_ago, a_week_ago))
    path = await import_layer(settings, raw)
    assert not old.exists()
    assert young.exists()
    assert list(layers.directory.glob("*.lsmt")) == [path]


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
