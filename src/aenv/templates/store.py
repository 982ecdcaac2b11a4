"""The templates and snapshots of a node: ``$AENV_HOME/templates/<id>/``, and ``names.json`` beside them.

    <id>/template.json     what it is (`Template` without its names); never changes
    <id>/checkpoint        a symbolic link to the folder ``checkpoint-…`` beside it, what sandboxes start from
    names.json             ``{"name:tag": id}``
    names.lock             held by whoever changes any of these

A template appears by a rename of its finished folder, names move by a rename of ``names.json``, another checkpoint
comes by a rename of the link. So a reader never sees half of anything. A damaged template is left out, not the others.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from aenv.errors import BadRequest, Conflict, Forbidden, ImageError, InsufficientStorage, NotFound, ProvisionError
from aenv.images.durable import sync, sync_files
from aenv.images.process import identify
from aenv.snapshots.checkpoint import read
from aenv.templates import manifest
from aenv.templates.models import DEFAULT_TAG, Template

log = structlog.get_logger(__name__)

NAMES = "names.json"
LOCK = "names.lock"
MANIFEST = "template.json"
CHECKPOINT = "checkpoint"
REFERENCE = re.compile(r"(?P<name>(?:[a-z0-9_-]+/)?[a-z0-9_-]+)(?::(?P<tag>[a-z0-9_.-]+))?")
"""``name``, ``ns/name``, with ``:tag``, lower-cased (E2B's rule)."""
ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""A template's id, which is also its folder's name."""
_STAGING = ".staging-"
"""Begins the name of a folder that is being made; then come its maker (`_maker`) and a random number."""


class TemplateStore:
    """Reads, publishes and deletes templates. Reads follow what other processes publish, by a `stat` each.

    What publishes, bakes or deletes blocks until that is on stable storage.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._changes = 0
        """How often this object changed anything: two changes may come within one tick of the file system's clock."""
        self._read_last = _Tables(stamp=None, names={}, templates={}, damaged={}, manifests={})
        self._reading = threading.Lock()

    def list(self) -> tuple[Template, ...]:
        """All templates that were built and have a name, newest first."""
        return _newest_first(template for template in self._read().templates.values() if template.source is None)

    def snapshots(self) -> tuple[Template, ...]:
        """All snapshots of sandboxes, newest first."""
        return _newest_first(template for template in self._read().templates.values() if template.source is not None)

    def resolve(self, reference: str) -> Template:
        """By id, name, or ``name:tag``. Raises NotFound or BadRequest with E2B's texts; ProvisionError if damaged."""
        tables = self._read()
        template_id = reference
        if reference not in tables.templates and reference not in tables.damaged:
            name, tag = parse(reference)
            try:
                template_id = tables.names[f"{name}:{tag}"]
            except KeyError:
                if any(key.startswith(f"{name}:") for key in tables.names):
                    raise NotFound(f"tag '{tag}' does not exist for template '{name}'") from None
                raise NotFound(f"template '{reference}' not found") from None
        if why := tables.damaged.get(template_id):
            raise ProvisionError(why)
        return tables.templates[template_id]

    def path(self, template_id: str) -> Path:
        """Where a template's folder is or will be."""
        return self._dir / template_id

    def checkpoint(self, template_id: str) -> Path:
        """The folder of what its sandboxes start from now. It stays for a while after another one was baked.

        Raises NotFound, ImageError if there is none.
        """
        link = self.path(template_id) / CHECKPOINT
        try:
            return link.parent / link.readlink()
        except OSError as error:
            if not link.parent.exists():
                raise NotFound(f"template '{template_id}' does not exist on this node") from error
            raise ImageError(f"template '{template_id}' has no checkpoint: run `aenv setup`, or build it") from error

    def stage(self) -> Path:
        """A fresh folder for one template, beside its later place. The maker deletes it or publishes it."""
        self._dir.mkdir(parents=True, exist_ok=True)
        staging = self._dir / f"{_STAGING}{_maker()}-{uuid.uuid4().hex}"
        staging.mkdir(mode=0o755)
        return staging

    def publish(self, staging: Path, template: Template) -> None:
        """Make `staging`, with a checkpoint in its folder ``checkpoint``, the template's folder, and its names mean it
        from now on. All of it is on stable storage then.

        Raises ProvisionError, ImageError and NotFound for what is no checkpoint, InsufficientStorage, BadRequest for a
        name that is none, Conflict for a snapshot that would take the name of a template.
        """
        keys = [":".join(parse(name)) for name in template.names]
        place = self.path(template.id)
        checkpoint = read(staging / CHECKPOINT)
        with self._changing(f"publish template {template.id}"):
            names = self._read_names()
            self._check_free(template, [names[key] for key in keys if key in names])
            if place.exists():  # made by a process that ended before it could move the names
                self._repair(template, staging)
            else:
                _write(staging / MANIFEST, manifest.encode(template))
                sync_files([*checkpoint.files, staging / MANIFEST])  # at once: one turn of the disk
                _link_checkpoint(staging, staging / CHECKPOINT)
                staging.rename(place)
            self._write_names(names | dict.fromkeys(keys, template.id))

    def bake(self, template_id: str, folder: Path) -> None:
        """Make the checkpoint in `folder`, which moves, what sandboxes of a template start from now on.

        Raises NotFound, ImageError, ProvisionError, InsufficientStorage.
        """
        place = self.path(template_id)
        if not place.exists():
            raise NotFound(f"template '{template_id}' does not exist on this node")
        sync_files(read(folder).files)
        with self._changing(f"give template {template_id} another checkpoint"):
            with suppress(ImageError):
                before = self.checkpoint(template_id)
                for older in place.glob(f"{CHECKPOINT}-*"):
                    # Sandboxes that start right now may still be opening what was there before.
                    if older != before:
                        shutil.rmtree(older, ignore_errors=True)
                for unused in place.glob(f".{CHECKPOINT}-*"):
                    unused.unlink(missing_ok=True)
            _link_checkpoint(place, folder)
            sync(place)

    def delete(self, reference: str) -> None:
        """Delete a snapshot, with all its names. Sandboxes that run from it go on.

        Raises NotFound, BadRequest, Forbidden for a template that was built, ProvisionError, InsufficientStorage.
        """
        template = self.resolve(reference)
        if template.source is None:
            raise Forbidden(f"'{reference}' is a template, not a snapshot; only snapshots can be deleted yet")
        trash = self._dir / f"{_STAGING}{_maker()}-{uuid.uuid4().hex}"
        with self._changing(f"delete snapshot {template.id}"):
            names = self._read_names()
            kept = {key: known for key, known in names.items() if known != template.id}
            if kept != names:
                self._write_names(kept)
            try:
                self.path(template.id).rename(trash)
            except FileNotFoundError:
                raise NotFound(f"template '{reference}' not found") from None
            sync(self._dir)
        shutil.rmtree(trash, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what was being made, or deleted, by processes that are no more."""
        for leftover in self._dir.glob(f"{_STAGING}*"):
            if not _lives(leftover.name.removeprefix(_STAGING).partition("-")[0]):
                shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """The only one who changes anything, among all threads and processes, for the block."""
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                self._changes += 1
                os.close(lock)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InsufficientStorage(f"no space to {what} in {self._dir}: free some on the host") from error
            raise ProvisionError(f"cannot {what} in {self._dir}: {error}") from error

    def _check_free(self, template: Template, holders: Sequence[str]) -> None:
        """Only what was built may take the name of what was built: a snapshot would take it from all who create."""
        if template.source is None:
            return
        for holder in holders:
            with suppress(ProvisionError):
                if self._read_manifest(holder).template.source is None:
                    name = ", ".join(template.names)
                    raise Conflict(f"'{name}' is the name of a template; choose another name or tag for the snapshot")

    def _repair(self, template: Template, staging: Path) -> None:
        """Complete a template that is there, and delete `staging`."""
        place = self.path(template.id)
        try:
            self._read_manifest(template.id)
        except ProvisionError:
            _write(place / MANIFEST, manifest.encode(template))
            sync(place / MANIFEST)
        try:
            self.checkpoint(template.id)
        except ImageError:
            sync_files(read(staging / CHECKPOINT).files)
            _link_checkpoint(place, staging / CHECKPOINT)
        sync(place)
        shutil.rmtree(staging)

    def _write_names(self, names: Mapping[str, str]) -> None:
        """Make names mean something else; tells other processes that there is something new."""
        fresh = _write(self._dir / f"{NAMES}.new", names)
        sync(fresh)
        fresh.replace(self._dir / NAMES)
        sync(self._dir)

    def _read(self) -> "_Tables":
        """What there is now."""
        with self._reading:
            try:
                found = (self._dir / NAMES).stat()
                stamp = (found.st_ino, found.st_mtime_ns, self._changes)
            except FileNotFoundError:
                stamp = (0, 0, self._changes)
            except OSError as error:
                raise ProvisionError(f"cannot read {self._dir / NAMES}: {error}") from error
            if stamp != self._read_last.stamp:
                self._read_last = self._read_all(stamp)
            return self._read_last

    def _read_all(self, stamp: tuple[int, int, int]) -> "_Tables":
        before = self._read_last
        tables = _Tables(stamp=stamp, names=self._read_names(), templates={}, damaged={}, manifests={})
        names: dict[str, list[str]] = {}
        for key, template_id in tables.names.items():
            names.setdefault(template_id, []).append(key.removesuffix(f":{DEFAULT_TAG}"))
        for template_id in names.keys() | self._ids():
            try:
                known = self._read_manifest(template_id, before.manifests.get(template_id))
            except ProvisionError as error:
                tables.damaged[template_id] = error.message
                if before.damaged.get(template_id) != error.message:
                    log.error("template.damaged", id=template_id, error=error.message)
                continue
            tables.manifests[template_id] = known
            if template_id in names or known.template.source is not None:  # what was built goes with its last name
                tables.templates[template_id] = replace(known.template, names=tuple(names.get(template_id, ())))
        return tables

    def _ids(self) -> set[str]:
        try:
            return {entry.name for entry in os.scandir(self._dir) if ID.fullmatch(entry.name)}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise ProvisionError(f"cannot read {self._dir}: {error}") from error

    def _read_names(self) -> dict[str, str]:
        path = self._dir / NAMES
        try:
            names = json.loads(path.read_text())
            if not isinstance(names, dict):
                raise ValueError("it is no object")
            for name, template_id in names.items():
                if not REFERENCE.fullmatch(name) or not isinstance(template_id, str) or not ID.fullmatch(template_id):
                    raise ValueError(f"{name[:100]!r} names no template: {str(template_id)[:100]!r}")
            return names
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise ProvisionError(f"{path} is damaged ({error}); delete it and run `aenv setup`") from error

    def _read_manifest(self, template_id: str, known: "_Manifest | None" = None) -> "_Manifest":
        """`known` if its file is still the same. Raises ProvisionError."""
        path = self.path(template_id) / MANIFEST
        try:
            found = path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if known is not None and known.stamp == stamp:
                return known
            template = manifest.parse(json.loads(path.read_text()))
            if template.id != template_id:
                raise ValueError(f"it is of template {template.id[:100]!r}")
            return _Manifest(stamp, template)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProvisionError(
                f"template {template_id} is damaged: {path}: {error}; run `aenv setup`, or build it again"
            ) from error


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A template, without its names, as the file with `stamp` has it."""

    stamp: tuple[int, int, int]
    template: Template


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """All templates, by id, as they were when ``names.json`` had `stamp`; why the `damaged` cannot be read."""

    stamp: tuple[int, int, int] | None
    names: Mapping[str, str]
    templates: dict[str, Template]
    damaged: dict[str, str]
    manifests: dict[str, _Manifest]


def parse(reference: str) -> tuple[str, str]:
    """Name (with its namespace) and tag of a reference, in lower case. Raises BadRequest with E2B's text."""
    match = REFERENCE.fullmatch(reference.lower())
    if match is None:
        raise BadRequest(f"Invalid template reference: '{reference[:200]}': expected an id, name or name:tag")
    return match["name"], match["tag"] or DEFAULT_TAG


def _maker() -> str:
    """This process, as no other one is called."""
    known = identify(os.getpid())
    return f"{known.pid}.{known.start_time}" if known else str(os.getpid())


def _lives(maker: str) -> bool:
    pid, _, start_time = maker.partition(".")
    known = identify(int(pid)) if pid.isascii() and pid.isdigit() else None
    return known is not None and str(known.start_time) == start_time


def _newest_first(templates: Iterable[Template]) -> tuple[Template, ...]:
    return tuple(sorted(templates, key=lambda template: template.created_at, reverse=True))


def _link_checkpoint(place: Path, folder: Path) -> None:
    """Make `folder`, which moves into the template's folder `place`, its checkpoint."""
    target = place / f"{CHECKPOINT}-{uuid.uuid4().hex}"
    folder.rename(target)
    link = place / f".{target.name}"
    link.symlink_to(target.name)
    link.replace(place / CHECKPOINT)


def _write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value, indent=2) + "\n")
    return path
