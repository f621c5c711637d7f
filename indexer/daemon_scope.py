"""The stages of the daemon that apply a changed scope: build them from the settings."""

from collections.abc import Awaitable, Callable, Iterator, Sequence

from indexer.concurrency.stage_progress import StageProgress
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.service.background.scope_narrowing import ScopeNarrowing
from indexer.service.background.scope_untracking import ScopeUntracking
from indexer.service.crawl.scope_backfill import ScopeBackfill
from indexer.service.crawl.signal_discovery import SignalDiscovery
from indexer.service.current_scope import CurrentScope
from indexer.store import Store
from indexer.sync.shard import Shard


class DaemonScope:
    """The stages of one shard that delete what left the scope, and find and fetch what entered it."""

    def __init__(
        self,
        shard: Shard,
        store: Store,
        outbound: OutboundClient,
        metrics: Metrics,
        scope: CurrentScope,
        sources: Callable[[], Sequence[str]],
        reconciled_at: Callable[[], float | None],
    ) -> None:
        """Build the stages. `sources` returns the relays that list repos, `reconciled_at` the end of the last crawl."""
        self._narrowing = ScopeNarrowing(store, scope, shard, metrics)
        self._untracking = ScopeUntracking(store, scope, shard)
        self._backfill = ScopeBackfill(store, outbound, scope, sources, shard, metrics)
        self._discovery = SignalDiscovery(store, outbound, scope, sources, reconciled_at)
        self._lists_repos = shard.index == 0  # the lists are of all shards

    def progress(self) -> Iterator[StageProgress]:
        """Yield the progress of all stages that `stages` returns."""
        yield from (self._narrowing.stage, self._untracking.stage, self._backfill.stage)
        if self._lists_repos:
            yield self._discovery.stage

    def stages(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the stages by task name. They may run only while this process owns its shard."""
        stages: dict[str, Callable[[], Awaitable[None]]] = {
            "scope narrowing": self._narrowing.run,
            "scope untracking": self._untracking.run,
            "scope backfill": self._backfill.run,
        }
        return stages | {"signal discovery": self._discovery.run} if self._lists_repos else stages
