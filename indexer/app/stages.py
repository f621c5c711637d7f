"""The one list of the stages of the daemon: what each of them runs, watches, measures, shows, and does at the end.

Run, stop, health checks, metrics and status page of the daemon are loops over this list.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Protocol, Self

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


class Part(Protocol):
    """A part of the daemon that is a stage, with its progress."""

    stage: StageProgress

    async def run(self) -> None:
        """Run, and end only with an exception."""


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
        run: Runs it, and ends only with an exception; None if something else runs it.
        progress: What the health check watches.
        role: The role whose processes run it; None if every process does.
        needs_shard: It starts as soon as this process owns its shard.
        drain: What it does in the steps of a stop, given its task. After `SAVE`, its task has ended.
        not_ready: Returns why the database is not up to date because of it.
        gauges: The functions that read its gauges at each scrape, by the name of the gauge.
        show: Returns its fields of the status of this process.
    """

    name: str
    run: Callable[[], Coroutine[Any, Any, None]] | None = None
    progress: Sequence[StageProgress] = ()
    role: str | None = None
    needs_shard: bool = False
    drain: Mapping[Drain, Callable[[Task], Awaitable[object]]] = field(default_factory=dict)
    not_ready: Callable[[], Iterable[ReadinessReason]] = tuple
    gauges: Mapping[str, Callable[[], Reading]] = field(default_factory=dict)
    show: Callable[[], Row] = dict

    @classmethod
    def of(cls, part: Part, **fields: Any) -> Self:
        """Return the stage that runs a part and watches its progress, with these other fields."""
        of_part: dict[str, Any] = {"name": part.stage.name, "run": part.run, "progress": [part.stage]}
        return cls(**of_part | fields)


def all_stages(daemon: "Daemon", others: Iterable[StageProgress]) -> list[Stage]:
    """Return the stages of all roles. `others` are watched, too, but run outside the daemon."""
    by_role = {"live": (_streams, _live, _gaps, _tasks, _hosts), "resync": (_resync,), "feed": (_feed,)}
    return [
        *_common(daemon),
        *(replace(stage, role=role) for role, parts in by_role.items() for part in parts for stage in part(daemon)),
        *(Stage(progress.name, progress=[progress]) for progress in others),
    ]


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

    async def save_hosts() -> None:
        """Store the states of hosts that changed."""
        if states := hosts.unsaved():
            await daemon.db.hosts.save(states)
            hosts.mark_saved(states)

    async def save_at_end(_task: Task) -> None:
        with DatabaseAttempt():
            await save_hosts()

    yield Stage("database monitor", partial(daemon.database_monitor.run, daemon.report))
    yield Stage("daemon monitor", daemon.daemon_monitor.run, not_ready=lasting_conditions, show=show_conditions)
    yield Stage("garbage collection", partial(collect_garbage, daemon.tuning.garbage_interval))
    yield Stage("event loop delay", partial(measure_delays, daemon.metrics.event_loop_delay.observe))
    yield Stage("status samples", daemon.history.run)
    yield Stage(
        "host states",
        partial(run_periodically, save_hosts, daemon.tuning.host_save_interval, host_states, wait_first=True),
        [host_states],
        drain={Drain.SAVE: save_at_end},
        gauges={
            "indexer_hosts_paused": lambda: len(hosts.paused()),
            "indexer_hosts_failing": lambda: len(hosts.failing()),
            "indexer_host_consecutive_failures": lambda: {
                (state.host,): state.consecutive_failures for state in hosts.failing()[:MAX_LISTED]
            },
        },
    )
    directory = daemon.settings.data_dir
    yield Stage(
        "data disk",
        gauges={
            "indexer_data_disk_free_bytes": lambda: _disk(directory)[1],
            "indexer_data_disk_size_bytes": lambda: _disk(directory)[0],
        },
    )
    yield Stage("identity cache", daemon.identities.run)
    if daemon.settings.plc_follow:
        listen = partial(daemon.db.identities.listen, daemon.identities.forget)
        yield Stage("identity changes", partial(run_periodically, listen, RETRY_SECONDS, Work()))
    yield Stage("open transactions", daemon.open_transactions.run)
    for part in (daemon.status_reading, daemon.change_log_retention, daemon.scope):
        yield Stage.of(part)
    if (numbering := daemon.change_numbering) is not None:
        yield Stage.of(numbering, drain={Drain.NUMBER: lambda _task: numbering.finish()})


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

    yield Stage.of(ownership, name="shard ownership", not_ready=shard_lock)
    yield Stage(
        "inbox",
        progress=[inbox.stage],
        gauges={
            "indexer_queue_bytes": lambda: inbox.unsettled_bytes,
            "indexer_queue_messages": lambda: inbox.unsettled,
        },
    )
    yield Stage.of(
        lookups,
        drain={Drain.CLOSE: lambda _task: lookups.close()},
        gauges={"indexer_key_waiting_messages": lambda: len(lookups)},
    )
    yield Stage.of(
        writer,
        drain={Drain.WRITE: partial(_settle, inbox, MAX_DRAIN_SHARE * daemon.settings.stop_timeout)},
        not_ready=writer_reasons,
        gauges={"indexer_firehose_lag_seconds": lambda: writer.lag},
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
        not_ready=stream_errors,
        gauges={
            "indexer_relay_connected": lambda: {(relay,): float(relay in open_relays(streams)) for relay in relays},
            "indexer_seconds_since_last_message": lambda: {
                (relay,): silent_seconds(streams, relay) for relay in relays
            },
            "indexer_cursor_age_seconds": lambda: {
                (one.origin.relay,): one.cursor_age
                for one in [stream.position for stream in streams]
                if one.origin.relay
            },
        },
        show=show_streams,
    )
    for stream in streams:
        yield Stage.of(stream.consumer, needs_shard=True, drain={Drain.RECEIVE_NO_MORE: _end})


def _gaps(daemon: "Daemon") -> Iterator[Stage]:
    """Yield the stages that find, load and close gaps."""
    gaps, reconciliation = daemon.open_gaps, daemon.reconciliation
    if daemon.settings.upstream == "jetstream":
        hosts = daemon.repo_checks

        def not_compared() -> Iterator[ReadinessReason]:
            if hosts.lacking is not None:
                yield ReadinessReason("not-compared", hosts.lacking, hosts.total - hosts.compared)

        yield Stage.of(hosts, needs_shard=True, not_ready=not_compared)
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

    yield Stage.of(gaps, not_ready=open_gaps)
    checks = {"stream continuity": check_silence, "relay comparison": daemon.comparison.check}
    for name, check in checks.items():
        run = partial(run_periodically, check, GAP_CHECK_SECONDS, gaps.stage.add())
        yield Stage(name, run, needs_shard=True)
    yield Stage.of(reconciliation, needs_shard=True)


def _tasks(daemon: "Daemon") -> Iterator[Stage]:
    yield from map(Stage.of, daemon.tasks)
    yield from (Stage.of(task, needs_shard=True) for task in daemon.shard_tasks)


def _hosts(daemon: "Daemon") -> Iterator[Stage]:
    crawl = daemon.host_crawl

    def hosts() -> Reading:
        return {(state,): crawl.totals.get(state, 0) for state in ("listed", "failing", "withheld")}

    streams, has_relays = daemon.host_streams, daemon.settings.upstream == "relay"
    yield Stage.of(
        streams,
        run=streams.run if has_relays else None,
        needs_shard=True,
        drain={Drain.RECEIVE_NO_MORE: _end} if has_relays else {},
        gauges={"indexer_host_streams": lambda: len(open_relays(list(streams.streams.values())))},
    )
    yield Stage.of(
        crawl,
        run=crawl.run if crawl.settings.interval and has_relays else None,
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

    yield Stage.of(
        pool,
        drain={
            Drain.RECEIVE_NO_MORE: _end,
            Drain.GIVE_BACK: lambda _task: pool.give_back(),
            Drain.CLOSE: lambda _task: pool.close(),
        },
        not_ready=claim_errors,
        gauges={"indexer_resync_running": lambda: len(pool.shares.running)},
        show=show_resyncs,
    )
    yield Stage("queue maintenance", maintenance.run, progress)
    listen = partial(daemon.db.resyncs.listen, daemon.request_record)
    yield Stage("record requests", partial(run_periodically, listen, RETRY_SECONDS, Work()))


def _feed(daemon: "Daemon") -> Iterator[Stage]:
    tap, jetstream, webhook = daemon.tap_feed, daemon.jetstream_reader, daemon.webhook

    async def stop(task: Task) -> None:
        await tap.stop()
        await asyncio.wait([task], timeout=FEED_STOP_SECONDS)

    yield Stage.of(
        tap,
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
    yield Stage.of(jetstream)
    yield Stage("waiting clients", daemon.rev_waits.run)
    if webhook is not None:
        yield Stage.of(webhook)


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


def _disk(directory: Path) -> tuple[int | None, int | None]:
    """Return total and free bytes of the disk with `directory`, or with its nearest parent that exists.

    They are None if the system does not say them, for example if a network file system has gone.
    """
    path = directory.absolute()
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
    except OSError:
        return None, None
    return usage.total, usage.free


async def _end(task: Task) -> None:
    """Cancel the task of a stage, and wait for its end. The daemon raises its exception later."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
