"""The composition root: settings to a running daemon.

The stages are tasks; an error that is ours in any of them ends all, loudly. The first SIGTERM or SIGINT drains:
the stream is closed, what was received is written with its cursor, running resyncs are given back. The second one
stops at once; what is lost then comes again after the next start.
"""

import asyncio
import gc
import math
import resource
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from time import monotonic, time
from typing import Any

import structlog

from indexer import __version__
from indexer.clients import origin_of, pds_client_of, requests_of, resolver_of
from indexer.config import Settings
from indexer.errors import SettingsError, UnavailableError
from indexer.health import serve_health
from indexer.identity import Freshness, Handles, Identities
from indexer.metrics import Metrics
from indexer.outbound import Outbound
from indexer.pds import PdsClient
from indexer.relay.subscription import Subscription
from indexer.service.erasure import Erasure
from indexer.service.handles import HandleChecks
from indexer.service.inbox import Inbox
from indexer.service.keys import KeyDesk
from indexer.service.lane import places_of_large
from indexer.service.pool import Pool
from indexer.service.reader import Place, Reader
from indexer.service.renewal import Renewal
from indexer.service.replay import Replay
from indexer.service.resync import Resync
from indexer.service.retention import Retention
from indexer.service.sweep import Sweep
from indexer.service.tenure import Tenure
from indexer.service.writer import Writer
from indexer.status import READY_LAG_SECONDS
from indexer.store import RESERVED, Keep, Store
from indexer.store.embedded import database
from indexer.store.migrate import migrate, schema_is_current

DRAIN_SECONDS = 20.0
STALL_SECONDS = 120.0
OBSERVE_SECONDS = 10.0
OBSERVE_SHARE = 100.0  # counting reads every repo's row, so it gets a hundredth of the time
RECEIVED_FRAMES = 4  # so many times the limit are received to be refused by name; only beyond that, the line is cut
INBOX_BYTES = 64 * 1024 * 1024
KEY_PATIENCE_SECONDS = 15.0
KEYS_AT_ONCE = 64
HOSTS_SECONDS = 5.0
HOSTS_SHOWN = 10
MOST_FILES = 65_536
MOST_CONNECTIONS = 40  # of one process: Postgres has a hundred by default, for other processes and for readers, too

log = structlog.get_logger(__name__)


async def run(settings: Settings, *, migrate_first: bool = True) -> int:
    """The command `indexer run`: serves until a signal comes; gives the exit code."""
    stop = asyncio.Event()
    open_many_files()
    with signals(stop):
        async with database(_url(settings), settings.data_dir) as dsn:
            if migrate_first:
                await migrate(dsn)
            elif not await schema_is_current(dsn):
                raise SettingsError("the database's schema is not this program's: run `indexer migrate`")
            async with (
                daemon(settings, dsn) as running,
                serve_health(settings.http_bind, running, running.metrics.registry) as address,
            ):
                _settle_memory()
                log.info("daemon.started", health=f"http://{address}", version=__version__)
                await running.run(stop)
    log.info("daemon.stopped")
    return 0


@asynccontextmanager
async def daemon(settings: Settings, dsn: str) -> AsyncIterator["Daemon"]:
    """A daemon over a migrated database, not yet running; closes what it opened."""
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        store = await Store.open(dsn, connections=connections(settings.resync_workers))
        stack.push_async_callback(store.close)
        outbound = await stack.enter_async_context(requests_of(settings, metrics.outbound_request))
        outbound.hosts.load(await store.load_hosts())
        resolver = resolver_of(settings, outbound)
        identities = Identities(resolver, store, metrics, clock=time, refresh_rate=settings.plc_rate / 2)
        stack.push_async_callback(identities.close)
        pds = pds_client_of(settings, outbound)
        yield Daemon(settings, store, identities, _handles(settings, outbound, metrics), pds, outbound, metrics)


@asynccontextmanager
async def replay(settings: Settings, store: Store) -> AsyncIterator[Replay]:
    """Dead letters are taken up as the daemon of these settings would; closes what it opened.

    Only an operator causes look-ups here: none is too many, and that there was no key is no answer.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        outbound = await stack.enter_async_context(requests_of(settings, metrics.outbound_request))
        outbound.hosts.load(await store.load_hosts())
        resolver, freshness = resolver_of(settings, outbound), Freshness(missing=0.0)
        identities = Identities(resolver, store, metrics, clock=time, refresh_rate=math.inf, freshness=freshness)
        stack.push_async_callback(identities.close)
        of_pds = settings.upstream == "pds"
        yield Replay(store, identities, settings.policy, of_pds=of_pds, patience=KEY_PATIENCE_SECONDS)
        await store.save_hosts(outbound.hosts.unsaved())


class Daemon:
    """The stages of one process, and what they tell of themselves (`health.Probe`)."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        identities: Identities,
        handles: Handles | None,
        pds: PdsClient,
        outbound: Outbound,
        metrics: Metrics,
    ) -> None:
        self.metrics = metrics
        self.store = store
        self.hosts = outbound.hosts
        self._settings = settings
        policy = settings.policy
        self.identities = identities
        self.handles = HandleChecks(store, handles, settings.shard, rate=settings.handle_rate) if handles else None
        self.inbox = Inbox(INBOX_BYTES)
        self.keys = KeyDesk(identities, self.inbox, patience=KEY_PATIENCE_SECONDS, at_once=KEYS_AT_ONCE)
        self.tenure = Tenure(store, settings.shard)
        self.subscription = Subscription(settings.relays, RECEIVED_FRAMES * settings.frame_bytes, settings.user_agent)
        self.place = Place(lambda: self.subscription.connection is not None, of_pds=settings.upstream == "pds")
        self.sweep = sweep_of(settings, store, outbound, metrics)
        self.reader = Reader(
            store,
            self.subscription,
            self.inbox,
            self.place,
            settings.shard,
            settings.start,
            settings.limits,
            metrics,
            self.sweep.ask,
        )
        self.writer = Writer(
            store, identities, self.keys, self.inbox, self.place, policy, settings.shard, self.tenure.held, metrics
        )
        resync = Resync(store, identities, pds, policy, metrics, _sources(settings))
        self.pool = Pool(
            store,
            identities,
            resync,
            policy,
            settings.shard,
            metrics,
            workers=settings.resync_workers,
            sweep_interval=settings.sweep_interval,
        )
        self.renewal = Renewal(store, identities, policy, settings.shard)
        self.erasure = Erasure(store, settings.shard, metrics)
        self.retention = Retention(
            store,
            Keep(settings.change_retention, settings.change_bytes, settings.reader_limit),
            metrics,
            alarm=settings.reader_alarm,
        )
        metrics.watch(
            lag_seconds=lambda: math.nan if self.writer.lag is None else self.writer.lag,
            queue_bytes=lambda: self.inbox.held_bytes,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, then drains; raises what ended a stage."""
        await self._compare_choice()
        stages: dict[str, Coroutine[Any, Any, None]] = {
            "observe": self._observe(),
            "hosts": self._keep_hosts(),
            "identities": self.identities.run(),
            "retention": self.retention.run(),
        }
        if "live" in self._settings.roles:
            stages |= {"tenure": self.tenure.run(), "renewal": self.renewal.run(), "erasure": self.erasure.run()}
            stages |= {"reader": self._read(), "keys": self.keys.run(), "writer": self.writer.run()}
            if self._settings.sweep_interval and self._settings.shard.index == 0:  # one for all shards
                stages |= {"sweep": self._sweep()}
        if "resync" in self._settings.roles:
            stages |= {"pool": self.pool.run()}
            if self.handles is not None:
                stages |= {"handles": self.handles.run()}
        tasks = {name: asyncio.create_task(stage, name=name) for name, stage in stages.items()}
        stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*tasks.values(), stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks.values():
                if task.done():
                    task.result()  # a stage never ends but with an error
            await self._drain(tasks)
        finally:
            for task in (*tasks.values(), stopped):
                task.cancel()
            await asyncio.gather(*tasks.values(), stopped, return_exceptions=True)
            await self.keys.close()

    async def _compare_choice(self) -> None:
        chosen = str(self._settings.collections)
        before = await self.store.choose("collections", chosen)
        if before not in {None, chosen}:
            log.warning("collections.changed", before=before, now=chosen, then="indexer resync --all")

    async def _read(self) -> None:
        await self.tenure.held.wait()
        await self.reader.run()

    async def _sweep(self) -> None:
        await self.tenure.held.wait()
        await self.sweep.run()

    async def _drain(self, tasks: Mapping[str, asyncio.Task[None]]) -> None:
        """Raises what ends a stage meanwhile."""
        log.info("daemon.draining", messages=self.inbox.held, resyncs=len(self.pool.running))
        ending = [tasks[name] for name in ("reader", "pool") if name in tasks]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if "writer" in tasks:
            empty = asyncio.create_task(self.inbox.empty())
            await asyncio.wait([tasks["writer"], empty], timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            empty.cancel()
        await self.pool.give_back()
        await self._save_hosts()
        for task in tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def _observe(self) -> None:
        while True:
            began = monotonic()
            try:
                counts = await self.store.counts()
                self.metrics.repos(counts.statuses, counts.queued)
            except UnavailableError as error:
                log.warning("database.unavailable", error=str(error))
            took = monotonic() - began
            await asyncio.sleep(max(OBSERVE_SECONDS, took * OBSERVE_SHARE))

    async def _keep_hosts(self) -> None:
        """So that no restart forgets whom we should leave alone."""
        while True:
            await asyncio.sleep(HOSTS_SECONDS)
            await self._save_hosts()

    async def _save_hosts(self) -> None:
        self.metrics.paused_hosts(len(self.hosts.paused()))
        if not (states := self.hosts.unsaved()):
            return
        try:
            await self.store.save_hosts(states)
        except UnavailableError as error:
            log.warning("database.unavailable", error=str(error))
            return
        self.hosts.saved(states)

    def alive(self) -> str | None:
        idle = self.inbox.held == len(self.keys) or not self.tenure.held.is_set()
        if not idle and monotonic() - self.writer.progress > STALL_SECONDS and self.writer.trouble is None:
            return f"the writer has written nothing for {monotonic() - self.writer.progress:.0f} s"
        resyncs = "resync" in self._settings.roles and self.pool.free > 0 and self.pool.trouble is None
        if resyncs and monotonic() - self.pool.progress > STALL_SECONDS:
            return f"free resync workers have asked for no repo for {monotonic() - self.pool.progress:.0f} s"
        return None

    def ready(self) -> str | None:
        if trouble := self.writer.trouble or self.pool.trouble or self.reader.trouble:
            return trouble
        if "live" not in self._settings.roles:
            return None
        if self.tenure.trouble:
            return self.tenure.trouble
        if self.subscription.connection is None:
            return f"no relay is connected: {self.subscription.last_error or 'connecting'}"
        if self.writer.lag is not None and self.writer.lag > READY_LAG_SECONDS:
            return f"{self.writer.lag:.0f} s behind the relay"
        return None

    def status(self) -> Mapping[str, Any]:
        now = time()
        return {
            "relay": self.subscription.connection.relay if self.subscription.connection else None,
            "cursor": self.place.watermark.position,
            "lag seconds": self.writer.lag,
            "gaps": self.reader.gaps,
            "sweep": self.sweep.progress,
            "messages in hand": self.inbox.held,
            "bytes in hand": self.inbox.held_bytes,
            "waiting for keys": len(self.keys),
            "readers behind": self.retention.lagging,
            "hosts paused": {
                state.host: f"{state.pause_reason} for {(state.paused_until or now) - now:.0f} s"
                for state in self.hosts.paused()[:HOSTS_SHOWN]
            },
            "resyncs running": {run.claimed.did: f"{now - run.began:.0f} s" for run in self.pool.running},
        }


def open_many_files() -> None:
    """Connections are files: up to `MOST_FILES` where the system lets us, as many start with a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _settle_memory() -> None:
    """What is there at the start stays: the collector need not look at it again, nor look as often as it does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def connections(workers: int) -> int:
    """How many to the database: one for each resync that may be under way, and those that resyncs leave to others.

    Beyond the most, resyncs that write take turns.
    """
    return min(workers + places_of_large(workers) + RESERVED, MOST_CONNECTIONS)


def _url(settings: Settings) -> str | None:
    return settings.database_url.get_secret_value() if settings.database_url else None


def _handles(settings: Settings, outbound: Outbound, metrics: Metrics) -> Handles | None:
    if not settings.handle_rate:
        return None
    return Handles(
        outbound,
        settings.dns_servers,
        allow_private_hosts=settings.allow_private_hosts,
        on_lookup=metrics.identity_lookup,
    )


def _sources(settings: Settings) -> list[str | None]:
    return [origin_of(settings.relays[0]) if source == "relay" else None for source in settings.resync_source]


def sweep_of(settings: Settings, store: Store, outbound: Outbound, metrics: Metrics) -> Sweep:
    """Of the first relay's list."""
    drift = settings.limits.clock_drift_seconds
    return Sweep(store, outbound, metrics, origin_of(settings.relays[0]), interval=settings.sweep_interval, drift=drift)


@contextmanager
def signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second one cancels the running task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def received() -> None:
        if stop.is_set() and task is not None:
            log.warning("daemon.stopped-at-once")
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
