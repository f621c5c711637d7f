"""The composition root: build the stages of the daemon from the settings, run them, and stop them in order.

Every stage is a task. An unexpected exception in any stage stops the daemon. The first SIGTERM or SIGINT drains:
the stream is closed, received messages are written with their cursor, and running resyncs give their claims back. A
second signal stops at once; what was not written is received again after the next start.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic, time
from typing import Any

import structlog

from indexer import __version__
from indexer.clients import http_origin, make_did_resolver, make_pds_client, open_outbound_client
from indexer.daemon_probe import DaemonProbe
from indexer.identity import HandleVerifier, IdentityCache, IdentityLifetimes
from indexer.monitoring.health import serve_health
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.pds import PdsClient
from indexer.process_setup import raise_file_limit, stop_on_signals, tune_garbage_collector
from indexer.relay.subscription import Subscription
from indexer.service.background.account_erasure import AccountErasure
from indexer.service.background.change_log_retention import ChangeLogRetention
from indexer.service.background.handle_checks import HandleChecks
from indexer.service.background.identity_refresh import IdentityRefresh
from indexer.service.background.shard_ownership import ShardOwnership
from indexer.service.crawl.reconcile import Reconciliation
from indexer.service.live.batch_writer import BatchWriter, WriterSettings
from indexer.service.live.dead_letter_replay import DeadLetterReplay
from indexer.service.live.firehose_consumer import ConsumerSettings, FirehoseConsumer
from indexer.service.live.inbox import Inbox
from indexer.service.live.key_lookups import KeyLookups
from indexer.service.live.stream_position import StreamPosition
from indexer.service.periodic import DatabaseAttempt, run_periodically
from indexer.service.resync.attempt import ResyncAttempts
from indexer.service.resync.large_repo_slots import large_repo_slot_count
from indexer.service.resync.queue_maintenance import MaintenanceSettings, QueueMaintenance
from indexer.service.resync.worker_pool import WorkerPool, WorkerPoolSettings
from indexer.settings import Settings
from indexer.store import RESERVED_CONNECTIONS, RetentionPolicy, Store
from indexer.store.embedded import database
from indexer.store.migrate import migrate, require_current_schema

DRAIN_SECONDS = 20.0
"""Maximum time to write the received messages after a signal."""
COUNT_INTERVAL_SECONDS = 10.0
"""Minimum interval between two counts of the repos."""
MAX_COUNT_SHARE = 0.01
"""Maximum share of the time that is spent on counting: it reads the row of every repo."""
HOST_SAVE_SECONDS = 5.0
"""Interval at which the states of hosts are saved, so that pauses survive a restart."""
FRAME_SIZE_MARGIN = 4
"""Frames up to this multiple of `INDEXER_FRAME_BYTES` are received and rejected, so that the connection stays
open. A larger frame ends the connection."""
INBOX_BYTES = 64 * 1024 * 1024
KEY_LOOKUP_TIMEOUT_SECONDS = 15.0
KEY_LOOKUP_CONCURRENCY = 64
MAX_CONNECTIONS = 40
"""Database connections of one process. Postgres allows 100 by default, for all processes and consumers together."""

log = structlog.get_logger(__name__)


async def run(settings: Settings, *, migrate_first: bool = True) -> int:
    """Run the daemon until a signal arrives, and return the exit code.

    Raises:
        SchemaVersionError: `migrate_first` is False and the database schema is not current.
    """
    stop = asyncio.Event()
    raise_file_limit()
    url = settings.database_url.get_secret_value() if settings.database_url else None
    with stop_on_signals(stop):
        async with database(url, settings.data_dir) as dsn:
            if migrate_first:
                await migrate(dsn)
            else:
                await require_current_schema(dsn)
            async with (
                open_daemon(settings, dsn) as daemon,
                serve_health(settings.http_bind, daemon.probe, daemon.metrics.registry) as address,
            ):
                tune_garbage_collector()
                log.info("daemon.started", health=f"http://{address}", version=__version__)
                await daemon.run(stop)
    log.info("daemon.stopped")
    return 0


@asynccontextmanager
async def open_daemon(settings: Settings, dsn: str) -> AsyncIterator["Daemon"]:
    """Build a daemon on a database with the current schema; `Daemon.run` starts it. Close its resources at the end."""
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        store = await Store.open(dsn, connections=connection_count(settings.resync_workers))
        stack.push_async_callback(store.close)
        outbound = await stack.enter_async_context(open_outbound_client(settings, metrics.outbound_request))
        outbound.hosts.restore(await store.load_hosts())
        resolver = make_did_resolver(settings, outbound)
        identities = IdentityCache(resolver, store, metrics, clock=time, refresh_rate=settings.plc_rate / 2)
        stack.push_async_callback(identities.close)
        pds = make_pds_client(settings, outbound)
        yield Daemon(settings, store, identities, pds, outbound, metrics)


@asynccontextmanager
async def open_replay(settings: Settings, store: Store) -> AsyncIterator[DeadLetterReplay]:
    """Build the replay of dead letters, with the same rules as a daemon with these settings.

    Only the operator causes lookups here, so identities are refreshed without a limit, and missing keys are looked up
    again.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        outbound = await stack.enter_async_context(open_outbound_client(settings, metrics.outbound_request))
        outbound.hosts.restore(await store.load_hosts())
        resolver, lifetimes = make_did_resolver(settings, outbound), IdentityLifetimes(missing_max_age=0.0)
        identities = IdentityCache(resolver, store, metrics, clock=time, refresh_rate=math.inf, lifetimes=lifetimes)
        stack.push_async_callback(identities.close)
        yield DeadLetterReplay(
            store,
            identities,
            settings.policy,
            upstream_is_pds=settings.upstream == "pds",
            key_timeout=KEY_LOOKUP_TIMEOUT_SECONDS,
        )
        await store.save_hosts(outbound.hosts.unsaved())


class Daemon:
    """The stages of one process.

    Attributes:
        probe: The state of the stages, for the health checks and the status page.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        identities: IdentityCache,
        pds: PdsClient,
        outbound: OutboundClient,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self.store = store
        self.identities = identities
        self.hosts = outbound.hosts
        self.metrics = metrics
        self.reconciliation = make_reconciliation(settings, store, outbound, metrics)
        self._build_live_stages()
        self._build_resync_stages(pds)
        self._build_background_stages(outbound)
        metrics.watch(
            lag_seconds=lambda: math.nan if self.batch_writer.lag is None else self.batch_writer.lag,
            queue_bytes=lambda: self.inbox.unsettled_bytes,
        )
        self.probe = self._make_probe()

    def _build_live_stages(self) -> None:
        settings, shard = self._settings, self._settings.shard
        self.shard_ownership = ShardOwnership(self.store, shard)
        self.inbox = Inbox(INBOX_BYTES)
        self.subscription = Subscription(settings.relays, FRAME_SIZE_MARGIN * settings.frame_bytes, settings.user_agent)
        self.stream_position = StreamPosition(
            lambda: self.subscription.connection is not None, upstream_is_pds=settings.upstream == "pds"
        )
        self.firehose_consumer = FirehoseConsumer(
            self.store,
            self.subscription,
            self.inbox,
            self.stream_position,
            ConsumerSettings(shard, settings.limits, settings.start),
            self.metrics,
            on_gap=self.reconciliation.request,
        )
        self.key_lookups = KeyLookups(
            self.identities, self.inbox, timeout=KEY_LOOKUP_TIMEOUT_SECONDS, concurrency=KEY_LOOKUP_CONCURRENCY
        )
        self.batch_writer = BatchWriter(
            self.store,
            self.inbox,
            self.key_lookups,
            self.stream_position,
            self.shard_ownership.owned,
            WriterSettings(settings.policy, shard),
            self.metrics,
        )

    def _build_resync_stages(self, pds: PdsClient) -> None:
        settings, shard = self._settings, self._settings.shard
        relay = http_origin(settings.relays[0])
        sources = [relay if source == "relay" else None for source in settings.resync_source]
        self.resync_pool = WorkerPool(
            self.store,
            self.identities,
            ResyncAttempts(self.store, self.identities, pds, settings.policy, self.metrics, sources),
            settings.policy,
            shard,
            self.metrics,
            WorkerPoolSettings(workers=settings.resync_workers),
        )
        self.queue_maintenance = QueueMaintenance(
            self.store, shard, self.metrics, MaintenanceSettings(unpark_after=settings.sweep_interval)
        )

    def _build_background_stages(self, outbound: OutboundClient) -> None:
        settings, shard = self._settings, self._settings.shard
        self.identity_refresh = IdentityRefresh(self.store, self.identities, settings.policy, shard)
        self.account_erasure = AccountErasure(self.store, shard, self.metrics)
        self.change_log_retention = ChangeLogRetention(
            self.store,
            RetentionPolicy(settings.change_retention, settings.change_bytes, settings.consumer_lag_limit),
            self.metrics,
            lag_alarm=settings.consumer_lag_alarm,
        )
        self.handle_checks: HandleChecks | None = None
        if settings.handle_rate:
            handles = HandleVerifier(
                outbound,
                settings.dns_servers,
                allow_private_hosts=settings.allow_private_hosts,
                on_lookup=self.metrics.identity_lookup,
            )
            self.handle_checks = HandleChecks(self.store, handles, shard, rate=settings.handle_rate)

    def _make_probe(self) -> DaemonProbe:
        return DaemonProbe(
            roles=self._settings.roles,
            subscription=self.subscription,
            stream_position=self.stream_position,
            firehose_consumer=self.firehose_consumer,
            inbox=self.inbox,
            key_lookups=self.key_lookups,
            batch_writer=self.batch_writer,
            shard_ownership=self.shard_ownership,
            resync_pool=self.resync_pool,
            reconciliation=self.reconciliation,
            change_log_retention=self.change_log_retention,
            hosts=self.hosts,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Run all stages until `stop` is set, then drain. An exception of a stage is raised here."""
        await self._warn_if_collections_changed()
        tasks = {name: asyncio.create_task(stage, name=name) for name, stage in self._stages().items()}
        stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*tasks.values(), stopped], return_when=asyncio.FIRST_COMPLETED)
            _raise_exceptions(tasks.values())
            await self._drain(tasks)
        finally:
            for task in (*tasks.values(), stopped):
                task.cancel()
            await asyncio.gather(*tasks.values(), stopped, return_exceptions=True)
            await self.key_lookups.close()
            await self.resync_pool.close()

    def _stages(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the stages of the roles of this process, by task name."""
        stages: dict[str, Coroutine[Any, Any, None]] = {
            "repo counts": self._count_repos(),
            "host states": run_periodically(self._save_hosts, HOST_SAVE_SECONDS, wait_first=True),
            "identity cache": self.identities.run(),
            "change log retention": self.change_log_retention.run(),
        }
        if "live" in self._settings.roles:
            stages |= {
                "shard ownership": self.shard_ownership.run(),
                "firehose consumer": self._when_owned(self.firehose_consumer.run),
                "key lookups": self.key_lookups.run(),
                "batch writer": self.batch_writer.run(),
                "identity refresh": self.identity_refresh.run(),
                "account erasure": self.account_erasure.run(),
            }
            if self._settings.sweep_interval and self._settings.shard.index == 0:  # one process does it for all shards
                stages |= {"reconciliation": self._when_owned(self.reconciliation.run)}
        if "resync" in self._settings.roles:
            stages |= {"resync pool": self.resync_pool.run(), "queue maintenance": self.queue_maintenance.run()}
            if self.handle_checks is not None:
                stages |= {"handle checks": self.handle_checks.run()}
        return stages

    async def _warn_if_collections_changed(self) -> None:
        collections = str(self._settings.collections)
        previous = await self.store.remember_setting("collections", collections)
        if previous not in {None, collections}:
            log.warning("collections.changed", before=previous, now=collections, then="indexer resync --all")

    async def _when_owned(self, run_stage: Callable[[], Awaitable[None]]) -> None:
        """Run a stage as soon as this process owns its shard."""
        await self.shard_ownership.owned.wait()
        await run_stage()

    async def _drain(self, tasks: Mapping[str, asyncio.Task[None]]) -> None:
        """Stop receiving, write the received messages, and give claims back. Raise the exceptions of the stages."""
        log.info("daemon.draining", messages=self.inbox.unsettled, resyncs=len(self.resync_pool.running))
        receiving = [tasks[name] for name in ("firehose consumer", "resync pool") if name in tasks]
        for task in receiving:
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
        if writer := tasks.get("batch writer"):
            settled = asyncio.create_task(self.inbox.wait_until_settled())
            await asyncio.wait([writer, settled], timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
        await self.resync_pool.give_back()
        await self._save_hosts()
        _raise_exceptions(task for task in tasks.values() if not task.cancelled())

    async def _count_repos(self) -> None:
        """Update the metrics of all repos, without using more than a small share of the time for it."""
        while True:
            began = monotonic()
            with DatabaseAttempt():
                counts = await self.store.counts()
                self.metrics.repos(counts.statuses, counts.queued)
            duration = monotonic() - began
            await asyncio.sleep(max(COUNT_INTERVAL_SECONDS, duration / MAX_COUNT_SHARE))

    async def _save_hosts(self) -> None:
        self.metrics.paused_hosts(len(self.hosts.paused()))
        if not (states := self.hosts.unsaved()):
            return
        with DatabaseAttempt():
            await self.store.save_hosts(states)
            self.hosts.mark_saved(states)


def _raise_exceptions(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raise the exception of a stage that has ended. A stage ends only with an exception."""
    for task in tasks:
        if task.done():
            task.result()


def make_reconciliation(settings: Settings, store: Store, outbound: OutboundClient, metrics: Metrics) -> Reconciliation:
    """Return the reconciliation with the repo list of the first relay."""
    return Reconciliation(
        store,
        outbound,
        metrics,
        http_origin(settings.relays[0]),
        interval=settings.sweep_interval,
        drift=settings.limits.clock_drift_seconds,
    )


def connection_count(workers: int) -> int:
    """Return the number of database connections: one per possible resync, and the ones that resyncs do not use.

    With more workers than `MAX_CONNECTIONS` allows, some resyncs wait for a connection before they write.
    """
    return min(workers + large_repo_slot_count(workers) + RESERVED_CONNECTIONS, MAX_CONNECTIONS)
