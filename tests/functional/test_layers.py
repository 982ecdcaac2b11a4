"""Layers of a node: made once for each content, by `aenv setup`, and made again when they are gone."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from aenv.config import ImageSettings, Settings, load
from aenv.errors import ImageError, NotFound, ProvisionError
from aenv.images import plain
from aenv.images.layers import MANIFEST, LayerStore, Stack, digest_of_name, read_stack, write_stack
from aenv.images.store import find_blockd, make_store, prepare

SIZE = 2 << 20


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    try:
        binary = find_blockd(load())
    except ProvisionError as error:
        pytest.skip(error.message)
    if os.geteuid() != 0:
        pytest.skip("mounts: needs root")
    return Settings(home=tmp_path, images=ImageSettings(store="blockd", blockd=str(binary)))


def template(settings: Settings, name: str, content: bytes = b"content") -> Path:
    """As an earlier version made it: a raw image."""
    folder = settings.templates_dir / name
    folder.mkdir(parents=True)
    with (folder / plain.ROOTFS).open("wb") as raw:
        raw.write(content)
        raw.truncate(SIZE)
    return folder


async def test_a_template_of_an_earlier_version_is_completed(settings: Settings) -> None:
    folder = template(settings, "told")
    with pytest.raises(ImageError, match="run `aenv setup`"):
        read_stack(folder)
    await prepare(settings, folder, folder)
    stack = read_stack(folder)
    path = LayerStore(settings.layers_dir).path(stack.layers[0])
    assert stack.size == SIZE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == stack.layers[0] == digest_of_name(path)
    made = path.stat()
    await prepare(settings, folder, folder)
    assert path.stat() == made  # nothing is done twice


async def test_a_deleted_layer_is_made_again(settings: Settings) -> None:
    folder = template(settings, "tbase")
    await prepare(settings, folder, folder)
    layers = LayerStore(settings.layers_dir)
    layers.path(read_stack(folder).layers[0]).unlink()
    store = make_store(settings)
    await store.start([])
    try:
        with pytest.raises(ImageError, match="a layer of image 'tbase' is missing; run `aenv setup`"):
            await store.attach("tbase", settings.home, 0)
    finally:
        await store.aclose()
    await prepare(settings, folder, folder)
    assert layers.path(read_stack(folder).layers[0]).exists()


async def test_what_interrupted_work_left_goes_with_time(settings: Settings) -> None:
    layers = LayerStore(settings.layers_dir)
    layers.directory.mkdir()
    old, young = layers.directory / ".new-old", layers.directory / ".new-young"
    old.touch()
    young.touch()
    a_week_ago = time.time() - 7 * 24 * 3600
    os.utime(old, (a_week_ago, a_week_ago))
    folder = template(settings, "tbase")
    await prepare(settings, folder, folder)
    assert not old.exists()
    assert young.exists()
    assert [path.name for path in layers.directory.glob("*.lsmt")] == [f"{read_stack(folder).layers[0]}.lsmt"]


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


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "size": 1, "layers": []}', '{"version": 1, "size": 1, "layers": ["../x"]}']
)
def test_a_damaged_list_of_layers(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ImageError, match="is damaged"):
        read_stack(tmp_path)


def test_a_list_of_layers_is_read_as_written(tmp_path: Path) -> None:
    stack = Stack(layers=("0" * 64, "f" * 64), size=4096)
    write_stack(tmp_path, stack)
    assert read_stack(tmp_path) == stack
    with pytest.raises(NotFound, match="'none' does not exist"):
        read_stack(tmp_path / "none")
