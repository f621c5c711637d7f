"""Progress of long commands on stderr: a bar on a terminal, otherwise a line after two seconds and then every ten."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
from rich.text import Text

from indexer.cli.output import duration_text

FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Time until the first line without a terminal, and the interval of the following ones. A short command writes none."""
SLOW_RATE = 10.0
"""Rates below this are shown with a decimal."""


class RateColumn(ProgressColumn):
    """The rate of a task, per second."""

    def render(self, task: Task) -> Text:
        """Return the rate of the last half minute; nothing while it is unknown."""
        return Text("" if task.speed is None else f"{rate_text(task.speed)}/s", "progress.data.speed")


class CommandProgress:
    """The progress of one command. Start it with `show_progress`."""

    def __init__(self, name: str, total: float | None, console: Console) -> None:
        times = (RateColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        # Without a terminal, rich shows nothing, but it still computes rate and time left.
        self._bar = Progress(*columns, *times, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task(name, total=total, note="")

    def update(self, completed: float, *, total: float | None = None, note: str = "") -> None:
        """Set the number of completed items, the expected number if it has changed, and a text to show beside them."""
        self._bar.update(self._task, completed=completed, total=total, note=note)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the bar during the block, which writes to stdout: that may be the same terminal."""
        self._bar.stop()
        yield
        self._bar.start()

    @property
    def line(self) -> str:
        """The present state as a line of text."""
        return progress_line(self._bar.tasks[0])

    def start(self) -> None:
        """Show the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Remove the bar."""
        self._bar.stop()


@contextmanager
def show_progress(name: str, total: float | None, console: Console) -> Iterator[CommandProgress]:
    """Show the progress of `total` items (None: unknown) during the block: a bar on a terminal, otherwise lines."""
    progress = CommandProgress(name, total, console)
    ended = threading.Event()

    def write_lines() -> None:
        pause = FIRST_LINE_SECONDS
        while not ended.wait(pause):
            click.echo(progress.line, err=True)
            pause = LINE_SECONDS

    # A thread, because a line shows also that nothing moves, for example while the event loop is blocked.
    writer = None if console.is_terminal else threading.Thread(target=write_lines, name="progress", daemon=True)
    progress.start()
    if writer is not None:
        writer.start()
    try:
        yield progress
    finally:
        ended.set()
        progress.stop()
        if writer is not None:
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
