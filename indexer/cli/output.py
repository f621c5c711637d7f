"""Output for people and scripts: JSON, tables that cannot control the terminal, and progress on stderr.

Progress is a bar on a terminal, otherwise a line after two seconds and then every ten.
"""

import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from indexer.telemetry.log import printable

WIDE = 400
"""Columns of a console without a terminal: wide enough that no value is wrapped."""
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Time until the first line without a terminal, and the interval of the following ones. A short command writes none."""
SLOW_RATE = 10.0
"""Rates below this are shown with a decimal."""


def result_console() -> Console:
    """Return a console on stdout, as wide as the terminal if there is one."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)


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


def row_table(rows: Sequence[Mapping[str, Any]], **options: Any) -> Table:
    """Return a table of rows that have their cells by the names of the columns. None is shown as `-`."""
    table = Table(*(name.replace("_", " ") for name in rows[0]), title_justify="left", **options)
    for row in rows:
        table.add_row(*(literal_text("-" if cell is None else str(cell)) for cell in row.values()))
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


class RateColumn(ProgressColumn):
    """The rate of a task, per second."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last half minute; nothing while it is unknown."""
        return Text("" if task.speed is None else f"{rate_text(task.speed)}/s", "progress.data.speed")


class CommandProgress:
    """The progress of one command. Start it with `show_progress`.

    Attributes:
        bar: Shows nothing without a terminal, but still computes rate and time left.
    """

    def __init__(self, name: str, total: float | None) -> None:
        columns = (
            TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), RateColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self.bar.add_task(name, total=total, note="")

    def update(self, completed: float, *, total: float | None = None, note: str = "") -> None:
        """Set the number of completed items, the expected number if it has changed, and a text to show beside them."""
        self.bar.update(self._task, completed=completed, total=total, note=note)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the bar during the block, which writes to stdout: that may be the same terminal."""
        self.bar.stop()
        yield
        self.bar.start()


@contextmanager
def show_progress(name: str, total: float | None) -> Iterator[CommandProgress]:
    """Show the progress of `total` items (None: unknown) during the block: a bar on a terminal, otherwise lines."""
    progress = CommandProgress(name, total)
    ended = threading.Event()

    def write_lines() -> None:
        pause = FIRST_LINE_SECONDS
        while not ended.wait(pause):
            click.echo(progress_line(progress.bar.tasks[0]), err=True)
            pause = LINE_SECONDS

    # A thread, because a line shows also that nothing moves, for example while the event loop is blocked.
    writer = threading.Thread(target=write_lines, name="progress", daemon=True)
    try:
        with progress.bar:
            if progress.bar.disable:
                writer.start()
            yield progress
    finally:
        ended.set()
        if progress.bar.disable:
            writer.join()


def progress_line(task: Task) -> str:
    """Return name, count, share, rate and time left of a task, as far as they are known."""
    of_total = f" of {task.total:,.0f} ({task.percentage:.0f} %)" if task.total else ""
    parts = [f"{task.description}: {task.completed:,.0f}{of_total}"]
    parts += [str(task.fields["note"])] if task.fields["note"] else []
    parts += [f"{rate_text(task.speed)} per second"] if task.speed is not None else []
    parts += [f"{duration_text(task.elapsed)} elapsed"] if task.elapsed is not None else []
    parts += [f"{duration_text(task.time_remaining)} left"] if task.time_remaining is not None else []
    return ", ".join(parts)


def rate_text(rate: float) -> str:
    """Return a rate per second, with a decimal if it is low."""
    return f"{rate:,.1f}" if rate < SLOW_RATE else f"{rate:,.0f}"
