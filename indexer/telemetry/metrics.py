"""Prometheus metrics of one process. The names are a public interface; the label sets are closed or bounded."""

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from indexer import __version__
from indexer.reasons import Desync, FetchFailure, OmittedValue, Rejection
from indexer.sync.changes import Action
from indexer.sync.repo import Outcome, SyncStatus
from indexer.telemetry.metric_definitions import (
    FOUND_IN,
    MAX_LISTED,
    METRICS,
    REFRESH_CAUSES,
    REFRESH_RESULTS,
    REQUEST_RESULTS,
    MetricDefinition,
)

KINDS = ("commit", "sync", "identity", "account", "info", "error", "unknown", "malformed")
ACTIONS = ("create", "update", "delete")
STAGES = ("load", "plan", "apply", "verify-ahead", "fetch", "verify-export", "diff", "apply-export")
RESYNC_RESULTS = ("synchronized", "unchanged", "lost", "postponed", *Desync, *FetchFailure)
LOOKUP_METHODS = ("plc", "web", "dns", "https")
LOOKUP_RESULTS = ("found", "missing", *FetchFailure)
CONSUMER_STATES = ("following", "cut-off")
FEED_KINDS = ("tap", "jetstream", "webhook")
DISCONNECTIONS = {
    "tap": ("client", "feed-ended"),
    "jetstream": (
        "client",
        "too-slow",
        "not-reading",
        "log-trimmed",
        "bad-message",
        "no-hello",
        "displaced",
        "refused",
    ),
}
"""Why connections of clients of feeds end, by the kind of the feed."""

Reading = float | Mapping[tuple[str, ...], float]
"""The value of a gauge without labels, or its values by the values of its labels."""

_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_NUMBERING_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
_DELAY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RESYNC_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series with the start time of each counter tells nothing that the process metrics do not


class ConsumerLag(NamedTuple):
    """A consumer of the change log, the age of its oldest unread change, and the number of unread changes."""

    consumer: str
    seconds: float
    changes: int


class _GaugesReadAtScrape(Collector):
    """Gauges whose values are read from the stages at each scrape.

    Attributes:
        readers: The function that reads a gauge, by its name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.readers: dict[str, Callable[[], Reading]] = {
            name: dict[tuple[str, ...], float] if METRICS[name].labels else _unknown for name in names
        }

    def collect(self) -> Iterable[Metric]:
        for name, read in self.readers.items():
            definition, reading = METRICS[name], read()
            family = GaugeMetricFamily(name, definition.meaning, labels=definition.labels)
            values = reading if isinstance(reading, Mapping) else {(): reading}
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


class _CountersReadAtScrape(Collector):
    """A counter that is incremented for each message: plain numbers, which cost a third of `Counter.inc` with its lock.

    Only the event loop's thread may increment them.

    Attributes:
        counts: The numbers by the values of the labels.
    """

    def __init__(self, definition: MetricDefinition, name: str, labels: Iterable[tuple[str, ...]]) -> None:
        self.counts = dict.fromkeys(labels, 0)
        self._definition = definition
        self._name = name

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._definition.meaning, labels=self._definition.labels)
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family


def _unknown() -> float:
    return math.nan


class Metrics:
    """The metrics: an attribute for each that callers increment or set, and a method where more is to be done.

    A label value outside its closed set is a bug of the caller and raises KeyError. All counters exist from the start,
    so that a rate over the first increment is right.

    Attributes:
        registry: The registry that `/metrics` shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._registered: set[str] = set()
        self._add_process_metrics()
        self._add_event_metrics()
        self._add_record_metrics()
        self._add_resync_metrics()
        self._add_identity_metrics()
        self._add_outbound_metrics()
        self._add_change_log_metrics()
        self._add_feed_metrics()
        self._add_link_metrics()
        self._read_at_scrape = _GaugesReadAtScrape(name for name in METRICS if name not in self._registered)
        self.registry.register(self._read_at_scrape)

    def _add_process_metrics(self) -> None:
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.event_loop_delay = self._histogram("indexer_event_loop_delay_seconds", _DELAY_BUCKETS)
        build = Info("indexer_build", self._definition("indexer_build_info").meaning, registry=self.registry)
        build.info({"version": __version__, "python": platform.python_version()})
        self.database_up = self._gauge("indexer_database_up")
        self.database_up.set(1)
        self.postgres_restarts = self._counter("indexer_postgres_restarts_total")

    def _add_event_metrics(self) -> None:
        name = "indexer_events_received_total"
        received = _CountersReadAtScrape(self._definition(name), name, [(kind,) for kind in KINDS])
        self.registry.register(received)
        self._received = received.counts
        events = self._counter("indexer_events_total")
        self._events = {(kind, outcome): events.labels(kind, outcome) for kind in KINDS for outcome in Outcome}
        rejected = self._counter("indexer_rejected_total")
        self._rejected = {reason: rejected.labels(reason) for reason in Rejection}
        desynchronized = self._counter("indexer_desynchronized_total")
        self._desynchronized = {reason: desynchronized.labels(reason) for reason in Desync}
        self._lenient_commits = self._counter("indexer_lenient_commits_total")
        self.refused_accounts = self._counter("indexer_refused_accounts_total")
        self._cursor = self._gauge("indexer_cursor_seq")
        self.gaps_open = self._gauge("indexer_gaps_open")
        stages = self._histogram("indexer_batch_seconds", _STAGE_BUCKETS)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}

    def _add_record_metrics(self) -> None:
        changes = self._counter("indexer_record_changes_total")
        self._changes = {
            (action, live): changes.labels(action, str(live).lower()) for action in ACTIONS for live in (True, False)
        }
        self.erased_records = self._counter("indexer_erased_records_total")

    def _add_resync_metrics(self) -> None:
        repos = self._gauge("indexer_repos")
        self._repos = {status: repos.labels(status) for status in SyncStatus}
        reasons = self._gauge("indexer_repos_desynchronized")
        self._reasons = {reason: reasons.labels(reason) for reason in Desync}
        resyncs = self._counter("indexer_resync_total")
        self._resyncs = {result: resyncs.labels(result) for result in RESYNC_RESULTS}
        self._resync_seconds = self._histogram("indexer_resync_seconds", _RESYNC_BUCKETS)
        self._resync_queue = self._gauge("indexer_resync_queue")
        self._scope_incomplete = self._gauge("indexer_scope_incomplete_repos")

    def _add_identity_metrics(self) -> None:
        lookups = self._counter("indexer_identity_lookups_total")
        self._lookups = {
            (method, result): lookups.labels(method, result) for method in LOOKUP_METHODS for result in LOOKUP_RESULTS
        }
        cache = self._counter("indexer_identity_cache_total")
        self._cache = {found_in: cache.labels(found_in) for found_in in FOUND_IN}
        refreshes = self._counter("indexer_identity_refreshes_total")
        self._refreshes: dict[tuple[str, str], Counter] = {
            (cause, result): refreshes.labels(cause, result) for cause in REFRESH_CAUSES for result in REFRESH_RESULTS
        }

    def _add_outbound_metrics(self) -> None:
        requests = self._counter("indexer_outbound_requests_total")
        self._requests = {result: requests.labels(result) for result in REQUEST_RESULTS}

    def _add_change_log_metrics(self) -> None:
        self._log_bytes = self._gauge("indexer_change_log_bytes")
        self._numbering = self._histogram("indexer_numbering_seconds", _NUMBERING_BUCKETS)
        self._unnumbered = self._gauge("indexer_unnumbered_batches")
        self.notification_queue = self._gauge("indexer_notification_queue_ratio")
        self._in_doubt = self._gauge("indexer_transactions_in_doubt")
        self._consumer_lag = self._gauge("indexer_consumer_lag_seconds")
        self._behind_seconds = self._gauge("indexer_consumer_behind_seconds")
        self._behind_changes = self._gauge("indexer_consumer_behind_changes")
        consumers = self._gauge("indexer_consumers")
        self._consumers = {state: consumers.labels(state) for state in CONSUMER_STATES}

    def _add_feed_metrics(self) -> None:
        events = self._counter("indexer_feed_events_total")
        self.feed_events = {kind: events.labels(kind) for kind in FEED_KINDS}
        omitted = self._counter("indexer_feed_values_omitted_total")
        self._feed_values_omitted = {reason: omitted.labels(reason) for reason in OmittedValue}
        disconnections = self._counter("indexer_feed_disconnections_total")
        self.feed_disconnections = {
            (kind, reason): disconnections.labels(kind, reason)
            for kind, reasons in DISCONNECTIONS.items()
            for reason in reasons
        }

    def _add_link_metrics(self) -> None:
        self._links_progress = self._gauge("indexer_links_progress_ratio")
        self._links_progress.set(1.0)

    def _definition(self, name: str) -> MetricDefinition:
        self._registered.add(name)
        return METRICS[name]

    def _counter(self, name: str) -> Counter:
        defined = self._definition(name)
        # The library adds the suffix.
        return Counter(name.removesuffix("_total"), defined.meaning, defined.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        defined = self._definition(name)
        return Gauge(name, defined.meaning, defined.labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        defined = self._definition(name)
        return Histogram(name, defined.meaning, defined.labels, registry=self.registry, buckets=buckets)

    def received(self, kind: str) -> None:
        """Count a message received."""
        self._received[kind,] += 1

    def outcome(self, kind: str, outcome: Outcome, count: int = 1) -> None:
        """Count the outcome of messages. Every message received has exactly one outcome."""
        self._events[kind, outcome].inc(count)

    def rejected(self, reason: Rejection, count: int = 1) -> None:
        """Count rejected messages."""
        self._rejected[reason].inc(count)

    def desynchronized(self, reason: Desync, count: int = 1) -> None:
        """Count repos that became desynchronized."""
        self._desynchronized[reason].inc(count)

    def lenient_commits(self, count: int) -> None:
        """Count commits that were applied although their inversion is undecidable."""
        self._lenient_commits.inc(count)

    def record_changes(self, action: Action | str, *, live: bool, count: int = 1) -> None:
        """Count record changes written; `live` is False for changes that a resync found."""
        self._changes[action, live].inc(count)

    def cursor(self, relay: str, seq: int) -> None:
        """Set the stored cursor of a relay."""
        # The label is added at the first use: a relay that was never used has no cursor, not the cursor 0.
        self._cursor.labels(relay).set(seq)

    def resync(self, result: str, seconds: float) -> None:
        """Count a resync that ended, and its duration."""
        self._resyncs[result].inc()
        self._resync_seconds.observe(seconds)

    def postponed(self, result: str) -> None:
        """Count a claimed repo that was postponed before its resync began. It has no duration."""
        self._resyncs[result].inc()

    def feed_value_omitted(self, reason: OmittedValue) -> None:
        """Count an event of the feed for clients of tap that comes without the value of its record."""
        self._feed_values_omitted[reason].inc()

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

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that measures the duration of one stage."""
        return self._stages[name].time()

    def repos(
        self, statuses: Mapping[SyncStatus, int], reasons: Mapping[str, int], resync_queue: int, incomplete: int
    ) -> None:
        """Set the number of repos by sync status and by sync reason, and of those that wait.

        `resync_queue` wait for a resync, and `incomplete` for the records of a collection that the scope added.
        """
        for status, gauge in self._repos.items():
            gauge.set(statuses.get(status, 0))
        for reason, gauge in self._reasons.items():
            gauge.set(reasons.get(reason, 0))
        self._resync_queue.set(resync_queue)
        self._scope_incomplete.set(incomplete)

    def links(self, progress: float | None) -> None:
        """Set the progress of the backfill of links; None if none are kept."""
        self._links_progress.set(1.0 if progress is None else progress)

    def change_log(self, size: int, following: Sequence[ConsumerLag], *, cut_off: int) -> None:
        """Set the state of the change log.

        Args:
            size: Bytes of the change log.
            following: The consumers that follow the change log.
            cut_off: Number of consumers that were disconnected.
        """
        self._log_bytes.set(size)
        self._consumer_lag.set(max([lag.seconds for lag in following], default=0.0))
        self._consumers["following"].set(len(following))
        self._consumers["cut-off"].set(cut_off)
        self._behind_seconds.clear()
        self._behind_changes.clear()
        for lag in sorted(following, key=lambda lag: -lag.seconds)[:MAX_LISTED]:
            self._behind_seconds.labels(lag.consumer).set(lag.seconds)
            self._behind_changes.labels(lag.consumer).set(lag.changes)

    def numbering(self, numbered: Iterable[float], *, waiting: int, in_doubt: int) -> None:
        """Note the ages in seconds of change batches that were numbered, and what remains.

        Args:
            numbered: The ages.
            waiting: Change batches without numbers.
            in_doubt: Transactions in doubt.
        """
        for age in numbered:
            self._numbering.observe(age)
        self._unnumbered.set(waiting)
        self._in_doubt.set(in_doubt)

    def watch(self, readers: Mapping[str, Callable[[], Reading]]) -> None:
        """Set the functions that read gauges from the stages at each scrape, by the name of the gauge."""
        unknown = readers.keys() - self._read_at_scrape.readers.keys()
        if unknown:
            raise KeyError(*unknown)
        self._read_at_scrape.readers.update(readers)
