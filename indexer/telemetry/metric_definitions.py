"""Every metric of this program: its name, type and labels, its meaning, and when to worry (docs/metrics.md)."""

from dataclasses import dataclass
from typing import Literal

from indexer.reasons import FetchFailure

MAX_LISTED = 20
"""Maximum number of hosts, and of consumers, that have a time series of their own: those with the highest values."""

RefreshCause = Literal["signature", "change", "age"]
REFRESH_CAUSES: tuple[RefreshCause, ...] = ("signature", "change", "age")
"""Why a known identity is looked up again: its key did not verify a signature, a change was announced, or its age."""

REFRESH_RESULTS = ("asked", "too-soon", "over-budget")
FOUND_IN = ("memory", "database", "nowhere")
REQUEST_RESULTS = (
    "2xx",
    "3xx",
    "4xx",
    "5xx",
    "other",
    "given-up",
    FetchFailure.UNREACHABLE,
    FetchFailure.NO_SUCH_HOST,
    FetchFailure.TIMEOUT,
    FetchFailure.TOO_LARGE,
    FetchFailure.BAD_ANSWER,
    FetchFailure.REFUSED_ADDRESS,
    FetchFailure.THROTTLED,
    FetchFailure.HOST_PAUSED,
)
"""All results of a request. With one of the last three, the request was not sent."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """The definition of one metric.

    Attributes:
        name: The name as Prometheus shows it, without the suffixes of the series of a histogram.
        meaning: The help text. It ends with a full stop.
        worry: When an operator should act, or look further.
        labels: The names of its labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    worry: str
    labels: tuple[str, ...] = ()


_STREAM = (
    MetricDefinition(
        "indexer_relay_connected",
        "gauge",
        "1 while the relay is connected, else 0.",
        "The sum over all relays of a process is 0 for more than a minute.",
        ("relay",),
    ),
    MetricDefinition(
        "indexer_seconds_since_last_message",
        "gauge",
        "Time since the relay sent a message; NaN before the first.",
        "It exceeds the usual pauses although the relay is connected.",
        ("relay",),
    ),
    MetricDefinition(
        "indexer_events_received_total",
        "counter",
        "Messages received from relays.",
        "Its rate falls far below that of other days.",
        ("kind",),
    ),
    MetricDefinition(
        "indexer_events_total",
        "counter",
        "Messages processed, by outcome.",
        "Received messages minus `indexer_queue_messages` differ from the sum over all outcomes.",
        ("kind", "outcome"),
    ),
    MetricDefinition(
        "indexer_rejected_total",
        "counter",
        "Messages rejected by their own fault; each leaves a dead letter.",
        "Its rate grows; see [reasons.md](reasons.md).",
        ("reason",),
    ),
    MetricDefinition(
        "indexer_desynchronized_total",
        "counter",
        "Repos that became desynchronized.",
        "Its rate stays above that of synchronized resyncs.",
        ("reason",),
    ),
    MetricDefinition(
        "indexer_lenient_commits_total",
        "counter",
        "Commits applied although their inversion is undecidable.",
        "It grows although `INDEXER_INVERSION` should be strict.",
    ),
    MetricDefinition(
        "indexer_refused_accounts_total",
        "counter",
        "Unknown did:web that were ignored because their domain added too many accounts.",
        "It grows; the condition `new-accounts-limited` names the domain.",
    ),
    MetricDefinition(
        "indexer_cursor_seq",
        "gauge",
        "Stored cursor: every event up to it is applied.",
        "It does not change while messages are received.",
        ("relay",),
    ),
    MetricDefinition(
        "indexer_cursor_age_seconds",
        "gauge",
        "The lag; before the first event, the age of the message at the stored cursor; NaN if not known.",
        "It approaches the time for which the relay keeps messages (72 hours for public relays).",
        ("relay",),
    ),
    MetricDefinition(
        "indexer_firehose_lag_seconds",
        "gauge",
        "Time since the moment up to which all events are stored, by the times in most events; NaN before the first.",
        "It is above 60 (the daemon is not ready) or grows.",
    ),
    MetricDefinition(
        "indexer_gaps_open",
        "gauge",
        "Gaps in the stream that no reconciliation has closed yet.",
        "It is above 0 for longer than a reconciliation takes.",
    ),
    MetricDefinition(
        "indexer_queue_bytes",
        "gauge",
        "Size of the messages that are received and not settled.",
        "It stays at its limit of 64 MiB: the database is slower than the stream.",
    ),
    MetricDefinition(
        "indexer_queue_messages",
        "gauge",
        "Messages that are received and have no outcome yet.",
        "It stays high while few messages are processed.",
    ),
    MetricDefinition(
        "indexer_key_waiting_messages",
        "gauge",
        "Messages that wait for the lookup of a signing key; a part of `indexer_queue_messages`.",
        "It is most of the queue: the directory is slow or unreachable.",
    ),
    MetricDefinition(
        "indexer_batch_seconds",
        "histogram",
        "Duration of one stage of a batch or an export. `verify-export` and `diff` include the wait for their thread; "
        "new repos that share a transaction count once.",
        "A stage takes several times as long as on other days.",
        ("stage",),
    ),
    MetricDefinition(
        "indexer_record_changes_total",
        "counter",
        "Record changes written.",
        "Its rate falls far below that of other days.",
        ("action", "live"),
    ),
)

_REPOS = (
    MetricDefinition(
        "indexer_repos",
        "gauge",
        "Repos by sync status; an estimate above three million.",
        "`desynchronized` grows for hours.",
        ("sync_status",),
    ),
    MetricDefinition(
        "indexer_repos_desynchronized",
        "gauge",
        "Repos that are not synchronized now, by reason.",
        "One reason grows for hours; see [reasons.md](reasons.md).",
        ("reason",),
    ),
    MetricDefinition(
        "indexer_resync_queue",
        "gauge",
        "Repos waiting for a resync.",
        "It grows for hours.",
    ),
    MetricDefinition(
        "indexer_scope_incomplete_repos",
        "gauge",
        "Repos that wait for the records of an added collection.",
        "It is above 0 and does not fall for an hour.",
    ),
    MetricDefinition(
        "indexer_resync_total",
        "counter",
        "Resyncs that ended, by result.",
        "Results other than `synchronized`, `unchanged` and `postponed` are most of them.",
        ("result",),
    ),
    MetricDefinition(
        "indexer_resync_seconds",
        "histogram",
        "Duration of one resync.",
        "It is several times as long as on other days.",
    ),
    MetricDefinition(
        "indexer_resync_running",
        "gauge",
        "Resyncs that run now.",
        "It stays 0 while `indexer_resync_queue` does not.",
    ),
    MetricDefinition(
        "indexer_erased_records_total",
        "counter",
        "Records of deleted accounts that were erased.",
        "It jumps without a known reason.",
    ),
)

_IDENTITY = (
    MetricDefinition(
        "indexer_identity_lookups_total",
        "counter",
        "Identity lookups over the network.",
        "Results other than `found` and `missing` are most of those with the method `plc`.",
        ("method", "result"),
    ),
    MetricDefinition(
        "indexer_identity_cache_total",
        "counter",
        "Identities needed, by where they were found.",
        "`nowhere` is a large share long after the first start.",
        ("found_in",),
    ),
    MetricDefinition(
        "indexer_identity_refreshes_total",
        "counter",
        "Requests to refresh a known identity.",
        "`over-budget` is most of them: raise `INDEXER_PLC_RATE`.",
        ("cause", "result"),
    ),
)

_HOSTS = (
    MetricDefinition(
        "indexer_outbound_requests_total",
        "counter",
        "HTTP requests to other hosts, also refused ones.",
        "Failures are most of them.",
        ("result",),
    ),
    MetricDefinition(
        "indexer_hosts_paused",
        "gauge",
        "Hosts to which no requests are sent at present.",
        "It jumps, perhaps because of the network of this machine.",
    ),
    MetricDefinition(
        "indexer_hosts_failing",
        "gauge",
        "Hosts whose last five or more requests failed.",
        "It jumps, perhaps because of the network of this machine.",
    ),
    MetricDefinition(
        "indexer_host_consecutive_failures",
        "gauge",
        f"Failed requests since the last response, for the {MAX_LISTED} failing hosts with the most of them.",
        "The host has many repos and does not recover.",
        ("host",),
    ),
)

_CHANGE_LOG = (
    MetricDefinition(
        "indexer_change_log_bytes",
        "gauge",
        "Size of the change log.",
        "It is above `INDEXER_CHANGE_BYTES`: a consumer is behind.",
    ),
    MetricDefinition(
        "indexer_numbering_seconds",
        "histogram",
        "On a cluster, the time from the commit of a change batch to its numbers.",
        "It grows to seconds: consumers get changes late.",
    ),
    MetricDefinition(
        "indexer_unnumbered_batches",
        "gauge",
        "On a cluster, committed change batches without numbers.",
        "It stays above 0: a node does not answer, or transactions are in doubt.",
    ),
    MetricDefinition(
        "indexer_transactions_in_doubt",
        "gauge",
        "Prepared transactions on nodes of a cluster that were not completed within seconds.",
        "It is above 0 for longer than `citus.recover_2pc_interval` while all nodes answer.",
    ),
    MetricDefinition(
        "indexer_notification_queue_ratio",
        "gauge",
        "Used share of the notification queue of Postgres, 0 to 1.",
        "It is above 0.05: a session that listens has left a transaction open.",
    ),
    MetricDefinition(
        "indexer_consumer_lag_seconds",
        "gauge",
        "Age of the oldest change that a registered consumer has not read.",
        "It is above an hour.",
    ),
    MetricDefinition(
        "indexer_consumers",
        "gauge",
        "Registered consumers of the change log.",
        "`cut-off` is above 0: register these consumers again, and read the records again.",
        ("state",),
    ),
    MetricDefinition(
        "indexer_consumer_behind_seconds",
        "gauge",
        f"Age of the oldest change that the consumer has not read, for the {MAX_LISTED} consumers that lag most.",
        "It is above an hour.",
        ("consumer",),
    ),
    MetricDefinition(
        "indexer_consumer_behind_changes",
        "gauge",
        f"Changes that the consumer has not read, for the {MAX_LISTED} consumers that lag most.",
        "It grows.",
        ("consumer",),
    ),
)

_FEEDS = (
    MetricDefinition(
        "indexer_feed_clients",
        "gauge",
        "Connected clients of `/channel` (`tap`) and of `/subscribe` (`jetstream`); 1 for a configured `webhook`.",
        "It falls to 0 although clients are expected.",
        ("kind",),
    ),
    MetricDefinition(
        "indexer_feed_events_total",
        "counter",
        "Events that were sent to clients, repeated ones included.",
        "Its rate is 0 although there are clients and new changes.",
        ("kind",),
    ),
    MetricDefinition(
        "indexer_feed_values_omitted_total",
        "counter",
        "Events for clients of tap without the value of their record, which they would refuse (docs/reasons.md).",
        "It grows steadily.",
        ("reason",),
    ),
    MetricDefinition(
        "indexer_feed_disconnections_total",
        "counter",
        "Connections of clients that ended. `client`: the client ended it, or the network. `displaced`, `refused`: all "
        "websockets were open.",
        "`too-slow` or `not-reading` grows steadily: clients are too slow, or this process is. `refused` grows.",
        ("kind", "reason"),
    ),
    MetricDefinition(
        "indexer_feed_oldest_unacknowledged_seconds",
        "gauge",
        "Age of the oldest change that clients of tap, or the webhook, have not acknowledged; 0 without any.",
        "It grows: clients are too slow, or refuse an event.",
    ),
    MetricDefinition(
        "indexer_feed_refused_events",
        "gauge",
        "Events that clients of tap, or the webhook, do not acknowledge, unlike others; at most 20.",
        "It is above 0: their repos wait. `indexer status` names the records.",
    ),
    MetricDefinition(
        "indexer_feed_set_aside_events",
        "gauge",
        "Events that were set aside because clients of tap, or the webhook, refused them for long.",
        "It is above 0: clients lack these records. `indexer rejected list --feed` names them.",
    ),
)

_PROCESS = (
    MetricDefinition(
        "indexer_build_info",
        "gauge",
        "Version of the indexer and of Python.",
        "Versions differ for longer than a rollout.",
        ("version", "python"),
    ),
    MetricDefinition(
        "indexer_core_info",
        "gauge",
        "Implementation of decoding and verification, `python` or `native`, and its version.",
        "It is `python`, which needs several times the CPU, although the native core is installed.",
        ("core", "version"),
    ),
    MetricDefinition(
        "indexer_ready",
        "gauge",
        "1 while `/readyz` answers with status 200, else 0.",
        "It is 0 for more than some minutes.",
    ),
    MetricDefinition(
        "indexer_not_ready",
        "gauge",
        "1 for each reason why the daemon is not ready, by its code; docs/runbook.md lists the codes.",
        "A code stays for more than some minutes.",
        ("code",),
    ),
    MetricDefinition(
        "indexer_stage_seconds_without_progress",
        "gauge",
        "How long the stage has had work without progress.",
        "It is above 120 for most stages: `/healthz` fails and names the stage.",
        ("stage",),
    ),
    MetricDefinition(
        "indexer_condition_occurrences",
        "gauge",
        "How often an active condition occurred since it began; docs/runbook.md lists the conditions.",
        "A condition lasts. After 20 subjects, further ones share the subject `others`.",
        ("condition", "subject"),
    ),
    MetricDefinition(
        "indexer_database_up",
        "gauge",
        "1 while the database answers, else 0.",
        "It is 0.",
    ),
    MetricDefinition(
        "indexer_postgres_restarts_total",
        "counter",
        "Restarts of the embedded Postgres after it ended unexpectedly.",
        "It grows: `postgres.log` in the data directory says why.",
    ),
    MetricDefinition(
        "indexer_data_disk_free_bytes",
        "gauge",
        "Free space on the file system of the data directory.",
        "It is below a tenth of the size. It does not show the disk of your own Postgres.",
    ),
    MetricDefinition(
        "indexer_data_disk_size_bytes",
        "gauge",
        "Size of the file system of the data directory.",
        "Never; compare it with the free space.",
    ),
    MetricDefinition(
        "indexer_event_loop_delay_seconds",
        "histogram",
        "Delay of a timer on the event loop.",
        "Delays above 0.25 seconds are frequent: report a bug.",
    ),
)

_LINKS = (
    MetricDefinition(
        "indexer_links_progress_ratio",
        "gauge",
        "Estimated share of the repos whose links are stored, 0 to 1; 1 if links are off.",
        "It is below 1 and does not grow for an hour.",
    ),
)

METRIC_GROUPS = {
    "Stream": _STREAM,
    "Repos and resyncs": _REPOS,
    "Identities": _IDENTITY,
    "Other hosts": _HOSTS,
    "Change log and its consumers": _CHANGE_LOG,
    "Feeds": _FEEDS,
    "Links between records": _LINKS,
    "Process and database": _PROCESS,
}
"""The metrics by their section of docs/metrics.md."""

METRICS = {metric.name: metric for group in METRIC_GROUPS.values() for metric in group}
