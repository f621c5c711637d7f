"""What is counted. Names are an interface, label sets are closed and made at the start."""

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)

from indexer import __version__
from indexer.identity import CAUSES, FOUND_IN, REFRESHES
from indexer.outbound import RESULTS
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.plan import Action
from indexer.sync.repo import Outcome, SyncStatus

KINDS = ("commit", "sync", "identity", "account", "info", "error", "unknown", "malformed")
ACTIONS = ("create", "update", "delete")
STAGES = ("load", "plan", "apply", "fetch", "verify-export", "diff", "apply-export")
RESYNC_RESULTS = ("synchronized", "unchanged", "lost", "put-off", *Desync, *FetchFailure)
LOOKUP_METHODS = ("plc", "web", "dns", "https")
LOOKUP_RESULTS = ("found", "missing", *FetchFailure)

_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_RESYNC_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """Counters of one process, with plain methods to move them; `registry` is what /metrics shows.

    A kind, stage or result outside its closed set is our own bug and raises KeyError.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        Info("indexer_build", "This program.", registry=registry).info(
            {"version": __version__, "python": platform.python_version()}
        )
        received = Counter("indexer_events_received", "Messages received.", ["kind"], registry=registry)
        self._received = {kind: received.labels(kind) for kind in KINDS}
        events = Counter("indexer_events", "What became of messages.", ["kind", "outcome"], registry=registry)
        self._events = {(kind, outcome): events.labels(kind, outcome) for kind in KINDS for outcome in Outcome}
        rejected = Counter("indexer_rejected", "Messages refused by their own fault.", ["reason"], registry=registry)
        self._rejected = {reason: rejected.labels(reason) for reason in Rejection}
        desynchronized = Counter(
            "indexer_desynchronized", "Repos that lost the network's state.", ["reason"], registry=registry
        )
        self._desynchronized = {reason: desynchronized.labels(reason) for reason in Desync}
        changes = Counter(
            "indexer_record_changes", "Records written and deleted.", ["action", "live"], registry=registry
        )
        self._changes = {
            (action, live): changes.labels(action, str(live).lower()) for action in ACTIONS for live in (True, False)
        }
        self._erased = Counter("indexer_erased_records", "Records of deleted accounts erased.", registry=registry)
        self._cursor = Gauge("indexer_cursor_seq", "Everything up to here is saved.", ["relay"], registry=registry)
        self._lag = Gauge("indexer_firehose_lag_seconds", "Age of the newest saved event.", registry=registry)
        self._lag.set(float("nan"))
        repos = Gauge("indexer_repos", "Repos by sync status.", ["sync_status"], registry=registry)
        self._repos = {status: repos.labels(status) for status in SyncStatus}
        resyncs = Counter("indexer_resync", "Ends of resyncs.", ["result"], registry=registry)
        self._resyncs = {result: resyncs.labels(result) for result in RESYNC_RESULTS}
        self._resync_seconds = Histogram(
            "indexer_resync_seconds", "Time of one resync.", registry=registry, buckets=_RESYNC_BUCKETS
        )
        self._resync_queue = Gauge("indexer_resync_queue", "Repos waiting for a resync.", registry=registry)
        lookups = Counter(
            "indexer_identity_lookups", "Look-ups of identities.", ["method", "result"], registry=registry
        )
        self._lookups = {
            (method, result): lookups.labels(method, result) for method in LOOKUP_METHODS for result in LOOKUP_RESULTS
        }
        cache = Counter("indexer_identity_cache", "Where identities were found.", ["found_in"], registry=registry)
        self._cache = {found_in: cache.labels(found_in) for found_in in FOUND_IN}
        refreshes = Counter(
            "indexer_identity_refreshes", "Newer identities wanted.", ["cause", "result"], registry=registry
        )
        self._refreshes: dict[tuple[str, str], Counter] = {
            (cause, result): refreshes.labels(cause, result) for cause in CAUSES for result in REFRESHES
        }
        requests = Counter(
            "indexer_outbound_requests",
            "Requests to hosts, and those that were refused before they were sent.",
            ["result"],
            registry=registry,
        )
        self._requests = {result: requests.labels(result) for result in RESULTS}
        self._paused_hosts = Gauge("indexer_hosts_paused", "Hosts that get no requests just now.", registry=registry)
        batch = Histogram(
            "indexer_batch_seconds", "Time of one stage.", ["stage"], registry=registry, buckets=_STAGE_BUCKETS
        )
        self._stages = {stage: batch.labels(stage) for stage in STAGES}
        self._log_bytes = Gauge("indexer_change_log_bytes", "Size of the change log.", registry=registry)
        self._reader_lag = Gauge(
            "indexer_reader_lag_seconds", "Age of the oldest change that a reader lacks, the worst.", registry=registry
        )
        readers = Gauge("indexer_readers", "Registered readers of the change log.", ["state"], registry=registry)
        self._readers = {state: readers.labels(state) for state in ("following", "cut-off")}
        self._queue_bytes = Gauge("indexer_queue_bytes", "Messages received and not yet settled.", registry=registry)

    def erased(self, records: int) -> None:
        """Of accounts that stayed deleted."""
        self._erased.inc(records)

    def received(self, kind: str) -> None:
        self._received[kind].inc()

    def outcome(self, kind: str, outcome: Outcome, count: int = 1) -> None:
        """Exactly once for each message received."""
        self._events[kind, outcome].inc(count)

    def rejected(self, reason: Rejection, count: int = 1) -> None:
        self._rejected[reason].inc(count)

    def desynchronized(self, reason: Desync, count: int = 1) -> None:
        self._desynchronized[reason].inc(count)

    def record_changes(self, action: Action | str, *, live: bool, count: int = 1) -> None:
        """`live` is False for what a resync found to be different."""
        self._changes[action, live].inc(count)

    def cursor(self, relay: str, seq: int) -> None:
        # Not made at the start: before a relay is used it has no cursor, and 0 would be a lie.
        self._cursor.labels(relay).set(seq)

    def resync(self, result: str, seconds: float) -> None:
        self._resyncs[result].inc()
        self._resync_seconds.observe(seconds)

    def put_off(self, count: int) -> None:
        """Claimed repos of hosts that have their share: they took no time."""
        self._resyncs["put-off"].inc(count)

    def identity_lookup(self, method: str, result: str) -> None:
        """One answer over the network: of a directory, a did:web's host, a name server, a handle's host."""
        self._lookups[method, result].inc()

    def identity_cache(self, found_in: str, count: int) -> None:
        """So many of a batch's identities were there."""
        self._cache[found_in].inc(count)

    def identity_refresh(self, cause: str, result: str) -> None:
        """Something newer than a known identity was wanted."""
        self._refreshes[cause, result].inc()

    def outbound_request(self, result: str) -> None:
        self._requests[result].inc()

    def paused_hosts(self, count: int) -> None:
        self._paused_hosts.set(count)

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Times the block."""
        return self._stages[name].time()

    def repos(self, counts: Mapping[SyncStatus, int], resync_queue: int) -> None:
        """All repos by status, and those that wait for a resync."""
        for status, gauge in self._repos.items():
            gauge.set(counts.get(status, 0))
        self._resync_queue.set(resync_queue)

    def change_log(self, size: int, *, worst_lag: float, readers: int, cut_off: int) -> None:
        """Bytes of the log; seconds that the last of its readers is behind; readers that follow, and that don't."""
        self._log_bytes.set(size)
        self._reader_lag.set(worst_lag)
        self._readers["following"].set(readers)
        self._readers["cut-off"].set(cut_off)

    def watch(self, *, lag_seconds: Callable[[], float], queue_bytes: Callable[[], float]) -> None:
        """Sources that are read at each scrape; `lag_seconds` is NaN as long as no event is saved."""
        self._lag.set_function(lag_seconds)
        self._queue_bytes.set_function(queue_bytes)
