"""The node's memory: SQLite in WAL mode, written by one thread in the order of the calls.

A write returns an awaitable that is done when the row is in the log; a reader after ``kill -9`` sees every write that
was awaited, and for each sandbox the newest of them. `events` is the audit log: what happened to whom, when and why.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import structlog

from aenv.errors import ConfigError, InfrastructureError, InsufficientStorage
from aenv.orchestrator.record import Record, from_json, to_json

T = TypeVar("T")
log = structlog.get_logger(__name__)

MOST_UNLOGGED = 100
"""Lines of one sandbox that are kept while they cannot be written."""
SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE sandboxes (id TEXT PRIMARY KEY, stable TEXT NOT NULL, ended_at TEXT, document TEXT NOT NULL) STRICT;
CREATE INDEX sandboxes_by_end ON sandboxes (ended_at);
CREATE TABLE events (
  seq INTEGER PRIMARY KEY, sandbox_id TEXT NOT NULL, at TEXT NOT NULL, event TEXT NOT NULL, detail TEXT NOT NULL,
  position TEXT NOT NULL
) STRICT;
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);
CREATE TABLE idempotency (
  key TEXT PRIMARY KEY, digest TEXT NOT NULL, sandbox_id TEXT NOT NULL, at TEXT NOT NULL
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line of the audit log."""

    at: str
    event: str
    detail: str
    position: str


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A create call's key, the digest of its spec, and the sandbox it made."""

    key: str
    digest: str
    sandbox_id: str


class Store:
    """Owns the database. `aclose` finishes what was begun."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unlogged: dict[str, list[LoggedEvent]] = {}
        """By sandbox, the lines whose write failed. Only the thread touches it."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        try:
            self._db = self._thread.submit(self._open).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise ConfigError(f"cannot open the state database {path}: {error}; restore it or move it away") from error

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # SQLite gives its -wal and -shm files the mode of the database: private before there is anything in them.
        self._path.touch(mode=0o600)
        self._path.chmod(0o600)
        db = sqlite3.connect(self._path, isolation_level=None, timeout=5)
        # NORMAL in WAL mode survives the death of the process at any instant; a crash of the host ends every sandbox.
        db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if 0 < version < SCHEMA_VERSION:
            # Before 2, sandboxes could neither pause nor be launched again: what runs of them is swept, and told here.
            log.warning("store.outdated", path=str(self._path), version=version, lost=_count(db))
            db.executescript("BEGIN; DROP TABLE sandboxes; DROP TABLE events; DROP TABLE idempotency; COMMIT;")
            version = 0
        if version == 0:
            db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"schema version {version}, this program knows {SCHEMA_VERSION}")
        return db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Every write happens in one: all of it or, on any error, nothing; the next write can begin in any case."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # some errors, such as a full disk, may have rolled it back already
                self._db.execute("ROLLBACK")

    def save(self, record: Record, *events: LoggedEvent) -> "asyncio.Future[None]":
        """Write the row and the lines of its log, in one transaction.

        Lines that could not be written go with its next row, before that one's own.
        """
        ended_at = record.ended_at.isoformat() if record.ended_at else None
        row = (record.id, record.life.position.stable, ended_at, to_json(record))

        def write() -> None:
            lines = [*self._unlogged.pop(record.id, ()), *events]
            try:
                with self._transaction() as db:
                    db.execute("INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?)", row)
                    db.executemany(
                        "INSERT INTO events (sandbox_id, at, event, detail, position) VALUES (?, ?, ?, ?, ?)",
                        [(record.id, line.at, line.event, line.detail, line.position) for line in lines],
                    )
            except BaseException:
                self._unlogged[record.id] = lines[-MOST_UNLOGGED:]
                raise

        return self._submit(write)

    async def live(self) -> list[Record]:
        """The rows of all sandboxes that have not ended. A row that cannot be read is an error, never skipped."""
        return await self._rows("SELECT document FROM sandboxes WHERE ended_at IS NULL ORDER BY rowid")

    async def recently_ended(self, limit: int) -> list[Record]:
        """The rows of the sandboxes that ended last, oldest end first."""
        newest = await self._rows(
            f"SELECT document FROM sandboxes WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT {limit:d}"
        )
        return newest[::-1]

    async def _rows(self, query: str) -> list[Record]:
        def read() -> list[Record]:
            return [from_json(text) for (text,) in self._db.execute(query)]

        try:
            return await self._submit(read)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"a row of {self._path} is damaged: {error!r}; restore it or move it away") from error

    async def events(self, sandbox_id: str) -> list[LoggedEvent]:
        """The story of one sandbox, oldest first."""

        def read() -> list[LoggedEvent]:
            rows = self._db.execute(
                "SELECT at, event, detail, position FROM events WHERE sandbox_id = ? ORDER BY seq", (sandbox_id,)
            )
            return [LoggedEvent(*row) for row in rows]

        return await self._submit(read)

    async def claim(self, claim: IdempotencyKey) -> IdempotencyKey:
        """Bind the key unless it is bound already; return what it is bound to."""

        def write() -> IdempotencyKey:
            with self._transaction() as db:
                db.execute(
                    "INSERT OR IGNORE INTO idempotency VALUES (?, ?, ?, ?)",
                    (claim.key, claim.digest, claim.sandbox_id, datetime.now(UTC).isoformat()),
                )
                row = db.execute(
                    "SELECT key, digest, sandbox_id FROM idempotency WHERE key = ?", (claim.key,)
                ).fetchone()
            return IdempotencyKey(*row)

        return await self._submit(write)

    async def unclaim(self, key: str, sandbox_id: str) -> None:
        """Free a key whose creation failed, so that a retry can try again."""

        def write() -> None:
            with self._transaction() as db:
                db.execute("DELETE FROM idempotency WHERE key = ? AND sandbox_id = ?", (key, sandbox_id))

        await self._submit(write)

    async def prune(self, before: datetime) -> list[str]:
        """Forget what ended before `before`, with its log and its idempotency keys; return the ids."""

        def write() -> list[str]:
            with self._transaction() as db:
                ids = [i for (i,) in db.execute("SELECT id FROM sandboxes WHERE ended_at < ?", (before.isoformat(),))]
                for sandbox_id in ids:
                    db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))
                    db.execute("DELETE FROM events WHERE sandbox_id = ?", (sandbox_id,))
                    db.execute("DELETE FROM idempotency WHERE sandbox_id = ?", (sandbox_id,))
            return ids

        return await self._submit(write)

    def _submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        def guarded() -> T:
            try:
                return work()
            except sqlite3.Error as error:
                raise self._explained(error) from error

        return asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _explained(self, error: sqlite3.Error) -> InfrastructureError:
        """The error of ours that says the same; the low byte of SQLite's extended code is its kind."""
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_FULL:
                return InsufficientStorage(f"no space to write {self._path}: free some on the host")
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                said = f"the state database {self._path} is damaged: {error}"
                return InfrastructureError(f"{said}; stop the server, then restore it or move it away")
            case _:
                return InfrastructureError(f"the state database {self._path} failed: {error}")

    async def aclose(self) -> None:
        """Finish the writes under way and close."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()


def _count(db: sqlite3.Connection) -> int:
    """Sandboxes that have not ended."""
    (count,) = db.execute("SELECT count(*) FROM sandboxes WHERE ended_at IS NULL").fetchone()
    return int(count)
