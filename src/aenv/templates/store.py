"""The templates of a node: ``$AENV_HOME/templates/<id>/template.json`` beside the image, and ``names.json``.

A template appears by a rename of its finished folder; a name moves by a rename of ``names.json``. So a reader never
sees half a template, and a name never points at one that is not ready. A damaged template is left out, not the others.
"""

import dataclasses
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import structlog

from aenv.errors import BadRequest, NotFound, ProvisionError
from aenv.templates.models import Template

log = structlog.get_logger(__name__)

NAMES = "names.json"
MANIFEST = "template.json"
REFERENCE = re.compile(r"(?P<name>(?:[a-z0-9_-]+/)?[a-z0-9_-]+)(?::(?P<tag>[a-z0-9_.-]+))?")
"""``name``, ``ns/name``, with ``:tag``, lower-cased (E2B's rule)."""
ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""A template's id, which is also its folder's name."""
DEFAULT_TAG = "default"


class TemplateStore:
    """Reads and publishes templates. Reads follow what `aenv setup` publishes while the server runs."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._stamp: tuple[int, int] | None = None
        self._names: dict[str, str] = {}
        self._templates: dict[str, Template] = {}
        self._damaged: dict[str, str] = {}
        """Ids of templates that cannot be read, and why."""

    def list(self) -> tuple[Template, ...]:
        """All templates that have a name, newest first."""
        self._refresh()
        return tuple(sorted(self._templates.values(), key=lambda t: t.created_at, reverse=True))

    def resolve(self, reference: str) -> Template:
        """By id, name, or ``name:tag``. Raises NotFound or BadRequest with E2B's texts; ProvisionError if damaged."""
        self._refresh()
        if reference in self._templates or reference in self._damaged:
            return self._get(reference)
        match = REFERENCE.fullmatch(reference.lower())
        if match is None:
            raise BadRequest(f"Invalid template reference: '{reference[:200]}': expected an id, name or name:tag")
        name, tag = match["name"], match["tag"] or DEFAULT_TAG
        known = {key.partition(":")[0] for key in self._names}
        if name not in known:
            raise NotFound(f"template '{reference}' not found")
        try:
            template_id = self._names[f"{name}:{tag}"]
        except KeyError:
            raise NotFound(f"tag '{tag}' does not exist for template '{name}'") from None
        return self._get(template_id)

    def _get(self, template_id: str) -> Template:
        if why := self._damaged.get(template_id):
            raise ProvisionError(why)
        return self._templates[template_id]

    def stage(self) -> Path:
        """A fresh folder for one build, beside its later place. The builder deletes it or publishes it."""
        self._dir.mkdir(parents=True, exist_ok=True)
        staging = self._dir / f".staging-{uuid.uuid4().hex}"
        staging.mkdir(mode=0o755)
        return staging

    def path(self, template_id: str) -> Path:
        """Where a template's folder is or will be."""
        return self._dir / template_id

    def publish(self, staging: Path, template: Template) -> None:
        """Make `staging` the template's folder and point its names at it. Raises ProvisionError."""
        manifest = dataclasses.asdict(template) | {"created_at": template.created_at.isoformat()}
        try:
            if self.path(template.id).exists():  # finished by a build that ended before it could move the names
                self._repair(template.id, manifest)
                shutil.rmtree(staging)
            else:
                _write(staging / MANIFEST, manifest)
                os.sync()
                staging.rename(self.path(template.id))
            names = self._read_names()
            names.update({f"{name}:{DEFAULT_TAG}": template.id for name in template.names})
            _write(self._dir / NAMES, names)
        except OSError as error:
            raise ProvisionError(f"cannot publish template {template.id} in {self._dir}: {error}") from error

    def sweep(self) -> None:
        """Delete what an interrupted build left."""
        for leftover in self._dir.glob(".staging-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _repair(self, template_id: str, manifest: dict[str, Any]) -> None:
        try:
            self._read(template_id)
        except ProvisionError:
            _write(self.path(template_id) / MANIFEST, manifest)

    def _refresh(self) -> None:
        try:
            found = (self._dir / NAMES).stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ProvisionError(f"cannot read {self._dir / NAMES}: {error}") from error
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            self._names = self._read_names()
            self._read_all(set(self._names.values()))
            self._stamp = stamp

    def _read_all(self, ids: Iterable[str]) -> None:
        before, self._templates, self._damaged = self._damaged, {}, {}
        for template_id in ids:
            try:
                self._templates[template_id] = self._read(template_id)
            except ProvisionError as error:
                self._damaged[template_id] = error.message
                if before.get(template_id) != error.message:
                    log.error("template.damaged", id=template_id, error=error.message)

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

    def _read(self, template_id: str) -> Template:
        path = self.path(template_id) / MANIFEST
        try:
            template = _parse(json.loads(path.read_text()))
            if template.id != template_id:
                raise ValueError(f"it is of template {template.id[:100]!r}")
            return template
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProvisionError(
                f"template {template_id} is damaged: {path}: {error}; run `aenv setup`, or build it again"
            ) from error


def _parse(manifest: Any) -> Template:
    """A template of its manifest. Raises ValueError, TypeError or KeyError if it is not as `publish` writes it."""
    if not isinstance(manifest, dict):
        raise TypeError("it is no object")
    template = Template(
        **manifest | {"created_at": datetime.fromisoformat(manifest["created_at"]), "names": tuple(manifest["names"])}
    )
    texts = [template.id, template.build_id, template.envd_version, template.user, template.workdir]
    if not isinstance(template.env, dict):
        raise TypeError("its env is no object")
    if not all(isinstance(text, str) for text in [*texts, *template.names, *template.env.values()]):
        raise TypeError("a text is not a string")
    for size in (template.cpu_count, template.memory_mb, template.disk_mb):
        if type(size) is not int or size < 1:
            raise ValueError("a size is not a positive integer")
    if template.created_at.tzinfo is None:
        raise ValueError("its time has no zone")
    return template


def _write(path: Path, value: object) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    fresh.replace(path)
