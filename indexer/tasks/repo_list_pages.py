"""Read a whole list page by page, with retries, and remember the listed accounts in a small filter."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from hashlib import blake2b
from secrets import token_bytes

import stamina
import structlog

from indexer.concurrency.stage_progress import Work
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.pds.xrpc import Entry, ListedAccount, ListPage, XrpcError, list_repos
from indexer.reasons import FetchFailure

stamina.instrumentation.set_on_retry_hooks(())  # it would log events of its own, which docs/logs.md does not have

MAX_ATTEMPTS = 6
"""Attempts to fetch one page, over about a minute."""

log = structlog.get_logger(__name__)


def repo_list_pages(
    outbound: OutboundClient,
    source: str,
    collection: str,
    cursor: str | None,
    requests: Work,
    attempts: int = MAX_ATTEMPTS,
) -> AsyncIterator[ListPage[ListedAccount]]:
    """Yield the pages of the repo list of `source`, as `list_pages` does."""
    return list_pages(partial(list_repos, outbound, source, collection), source, cursor, requests, attempts)


async def list_pages(
    fetch: Callable[[str | None], Awaitable[ListPage[Entry]]],
    source: str,
    cursor: str | None,
    requests: Work,
    attempts: int = MAX_ATTEMPTS,
) -> AsyncIterator[ListPage[Entry]]:
    """Yield the pages that `fetch` returns for their cursors, from `cursor` to the end.

    Each request is work of `requests`; a pause before a retry is not. A request is sent at most `attempts` times.

    Raises:
        UnavailableError: All attempts to fetch a page failed, or the cursors lead in a circle (BAD_ANSWER).
    """
    # Brent's algorithm finds a circle: each cursor is compared with an earlier one, which is replaced after 1, 2, 4, …
    # pages. So it lies in the circle at last, and few pages are read more than once.
    earlier, pages, replace_after = cursor, 0, 1
    invalid, first = 0, ""
    try:
        while True:
            async for attempt in stamina.retry_context(
                on=_retry_after, attempts=attempts, timeout=None, wait_initial=1.0, wait_max=60.0
            ):
                with attempt, requests.busy():
                    try:
                        page = await fetch(cursor)
                    except UnavailableError as error:
                        log.debug("repo-list.page-failed", source=source, attempt=attempt.num, error=str(error))
                        raise
            if page.cursor is not None and page.cursor == earlier:
                raise UnavailableError(FetchFailure.BAD_ANSWER, f"the cursors lead in a circle: {page.cursor!r:.100}")
            invalid, first = invalid + len(page.invalid), first or next(iter(page.invalid), "")
            yield page
            cursor, pages = page.cursor, pages + 1
            if cursor is None:
                return
            if pages == replace_after:
                earlier, pages, replace_after = cursor, 0, 2 * replace_after
    finally:
        if invalid:
            log.warning("repo-list.invalid-entries", source=source, count=invalid, first=first)


def _retry_after(error: Exception) -> bool | float:
    """Return the seconds after which the host allows a retry, True if it named none, False if no retry helps."""
    if isinstance(error, XrpcError) and error.definite:
        return False
    return isinstance(error, UnavailableError) and (error.retry_after or True)


MIN_ACCOUNTS = 10_000


class ListedAccounts:
    """A Bloom filter of DIDs: a quarter of a byte per account and hash, so by default 3 bytes.

    A DID that was added is always in it. Another one is in it by chance with a probability of 0.39 for each hash, so by
    default of about 1 in 70,000, as long as at most `expected` DIDs were added. Nobody else can know which ones.
    """

    def __init__(self, expected: int, hashes: int = 12) -> None:
        self._bits = max(expected, MIN_ACCOUNTS) * 2 * hashes
        self._filter = bytearray(self._bits // 8 + 1)
        self._hashes, self._key = hashes, token_bytes(16)

    def add(self, did: str) -> None:
        """Add a DID."""
        for position in self._positions(did):
            self._filter[position >> 3] |= 1 << (position & 7)

    def __contains__(self, did: str) -> bool:
        """Return False only if the DID was not added."""
        return all(self._filter[position >> 3] >> (position & 7) & 1 for position in self._positions(did))

    def _positions(self, did: str) -> Iterator[int]:
        digest = blake2b(did.encode(), digest_size=16, key=self._key).digest()
        first, step = int.from_bytes(digest[:8]), int.from_bytes(digest[8:]) | 1
        return ((first + number * step) % self._bits for number in range(self._hashes))
