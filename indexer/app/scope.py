"""The stages of the daemon that apply a changed scope: build them from the settings."""

from collections.abc import Awaitable, Callable, Iterator, Sequence

from indexer.app.tuning import Tuning
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Store
from indexer.db.current_scope import CurrentScope
from indexer.net.http import OutboundClient
from indexer.sync.shard import Shard
from indexer.tasks.scope_backfill import ScopeBackfill
from indexer.tasks.scope_narrowing import ScopeNarrowing
from indexer.tasks.scope_untracking import ScopeUntracking
from indexer.tasks.signal_discovery import SignalDiscovery
from indexer.telemetry.metrics import Metrics


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
        tuning: Tuning,
    ) -> None:
        """Build the stages. `sources` returns the relays that list repos, `reconciled_at` the end of the last crawl."""
        interval, settle = tuning.scope_interval, tuning.scope_settle
        self._narrowing = ScopeNarrowing(
            store, scope, shard, metrics, interval=interval, batch_size=tuning.narrowing_batch
        )
        self._untracking = ScopeUntracking(
            store, scope, shard, interval=interval, retry=tuning.untracking_retry, batch_size=tuning.untracking_batch
        )
        self._backfill = ScopeBackfill(
            store,
            outbound,
            scope,
            sources,
            shard,
            metrics,
            interval=interval,
            settle=settle,
            recheck=tuning.scope_rechecks,
            recheck_poll=tuning.scope_recheck_poll,
        )
        self._discovery = SignalDiscovery(
            store, outbound, scope, sources, reconciled_at, interval=interval, settle=settle
        )
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
