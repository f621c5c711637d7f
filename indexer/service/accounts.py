"""Reading a host's list of accounts to its end, however long it is and however often the host falters."""

from collections.abc import AsyncIterator

import stamina

from indexer.errors import UnavailableError
from indexer.outbound import Outbound
from indexer.pds.accounts import Page, list_repos

TRIES = 6  # of one page, over about a minute


async def pages(outbound: Outbound, source: str, collection: str, cursor: str | None) -> AsyncIterator[Page]:
    """From `cursor` on. Raises `UnavailableError` for a page that can't be had after some tries."""
    while True:
        page = await _page(outbound, source, collection, cursor)
        yield page
        cursor = page.cursor
        if cursor is None:
            return


async def _page(outbound: Outbound, source: str, collection: str, cursor: str | None) -> Page:
    retries = stamina.retry_context(on=_again, attempts=TRIES, timeout=None, wait_initial=1.0, wait_max=60.0)
    async for attempt in retries:
        with attempt:
            return await list_repos(outbound, source, collection, cursor)
    raise AssertionError("the last attempt raises")


def _again(error: Exception) -> bool | float:
    """Whether, or in how many seconds, to ask once more."""
    return isinstance(error, UnavailableError) and (error.retry_after or True)
