"""Tables for people, JSON for programs: the same rows either way."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

out = Console()
err = Console(stderr=True)


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


Output = Annotated[
    Format | None, typer.Option("--output", "-o", help="Default: a table on a terminal, JSON when piped.")
]


def wants_json(output: Format | None) -> bool:
    """Whether JSON is to be printed."""
    return output is Format.JSON if output is not None else not sys.stdout.isatty()


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_id(identifier: str) -> None:
    """One line that a script can take as it is."""
    out.print(identifier, highlight=False, markup=False, soft_wrap=True)


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str], output: Format | None) -> None:
    """`rows` as they are in JSON, or their `columns` as a table."""
    if wants_json(output):
        print_json(list(rows))
        return
    table = Table(*(column.upper() for column in columns), box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    out.print(table)


def left_until(moment: str) -> str:
    """RFC 3339 to a short span from now: ``4m 10s``."""
    seconds = int((datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds())
    if seconds <= 0:
        return "now"
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    return " ".join(f"{n}{unit}" for n, unit in [p for p in parts if p[0]][:2])
