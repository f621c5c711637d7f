"""The progress of a crawl, so that an interrupted crawl continues where it stopped."""

from dataclasses import dataclass, replace
from typing import Literal, Self

Purpose = Literal["discover", "sweep"]


@dataclass(frozen=True, slots=True)
class CrawlProgress:
    """The progress of one crawl of a host's repo list.

    Attributes:
        source: The base URL of the host.
        collection: List only accounts with records in this collection; "" lists all accounts.
        cursor: The cursor of the next page; None for the first page.
        listed: The number of accounts listed so far.
        found: The number of listed accounts that needed an action: added by `discover`, marked by `sweep`.
        began_at: Unix seconds.
        finished_at: Unix seconds; None while pages are left.
    """

    purpose: Purpose
    source: str
    collection: str = ""
    cursor: str | None = None
    listed: int = 0
    found: int = 0
    began_at: float = 0.0
    finished_at: float | None = None

    def after_page(self, cursor: str | None, listed: int, found: int, now: float) -> Self:
        """Return the progress after one more page; `cursor` None means that it was the last page."""
        return replace(
            self,
            cursor=cursor,
            listed=self.listed + listed,
            found=self.found + found,
            finished_at=now if cursor is None else None,
        )
