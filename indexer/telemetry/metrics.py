"""Prometheus metrics of one process. The names are a public interface; the label sets are closed or bounded."""

import math
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from indexer import __version__
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.changes import Action
from indexer.sync.repo import Outcome, SyncStatus

MAX_LISTED = 20
"""Maximum number of hosts, and of consumers, that have a time series of their own: those with the highest values."""

RefreshCause = Literal["signature", "change", "age"]
"""Why a known identity is looked up again: its key did not verify a signature, a change was announced, or its age."""

REQUEST_RESULTS = (
    *("2xx", "3xx", "4xx", "5xx", "other", "given-up"),
    *(FetchFailure.UNREACHABLE, FetchFailure.NO_SUCH_HOST, FetchFailure.TIMEOUT, FetchFailure.TOO_LARGE),
    *(FetchFailure.BAD_ANSWER, FetchFailure.REFUSED_ADDRESS, FetchFailure.THROTTLED, FetchFailure.HOST_PAUSED),
)
"""All results of a request. With one of the last three, the request was not sent."""

KINDS = ("commit", "sync", "identity", "account", "info", "error", "unknown", "malformed")
STAGES = ("load", "plan", "apply", "verify-ahead", "fetch", "verify-export", "diff", "apply-export")
RESYNC_RESULTS = ("synchronized", "unchanged", "lost", "postponed", *Desync, *FetchFailure)
LOOKUP_METHODS = ("plc", "web", "dns", "https")
LOOKUP_RESULTS = ("found", "missing", *FetchFailure)
FEED_KINDS = ("tap", "jetstream", "webhook")
DISCONNECTIONS = (
    *("client", "feed-ended", "too-slow", "not-reading", "log-trimmed", "bad-message", "no-hello", "displaced"),
    "refused",
)
"""Why connections of clients of feeds end."""

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
"""Upper bounds of the buckets of all histograms, in seconds."""

Reading = float | None | Mapping[tuple[str, ...], float | None]
"""The value of a gauge without labels, or its values by the values of its labels. None is shown as NaN."""

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)
_OPTIONS: dict[type, dict[str, Any]] = {Histogram: {"buckets": BUCKETS}}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series with the start time of each counter tells nothing that the process metrics do not


class MetricDefinition(NamedTuple):
    """The definition of one metric.

    Attributes:
        name: The name as Prometheus shows it, without the suffixes of the series of a histogram.
        kind: `counter`, `gauge` or `histogram`.
        meaning: The help text. It ends with a full stop.
        worry: When an operator should act, or look further.
        section: The heading in docs/metrics.md.
    """

    name: str
    kind: str
    meaning: str
    worry: str
    labels: tuple[str, ...]
    section: str


class Metrics(Collector):
    """The metrics: an attribute for each that callers increment, set or observe.

    A metric with closed label sets is a dict of its series, by the label, or by the tuple of its labels. So a label
    value outside its set is a bug of the caller and raises KeyError. All these series exist from the start, so that a
    rate over the first increment is right.
    """

    def __init__(self) -> None:  # noqa: PLR0915 - a list
        self.registry = CollectorRegistry()
        self.definitions: dict[str, MetricDefinition] = {}
        self._readers: dict[str, Callable[[], Reading]] = {}
        # fmt: off
        self._section = "Stream"
        self._at_scrape(
            "indexer_relay_connected", ("relay",), "1 while the relay is connected, else 0.",
            "The sum over all relays of a process is 0 for more than a minute.")
        self._at_scrape(
            "indexer_seconds_since_last_message", ("relay",),
            "Time since the relay sent a message; NaN before the first.",
            "It exceeds the usual pauses although the relay is connected.")
        self.events_received = self._series(
            Counter, "indexer_events_received_total", {"kind": KINDS}, "Messages received from relays.",
            "Its rate falls far below that of other days.")
        self.events = self._series(
            Counter, "indexer_events_total", {"kind": KINDS, "outcome": Outcome}, "Messages processed, by outcome.",
            "Received messages minus `indexer_queue_messages` differ from the sum over all outcomes.")
        self.duplicate_events = self._add(
            Counter, "indexer_duplicate_events_total", ("relay",),
            "Messages of the relay that another relay had brought before; part of the outcome `replayed`.",
            "With several relays, the sum of its rates is far below the rate of one relay.")
        self.rejected = self._series(
            Counter, "indexer_rejected_total", {"reason": Rejection},
            "Messages rejected by their own fault; each leaves a dead letter.",
            "Its rate grows; see [reasons.md](reasons.md).")
        self.desynchronized = self._series(
            Counter, "indexer_desynchronized_total", {"reason": Desync}, "Repos that became desynchronized.",
            "Its rate stays above that of synchronized resyncs.")
        self.cursor_seq = self._add(
            Gauge, "indexer_cursor_seq", ("relay",), "Stored cursor: every event up to it is applied.",
            "It does not change while messages are received.")
        self._at_scrape(
            "indexer_cursor_age_seconds", ("relay",),
            "The lag; before the first event, the age of the message at the stored cursor; NaN if not known.",
            "It approaches the time for which the relay keeps messages (72 hours for public relays).")
        self._at_scrape(
            "indexer_firehose_lag_seconds", (),
            "Time since the moment up to which all events are stored, by the times in most events; NaN before the "
            "first.",
            "It is above 60 (the daemon is not ready) or grows.")
        self.gaps_open = self._add(
            Gauge, "indexer_gaps_open", (), "Gaps in the streams that are not closed yet.",
            "It is above 0 for longer than a reconciliation takes.")
        self.relay_missing_messages = self._add(
            Counter, "indexer_relay_missing_messages_total", ("relay",),
            "Messages that the relay has not sent within a minute after another relay.",
            "It grows: the relay omits messages, or the other one is ahead of it by more than a minute.")
        self.relay_uncompared_messages = self._add(
            Counter, "indexer_relay_uncompared_messages_total", ("relay",),
            "Messages of other relays that this relay may lack: it was disconnected or behind for too long to know.",
            "It grows while the relay is connected.")
        self._at_scrape(
            "indexer_queue_bytes", (), "Size of the messages that are received and not settled.",
            "It stays at its limit of 16 MiB: the database is slower than the stream.")
        self._at_scrape(
            "indexer_queue_messages", (), "Messages that are received and have no outcome yet.",
            "It stays high while few messages are processed.")
        self._at_scrape(
            "indexer_key_waiting_messages", (),
            "Messages that wait for the lookup of a signing key; a part of `indexer_queue_messages`.",
            "It is most of the queue: the directory is slow or unreachable.")
        self.batch_seconds = self._series(
            Histogram, "indexer_batch_seconds", {"stage": STAGES},
            "Duration of one stage of a batch or an export. `verify-export` and `diff` include the wait for their "
            "thread; new repos that share a transaction count once.",
            "A stage takes several times as long as on other days.")
        self.record_changes = self._series(
            Counter, "indexer_record_changes_total", {"action": get_args(Action), "live": ("true", "false")},
            "Record changes written.", "Its rate falls far below that of other days.")

        self._section = "Repos and resyncs"
        self.repos = self._series(
            Gauge, "indexer_repos", {"sync_status": SyncStatus},
            "Repos by sync status; an estimate above three million.", "`desynchronized` grows for hours.")
        self.repos_desynchronized = self._series(
            Gauge, "indexer_repos_desynchronized", {"reason": Desync},
            "Repos that are not synchronized now, by reason.",
            "One reason grows for hours; see [reasons.md](reasons.md).")
        self.resync_queue = self._add(
            Gauge, "indexer_resync_queue", (), "Repos waiting for a resync.", "It grows for hours.")
        self.scope_incomplete_repos = self._add(
            Gauge, "indexer_scope_incomplete_repos", (), "Repos that wait for the records of an added collection.",
            "It is above 0 and does not fall for an hour.")
        self.resyncs = self._series(
            Counter, "indexer_resync_total", {"result": RESYNC_RESULTS}, "Resyncs that ended, by result.",
            "Results other than `synchronized`, `unchanged` and `postponed` are most of them.")
        self.resync_seconds = self._add(
            Histogram, "indexer_resync_seconds", (), "Duration of one resync.",
            "It is several times as long as on other days.")
        self._at_scrape(
            "indexer_resync_running", (), "Resyncs that run now.", "It stays 0 while `indexer_resync_queue` does not.")

        self._section = "Identities"
        self.identity_lookups = self._series(
            Counter, "indexer_identity_lookups_total", {"method": LOOKUP_METHODS, "result": LOOKUP_RESULTS},
            "Identity lookups over the network.",
            "Results other than `found` and `missing` are most of those with the method `plc`.")
        self.identity_cache = self._series(
            Counter, "indexer_identity_cache_total", {"found_in": ("memory", "database", "nowhere")},
            "Identities needed, by where they were found.", "`nowhere` is a large share long after the first start.")
        self.identity_refreshes = self._series(
            Counter, "indexer_identity_refreshes_total",
            {"cause": get_args(RefreshCause), "result": ("asked", "too-soon", "over-budget")},
            "Requests to refresh a known identity.", "`over-budget` is most of them: raise `INDEXER_PLC_RATE`.")
        self.plc_logs = self._add(
            Counter, "indexer_plc_logs_total", ("directory", "result"),
            "Logs of did:plc operations, `verified` or refused for a reason in docs/reasons.md.",
            "Many are refused: use another directory.")
        self.plc_operations = self._series(
            Counter, "indexer_plc_operations_total", {"result": ("proven", "repeated", "skipped", "unproven")},
            "Operations in the export of a PLC directory. `skipped`: of untracked repos.", "`unproven` grows.")

        self._section = "Other hosts"
        self.outbound_requests = self._series(
            Counter, "indexer_outbound_requests_total", {"result": REQUEST_RESULTS},
            "HTTP requests to other hosts, also refused ones.", "Failures are most of them.")
        self._at_scrape(
            "indexer_hosts_paused", (), "Hosts to which no requests are sent at present.",
            "It jumps, perhaps because of the network of this machine.")
        self._at_scrape(
            "indexer_hosts_failing", (), "Hosts whose last five or more requests failed.",
            "It jumps, perhaps because of the network of this machine.")
        self._at_scrape(
            "indexer_host_consecutive_failures", ("host",),
            f"Failed requests since the last response, for the {MAX_LISTED} failing hosts with the most of them.",
            "The host has many repos and does not recover.")
        self.host_lists = self._series(
            Counter, "indexer_host_lists_total", {"result": ("complete", "failed")},
            "Repo lists of hosts that were read to their end, or could not be.", "`failed` is most of them.")
        self._at_scrape(
            "indexer_hosts", ("state",),
            "Hosts that relays list: `listed` (their repo lists were read), `failing` (the last reading failed), and "
            "`withheld` (with accounts that no relay passes on).", "`failing` is most of `listed`.")
        self._at_scrape(
            "indexer_withheld_accounts", (),
            "Accounts that relays withhold, omit or bring too late, as the repo lists of their hosts show.",
            "It grows: see `atproto.relay_hosts`.")
        self._at_scrape(
            "indexer_host_streams", (),
            "Hosts whose own streams are open, because no relay passes on some of their accounts.",
            '0 while `indexer_hosts{state="withheld"}` is not.')

        self._section = "Change log and its consumers"
        self.change_log_bytes = self._add(
            Gauge, "indexer_change_log_bytes", (), "Size of the change log.",
            "It is above `INDEXER_CHANGE_BYTES`: a consumer is behind.")
        self.notification_queue_ratio = self._add(
            Gauge, "indexer_notification_queue_ratio", (), "Used share of the notification queue of Postgres, 0 to 1.",
            "It is above 0.05: a session that listens has left a transaction open.")
        self.consumer_lag_seconds = self._add(
            Gauge, "indexer_consumer_lag_seconds", (),
            "Age of the oldest change that a registered consumer has not read.", "It is above an hour.")
        self.consumers = self._series(
            Gauge, "indexer_consumers", {"state": ("following", "cut-off")}, "Registered consumers of the change log.",
            "`cut-off` is above 0: register these consumers again, and read the records again.")
        self.consumer_behind_seconds = self._add(
            Gauge, "indexer_consumer_behind_seconds", ("consumer",),
            f"Age of the oldest change that the consumer has not read, for the {MAX_LISTED} consumers that lag most.",
            "It is above an hour.")
        self.consumer_behind_changes = self._add(
            Gauge, "indexer_consumer_behind_changes", ("consumer",),
            f"Changes that the consumer has not read, for the {MAX_LISTED} consumers that lag most.", "It grows.")

        self._section = "Feeds"
        self._at_scrape(
            "indexer_feed_clients", ("kind",),
            "Connected clients of `/channel` (`tap`) and of both Jetstream streams (`jetstream`); 1 for a `webhook`.",
            "It falls to 0 although clients are expected.")
        self.feed_events = self._series(
            Counter, "indexer_feed_events_total", {"kind": FEED_KINDS},
            "Events that were sent to clients, repeated ones included.",
            "Its rate is 0 although there are clients and new changes.")
        self.feed_disconnections = self._series(
            Counter, "indexer_feed_disconnections_total", {"kind": ("tap", "jetstream"), "reason": DISCONNECTIONS},
            "Connections of clients that ended. `client`: the client ended it, or the network. `displaced`, `refused`: "
            "all websockets were open.",
            "`too-slow` or `not-reading` grows steadily: clients are too slow, or this process is. `refused` grows.")
        self._at_scrape(
            "indexer_feed_oldest_unacknowledged_seconds", (),
            "Age of the oldest change that clients of tap, or the webhook, have not acknowledged; 0 without any.",
            "It grows: clients are too slow, or refuse an event.")
        self._at_scrape(
            "indexer_feed_set_aside_events", (),
            "Events that were set aside because clients of tap, or the webhook, refused them for long.",
            "It is above 0: clients lack these records. `indexer rejected list --feed` names them.")

        self._section = "Links between records"
        self.links_progress = self._add(
            Gauge, "indexer_links_progress_ratio", (),
            "Estimated share of the repos whose links are stored, 0 to 1; 1 if links are off.",
            "It is below 1 and does not grow for an hour.")

        self._section = "Process and database"
        self.build_info = self._add(
            Gauge, "indexer_build_info", ("version", "python"), "Version of the indexer and of Python.",
            "Versions differ for longer than a rollout.")
        self._at_scrape(
            "indexer_ready", (), "1 while `/readyz` answers with status 200, else 0.",
            "It is 0 for more than some minutes.")
        self._at_scrape(
            "indexer_not_ready", ("code",),
            "1 for each reason why the daemon is not ready, by its code; docs/runbook.md lists the codes.",
            "A code stays for more than some minutes.")
        self._at_scrape(
            "indexer_stage_seconds_without_progress", ("stage",), "How long the stage has had work without progress.",
            "It is above 120 for most stages: `/healthz` fails and names the stage.")
        self.database_up = self._add(
            Gauge, "indexer_database_up", (), "1 while the database answers, else 0.", "It is 0.")
        self.postgres_restarts = self._add(
            Counter, "indexer_postgres_restarts_total", (),
            "Restarts of the embedded Postgres after it ended unexpectedly.",
            "It grows: `postgres/postgres.log` in the data directory says why.")
        self._at_scrape(
            "indexer_data_disk_free_bytes", (), "Free space on the file system of the data directory.",
            "It is below a tenth of the size. It does not show the disk of your own Postgres.")
        self._at_scrape(
            "indexer_data_disk_size_bytes", (), "Size of the file system of the data directory.",
            "Never; compare it with the free space.")
        self.event_loop_delay = self._add(
            Histogram, "indexer_event_loop_delay_seconds", (), "Delay of a timer on the event loop.",
            "Delays above 0.25 seconds are frequent: report a bug.")
        # fmt: on
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.build_info.labels(__version__, platform.python_version()).set(1)
        self.database_up.set(1)
        self.links_progress.set(1)

    def _add(self, kind: type[_Kind], name: str, labels: Collection[str], meaning: str, worry: str) -> _Kind:
        self._define(kind.__name__.lower(), name, labels, meaning, worry)
        # The library adds the suffix of a counter.
        return kind(name.removesuffix("_total"), meaning, labels, registry=self.registry, **_OPTIONS.get(kind, {}))

    def _series(
        self, kind: type[_Kind], name: str, labels: Mapping[str, Iterable[str]], meaning: str, worry: str
    ) -> dict[Any, _Kind]:
        """Add a metric with closed label sets; return its series by their label, or by the tuple of their labels."""
        metric = self._add(kind, name, labels, meaning, worry)
        sets = product(*labels.values())
        return {values if len(values) > 1 else values[0]: metric.labels(*values) for values in sets}

    def _at_scrape(self, name: str, labels: Collection[str], meaning: str, worry: str) -> None:
        """Add a gauge that is read by a function, see `watch`."""
        self._define("gauge", name, labels, meaning, worry)
        self._readers[name] = dict if labels else lambda: None

    def _define(self, kind: str, name: str, labels: Collection[str], meaning: str, worry: str) -> None:
        self.definitions[name] = MetricDefinition(name, kind, meaning, worry, tuple(labels), self._section)

    def collect(self) -> Iterable[Metric]:
        """Read the gauges that are read at each scrape."""
        for name, read in self._readers.items():
            definition, reading = self.definitions[name], read()
            family = GaugeMetricFamily(name, definition.meaning, labels=definition.labels)
            for labels, value in reading.items() if isinstance(reading, Mapping) else [((), reading)]:
                family.add_metric(labels, math.nan if value is None else value)
            yield family

    def outbound_request(self, result: str) -> None:
        """Count a request to another host."""
        self.outbound_requests[result].inc()

    def plc_log(self, directory: str, result: str) -> None:
        """Count a log of did:plc operations: "verified", or its flaw."""
        self.plc_logs.labels(directory, result).inc()

    def watch(self, readers: Mapping[str, Callable[[], Reading]]) -> None:
        """Set the functions that read gauges from the stages at each scrape, by the name of the gauge."""
        if unknown := readers.keys() - self._readers.keys():
            raise KeyError(*unknown)
        self._readers.update(readers)
