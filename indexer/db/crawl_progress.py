"""The progress of a crawl, so that an interrupted crawl continues where it stopped."""

from dataclasses import dataclass, replace
from typing import Literal, Self

Purpose = Literal["discover", "sweep", "signal", "untrack", "recheck"]
"""`discover`: a command adds the listed accounts. `sweep`: a reconciliation. `signal`: the list of a signal collection.
`untrack`: a search of stored repos that are out of scope; its cursor is a DID, and `source` is empty. `recheck`: the
list of an added collection, which was compared at `began_at` and is compared again later; `source` is empty."""


@dataclass(frozen=True, slots=True)
class CrawlProgress:
    """The progress of one crawl of a host's repo list.

    Attributes:
        source: The base URL of the host.
        collection: List only accounts with records in this collection; "" lists all accounts.
        cursor: The cursor of the next page; None for the first page.
        listed: The number of accounts listed so far.
        found: The number of listed accounts that needed an action: added, desynchronized, or shown again. For
            `untrack`, the number of repos that must be looked at again. For `recheck`, the number of repeated
            comparisons.
        began_at: Unix seconds.
        finished_at: Unix seconds; None while pages are left.
        shard: The shard whose repos are compared, as index/count; "0/1": all.
        last_gap: The ID of the newest gap when a reconciliation began, which closes no later one; 0: none.
    """

    purpose: Purpose
    source: str
    collection: str = ""
    cursor: str | None = None
    listed: int = 0
    found: int = 0
    began_at: float = 0.0
    finished_at: float | None = None
    shard: str = "0/1"
    last_gap: int = 0

    def after_page(self, cursor: str | None, listed: int, found: int, now: float) -> Self:
        """Return the progress after one more page; `cursor` None means that it was the last page."""
        return replace(
            self,
            cursor=cursor,
            listed=self.listed + listed,
            found=self.found + found,
            finished_at=now if cursor is None else None,
        )
