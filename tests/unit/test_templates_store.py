"""Templates on disk: published, resolved, and damaged."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from aenv.errors import BadRequest, Conflict, Forbidden, ImageError, InsufficientStorage, NotFound, ProvisionError
from aenv.images.protocol import Stack
from aenv.snapshots.checkpoint import Checkpoint, read
from aenv.snapshots.making import of_layers
from aenv.templates.models import Template, snapshot_id
from aenv.templates.store import CHECKPOINT, MANIFEST, NAMES, TemplateStore


def template(template_id: str, *names: str) -> Template:
    return Template(
        id=template_id, build_id="b", names=names, cpu_count=1, memory_mb=128, disk_mb=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC), envd_version="0", env={"A": "b"}, user="user", workdir="/",
    )  # fmt: skip


def snapshot(template_id: str, *names: str, day: int = 2) -> Template:
    return replace(template(template_id, *names), source="isandbox", created_at=datetime(2026, 1, day, tzinfo=UTC))


def publish(store: TemplateStore, one: Template) -> None:
    store.publish(staged(store), one)


def staged(store: TemplateStore) -> Path:
    """What a builder leaves."""
    staging = store.stage()
    checkpoint(staging / CHECKPOINT)
    return staging


def checkpoint(folder: Path) -> Checkpoint:
    layer = folder.parent / "layer"
    layer.write_bytes(b"layer")
    made = of_layers(folder, disk=Stack(layers=(layer,), size=4096))
    layer.unlink()
    return made


A, B = template("ta", "a"), template("tb", "b", "ns/b")


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    made = TemplateStore(tmp_path)
    for one in (A, B):
        publish(made, one)
    return made


def test_published_templates_are_found_by_id_and_name(store: TemplateStore) -> None:
    assert store.resolve("ta") == store.resolve("a") == store.resolve("A:default") == A
    assert store.resolve("ns/b") == B
    assert sorted(one.id for one in store.list()) == ["ta", "tb"]
    with pytest.raises(NotFound, match="template 'c' not found"):
        store.resolve("c")
    with pytest.raises(NotFound, match="tag 'v2' does not exist for template 'a'"):
        store.resolve("a:v2")
    with pytest.raises(BadRequest, match="Invalid template reference"):
        store.resolve("../a")


ODD = [
    "5", "null", "[1, 2]", '"x"', "", "{", '{"a:default": 5}', '{"a:default": null}', '{"a:default": ["ta"]}',
    '{"a:default": "../ta"}', '{"a:default": ""}', '{"../a": "ta"}', "[" * 20_000, '{"a":' * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("content", ODD, ids=range(len(ODD)))
def test_odd_names_are_reported_and_what_to_do(tmp_path: Path, store: TemplateStore, content: str) -> None:
    (tmp_path / NAMES).write_text(content)
    for call in (store.list, lambda: store.resolve("a"), lambda: publish(store, A)):
        with pytest.raises(ProvisionError, match=r"names\.json is damaged .*; delete it and run `aenv setup`"):
            call()
    (tmp_path / NAMES).unlink()
    publish(store, A)
    assert store.resolve("a") == TemplateStore(tmp_path).resolve("a") == A


def test_names_that_are_no_text_or_no_file_are_reported(tmp_path: Path, store: TemplateStore) -> None:
    (tmp_path / NAMES).write_bytes(b"\xff\xfe")
    with pytest.raises(ProvisionError):
        store.list()
    (tmp_path / NAMES).unlink()
    (tmp_path / NAMES).mkdir()
    with pytest.raises(ProvisionError):
        store.list()
    with pytest.raises(ProvisionError):
        TemplateStore(Path("/dev/null")).list()


CHANGES: list[dict[str, object]] = [
    {"cpu_count": "two"}, {"cpu_count": True}, {"memory_mb": None}, {"memory_mb": 0}, {"disk_mb": 1.5}, {"env": None},
    {"env": {"A": 1}}, {"id": "other"}, {"id": 5}, {"source": 5}, {"user": None}, {"created_at": 5},
    {"created_at": "2026-01-01T00:00:00"}, {"created_at": "today"}, {"surplus": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_manifest_of_wrong_types_is_damaged(store: TemplateStore, change: dict[str, object]) -> None:
    path = store.path("ta") / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for reference in ("a", "ta"):
        with pytest.raises(ProvisionError, match="template ta is damaged"):
            store.resolve(reference)


@pytest.mark.parametrize("content", ["", "{", "{}", "5", "null", "[]", "[" * 20_000])
def test_one_damaged_template_does_not_take_the_others_away_and_is_logged_once(
    tmp_path: Path, store: TemplateStore, content: str
) -> None:
    (store.path("tb") / MANIFEST).write_text(content)
    with capture_logs() as logged:
        for _ in range(3):
            assert store.list() == (A,)
            (tmp_path / NAMES).touch()  # read again
    assert [(line["event"], line["id"]) for line in logged] == [("template.damaged", "tb")]
    assert store.resolve("a") == A
    with pytest.raises(ProvisionError, match=r"template tb is damaged: .*template\.json: "):
        store.resolve("ns/b")


def test_publishing_a_damaged_template_again_repairs_it(tmp_path: Path, store: TemplateStore) -> None:
    image = store.path("tb") / "image"
    image.write_text("in use")
    (store.path("tb") / MANIFEST).unlink()
    (store.path("tb") / CHECKPOINT).unlink()
    (tmp_path / NAMES).touch()
    with pytest.raises(ProvisionError):
        store.resolve("b")
    publish(store, B)
    assert store.resolve("b") == B
    assert image.read_text() == "in use"
    assert read(store.checkpoint("tb"))


def test_manifests_of_earlier_versions_had_names(tmp_path: Path, store: TemplateStore) -> None:
    path = store.path("ta") / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "names": ["a"]}))
    assert TemplateStore(tmp_path).resolve("a") == A


def test_a_template_has_a_checkpoint_and_another_one_later(tmp_path: Path, store: TemplateStore) -> None:
    before = store.checkpoint("ta")
    assert read(before).disk.layers[0].read_bytes() == b"layer"
    made = [checkpoint(tmp_path / f"new{number}") for number in range(3)]
    store.bake("ta", made[0].path)
    after = store.checkpoint("ta")
    assert read(after).manifest == made[0].manifest
    assert read(before)  # who just began with it may finish
    for one in made[1:]:
        store.bake("ta", one.path)
        assert read(store.checkpoint("ta")).manifest == one.manifest
    assert len(list(store.path("ta").glob(f"{CHECKPOINT}-*"))) == 2
    with pytest.raises(NotFound, match="no checkpoint"):
        store.bake("ta", tmp_path / "none")
    assert read(store.checkpoint("ta")).manifest == made[2].manifest
    with pytest.raises(NotFound, match="'tc' does not exist"):
        store.checkpoint("tc")
    with pytest.raises(NotFound, match="'tc' does not exist"):
        store.bake("tc", tmp_path)
    (store.path("tb") / CHECKPOINT).unlink()
    with pytest.raises(ImageError, match="run `aenv setup`"):
        store.checkpoint("tb")


def test_a_killed_bake_leaves_one_of_both(
    tmp_path: Path, store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(store.checkpoint("ta"))

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    for step in ("rename", "symlink_to", "replace"):
        made = checkpoint(tmp_path / step).path
        with monkeypatch.context() as patched:
            patched.setattr(Path, step, killed)
            with pytest.raises(KeyboardInterrupt):
                store.bake("ta", made)
        assert read(TemplateStore(tmp_path).checkpoint("ta")) == before
    store.bake("ta", checkpoint(tmp_path / "new").path)
    assert not list(store.path("ta").glob(".checkpoint-*"))
    assert len([path for path in store.path("ta").iterdir() if path.is_dir() and not path.is_symlink()]) == 2


def test_snapshots_are_templates_that_are_listed_apart(store: TemplateStore) -> None:
    one, other, unnamed = snapshot("sa", "s"), snapshot("sb", "s:v1", "a:saved", day=4), snapshot("sc", day=3)
    for each in (one, other, unnamed):
        publish(store, each)
    assert store.snapshots() == (other, unnamed, one)
    assert {template.id for template in store.list()} == {"ta", "tb"}
    assert store.resolve("s") == store.resolve("S:default") == store.resolve("sa") == one
    assert store.resolve("s:v1") == store.resolve("a:saved") == other
    assert store.resolve("sc") == unnamed
    assert [snapshot_id(each) for each in (one, other, unnamed)] == ["s:default", "s:v1", "sc"]
    for each in (one, other, unnamed):
        assert store.resolve(snapshot_id(each)) == each
    with pytest.raises(NotFound, match="tag 'v2' does not exist for template 's'"):
        store.resolve("s:v2")


def test_a_used_name_moves(tmp_path: Path, store: TemplateStore) -> None:
    publish(store, snapshot("sa", "s", "s:v1"))
    publish(store, snapshot("sb", "S:default"))
    publish(store, snapshot("sc", "s:v1"))
    for reader in (store, TemplateStore(tmp_path)):
        assert reader.resolve("s") == reader.resolve("sb") == snapshot("sb", "s")
        assert reader.resolve("sa") == snapshot("sa")  # as long as nobody deletes it
    with pytest.raises(Conflict, match="'a' is the name of a template"):
        publish(store, snapshot("sd", "a"))
    publish(store, template("td", "s"))  # what is built may
    assert store.resolve("s").id == "td"
    with pytest.raises(BadRequest, match="Invalid template reference"):
        publish(store, snapshot("sd", "a:"))
    assert [left.name for left in tmp_path.iterdir() if left.name == "sd"] == []


def test_a_template_that_lost_its_name_is_gone(store: TemplateStore) -> None:
    publish(store, template("tc", "a"))
    assert store.resolve("a").id == "tc"
    with pytest.raises(NotFound):
        store.resolve("ta")


def test_snapshots_are_deleted_with_their_names(tmp_path: Path, store: TemplateStore) -> None:
    publish(store, snapshot("sa", "s", "t"))
    publish(store, snapshot("sb"))
    store.delete("s")
    store.delete("sb")
    for reference in ("s", "t", "sa", "sb"):
        with pytest.raises(NotFound):
            store.resolve(reference)
        with pytest.raises(NotFound):
            store.delete(reference)
    assert store.snapshots() == TemplateStore(tmp_path).snapshots() == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["names.json", "names.lock", "ta", "tb"]
    for reference in ("a", "ta"):
        with pytest.raises(Forbidden, match="only snapshots can be deleted"):
            store.delete(reference)


def test_reading_costs_one_look_at_the_names(store: TemplateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.resolve("a")
    monkeypatch.setattr(Path, "open", None)
    monkeypatch.setattr(os, "scandir", None)
    assert store.resolve("a") == A
    assert store.resolve("tb") == B


def test_many_publish_and_read_at_once(tmp_path: Path, store: TemplateStore) -> None:
    def work(number: int) -> None:
        one = snapshot(f"s{number}", f"s:v{number}")
        publish(store, one)
        assert store.resolve(f"s:v{number}") == one
        if number % 2:
            store.delete(f"s{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
    for reader in (store, TemplateStore(tmp_path)):
        assert {one.names for one in reader.snapshots()} == {(f"s:v{number}",) for number in range(0, 24, 2)}


def test_what_a_killed_process_left_is_swept(tmp_path: Path, store: TemplateStore) -> None:
    code = (
        "import sys, pathlib; from aenv.templates.store import TemplateStore as T; T(pathlib.Path(sys.argv[1])).stage()"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    ours, earlier = store.stage(), tmp_path / ".staging-0123456789abcdef0123456789abcdef"
    earlier.mkdir()
    another = tmp_path / ours.name.replace(f"{os.getpid()}.", f"{os.getpid()}.1")  # of one that had our number before
    another.mkdir()
    assert len(list(tmp_path.glob(".staging-*"))) == 4
    store.sweep()
    assert list(tmp_path.glob(".staging-*")) == [ours]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")
def test_a_full_disk_publishes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    try:
        store = TemplateStore(place / "templates")
        publish(store, A)
        staging = staged(store)
        with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(InsufficientStorage, match="no space to publish template sa"):
            store.publish(staging, snapshot("sa", "s"))
        assert store.snapshots() == TemplateStore(place / "templates").snapshots() == ()
        assert store.resolve("a") == A
    finally:
        subprocess.run(["umount", place], check=True)
