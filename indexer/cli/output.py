"""Output for people and scripts: JSON, tables that cannot control the terminal, and progress on stderr.

Progress is a bar on a terminal, otherwise a line every ten seconds.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from indexer.telemetry.log import printable

WIDE = 400
"""Columns of a console without a terminal: wide enough that no value is wrapped."""
LINE_SECONDS = 10.0
"""Interval between lines of progress without a terminal. A short command writes none."""


def result_console() -> Console:
    """Return a console on stdout, as wide as the terminal if there is one."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def to_json(value: Any) -> str:
    """Return the value as one line of JSON in ASCII, which cannot control a terminal."""
    return json.dumps(value, default=datetime.isoformat)


def json_wanted() -> bool:
    """Return True if the command got the option `--json`."""
    return bool(click.get_current_context().params.get("as_json"))


def echo_json(result: Mapping[str, Any]) -> bool:
    """Print a result on stdout as one line of JSON, and return True, if the command got the option `--json`."""
    if json_wanted():
        click.echo(to_json(result))
    return json_wanted()


def echo_result(result: Mapping[str, Any], text: str) -> None:
    """Print a result on stdout: as one line of JSON for scripts, otherwise as text."""
    if not echo_json(result):
        click.echo(text)


def to_readable_json(value: Any) -> str:
    """Return the value as indented JSON in Unicode, with all characters escaped that could control a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def fact_table(facts: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Table:
    """Return a table with one name and value per line. None is shown as `-`, times to the second."""
    table = Table.grid("name", "value", padding=(0, 2))
    for name, value in dict(facts).items():
        table.add_row(literal_text(name), literal_text(shown(value)))
    return table


def row_table(rows: Sequence[Mapping[str, Any]], **options: Any) -> Table:
    """Return a table of rows that have their cells by the names of the columns. None is shown as `-`."""
    table = Table(*(name.replace("_", " ") for name in rows[0]), title_justify="left", **options)
    for row in rows:
        table.add_row(*(literal_text("-" if cell is None else str(cell)) for cell in row.values()))
    return table


def literal_text(text: str) -> Text:
    """Return a text for a table in which nothing is markup or can control the terminal."""
    return Text(printable(text), overflow="fold")


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units: `2 d 3 h`, `4 min 5 s`, `6 s`; `-` for None."""
    if seconds is None:
        return "-"
    rest = max(round(seconds), 0)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if rest >= size or (unit == "s" and not parts):
            parts.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(parts[:2])


def counts_text(counts: Mapping[str, int]) -> str:
    """Return numbers with their names, in the order of the names: `2 applied, 1 replayed`."""
    return ", ".join([f"{count:,} {name}" for name, count in sorted(counts.items())])


def shown(value: Any) -> str:
    """Return a value as text: `-` for None, numbers with separators, times to the second."""
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


class CommandProgress(Progress):
    """The progress of one command, during a `with` block: a bar, or without a terminal a line every `LINE_SECONDS`."""

    def __init__(self, name: str, total: float | None) -> None:
        """Expect `total` items, or an unknown number."""
        columns = (
            TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self.add_task(name, total=total, note="")
        self._line_at = monotonic() + LINE_SECONDS

    def show(self, completed: float, *, total: float | None = None, note: str = "") -> None:
        """Set the number of completed items, the expected number if it has changed, and a text to show beside them."""
        self.update(self._task, completed=completed, total=total, note=note)
        if not self.disable or monotonic() < self._line_at:
            return
        self._line_at = monotonic() + LINE_SECONDS
        task = self.tasks[0]
        line = f"{task.description}: {completed:,.0f}"
        if task.total:
            line += f" of {task.total:,.0f} ({task.percentage:.0f} %)"
        if note:
            line += f", {note}"
        if task.time_remaining is not None:
            line += f", {duration_text(task.time_remaining)} left"
        click.echo(line, err=True)
