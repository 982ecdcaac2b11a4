"""Named states of sandboxes, kept as templates: committed, listed, found again, deleted."""

import asyncio
import base64
import binascii
import json
import secrets
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from aenv.errors import BadRequest, NotFound
from aenv.images.protocol import ImageStore
from aenv.orchestrator.models import Snapshot, SnapshotPage, SnapshotQuery
from aenv.orchestrator.record import Record
from aenv.snapshots.checkpoint import Checkpoint, read
from aenv.templates.models import Template, snapshot_id
from aenv.templates.store import parse
from aenv.threads import to_its_end


class Library(Protocol):
    """What is needed of the template store."""

    def resolve(self, reference: str) -> Template: ...

    def checkpoint(self, template_id: str) -> Path: ...

    def snapshots(self) -> tuple[Template, ...]: ...

    def stage(self) -> Path: ...

    def publish(self, staging: Path, template: Template) -> None: ...

    def delete(self, reference: str) -> None: ...


class Snapshots:
    """The snapshots of a node."""

    def __init__(self, *, library: Library, images: ImageStore) -> None:
        self._library = library
        self._images = images

    def check_name(self, name: str | None) -> None:
        """Raises BadRequest for one that cannot be."""
        if name is not None:
            parse(name)

    @asynccontextmanager
    async def staged(self) -> AsyncIterator[Path]:
        """A folder for a snapshot that is being made, gone at the end of the block unless it was published."""
        folder = await to_its_end(self._library.stage)
        try:
            yield folder
        finally:
            await to_its_end(shutil.rmtree, folder, ignore_errors=True)

    async def publish(self, folder: Path, record: Record, name: str | None) -> Snapshot:
        """Commit the checkpoint in `folder`, taken of the sandbox of `record`.

        Raises Conflict (the name is a template's), InfrastructureError.
        """
        checkpoint = await asyncio.to_thread(read, folder / "checkpoint")
        await self._images.make_durable(checkpoint.files)
        origin = record.template
        template = Template(
            id="s" + secrets.token_hex(10),
            build_id=str(uuid.uuid4()),
            names=() if name is None else (":".join(parse(name)),),
            cpu_count=origin.cpu_count,
            memory_mb=origin.memory_mb,
            disk_mb=origin.disk_mb,
            created_at=datetime.now(UTC),
            envd_version=origin.envd_version,
            env=dict(origin.env) | dict(record.spec.env_vars),
            user=origin.user,
            workdir=origin.workdir,
            source=record.id,
        )
        await to_its_end(self._library.publish, folder, template)
        return _shown(template)

    def page(self, query: SnapshotQuery) -> SnapshotPage:
        """Newest first. Raises BadRequest for a token that is not of this query."""
        wanted = None if query.name is None else parse(query.name)
        with_tag = query.name is not None and ":" in query.name

        def matches(snapshot: Template) -> bool:
            if query.sandbox_id is not None and snapshot.source != query.sandbox_id:
                return False
            names = [parse(name) for name in snapshot.names]
            return wanted is None or (wanted in names if with_tag else wanted[0] in [name for name, _ in names])

        shown = sorted(filter(matches, self._library.snapshots()), key=_position, reverse=True)
        if query.next_token is not None:
            after = _decoded(query.next_token, query)
            shown = [snapshot for snapshot in shown if _position(snapshot) < after]
        page, rest = shown[: query.limit], shown[query.limit :]
        token = _encoded(_position(page[-1]), query) if rest else None
        return SnapshotPage(tuple(_shown(snapshot) for snapshot in page), token)

    async def of(self, reference: str, sandbox_id: str) -> Checkpoint:
        """The checkpoint of a snapshot of this sandbox. Raises NotFound, BadRequest, ImageError."""
        template = self._library.resolve(reference)
        if template.source != sandbox_id:
            raise NotFound(f"sandbox {sandbox_id} has no snapshot '{reference[:200]}'")
        return await asyncio.to_thread(read, self._library.checkpoint(template.id))

    async def delete(self, reference: str) -> None:
        """Raises NotFound, Forbidden, BadRequest, an InfrastructureError."""
        await to_its_end(self._library.delete, reference)


def _position(template: Template) -> tuple[str, str]:
    return template.created_at.isoformat(), template.id


def _shown(template: Template) -> Snapshot:
    assert template.source is not None
    return Snapshot(
        id=snapshot_id(template),
        names=tuple(":".join(parse(name)) for name in template.names),
        sandbox_id=template.source,
        created_at=template.created_at,
        cpu_count=template.cpu_count,
        memory_mb=template.memory_mb,
        disk_mb=template.disk_mb,
    )


def _encoded(after: tuple[str, str], query: SnapshotQuery) -> str:
    return base64.urlsafe_b64encode(json.dumps([*after, query.sandbox_id, query.name]).encode()).decode()


def _decoded(token: str, query: SnapshotQuery) -> tuple[str, str]:
    try:
        created_at, snapshot, *bound = json.loads(base64.urlsafe_b64decode(token))
        if bound != [query.sandbox_id, query.name] or not isinstance(created_at, str) or not isinstance(snapshot, str):
            raise ValueError("it is of another listing")
    except (ValueError, binascii.Error, TypeError, RecursionError) as error:
        raise BadRequest("Invalid next token") from error
    return created_at, snapshot
