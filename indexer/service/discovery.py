"""Tracking the accounts that a host lists, page by page, from where it was left."""

from collections.abc import Callable
from functools import partial
from time import time

from indexer.outbound import Outbound
from indexer.service.accounts import pages
from indexer.store import Store
from indexer.sync.listing import Listing


class Discovery:
    """Each page's accounts are tracked in the transaction that notes the place behind it."""

    def __init__(self, store: Store, outbound: Outbound) -> None:
        self._store = store
        self._outbound = outbound
        self.refused = 0

    async def begin(self, source: str, collection: str) -> Listing:
        """Where the last one was left before its end; else at the beginning."""
        left = await self._store.listing("discover", source, collection)
        if left is not None and left.finished_at is None:
            return left
        return Listing("discover", source, collection, began_at=time())

    async def run(self, listing: Listing, heard: Callable[[Listing], None]) -> Listing:
        """Reads the list to its end, and tells `heard` of each page; gives how it ended.

        Accounts that are not active are left out: there is nothing to fetch, and the stream tells when that changes.
        `refused` counts entries that were no accounts. Raises `UnavailableError` if the host can't be read or the
        database can't be asked; what was read until then stays.
        """
        async for page in pages(self._outbound, listing.source, listing.collection, listing.cursor):
            self.refused += page.refused
            dids = [account.did for account in page.accounts if account.active]
            place = partial(_behind, listing, page.cursor, len(page.accounts))
            listing = await self._store.add_listed(dids, place)
            heard(listing)
        return listing


def _behind(listing: Listing, cursor: str | None, listed: int, found: int) -> Listing:
    return listing.after(cursor, listed, found, time())
