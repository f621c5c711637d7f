"""The progress of long commands, for a person at a terminal; elsewhere nothing is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from indexer.sync.listing import Listing


def counted(what: str, console: Console) -> Progress:
    """How many of how many, with the time left; gone in the end, and to be stopped while there is other output."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def accounts(name: str, total: int | None, console: Console) -> Iterator[Callable[[Listing], None]]:
    """A list of accounts being read, of about `total`, if anybody can say: call what it gives as it goes on."""
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]:,} found"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total, found=0)
        yield lambda listing: progress.update(task, completed=listing.listed, found=listing.found)
