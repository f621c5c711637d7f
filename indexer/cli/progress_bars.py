"""Progress bars for long commands. They are shown on a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from indexer.sync.crawl_progress import CrawlProgress


def count_progress_bar(name: str, console: Console) -> Progress:
    """Return a bar with a count and the time left, which disappears at the end. Stop it during other output."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def crawl_progress_bar(name: str, total: int | None, console: Console) -> Iterator[Callable[[CrawlProgress], None]]:
    """Show the progress of a crawl; yield the function to call after each page.

    `total` is the approximate number of accounts; None if it is unknown.
    """
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]:,} found"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total, found=0)
        yield lambda progress: bar.update(task, completed=progress.listed, found=progress.found)
