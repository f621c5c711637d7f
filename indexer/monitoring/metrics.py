"""Prometheus metrics of one process. The names are a public interface; the label sets are closed."""

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
from indexer.identity import FOUND_IN, REFRESH_CAUSES, REFRESH_RESULTS
from indexer.outbound import REQUEST_RESULTS
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.plans import Action
from indexer.sync.repo_state import SyncStatus
from indexer.sync.repo_transitions import Outcome

KINDS = ("commit", "sync", "identity", "account", "info", "error", "unknown", "malformed")
ACTIONS = ("create", "update", "delete")
STAGES = ("load", "plan", "apply", "fetch", "verify-export", "diff", "apply-export")
RESYNC_RESULTS = ("synchronized", "unchanged", "lost", "postponed", *Desync, *FetchFailure)
LOOKUP_METHODS = ("plc", "web", "dns", "https")
LOOKUP_RESULTS = ("found", "missing", *FetchFailure)
CONSUMER_STATES = ("following", "cut-off")

_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_RESYNC_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)


class Metrics:
    """The metrics, with one method for each thing that is counted or measured.

    A label value outside its closed set is a bug of the caller and raises KeyError. All counters exist from the start,
    so that a rate over the first increment is right.

    Attributes:
        registry: The registry that `/metrics` shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_process_metrics()
        self._add_event_metrics()
        self._add_record_metrics()
        self._add_resync_metrics()
        self._add_identity_metrics()
        self._add_outbound_metrics()
        self._add_change_log_metrics()

    def _add_process_metrics(self) -> None:
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        build = Info("indexer_build", "Version of the indexer and of Python.", registry=self.registry)
        build.info({"version": __version__, "python": platform.python_version()})

    def _add_event_metrics(self) -> None:
        received = self._counter("indexer_events_received", "Messages received from relays.", "kind")
        self._received = {kind: received.labels(kind) for kind in KINDS}
        events = self._counter("indexer_events", "Messages processed, by outcome.", "kind", "outcome")
        self._events = {(kind, outcome): events.labels(kind, outcome) for kind in KINDS for outcome in Outcome}
        rejected = self._counter("indexer_rejected", "Messages rejected by their own fault.", "reason")
        self._rejected = {reason: rejected.labels(reason) for reason in Rejection}
        desynchronized = self._counter("indexer_desynchronized", "Repos that became desynchronized.", "reason")
        self._desynchronized = {reason: desynchronized.labels(reason) for reason in Desync}
        self._cursor = self._gauge("indexer_cursor_seq", "Stored cursor: every event up to it is applied.", "relay")
        self._lag = self._gauge("indexer_firehose_lag_seconds", "Age of the newest stored event.")
        self._lag.set(float("nan"))
        self._queue_bytes = self._gauge(
            "indexer_queue_bytes", "Size of the messages that are received and not settled."
        )
        stages = self._histogram("indexer_batch_seconds", "Duration of one stage of a batch.", _STAGE_BUCKETS, "stage")
        self._stages = {stage: stages.labels(stage) for stage in STAGES}

    def _add_record_metrics(self) -> None:
        changes = self._counter("indexer_record_changes", "Record changes written.", "action", "live")
        self._changes = {
            (action, live): changes.labels(action, str(live).lower()) for action in ACTIONS for live in (True, False)
        }
        self._erased = self._counter("indexer_erased_records", "Records of deleted accounts that were erased.")

    def _add_resync_metrics(self) -> None:
        repos = self._gauge("indexer_repos", "Repos by sync status.", "sync_status")
        self._repos = {status: repos.labels(status) for status in SyncStatus}
        resyncs = self._counter("indexer_resync", "Resyncs that ended, by result.", "result")
        self._resyncs = {result: resyncs.labels(result) for result in RESYNC_RESULTS}
        self._resync_seconds = self._histogram("indexer_resync_seconds", "Duration of one resync.", _RESYNC_BUCKETS)
        self._resync_queue = self._gauge("indexer_resync_queue", "Repos waiting for a resync.")

    def _add_identity_metrics(self) -> None:
        lookups = self._counter("indexer_identity_lookups", "Identity lookups over the network.", "method", "result")
        self._lookups = {
            (method, result): lookups.labels(method, result) for method in LOOKUP_METHODS for result in LOOKUP_RESULTS
        }
        cache = self._counter("indexer_identity_cache", "Identities needed, by where they were found.", "found_in")
        self._cache = {found_in: cache.labels(found_in) for found_in in FOUND_IN}
        refreshes = self._counter(
            "indexer_identity_refreshes", "Requests to refresh a known identity.", "cause", "result"
        )
        self._refreshes: dict[tuple[str, str], Counter] = {
            (cause, result): refreshes.labels(cause, result) for cause in REFRESH_CAUSES for result in REFRESH_RESULTS
        }

    def _add_outbound_metrics(self) -> None:
        requests = self._counter(
            "indexer_outbound_requests", "HTTP requests to other hosts, sent or refused before sending.", "result"
        )
        self._requests = {result: requests.labels(result) for result in REQUEST_RESULTS}
        self._paused_hosts = self._gauge("indexer_hosts_paused", "Hosts to which no requests are sent at present.")

    def _add_change_log_metrics(self) -> None:
        self._log_bytes = self._gauge("indexer_change_log_bytes", "Size of the change log.")
        self._consumer_lag = self._gauge(
            "indexer_consumer_lag_seconds", "Age of the oldest change that a registered consumer has not read."
        )
        consumers = self._gauge("indexer_consumers", "Registered consumers of the change log.", "state")
        self._consumers = {state: consumers.labels(state) for state in CONSUMER_STATES}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def received(self, kind: str) -> None:
        """Count a message received."""
        self._received[kind].inc()

    def outcome(self, kind: str, outcome: Outcome, count: int = 1) -> None:
        """Count the outcome of messages. Every message received has exactly one outcome."""
        self._events[kind, outcome].inc(count)

    def rejected(self, reason: Rejection, count: int = 1) -> None:
        """Count rejected messages."""
        self._rejected[reason].inc(count)

    def desynchronized(self, reason: Desync, count: int = 1) -> None:
        """Count repos that became desynchronized."""
        self._desynchronized[reason].inc(count)

    def record_changes(self, action: Action | str, *, live: bool, count: int = 1) -> None:
        """Count record changes written; `live` is False for changes that a resync found."""
        self._changes[action, live].inc(count)

    def erased(self, records: int) -> None:
        """Count erased records of deleted accounts."""
        self._erased.inc(records)

    def cursor(self, relay: str, seq: int) -> None:
        """Set the stored cursor of a relay."""
        # The label is added at the first use: a relay that was never used has no cursor, not the cursor 0.
        self._cursor.labels(relay).set(seq)

    def resync(self, result: str, seconds: float) -> None:
        """Count a resync that ended, and its duration."""
        self._resyncs[result].inc()
        self._resync_seconds.observe(seconds)

    def postponed(self, count: int) -> None:
        """Count claimed repos that were postponed before their resync began. They have no duration."""
        self._resyncs["postponed"].inc(count)

    def identity_lookup(self, method: str, result: str) -> None:
        """Count an answer over the network: from a PLC directory, a did:web host, a DNS server or a handle's host."""
        self._lookups[method, result].inc()

    def identity_cache(self, found_in: str, count: int) -> None:
        """Count where the identities of a batch were found."""
        self._cache[found_in].inc(count)

    def identity_refresh(self, cause: str, result: str) -> None:
        """Count a request to refresh a known identity."""
        self._refreshes[cause, result].inc()

    def outbound_request(self, result: str) -> None:
        """Count a request to another host."""
        self._requests[result].inc()

    def paused_hosts(self, count: int) -> None:
        """Set the number of paused hosts."""
        self._paused_hosts.set(count)

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that measures the duration of one stage."""
        return self._stages[name].time()

    def repos(self, counts: Mapping[SyncStatus, int], resync_queue: int) -> None:
        """Set the number of repos by sync status, and the number of repos that wait for a resync."""
        for status, gauge in self._repos.items():
            gauge.set(counts.get(status, 0))
        self._resync_queue.set(resync_queue)

    def change_log(self, size: int, *, max_lag: float, following: int, cut_off: int) -> None:
        """Set the state of the change log.

        Args:
            size: Bytes of the change log.
            max_lag: Lag of the slowest consumer, in seconds.
            following: Number of consumers that follow the change log.
            cut_off: Number of consumers that were disconnected and have to register again.
        """
        self._log_bytes.set(size)
        self._consumer_lag.set(max_lag)
        self._consumers["following"].set(following)
        self._consumers["cut-off"].set(cut_off)

    def watch(self, *, lag_seconds: Callable[[], float], queue_bytes: Callable[[], float]) -> None:
        """Set the functions that are called at each scrape; `lag_seconds` returns NaN if no event is stored yet."""
        self._lag.set_function(lag_seconds)
        self._queue_bytes.set_function(queue_bytes)
