"""Output for people and scripts: consoles, JSON, and tables that cannot control the terminal."""

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from indexer.telemetry.log import printable

WIDE = 400  # columns of a console without a terminal: wide enough that no value is wrapped


def result_console() -> Console:
    """Return a console on stdout, as wide as the terminal if there is one."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def progress_console() -> Console:
    """Return a console on stderr. Progress bars show nothing there without a terminal."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def to_json(value: Any) -> str:
    """Return the value as one line of JSON in ASCII, which cannot control a terminal."""
    return json.dumps(value, default=datetime.isoformat)


def echo_result(result: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print a result on stdout: as one line of JSON for scripts, otherwise as text."""
    click.echo(to_json(result) if as_json else text)


def to_readable_json(value: Any) -> str:
    """Return the value as indented JSON in Unicode, with all characters escaped that could control a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def fact_table(facts: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Table:
    """Return a table with one name and value per line. None is shown as `-`, times to the second."""
    table = Table.grid("name", "value", padding=(0, 2))
    for name, value in dict(facts).items():
        table.add_row(literal_text(name), literal_text(_shown(value)))
    return table


def literal_text(text: str) -> Text:
    """Return a text for a table in which nothing is markup or can control the terminal."""
    return Text(printable(text), overflow="fold")


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: `2 d 3 h`, `4 min 5 s`, `6 s`."""
    rest = max(round(seconds), 0)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if rest >= size or (unit == "s" and not parts):
            parts.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(parts[:2])


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.isoformat(" ", "seconds")
        case int():
            return f"{value:,}"
        case _:
            return str(value)
