"""The panels of the Grafana dashboard, by row. In queries, `@` stands for the selector of the chosen processes.

A process that owns a part of the accounts has its own share of most numbers, so they are added up. What all processes
of one database report alike (repos, consumers, the change log) is taken once, with `max`.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "stacked", "stat", "table"]
Steps = tuple[tuple[float, str], ...]
"""Values from which a colour applies, in order. Below the first one, the colour is green; below 0, it is red."""

ABOVE_ZERO: Steps = ((1, "red"),)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        unit: A unit of Grafana, for example `s`, `bytes`, `reqps` (per second), `percentunit` (0 to 1).
        description: What the panel shows and when to worry; Grafana shows it at the title.
        queries: The legend of each query, with `{{label}}`, and its expression.
        width: Columns of 24.
        steps: The thresholds.
        decimals: Digits after the decimal point; None: Grafana decides.
    """

    title: str
    unit: str
    description: str
    queries: tuple[tuple[str, str], ...]
    kind: Kind = "lines"
    width: int = 8
    steps: Steps = ()
    decimals: int | None = None


LIVE_STAGES, RESYNC_STAGES = 'stage=~"load|plan|apply"', 'stage!~"load|plan|apply"'
COMPLETED = 'result=~"synchronized|unchanged"'
DIRECTORY = 'method="plc"'
ANSWERED = f'{DIRECTORY}, result=~"found|missing"'


def rate(counter: str, by: str = "", match: str = "") -> str:
    """Return the query for the increase per second of a counter, summed by the labels `by`."""
    selected = f"{{@, {match}}}" if match else "{@}"
    return f"sum{f' by ({by}) ' if by else ''}(rate({counter}{selected}[$__rate_interval]))"


OVERVIEW = (
    Panel(
        "Ready",
        "short",
        "Processes whose database is up to date, out of all. Not ready: see the panel below for the reasons.",
        (("ready", "sum(indexer_ready{@})"), ("of", "count(indexer_ready{@})")),
        "stat",
        3,
    ),
    Panel(
        "Lag",
        "s",
        "Time since the moment up to which all events are stored. The daemon is not ready above 60 seconds.",
        (("lag", "max(indexer_firehose_lag_seconds{@})"),),
        "stat",
        3,
        ((60, "orange"), (300, "red")),
    ),
    Panel(
        "Messages",
        "reqps",
        "Messages that the relay sends per second. Each process receives the whole stream.",
        (("received", "max(sum by (instance) (rate(indexer_events_received_total{@}[$__rate_interval])))"),),
        "stat",
        3,
    ),
    Panel(
        "Synchronized repos",
        "percentunit",
        "Share of the repos whose stored records equal the network's.",
        (
            (
                "synchronized",
                'max(indexer_repos{@, sync_status="synchronized"}) / max(sum by (instance) (indexer_repos{@}))',
            ),
        ),
        "stat",
        3,
        decimals=2,
    ),
    Panel(
        "Waiting repos",
        "short",
        "The resync queue, with the repos that are tried again later.",
        (("waiting", "max(indexer_resync_queue{@})"),),
        "stat",
        3,
    ),
    Panel(
        "Cursor time left",
        "s",
        "Public relays keep 72 hours. If the cursor becomes older, messages are missed and every repo is compared.",
        (("left", "72 * 3600 - min(indexer_cursor_age_seconds{@})"),),
        "stat",
        3,
        ((0, "red"), (86_400, "orange"), (172_800, "green")),
    ),
    Panel(
        "Slowest consumer",
        "s",
        "Age of the oldest change that some consumer of the change log has not read.",
        (("behind", "max(indexer_consumer_lag_seconds{@})"),),
        "stat",
        3,
        ((600, "orange"), (3_600, "red")),
    ),
    Panel(
        "Free disk space",
        "bytes",
        "On the file system of the data directory, not on that of your own Postgres.",
        (("free", "min(indexer_data_disk_free_bytes{@})"),),
        "stat",
        3,
    ),
    Panel(
        "Messages by outcome",
        "reqps",
        "Every message ends with exactly one outcome. `rejected` and `desynchronized` are rare.",
        (("{{outcome}}", rate("indexer_events_total", "outcome")),),
        "stacked",
    ),
    Panel(
        "Lag over time",
        "s",
        "It grows with the clock while nothing is written, whatever the cause.",
        (("{{instance}}", "indexer_firehose_lag_seconds{@}"),),
        steps=((60, "red"),),
    ),
    Panel(
        "Reasons why processes are not ready",
        "short",
        "Number of processes by reason. docs/runbook.md has a section for each.",
        (("{{code}}", "sum by (code) (indexer_not_ready{@})"),),
        "stacked",
    ),
)

LIVE = (
    Panel(
        "Messages received by kind",
        "reqps",
        "What the relay sends. All kinds stop: the relay, the connection, or a full queue.",
        (("{{kind}}", rate("indexer_events_received_total", "kind")),),
        "stacked",
    ),
    Panel(
        "Time without a message",
        "s",
        "Per relay. It grows while the socket is open: the relay sends nothing.",
        (("{{relay}}", "max by (relay) (indexer_seconds_since_last_message{@})"),),
    ),
    Panel(
        "Connected relays",
        "short",
        "Processes that are connected to each relay. Each uses the first relay that works.",
        (("{{relay}}", "sum by (relay) (indexer_relay_connected{@})"),),
        "stacked",
    ),
    Panel(
        "Queue in bytes",
        "bytes",
        "Messages that are received and not stored yet. At 16 MiB, the process stops reading from the socket.",
        (("{{instance}}", "indexer_queue_bytes{@}"),),
        steps=((12e6, "red"),),
    ),
    Panel(
        "Queue in messages",
        "short",
        "All messages without an outcome, and those of them that wait for a signing key.",
        (("queued", "sum(indexer_queue_messages{@})"), ("wait for a key", "sum(indexer_key_waiting_messages{@})")),
    ),
    Panel(
        "Busy time of each stage",
        "percentunit",
        "Share of the time that a process spends in the stage. Near 100 %, this stage limits the rate.",
        (
            (
                "{{stage}}",
                'max by (stage) (rate(indexer_batch_seconds_sum{@, stage=~"load|plan|apply"}[$__rate_interval]))',
            ),
        ),
    ),
    Panel(
        "Duration of a batch by stage, 99th percentile",
        "s",
        "Load the rows of the repos, plan the messages, write the batch.",
        (
            (
                "{{stage}}",
                f"histogram_quantile(0.99, {rate('indexer_batch_seconds_bucket', 'stage, le', LIVE_STAGES)})",
            ),
        ),
    ),
    Panel(
        "Records written by live messages",
        "wps",
        "Changes per second by action.",
        (("{{action}}", rate("indexer_record_changes_total", "action", 'live="true"')),),
        "stacked",
    ),
    Panel(
        "Rejected messages by reason",
        "reqps",
        "Each leaves a dead letter: `indexer rejected`.",
        (("{{reason}}", rate("indexer_rejected_total", "reason") + " > 0"),),
        "stacked",
    ),
    Panel(
        "Stages without progress",
        "s",
        "How long a stage has had work without making progress. Above its limit, mostly 120 s, `/healthz` names it.",
        (("{{stage}}", "max by (stage) (indexer_stage_seconds_without_progress{@})"),),
        steps=((120, "red"),),
    ),
    Panel(
        "Delay of the event loop, 99th percentile",
        "s",
        "How late timers run: everything else of the process waits as long.",
        (("99 %", f"histogram_quantile(0.99, {rate('indexer_event_loop_delay_seconds_bucket', 'le')})"),),
        steps=((0.25, "red"),),
    ),
    Panel(
        "Age of the cursor",
        "s",
        "Public relays keep messages for 72 hours.",
        (("{{relay}}", "max by (relay) (indexer_cursor_age_seconds{@})"),),
        steps=((259_200, "red"),),
    ),
)

RESYNC = (
    Panel(
        "Time left until all repos are resynced",
        "s",
        "Waiting repos divided by the resyncs per second of the last interval. Repos of hosts that do not answer stay.",
        (
            (
                "left",
                f"max(indexer_resync_queue{{@}}) / ({rate('indexer_resync_total', match=COMPLETED)} > 0)",
            ),
        ),
    ),
    Panel(
        "Repos by sync status",
        "short",
        "During a backfill, `desynchronized` shrinks. Afterwards, it is a small, steady number.",
        (("{{sync_status}}", "max by (sync_status) (indexer_repos{@})"),),
        "stacked",
    ),
    Panel(
        "Waiting and running resyncs",
        "short",
        "Running resyncs are limited by `INDEXER_RESYNC_WORKERS`.",
        (
            ("waiting", "max(indexer_resync_queue{@})"),
            ("waiting for added collections", "max(indexer_scope_incomplete_repos{@})"),
            ("running", "sum(indexer_resync_running{@})"),
        ),
    ),
    Panel(
        "Resyncs by result",
        "ops",
        "docs/reasons.md explains the results.",
        (("{{result}}", rate("indexer_resync_total", "result") + " > 0"),),
        "stacked",
    ),
    Panel(
        "Records written by resyncs",
        "wps",
        "The speed of a backfill.",
        (("{{action}}", rate("indexer_record_changes_total", "action", 'live="false"')),),
        "stacked",
    ),
    Panel(
        "Duration of a resync",
        "s",
        "Large repos take minutes.",
        tuple(
            (
                f"{percent} %",
                f"histogram_quantile(0.{percent}, {rate('indexer_resync_seconds_bucket', 'le')})",
            )
            for percent in (50, 95, 99)
        ),
    ),
    Panel(
        "Stages of a resync, mean duration",
        "s",
        "Fetch the export, verify it, compare it with the stored records, write the differences.",
        (
            (
                "{{stage}}",
                (
                    f"{rate('indexer_batch_seconds_sum', 'stage', RESYNC_STAGES)} "
                    f"/ {rate('indexer_batch_seconds_count', 'stage', RESYNC_STAGES)}"
                ),
            ),
        ),
    ),
    Panel(
        "Repos that are not synchronized, by reason",
        "short",
        "`new` and `requested` are the backfill. docs/reasons.md explains the others.",
        (("{{reason}}", "max by (reason) (indexer_repos_desynchronized{@}) > 0"),),
        "stacked",
    ),
    Panel(
        "Repos that become desynchronized, by reason",
        "ops",
        "`chain-break` in large numbers: the relay or a host loses messages.",
        (("{{reason}}", rate("indexer_desynchronized_total", "reason") + " > 0"),),
        "stacked",
    ),
)

HOSTS = (
    Panel(
        "Hosts with the most failures",
        "short",
        "The failing hosts with the most failed requests since their last answer.",
        (("{{host}}", "max by (host) (indexer_host_consecutive_failures{@})"),),
        "table",
    ),
    Panel(
        "Failing and paused hosts",
        "short",
        "Hosts whose last five or more requests failed, and hosts to which no requests are sent. A jump has its cause "
        "on this machine or its network.",
        (("failing", "max(indexer_hosts_failing{@})"), ("paused", "max(indexer_hosts_paused{@})")),
    ),
    Panel(
        "Requests to other hosts by result",
        "reqps",
        "`host-paused` and `throttled` were not sent.",
        (("{{result}}", rate("indexer_outbound_requests_total", "result") + " > 0"),),
        "stacked",
    ),
)

IDENTITY = (
    Panel(
        "Lookups by method and result",
        "reqps",
        "`plc` and `web` fetch DID documents; `dns` and `https` verify handles.",
        (
            (
                "{{method}} {{result}}",
                rate("indexer_identity_lookups_total", "method, result") + " > 0",
            ),
        ),
        "stacked",
    ),
    Panel(
        "Failing lookups at the PLC directory",
        "percentunit",
        "Share of the lookups. Above 50 %, the daemon is not ready.",
        (
            (
                "failing",
                (
                    f"1 - {rate('indexer_identity_lookups_total', match=ANSWERED)} "
                    f"/ {rate('indexer_identity_lookups_total', match=DIRECTORY)}"
                ),
            ),
        ),
        steps=((0.5, "red"),),
    ),
    Panel(
        "Where identities are found",
        "ops",
        "`nowhere` needs a lookup.",
        (("{{found_in}}", rate("indexer_identity_cache_total", "found_in")),),
        "stacked",
    ),
)

DATABASE = (
    Panel(
        "Database answers",
        "short",
        "Processes whose database answers within 5 seconds.",
        (("answering", "sum(indexer_database_up{@})"), ("processes", "count(indexer_database_up{@})")),
    ),
    Panel(
        "Transactions of the batch writer",
        "ops",
        "Each writes up to 500 messages.",
        (("batches", rate("indexer_batch_seconds_count", match='stage="apply"')),),
    ),
    Panel(
        "Disk of the data directory",
        "bytes",
        "The embedded Postgres and spool files are here.",
        (("free", "min(indexer_data_disk_free_bytes{@})"), ("size", "min(indexer_data_disk_size_bytes{@})")),
    ),
)

CONSUMERS = (
    Panel(
        "Consumers behind, in time",
        "s",
        "Age of the oldest change that the consumer has not read.",
        (("{{consumer}}", "max by (consumer) (indexer_consumer_behind_seconds{@})"),),
        steps=((3_600, "red"),),
    ),
    Panel(
        "Consumers behind, in changes",
        "short",
        "Changes that the consumer has not read.",
        (("{{consumer}}", "max by (consumer) (indexer_consumer_behind_changes{@})"),),
    ),
    Panel(
        "Size of the change log",
        "bytes",
        "`INDEXER_CHANGE_BYTES` limits it; while a consumer is behind, twice as much.",
        (("size", "max(indexer_change_log_bytes{@})"),),
    ),
)

FEEDS = (
    Panel(
        "Clients of the feeds",
        "short",
        "Connected clients of `/channel` (tap) and `/subscribe` (jetstream); `webhook` if there is one.",
        (("{{kind}}", "sum by (kind) (indexer_feed_clients{@})"),),
    ),
    Panel(
        "Events sent to clients",
        "ops",
        "An event counts for each client that gets it, and again if it is sent again.",
        (("{{kind}}", rate("indexer_feed_events_total", "kind")),),
        "stacked",
    ),
    Panel(
        "Connections that ended",
        "ops",
        "`client` is no fault of this program. `too-slow`, `not-reading`: the client or the process is overloaded.",
        (("{{kind}} {{reason}}", rate("indexer_feed_disconnections_total", "kind, reason")),),
        "stacked",
    ),
    Panel(
        "Oldest unacknowledged change",
        "s",
        "Age of the oldest change that no client of tap has acknowledged, nor the webhook.",
        (("age", "max(indexer_feed_oldest_unacknowledged_seconds{@})"),),
        steps=((3_600, "red"),),
    ),
    Panel(
        "Refused events",
        "short",
        "Events that were set aside, because clients refused them: `indexer rejected list --feed` names the records.",
        (("events", "sum(indexer_feed_set_aside_events{@})"),),
        steps=ABOVE_ZERO,
    ),
)


def _zero(title: str, description: str, expression: str) -> Panel:
    return Panel(title, "short", description, (("", expression),), "stat", 3, ABOVE_ZERO, 0)


ZERO = (
    _zero(
        "Without an outcome",
        "Received, neither in the queue nor with an outcome. One more may wait for room in the queue.",
        "clamp_min(max(abs(sum by (instance) (indexer_events_received_total{@}) - sum by (instance) "
        "(indexer_events_total{@}) - on (instance) indexer_queue_messages{@})) - 1, 0)",
    ),
    _zero(
        "Refused writes",
        "Messages and exports whose content the database did not accept: `indexer rejected --reason store-failed`.",
        'sum(increase(indexer_rejected_total{@, reason="store-failed"}[$__range])) '
        '+ sum(increase(indexer_resync_total{@, result="not-storable"}[$__range]))',
    ),
    _zero(
        "Equivocations",
        "Two signed states of a repo with the same rev: a host or an account breaks the protocol.",
        'sum(increase(indexer_desynchronized_total{@, reason="equivocation"}[$__range]))',
    ),
    _zero(
        "Expired leases",
        "Resync workers that stopped without finishing: a process was killed.",
        'sum(increase(indexer_desynchronized_total{@, reason="lease-expired"}[$__range]))',
    ),
    _zero(
        "Spool files failed",
        "Exports that could not be written to the data directory, or not be read from it.",
        'sum(increase(indexer_resync_total{@, result=~"spool-.*"}[$__range]))',
    ),
    _zero(
        "Postgres restarts",
        "The embedded Postgres ended unexpectedly: see postgres/postgres.log in the data directory.",
        "sum(increase(indexer_postgres_restarts_total{@}[$__range]))",
    ),
    _zero(
        "Consumers cut off",
        "They were too far behind, and have to register again.",
        'max(indexer_consumers{@, state="cut-off"})',
    ),
    _zero(
        "Blocked over 1 s",
        "Times at which the event loop of a process did nothing else for more than a second. Report a bug.",
        "sum(increase(indexer_event_loop_delay_seconds_count{@}[$__range])) "
        '- sum(increase(indexer_event_loop_delay_seconds_bucket{@, le="1.0"}[$__range]))',
    ),
)

ROWS = {
    "Overview": OVERVIEW,
    "Counters that should be zero": ZERO,
    "Live path": LIVE,
    "Resync and backfill": RESYNC,
    "Hosts": HOSTS,
    "Identity": IDENTITY,
    "Database": DATABASE,
    "Consumers of the change log": CONSUMERS,
    "Feeds": FEEDS,
}
