"""The progress of long commands, for a person at a terminal; elsewhere nothing is shown."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from indexer.sync.listing import Listing


def counted(what: str, console: Console) -> Progress:
    """How many of how many, with the time left; gone in the end, and to be stopped while there is other output."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


class Accounts:
    """A list of accounts being read, of about `total`, if anybody can say."""

    def __init__(self, console: Console, name: str, total: int | None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[found]:,} found"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=total, found=0)

    def heard(self, listing: Listing) -> None:
        """Shows how far it is by now."""
        self._progress.update(self._task, completed=listing.listed, found=listing.found)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
