"""The templates of a node: ``$AENV_HOME/templates/<id>/template.json`` beside the image, and ``names.json``.

A template appears by a rename of its finished folder; a name moves by a rename of ``names.json``. So a reader never
sees half a template, and a name never points at one that is not ready.
"""

import dataclasses
import json
import os
import re
import shutil
import uuid
from datetime import datetime
from pathlib import Path

from aenv.errors import BadRequest, NotFound, ProvisionError
from aenv.templates.models import Template

NAMES = "names.json"
MANIFEST = "template.json"
REFERENCE = re.compile(r"(?P<name>(?:[a-z0-9_-]+/)?[a-z0-9_-]+)(?::(?P<tag>[a-z0-9_.-]+))?")
"""``name``, ``ns/name``, with ``:tag``, lower-cased (E2B's rule)."""
DEFAULT_TAG = "default"


class TemplateStore:
    """Reads and publishes templates. Reads follow what `aenv setup` publishes while the server runs."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._stamp: tuple[int, int] | None = None
        self._names: dict[str, str] = {}
        self._templates: dict[str, Template] = {}

    def list(self) -> tuple[Template, ...]:
        """All templates that have a name, newest first."""
        self._refresh()
        return tuple(sorted(self._templates.values(), key=lambda t: t.created_at, reverse=True))

    def resolve(self, reference: str) -> Template:
        """By id, name, or ``name:tag``. Raises NotFound or BadRequest with E2B's texts."""
        self._refresh()
        if template := self._templates.get(reference):
            return template
        match = REFERENCE.fullmatch(reference.lower())
        if match is None:
            raise BadRequest(f"Invalid template reference: '{reference[:200]}': expected an id, name or name:tag")
        name, tag = match["name"], match["tag"] or DEFAULT_TAG
        known = {key.partition(":")[0] for key in self._names}
        if name not in known:
            raise NotFound(f"template '{reference}' not found")
        try:
            return self._templates[self._names[f"{name}:{tag}"]]
        except KeyError:
            raise NotFound(f"tag '{tag}' does not exist for template '{name}'") from None

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

    def _refresh(self) -> None:
        try:
            found = (self._dir / NAMES).stat()
        except FileNotFoundError:
            return
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            self._names = self._read_names()
            self._templates = {i: self._read(i) for i in set(self._names.values())}
            self._stamp = stamp

    def _read_names(self) -> dict[str, str]:
        try:
            return dict(json.loads((self._dir / NAMES).read_text()))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ProvisionError(f"{self._dir / NAMES} is damaged ({error}); run `aenv setup`") from error

    def _read(self, template_id: str) -> Template:
        path = self.path(template_id) / MANIFEST
        try:
            manifest = json.loads(path.read_text())
            manifest["created_at"] = datetime.fromisoformat(manifest["created_at"])
            manifest["names"] = tuple(manifest["names"])
            return Template(**manifest)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ProvisionError(f"{path} is damaged ({error}); run `aenv setup`") from error


def _write(path: Path, value: object) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    fresh.replace(path)
