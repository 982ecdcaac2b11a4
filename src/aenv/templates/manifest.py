"""A template's manifest, ``template.json``: all of `Template` but its names, which move."""

import dataclasses
from datetime import datetime
from typing import Any

from aenv.templates.models import Template


def encode(template: Template) -> dict[str, Any]:
    """The manifest of a template."""
    value = dataclasses.asdict(template) | {"created_at": template.created_at.isoformat()}
    del value["names"]
    return value


def parse(value: Any) -> Template:
    """The template of a manifest, without names (those of earlier versions had some).

    Raises ValueError, TypeError or KeyError if it is not as `encode` makes it.
    """
    if not isinstance(value, dict):
        raise TypeError("it is no object")
    given = value | {"created_at": datetime.fromisoformat(value["created_at"]), "names": ()}
    template = Template(**given)
    texts = [template.id, template.build_id, template.envd_version, template.user, template.workdir]
    texts += [] if template.source is None else [template.source]
    if not isinstance(template.env, dict):
        raise TypeError("its env is no object")
    if not all(isinstance(text, str) for text in [*texts, *template.env.values()]):
        raise TypeError("a text is not a string")
    for size in (template.cpu_count, template.memory_mb, template.disk_mb):
        if type(size) is not int or size < 1:
            raise ValueError("a size is not a positive integer")
    if template.created_at.tzinfo is None:
        raise ValueError("its time has no zone")
    return template
