"""Templates on disk: published, resolved, and damaged."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from aenv.errors import BadRequest, NotFound, ProvisionError
from aenv.templates.models import Template
from aenv.templates.store import MANIFEST, NAMES, TemplateStore


def template(template_id: str, *names: str) -> Template:
    return Template(
        id=template_id, build_id="b", names=names, cpu_count=1, memory_mb=128, disk_mb=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC), envd_version="0", env={"A": "b"}, user="user", workdir="/",
    )  # fmt: skip


A, B = template("ta", "a"), template("tb", "b", "ns/b")


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    made = TemplateStore(tmp_path)
    for one in (A, B):
        made.publish(made.stage(), one)
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
    for call in (store.list, lambda: store.resolve("a"), lambda: store.publish(store.stage(), A)):
        with pytest.raises(ProvisionError, match=r"names\.json is damaged .*; delete it and run `aenv setup`"):
            call()
    (tmp_path / NAMES).unlink()
    store.publish(store.stage(), A)
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
    {"env": {"A": 1}}, {"id": "other"}, {"id": 5}, {"names": 5}, {"names": [1]}, {"user": None}, {"created_at": 5},
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


def test_publishing_a_damaged_template_again_repairs_it(store: TemplateStore) -> None:
    image = store.path("tb") / "image"
    image.write_text("in use")
    (store.path("tb") / MANIFEST).unlink()
    with pytest.raises(ProvisionError):
        store.resolve("b")
    store.publish(store.stage(), B)
    assert store.resolve("b") == B
    assert image.read_text() == "in use"
