"""Track the repos that have records of a signal collection, from the lists of a relay."""

from collections.abc import Callable, Sequence
from time import monotonic

import structlog

from indexer.atproto.syntax import is_nsid
from indexer.concurrency.stage_progress import StageProgress
from indexer.errors import UnavailableError
from indexer.outbound import OutboundClient
from indexer.service.crawl.discover import Discovery
from indexer.service.current_scope import CurrentScope
from indexer.service.periodic import run_periodically
from indexer.store import DatabaseError, Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.scope import Scope

SETTLE_SECONDS = 30.0
"""A list may lack what the stream has delivered just before."""
RETRY_SECONDS = 300.0
"""Pause after a list could not be read."""

log = structlog.get_logger(__name__)


class SignalDiscovery:
    """Reads the list of each signal collection at the start, after a change, and after each reconciliation.

    A pattern that ends in `.*` has no list: its repos are found when the stream delivers a commit. After a change that
    wants fewer repos, the lists are read half a minute later, because they decide which repos are untracked.

    Attributes:
        stage: Its progress. Each request, and the write of each page, is work.
    """

    def __init__(
        self,
        store: Store,
        outbound: OutboundClient,
        scope: CurrentScope,
        sources: Callable[[], Sequence[str]],
        reconciled_at: Callable[[], float | None],
        *,
        interval: float = 1.0,
        settle: float = SETTLE_SECONDS,
    ) -> None:
        """Create the discovery.

        Args:
            store: The store.
            outbound: The client for requests to the sources.
            scope: The scope with the signal collections.
            sources: Returns the base URLs of the relays to ask; none if no stream is open.
            reconciled_at: Returns when the last reconciliation of this process ended; None if none has.
            interval: Pause between two checks of the scope, in seconds.
            settle: Time from a change that wants fewer repos to the reading of the lists, in seconds.
        """
        self.stage = StageProgress("signal discovery")
        self._discovery = Discovery(store, outbound, self.stage)
        self._scope = scope
        self._sources = sources
        self._reconciled_at = reconciled_at
        self._interval = interval
        self._settle = settle
        self._done: tuple[int, float | None] | None = None
        self._retry_at = 0.0

    async def run(self) -> None:
        """Discover repos forever. Only an exception that is a bug ends it."""
        await run_periodically(self.step, self._interval, self.stage.add())

    async def step(self) -> None:
        """Read the lists if they are due.

        Raises:
            DatabaseError: The database is unavailable.
        """
        scope = self._scope.scope
        due = scope.version, self._reconciled_at()
        if scope.signals is None or due == self._done or monotonic() < self._retry_at:
            return
        settled_at = self._scope.changed_at + (self._settle if scope.repos_narrowed_in else 0.0)
        if monotonic() < settled_at or not (sources := self._sources()):
            return
        try:
            for collection in filter(is_nsid, scope.signals.patterns):
                await self._discover(sources[0], collection, scope)
        except DatabaseError:
            raise
        except UnavailableError as error:
            log.warning("scope.list-failed", collection=collection, error=str(error), retry_seconds=RETRY_SECONDS)
            self._retry_at = monotonic() + RETRY_SECONDS
        else:
            self._done = due

    async def _discover(self, source: str, collection: str, scope: Scope) -> None:
        def ignore(_: CrawlProgress) -> None:
            """Show no progress."""

        begun = await self._discovery.begin(source, collection, "signal")
        progress = await self._discovery.run(begun, ignore, scope)
        if progress.finished_at is not None:
            log.info(
                "scope.discovered", relay=source, collection=collection, listed=progress.listed, added=progress.found
            )
