"""The one list of the stages of the daemon: what each of them runs, watches, measures, shows, and does at the end.

Run, stop, health checks, metrics and status page of the daemon are loops over this list.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from indexer.app.process_setup import collect_garbage, measure_delays
from indexer.concurrency.stage_progress import StageProgress, Work
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.db.reports import MAX_ROWS
from indexer.live.inbox import Inbox
from indexer.live.streams import open_relays, silent_seconds
from indexer.serve.status_document import ReadinessReason, Row, describe_gap
from indexer.telemetry.metrics import MAX_LISTED, Reading

if TYPE_CHECKING:
    from indexer.app.daemon import Daemon

MAX_DRAIN_SHARE = 0.7
"""Maximum share of `INDEXER_STOP_TIMEOUT` that is spent on writing the received messages after a signal."""
FEED_STOP_SECONDS = 5.0
"""Maximum time to store what clients of the feed have acknowledged before the process ends."""
GAP_CHECK_SECONDS = 1.0
MAX_LISTED_GAPS = 5
"""Open gaps that a reason names."""
RETRY_SECONDS = 1.0
"""Pause before this process listens again for changes of identities, or for requests."""
MAX_READY_LAG_SECONDS = 60.0
"""Maximum lag of a daemon that is ready."""


Task = asyncio.Task[None]


class Drain(Enum):
    """The steps of a stop, in their order. The last log line has the value if the process does not end in time."""

    RECEIVE_NO_MORE = "end the stream and the resyncs"
    WRITE = "write the received messages"
    ACKNOWLEDGE = "store what clients of the feed have acknowledged"
    GIVE_BACK = "give back the claims of resyncs"
    SAVE = "save the states of hosts"
    CLOSE = "end the stages"
    NUMBER = "number the last changes"


@dataclass(frozen=True, slots=True)
class Stage:
    """One task, and everything that the rest of the process asks of it.

    Attributes:
        name: The name of its task.
        role: The role whose processes run it; None if every process does.
        run: Runs it, and ends only with an exception; None if something else runs it.
        progress: What the health check watches.
        needs_shard: It starts as soon as this process owns its shard.
        drain: What it does in the steps of a stop, given its task. After `SAVE`, its task has ended.
        not_ready: Returns why the database is not up to date because of it.
        gauges: The functions that read its gauges at each scrape, by the name of the gauge.
        show: Returns its fields of the status of this process.
    """

    name: str
    role: str | None
    run: Callable[[], Coroutine[Any, Any, None]] | None
    progress: Sequence[StageProgress]
    needs_shard: bool = False
    drain: Mapping[Drain, Callable[[Task], Awaitable[object]]] = field(default_factory=dict)
    not_ready: Callable[[], Iterable[ReadinessReason]] = tuple
    gauges: Mapping[str, Callable[[], Reading]] = field(default_factory=dict)
    show: Callable[[], Row] = dict


def all_stages(daemon: "Daemon", others: Iterable[StageProgress]) -> list[Stage]:
    """Return the stages of all roles. `others` are watched, too, but run outside the daemon."""
    stages = [
        *_common(daemon),
        *_streams(daemon),
        *_live(daemon),
        *_gaps(daemon),
        *_tasks(daemon),
        *_hosts(daemon),
        *_resync(daemon),
        *_feed(daemon),
    ]
    return [*stages, *(Stage(progress.name, None, None, [progress]) for progress in others)]


def _common(daemon: "Daemon") -> Iterator[Stage]:
    """Yield the stages of every process."""
    conditions, hosts = daemon.conditions, daemon.hosts
    host_states = StageProgress("host states")

    def lasting_conditions() -> Iterator[ReadinessReason]:
        for condition in conditions.active():
            if condition.kind.prevents_readiness:
                seconds = seconds_since(condition.began_at)
                value = seconds if condition.value is None else condition.value
                yield ReadinessReason(condition.kind.name, condition.message, value)

    def show_conditions() -> Row:
        rows = [
            {
                "name": condition.kind.name,
                "subject": condition.subject,
                "message": condition.message,
                "seconds": monotonic() - condition.began_at,
                "count": condition.count,
                "prevents_readiness": condition.kind.prevents_readiness,
            }
            for condition in conditions.active()[:MAX_ROWS]
        ]
        return {"conditions": rows}

    async def save_hosts(_task: Task) -> None:
        with DatabaseAttempt():
            await daemon.save_hosts()

    yield Stage("database monitor", None, partial(daemon.database_monitor.run, daemon.report), [])
    yield Stage(
        "daemon monitor",
        None,
        daemon.daemon_monitor.run,
        [],
        not_ready=lasting_conditions,
        show=show_conditions,
    )
    yield Stage("garbage collection", None, partial(collect_garbage, daemon.tuning.garbage_interval), [])
    yield Stage("event loop delay", None, partial(measure_delays, daemon.metrics.event_loop_delay.observe), [])
    yield Stage("status samples", None, daemon.history.run, [])
    yield Stage(
        "host states",
        None,
        lambda: run_periodically(daemon.save_hosts, daemon.tuning.host_save_interval, host_states, wait_first=True),
        [host_states],
        drain={Drain.SAVE: save_hosts},
        gauges={
            "indexer_hosts_paused": lambda: len(hosts.paused()),
            "indexer_hosts_failing": lambda: len(hosts.failing()),
            "indexer_host_consecutive_failures": lambda: {
                (state.host,): state.consecutive_failures for state in hosts.failing()[:MAX_LISTED]
            },
        },
    )
    yield Stage("identity cache", None, daemon.identities.run, [])
    if daemon.plc_operations is not None:
        listen = partial(daemon.db.identities.listen, daemon.identities.forget)
        yield Stage("identity changes", None, partial(run_periodically, listen, RETRY_SECONDS, Work()), [])
    yield Stage("open transactions", None, daemon.open_transactions.run, [])
    for part in (daemon.status_reading, daemon.change_log_retention, daemon.scope):
        yield Stage(part.stage.name, None, part.run, [part.stage])
    if (numbering := daemon.change_numbering) is not None:
        finish = {Drain.NUMBER: lambda _task: numbering.finish()}
        yield Stage("change numbering", None, numbering.run, [numbering.stage], drain=finish)


def _live(daemon: "Daemon") -> Iterator[Stage]:
    """Yield the stages from the stream to the database."""
    inbox, lookups, writer = daemon.inbox, daemon.key_lookups, daemon.batch_writer
    ownership = daemon.shard_ownership

    def shard_lock() -> Iterator[ReadinessReason]:
        if ownership.last_error:
            yield ReadinessReason("shard-lock", ownership.last_error, seconds_since(ownership.waits_since))

    def writer_reasons() -> Iterator[ReadinessReason]:
        if daemon.database_monitor.answering_since is not None:  # else, one reason says it
            yield from retried("the last batch was not written", writer.stage)
        settled = writer.totals.settled
        lag = writer.lag if settled else writer.cursor_age
        if lag is None and settled:
            message = "the lag is unknown: no event of the relay has a possible time"
            yield ReadinessReason("lag-unknown", message, settled)
        elif lag is not None and lag > MAX_READY_LAG_SECONDS:
            yield ReadinessReason("lag", f"the newest stored event is {lag:.0f} s old", round(lag, 1))

    yield Stage("shard ownership", "live", ownership.run, [ownership.stage], not_ready=shard_lock)
    yield Stage(
        "inbox",
        "live",
        None,
        [inbox.stage],
        gauges={
            "indexer_queue_bytes": lambda: inbox.unsettled_bytes,
            "indexer_queue_messages": lambda: inbox.unsettled,
        },
    )
    yield Stage(
        "key lookups",
        "live",
        lookups.run,
        [lookups.stage],
        drain={Drain.CLOSE: lambda _task: lookups.close()},
        gauges={"indexer_key_waiting_messages": lambda: len(lookups)},
    )
    yield Stage(
        "batch writer",
        "live",
        writer.run,
        [writer.stage],
        drain={Drain.WRITE: partial(_settle, inbox, MAX_DRAIN_SHARE * daemon.settings.stop_timeout)},
        not_ready=writer_reasons,
        gauges={"indexer_firehose_lag_seconds": lambda: _or_nan(writer.lag)},
    )


def _streams(daemon: "Daemon") -> Iterator[Stage]:
    """Yield the stages that read the streams."""
    streams, inbox, writer = daemon.streams, daemon.inbox, daemon.batch_writer
    is_jetstream = daemon.settings.upstream == "jetstream"
    configured = daemon.settings.jetstreams if is_jetstream else daemon.settings.relays
    relays = configured if "live" in daemon.settings.roles else ()

    def stream_errors() -> Iterator[ReadinessReason]:
        """Yield why no stream works. While one works, the trouble of another is a condition."""
        if any(stream.trouble is None for stream in streams):
            return
        if not open_relays(streams):
            errors = [stream.subscription.last_error for stream in streams if stream.subscription.last_error]
            message = "; last error: ".join(
                [f"no {'Jetstream' if is_jetstream else 'relay'} is connected", *errors[:1]]
            )
            since = max(stream.subscription.disconnected_since for stream in streams)
            yield ReadinessReason("relay-disconnected", message, seconds_since(since))
        for consumer in [stream.consumer for stream in streams]:
            if consumer.last_error and consumer.failing_since is not None:
                yield ReadinessReason("stream-error", consumer.last_error, seconds_since(consumer.failing_since))

    def show_streams() -> Row:
        """Return the state of the streams, those of hosts included. Of each, every message up to `seq` is stored."""
        rows = [
            {
                "relay": stream.position.origin.relay or stream.subscription.relays[0],
                "trouble": stream.trouble,
                "seq": stream.position.watermark.position,
                "lag_seconds": stream.position.lag,
                "silent_seconds": silent_seconds([stream]),
                **daemon.comparison.show(stream.subscription.relays[0]),
            }
            for stream in [*streams, *daemon.host_streams.streams.values()][:MAX_ROWS]
        ]
        stream = {
            "relay": next(iter(open_relays(streams)), None),
            "lag_seconds": writer.lag,
            "silent_seconds": silent_seconds(streams),
            "unsettled_messages": inbox.unsettled,
            "unsettled_bytes": inbox.unsettled_bytes,
            "waiting_for_keys": len(daemon.key_lookups),
            "reconciliation": daemon.reconciliation.progress,
        }
        return {"stream": stream, "streams": rows}

    yield Stage(
        "streams",
        "live",
        None,
        [],
        not_ready=stream_errors,
        gauges={
            "indexer_relay_connected": lambda: {(relay,): float(relay in open_relays(streams)) for relay in relays},
            "indexer_seconds_since_last_message": lambda: {
                (relay,): _or_nan(silent_seconds(streams, relay)) for relay in relays
            },
            "indexer_cursor_age_seconds": lambda: {
                (one.origin.relay,): _or_nan(one.cursor_age)
                for one in [stream.position for stream in streams]
                if one.origin.relay
            },
        },
        show=show_streams,
    )
    for consumer in [stream.consumer for stream in streams]:
        yield Stage(
            consumer.stage.name,
            "live",
            consumer.run,
            [consumer.stage],
            needs_shard=True,
            drain={Drain.RECEIVE_NO_MORE: _end},
        )


def _gaps(daemon: "Daemon") -> Iterator[Stage]:
    """Yield the stages that find, load and close gaps."""
    gaps, reconciliation = daemon.open_gaps, daemon.reconciliation
    if daemon.settings.upstream == "jetstream":
        hosts = daemon.repo_checks

        def not_compared() -> Iterator[ReadinessReason]:
            if hosts.lacking is not None:
                yield ReadinessReason("not-compared", hosts.lacking, hosts.total - hosts.compared)

        yield Stage(hosts.stage.name, "live", hosts.run, [hosts.stage], needs_shard=True, not_ready=not_compared)
        return

    async def check_silence() -> None:
        for stream in [*daemon.streams, *daemon.host_streams.streams.values()]:
            if stream.continuity is not None:
                await stream.continuity.check_silence()

    def open_gaps() -> Iterator[ReadinessReason]:
        if gaps.gaps is None:
            yield ReadinessReason(
                "gaps-unknown", "it is not known yet whether gaps are open", seconds_since(daemon.started_at)
            )
        elif gaps.gaps:
            listed = "; ".join([describe_gap(gap) for gap in gaps.gaps[:MAX_LISTED_GAPS]])
            progress = reconciliation.progress or "waiting for a relay"
            message = f"repos may be outdated: {listed}; reconciliation: {progress}"
            yield ReadinessReason("open-gaps", message, len(gaps.gaps))

    yield Stage("open gaps", "live", gaps.run, [gaps.stage], not_ready=open_gaps)
    checks = {"stream continuity": check_silence, "relay comparison": daemon.comparison.check}
    for name, check in checks.items():
        run = partial(run_periodically, check, GAP_CHECK_SECONDS, gaps.stage.add())
        yield Stage(name, "live", run, [], needs_shard=True)
    yield Stage("reconciliation", "live", reconciliation.run, [reconciliation.stage], needs_shard=True)


def _tasks(daemon: "Daemon") -> Iterator[Stage]:
    for part in (daemon.identity_refresh, daemon.account_erasure, daemon.links):
        yield Stage(part.stage.name, "live", part.run, [part.stage])
    if (reading := daemon.plc_operations) is not None:
        yield Stage(reading.stage.name, "live", reading.run, [reading.stage])
    handle_checks = () if daemon.handle_checks is None else (daemon.handle_checks,)
    for task in (*handle_checks, *daemon.scope_tasks):
        yield Stage(task.stage.name, "live", task.run, [task.stage], needs_shard=True)


def _hosts(daemon: "Daemon") -> Iterator[Stage]:
    crawl = daemon.host_crawl

    def hosts() -> Reading:
        return {(state,): crawl.totals.get(state, 0) for state in ("listed", "failing", "withheld")}

    streams, has_relays = daemon.host_streams, daemon.settings.upstream == "relay"
    yield Stage(
        streams.stage.name,
        "live",
        streams.run if has_relays else None,
        [streams.stage],
        needs_shard=True,
        drain={Drain.RECEIVE_NO_MORE: _end} if has_relays else {},
        gauges={"indexer_host_streams": lambda: len(open_relays(list(streams.streams.values())))},
    )
    yield Stage(
        crawl.stage.name,
        "live",
        crawl.run if crawl.settings.interval and has_relays else None,
        [crawl.stage],
        needs_shard=True,
        gauges={
            "indexer_hosts": hosts,
            "indexer_withheld_accounts": lambda: crawl.totals.get("accounts", 0),
        },
    )


def _resync(daemon: "Daemon") -> Iterator[Stage]:
    pool, maintenance = daemon.resync_pool, daemon.queue_maintenance
    progress = [maintenance.lease_expiry, maintenance.parked_repos, maintenance.unproven_repos]

    def claim_errors() -> Iterable[ReadinessReason]:
        answers = daemon.database_monitor.answering_since is not None
        return retried("the last claim of repos failed", pool.claims) if answers else ()

    def show_resyncs() -> Row:
        """Return the state of the pool, with the resyncs that run longest."""
        longest, now = sorted(pool.shares.running, key=lambda resync: resync.started_at), time()
        rows = [
            {
                "did": resync.claimed.did,
                "host": resync.host,  # "" if it is not known yet
                "phase": resync.phase,
                "phase_seconds": max(0.0, now - resync.phase_since),
                "seconds": max(0.0, now - resync.started_at),
                "received_bytes": resync.download and resync.download.received,
                "bytes_per_second": resync.download and round(resync.download.rate, 1),
                "slot": "large" if resync.large else "worker",
            }
            for resync in longest[:MAX_ROWS]
        ]
        free = pool.shares.free_workers if "resync" in daemon.settings.roles else None
        return {"resyncs": {"workers_free": free, "running": len(longest), "longest": rows}}

    yield Stage(
        "resync pool",
        "resync",
        pool.run,
        [pool.stage],
        drain={
            Drain.RECEIVE_NO_MORE: _end,
            Drain.GIVE_BACK: lambda _task: pool.give_back(),
            Drain.CLOSE: lambda _task: pool.close(),
        },
        not_ready=claim_errors,
        gauges={"indexer_resync_running": lambda: len(pool.shares.running)},
        show=show_resyncs,
    )
    yield Stage("queue maintenance", "resync", maintenance.run, progress)
    listen = partial(daemon.db.resyncs.listen, daemon.request_record)
    yield Stage("record requests", "resync", partial(run_periodically, listen, RETRY_SECONDS, Work()), [])


def _feed(daemon: "Daemon") -> Iterator[Stage]:
    tap, jetstream, webhook = daemon.tap_feed, daemon.jetstream_reader, daemon.webhook

    async def stop(task: Task) -> None:
        await tap.stop()
        await asyncio.wait([task], timeout=FEED_STOP_SECONDS)

    yield Stage(
        "tap feed",
        "feed",
        tap.run,
        [tap.stage],
        drain={Drain.ACKNOWLEDGE: stop},
        gauges={
            "indexer_feed_clients": lambda: {
                ("tap",): 0 if webhook is not None else tap.clients,
                ("jetstream",): jetstream.subscribers,
                ("webhook",): float(webhook is not None),
            },
            "indexer_feed_oldest_unacknowledged_seconds": tap.oldest_unacknowledged_seconds,
            "indexer_feed_set_aside_events": lambda: tap.set_aside,
        },
    )
    yield Stage("jetstream reader", "feed", jetstream.run, [jetstream.stage])
    yield Stage("waiting clients", "feed", daemon.rev_waits.run, [])
    if webhook is not None:
        yield Stage("webhook", "feed", webhook.run, [webhook.stage])


def retried(what: str, work: Work) -> Iterator[ReadinessReason]:
    """Yield a reason if the last attempt of `work` failed."""
    if work.failing_since is not None:
        message = f"{what} and is retried: {work.last_error}"
        yield ReadinessReason("database-errors", message, seconds_since(work.failing_since))


def seconds_since(moment: float) -> float:
    """Return the time since a moment in monotonic seconds."""
    return round(monotonic() - moment, 1)


async def _settle(inbox: Inbox, seconds: float, task: Task) -> None:
    """Wait until the received messages are written; at most until the time is over or the writer fails."""
    settled = asyncio.create_task(inbox.wait_until_settled())
    await asyncio.wait([task, settled], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


async def _end(task: Task) -> None:
    """Cancel the task of a stage, and wait for its end. The daemon raises its exception later."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
