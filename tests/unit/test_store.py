"""The state database when writes fail and when it is damaged."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from aenv.errors import ConfigError, InfrastructureError, InsufficientStorage
from aenv.lifecycle.events import CreateRequested
from aenv.lifecycle.machine import replay
from aenv.orchestrator.models import CreateSpec
from aenv.orchestrator.record import Record
from aenv.orchestrator.store import IdempotencyKey, LoggedEvent, Store
from aenv.templates.models import Template

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RECORD = Record(
    id="i1",
    spec=CreateSpec(template="base", timeout=60),
    template=Template(
        id="tbase", build_id="b", names=("base",), cpu_count=1, memory_mb=128, disk_mb=1, created_at=NOW,
        envd_version="0", env={}, user="user", workdir="/",
    ),
    generation="g", started_at=NOW, end_at=NOW, life=replay([CreateRequested()]),
)  # fmt: skip
LINE = LoggedEvent("2026-01-01T00:00:00+00:00", "CreateRequested", "", "new/creating")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path / "state.db")
    yield made
    await made.aclose()


async def sql(store: Store, script: str) -> None:
    await store._submit(lambda: store._db.executescript(script))


async def test_a_row_and_the_lines_of_its_log_come_back(store: Store) -> None:
    await store.save(RECORD, LINE, LINE)
    assert await store.live() == [RECORD]
    assert await store.events("i1") == [LINE, LINE]


@pytest.mark.parametrize("table", ["sandboxes", "events", "idempotency"])
async def test_a_write_that_fails_in_the_middle_changes_nothing_and_stops_no_later_one(
    store: Store, table: str
) -> None:
    await sql(
        store,
        f"""INSERT INTO sandboxes VALUES ('old', 'ended', '2000-01-01T00:00:00+00:00', '{{}}');
        INSERT INTO events (sandbox_id, at, event, detail, position) VALUES ('old', '', '', '', '');
        INSERT INTO idempotency VALUES ('k', 'd', 'old', '');
        CREATE TRIGGER broken BEFORE DELETE ON {table} BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END;""",
    )
    with pytest.raises(InfrastructureError, match="disk I/O error"):
        await store.prune(datetime.now(UTC))
    if table == "idempotency":
        with pytest.raises(InfrastructureError, match="disk I/O error"):
            await store.unclaim("k", "old")
    await store.save(RECORD, LINE)
    assert (await store.claim(IdempotencyKey("k", "d", "new"))).sandbox_id == "old"
    assert len(await store.events("old")) == 1
    await sql(store, "DROP TRIGGER broken")
    assert await store.prune(datetime.now(UTC)) == ["old"]


async def test_a_save_whose_log_cannot_be_written_leaves_no_row(store: Store) -> None:
    await sql(store, "CREATE TRIGGER broken BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(InfrastructureError):
        await store.save(RECORD, LINE)
    assert await store.live() == []


async def test_lines_that_could_not_be_written_go_with_the_next_row_in_order(store: Store) -> None:
    await sql(store, "CREATE TRIGGER broken BEFORE INSERT ON sandboxes BEGIN SELECT RAISE(ABORT, 'no'); END")
    lines = [replace(LINE, detail=str(number)) for number in range(4)]
    for line in lines[:2]:
        with pytest.raises(InfrastructureError):
            await store.save(RECORD, line)
    # The row after them is queued before it is known that they failed.
    failing = store.save(RECORD, lines[2])
    mending = asyncio.create_task(sql(store, "DROP TRIGGER broken"))
    await asyncio.sleep(0)  # queued now
    await store.save(RECORD, lines[3])
    await mending
    with pytest.raises(InfrastructureError):
        await failing
    assert await store.events("i1") == lines
    await store.save(RECORD, LINE)
    assert await store.events("i1") == [*lines, LINE]


async def test_a_full_disk_is_insufficient_storage(store: Store) -> None:
    await sql(store, "PRAGMA max_page_count = 1")  # SQLite answers as it does to ENOSPC
    with pytest.raises(InsufficientStorage, match="no space to write"):
        await store.save(RECORD, *[LINE] * 10_000)


async def test_a_damaged_database_is_an_error_of_ours(tmp_path: Path) -> None:
    """`sqlite3.DatabaseError: database disk image is malformed` is no OperationalError."""
    path = tmp_path / "state.db"
    store = Store(path)
    rows = "".join(f"INSERT INTO sandboxes VALUES ('i{i}', 'running', NULL, '{'x' * 500}');" for i in range(2000))
    await sql(store, f"BEGIN; {rows} COMMIT; PRAGMA wal_checkpoint(TRUNCATE);")
    await store.aclose()
    data = bytearray(path.read_bytes())
    data[3 * 4096 : 200 * 4096] = b"\xff" * (197 * 4096)
    path.write_bytes(data)
    store = Store(path)
    try:
        with pytest.raises(InfrastructureError, match="is damaged"):
            await store.live()
    finally:
        await store.aclose()


@pytest.mark.parametrize("document", ["{", "[]", "5", '{"spec": 5}', "[" * 20_000])
async def test_a_damaged_row_is_an_error_not_skipped(store: Store, document: str) -> None:
    await store._submit(
        lambda: store._db.execute("INSERT INTO sandboxes VALUES ('i1', 'running', NULL, ?)", (document,))
    )
    with pytest.raises(ConfigError, match=r"a row of .* is damaged"):
        await store.live()


async def test_every_error_of_the_database_is_ours(store: Store) -> None:
    def misuse() -> None:
        raise sqlite3.ProgrammingError("cannot operate on a closed database")

    with pytest.raises(InfrastructureError, match="closed database"):
        await store._submit(misuse)


@pytest.mark.parametrize("place", ["a-file/state.db", "a-folder"])
def test_a_place_where_no_database_can_be_is_a_config_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").touch()
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(ConfigError, match="cannot open the state database"):
        Store(tmp_path / place)
