"""Rows of sandboxes as a tree of parents and children. Pure."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def tree(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Each row after its parent, with the branches to draw before it; siblings keep their order. One whose parent is
    not among the rows is a root."""
    ids = {row["sandboxID"] for row in rows}
    children: dict[str | None, list[Row]] = {}
    for row in rows:
        parent = row.get("parentID")
        children.setdefault(parent if parent in ids else None, []).append(row)
    lines: list[tuple[str, Row]] = []
    waiting = [("", "", root) for root in reversed(children.get(None, []))]  # A stack: chains of forks can be long.
    while waiting:
        branches, indent, row = waiting.pop()
        lines.append((branches, row))
        below = list(reversed(children.get(row["sandboxID"], [])))
        for child in below:
            last = child is below[0]
            waiting.append((indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), child))
    return lines
