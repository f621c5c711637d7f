"""The composition root: build the stages of the daemon from the settings."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from time import monotonic, time
from urllib.parse import urlsplit

from aiohttp import web

from indexer import cluster
from indexer.app.clients import (
    core_of,
    http_origin,
    make_did_resolver,
    make_pds_client,
    make_plc_operations,
    open_outbound_client,
    open_webhook_client,
)
from indexer.app.monitor import DaemonMonitor, DatabaseMonitor
from indexer.app.process_setup import StopRequest
from indexer.app.settings import Settings
from indexer.app.stage_runner import run_stages
from indexer.app.stages import Part, all_stages
from indexer.app.status import DaemonProbe, SampledHistory, StatusPage, StatusReading
from indexer.app.tuning import Tuning
from indexer.cluster.numbering import ChangeNumbering
from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.stage_progress import StageProgress
from indexer.core.core import Core
from indexer.db import Database
from indexer.db.change_log_segments import RetentionPolicy
from indexer.db.connections import RESERVED_CONNECTIONS
from indexer.db.gaps import OpenGaps
from indexer.db.process_reports import DatabaseCheck, ProcessReport
from indexer.db.scope import CurrentScope
from indexer.live.account_limits import AccountLimits
from indexer.live.batch_writer import BATCH_SIZE, BatchWriter, SettledTotals
from indexer.live.firehose_consumer import FirehoseConsumer, GapRecorder, Start, StreamContinuity
from indexer.live.hint_reader import MAX_PATHS, HintReader
from indexer.live.host_streams import HOST_BYTES_PER_SECOND, HostStreams, MissedMessages
from indexer.live.inbox import Inbox
from indexer.live.key_lookups import KeyLookups
from indexer.live.relay_comparison import RelayComparison
from indexer.live.stream_position import StreamPosition
from indexer.live.streams import Stream, open_relays
from indexer.net.http.http_client import OutboundClient
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.net.pds.pds_client import PdsClient
from indexer.net.relay.stream_socket import (
    SHORT_INTERVAL,
    ConnectionSettings,
    Opening,
    ReadTimes,
    open_to_any_address,
)
from indexer.net.relay.subscription import Subscription
from indexer.net.server.address import Address
from indexer.readers.access import Access
from indexer.readers.jetstream.events import SUBSCRIBE_EVENTS
from indexer.readers.jetstream.log_reading import JetstreamReader
from indexer.readers.jetstream.subscriber import Subscriptions, get_dictionary
from indexer.readers.links import LinkReader
from indexer.readers.rev_waits import RevWaits
from indexer.readers.tap.channel import Channel, refuse_channel
from indexer.readers.tap.deliveries import RefusalLimits
from indexer.readers.tap.feed import TapFeed
from indexer.readers.tap.routes import TapRoutes
from indexer.readers.tap.webhook import Webhook
from indexer.resync.apply import LARGE_TURNS, TURNS, Applies
from indexer.resync.fetch import ResyncAttempts
from indexer.resync.pool import OTHER_TIME, WorkerPool
from indexer.resync.queue import QueueMaintenance
from indexer.resync.sparse import SparseFetch
from indexer.serve.health import Listener, serve_http
from indexer.serve.status_page import status_routes
from indexer.sync.repo import StreamPoint
from indexer.sync.scope import Track
from indexer.tasks.discover import SignalDiscovery
from indexer.tasks.erasure import AccountErasure
from indexer.tasks.hosts import LOOKUP_SHARE, HostCrawl
from indexer.tasks.identities import HandleChecks, IdentityRefresh
from indexer.tasks.open_transactions import OpenTransactions
from indexer.tasks.reconcile import Reconciliation
from indexer.tasks.repo_checks import RepoChecks
from indexer.tasks.retention import ChangeLogRetention
from indexer.tasks.scope import ScopeBackfill, ScopeNarrowing
from indexer.tasks.shard_ownership import ShardOwnership
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics

PDS_MESSAGE_TIMEOUT = 1_800.0
"""Seconds without any message, before the connection to a PDS is closed: its accounts may do nothing for a while."""
FRAME_SIZE_MARGIN = 4
"""Frames up to this multiple of the limit are received and rejected, so that the connection stays
open. A larger frame ends the connection."""
BATCH_SPACING = 0.9 * SHORT_INTERVAL
"""Minimum time from one batch to the next, as a share of the longest time from one read of the stream to the next. So a
batch begins with a read, and what was read does not wait."""
INBOX_BYTES = 16 * 1024 * 1024
KEY_LOOKUP_CONCURRENCY = 64
REQUEST_SECONDS = 0.05
"""Time after which resyncs that are due are looked for again, after a record was requested."""
CONNECTIONS = TURNS + LARGE_TURNS + RESERVED_CONNECTIONS
"""Size of the pool of connections. Some stages have connections of their own, such as the shard lock."""


@asynccontextmanager
async def open_daemon(
    settings: Settings,
    dsn: str,
    metrics: Metrics | None = None,
    others: Sequence[StageProgress] = (),
    core: Core | None = None,
    tuning: Tuning | None = None,
) -> AsyncIterator["Daemon"]:
    """Build a daemon on a database with the current schema; `Daemon.run` starts it. Close its resources at the end.

    `metrics` and `core` are those of the process, if it has them already. Its stages `others` run outside the daemon.

    Raises:
        DatabaseError: The database does not answer.
        SettingsError: The upstream of the database excludes one of the settings.
    """
    async with AsyncExitStack() as stack:
        metrics, tuning = metrics or Metrics(), tuning or Tuning()
        db = await Database.open(dsn, connections=CONNECTIONS)
        stack.push_async_callback(db.close)
        settings = settings.continuing(await db.gaps.cursors())
        outbound = await stack.enter_async_context(
            open_outbound_client(settings, metrics.outbound_request, tuning.timeouts, tuning.host_pauses)
        )
        outbound.hosts.restore(await db.hosts.load())
        resolver = make_did_resolver(settings, outbound, metrics.plc_log)
        identities = IdentityCache(
            resolver,
            db.identities,
            metrics,
            clock=time,
            refresh_rate=settings.plc_rate / 2,
            lifetimes=tuning.identities,
            max_entries=tuning.max_identities,
        )
        stack.push_async_callback(identities.close)
        core = core or core_of(settings)
        pds = make_pds_client(settings, outbound, core)
        webhook = await stack.enter_async_context(
            open_webhook_client(settings, metrics.outbound_request, tuning.timeouts, tuning.host_pauses)
        )
        daemon = Daemon(settings, db, identities, pds, outbound, metrics, core, tuning, others, webhook)
        await daemon.scope.begin()
        yield daemon


@dataclass(eq=False)
class Daemon:
    """The stages of one process.

    Attributes:
        webhook_client: The client for the webhook; None if the settings name none.
        tasks: Parts of the role `live` that need not own the shard.
        shard_tasks: Parts of the role `live` that start when this process owns its shard.
        started_at: When it was built (monotonic seconds).
    """

    settings: Settings
    db: Database
    identities: IdentityCache
    pds: PdsClient
    outbound: OutboundClient
    metrics: Metrics
    core: Core
    tuning: Tuning
    others: Sequence[StageProgress]
    webhook_client: OutboundClient | None

    def __post_init__(self) -> None:
        settings, db = self.settings, self.db
        self._shard = settings.shard.placed(db.layout)
        self.hosts = self.outbound.hosts
        self.conditions = Conditions()
        self.started_at = monotonic()
        self.scope = CurrentScope(db.scope, settings.policy, self.tuning.scope.interval, settings.chooses_scope)
        self._new_accounts_per_host = settings.new_accounts_per_host / self._shard.count
        self.new_accounts = NewAccounts(self._new_accounts_per_host)
        self.hint_paths = BoundedDict[str, str](MAX_PATHS)
        self._build_resync_stages()
        self._build_background_stages()
        self._build_live_stages()
        self._build_feeds()
        self._build_monitors()
        stages = all_stages(self, self.others)
        self._stages = [stage for stage in stages if stage.role is None or stage.role in settings.roles]
        self.probe = DaemonProbe(self._stages, self.database_monitor, self.shard_ownership, self.started_at)
        self.status = StatusPage(
            db, self.status_reading, self.probe, stages, self.history, str(self._shard), settings.roles
        )
        for gauges in (self.probe.gauges(), *(stage.gauges for stage in stages)):
            self.metrics.watch(gauges)

    def _build_live_stages(self) -> None:
        settings, shard, tuning = self.settings, self._shard, self.tuning
        self._writer_settings = replace(
            tuning.writer,
            shard=shard,
            batch_size=cluster.BATCH_SIZE if self.db.layout.parts > 1 else BATCH_SIZE,
            batch_window=settings.batch_window * BATCH_SPACING,
        )
        self.shard_ownership = ShardOwnership(self.db, shard, retry=tuning.retry)
        at_once = settings.relay_mode == "all" and settings.upstream == "relay"
        groups = [[relay] for relay in settings.relays] if at_once else [settings.relays]
        self.inbox = Inbox(INBOX_BYTES, len(groups))
        self.open_gaps = OpenGaps(self.db.gaps, shard, self.metrics, tuning.gap_refresh)
        self._read_times = ReadTimes()
        writer_totals = SettledTotals()
        if settings.upstream == "jetstream":
            self.streams = [self._hint_stream(writer_totals)]
        else:
            entries = asyncio.Barrier(len(groups))
            self.streams = [self._relay_stream(relays, entries) for relays in groups]
        compared = {stream.subscription.relays[0]: stream for stream in self.streams if stream.continuity}
        self.comparison = RelayComparison(compared, self.open_gaps, self.metrics, self.conditions, tuning.comparison)
        self.reconciliation = Reconciliation(
            self.db,
            self.outbound,
            self.metrics,
            self.open_gaps,
            self._open_sources,
            self._stream_point,
            self.scope,
            replace(tuning.reconciliation, shard=shard, interval=settings.comparison_interval),
            self.identities,
            sources_are_hosts=settings.upstream == "pds",
            may_be_covered=self.comparison.covered.may_close_all,
        )
        self.key_lookups = KeyLookups(
            self.identities, self.inbox, timeout=tuning.key_lookup_timeout, concurrency=KEY_LOOKUP_CONCURRENCY
        )
        positions = [stream.position for stream in self.streams]
        self.batch_writer = BatchWriter(
            self.db,
            self.inbox,
            self.key_lookups,
            positions,
            self.shard_ownership.owned,
            self._writer_settings,
            self.metrics,
            self.conditions,
            AccountLimits(self.new_accounts, NewAccounts(self._new_accounts_per_host), self.conditions),
            self.scope,
            self.core,
            self.comparison.add,
            writer_totals,
        )
        self.host_streams = HostStreams(
            self.db,
            self.inbox,
            positions,
            self._host_stream,
            replace(tuning.host_streams, shard=shard, hosts=settings.host_streams),
            self.metrics,
        )

    def _hint_stream(self, totals: SettledTotals) -> Stream:
        """Return the stream of the first Jetstream that works."""
        settings = self.settings
        connection = replace(self.tuning.connection, message_timeout=PDS_MESSAGE_TIMEOUT)
        max_bytes = FRAME_SIZE_MARGIN * settings.limits.frame_bytes
        reader = HintReader(
            self.db,
            Subscription(settings.jetstreams, max_bytes, settings.user_agent, connection),
            self.scope,
            self.identities,
            self._writer_settings,
            self.metrics,
            self.conditions,
            NewAccounts(self._new_accounts_per_host),
            self.hint_paths,
            self.resync_pool.wake,
            self.repo_checks.ask,
            totals,
        )
        return Stream(reader.subscription, None, reader.position, reader)

    def request_record(self, did: str, path: str) -> None:
        """Start resyncs that are due now. That of this repo requests this path first."""
        if self._shard.owns(did):
            self.hint_paths[did] = path
            self.resync_pool.wake()  # and again, because the first claim skips the row if it is locked
            asyncio.get_running_loop().call_later(REQUEST_SECONDS, self.resync_pool.wake)

    def _relay_stream(self, relays: Sequence[str], entries: asyncio.Barrier) -> Stream:
        """Return a stream of the first of these relays that works."""
        settings = self.settings
        start = settings.start if relays[0] == settings.relays[0] or isinstance(settings.start, str) else "live"
        connection = self.tuning.connection
        if settings.upstream == "pds":
            connection = replace(connection, message_timeout=PDS_MESSAGE_TIMEOUT)
        return self._stream(relays, connection, self.open_gaps, start, entries=entries)

    def _host_stream(self, pds: str) -> Stream:
        """Return the stream of a host that is read beside those of the relays."""
        connection = replace(
            self.tuning.connection, message_timeout=PDS_MESSAGE_TIMEOUT, bytes_per_second=HOST_BYTES_PER_SECOND
        )
        missed = MissedMessages(self.db, self._shard, self.metrics)
        return self._stream([pds], connection, missed, "live", self.outbound.opening)

    def _stream(
        self,
        relays: Sequence[str],
        connection: ConnectionSettings,
        gaps: GapRecorder,
        start: Start,
        opening: Opening | None = None,
        entries: asyncio.Barrier | None = None,
    ) -> Stream:
        """Return a stream; `opening` allows each connection to a host."""
        settings, tuning = self.settings, self.tuning
        connection = replace(connection, read_interval=settings.batch_window, read_times=self._read_times)
        max_bytes = FRAME_SIZE_MARGIN * settings.limits.frame_bytes
        subscription = Subscription(relays, max_bytes, settings.user_agent, connection, opening or open_to_any_address)
        continuity = StreamContinuity(
            self.db,
            gaps,
            subscription,
            self._shard,
            start,
            proof_timeout=tuning.proof_timeout,
            retry=tuning.retry,
            first_entries=entries,
        )
        position = StreamPosition(
            lambda: continuity.is_known, upstream_is_pds=settings.upstream == "pds", beside_relays=opening is not None
        )
        decode = self.core.decoder(settings.limits, self._shard)
        name = "firehose consumer" if self.inbox.streams == 1 else f"firehose consumer {urlsplit(relays[0]).netloc}"
        consumer = FirehoseConsumer(
            subscription, continuity, self.inbox, position, self._shard, decode, self.metrics, name
        )
        return Stream(subscription, continuity, position, consumer)

    def _build_resync_stages(self) -> None:
        settings, shard = self.settings, self._shard
        relay = http_origin(settings.relays[0])
        sources = [relay if source == "relay" else None for source in settings.resync_source]
        turns = cluster.RESYNC_TURNS if self.db.layout.parts > 1 else TURNS
        attempts = ResyncAttempts(
            Applies(self.db, self.metrics, self.conditions, turns),
            self.identities,
            self.pds,
            lambda: self.scope.policy,
            self.metrics,
            sources,
            self.conditions,
            SparseFetch(self.pds, settings.sparse_resync, self.hint_paths),
        )
        self.resync_pool = WorkerPool(
            self.db,
            self.identities,
            attempts,
            settings.deletion_grace,
            shard,
            self.metrics,
            self.conditions,
            replace(
                self.tuning.pool,
                workers=settings.resync_workers,
                attempt_timeout=OTHER_TIME + 2 * settings.export_time,  # of a relay, and then of the PDS
                streamed=settings.upstream != "jetstream",
                gathering_time=cluster.GATHERING_SECONDS if self.db.layout.parts > 1 else 0.0,
            ),
            self.new_accounts,
        )
        unpark_after = 86_400.0 if settings.sweep_interval is None else settings.sweep_interval
        self.queue_maintenance = QueueMaintenance(
            self.db,
            shard,
            self.metrics,
            replace(self.tuning.maintenance, unpark_after=unpark_after),
            may_forget=lambda: self.scope.scope.track is not Track.LISTED,
        )

    def _build_background_stages(self) -> None:
        settings, shard, tuning = self.settings, self._shard, self.tuning
        self.identity_refresh = IdentityRefresh(
            self.db, self.identities, settings.deletion_grace, shard, interval=tuning.identity_refresh_interval
        )
        self.account_erasure = AccountErasure(
            self.db, self.identities, self.pds, settings.deletion_grace, shard, interval=tuning.erasure_interval
        )
        links = LinkReader(self.db, wanted=settings.links)
        self.tasks: list[Part] = [self.identity_refresh, self.account_erasure, links]
        if settings.plc_follow:
            reading = make_plc_operations(settings, self.db, self.outbound, self.conditions, self.metrics)
            self.tasks.append(replace(reading, interval=tuning.operations_interval))
        self.host_crawl = HostCrawl(
            self.db,
            self.outbound,
            self.identities,
            self.metrics,
            self.conditions,
            self.scope,
            {relay: http_origin(relay) for relay in settings.relays},
            lambda: next(iter(self._open_sources()), None),
            self._stream_point,
            replace(tuning.hosts, shard=shard, interval=settings.hosts_interval),
            self._new_accounts_per_host,
            settings.plc_rate * LOOKUP_SHARE,
        )
        self.repo_checks = RepoChecks(
            self.db,
            self.outbound,
            self.metrics,
            self.scope,
            self.identities,
            replace(
                tuning.repo_checks,
                shard=shard,
                interval=settings.comparison_interval,
                min_rate=min(settings.host_rate, settings.outbound_rate / tuning.repo_checks.concurrency) / 2,
            ),
        )
        retention = RetentionPolicy(settings.change_retention, settings.change_bytes, settings.consumer_lag_limit)
        self.change_log_retention = ChangeLogRetention(self.db, retention, self.metrics)
        self.open_transactions = OpenTransactions(self.db, self.metrics, self.conditions)
        self.change_numbering: ChangeNumbering | None = None
        if not self.db.layout.commit_numbers:
            self.change_numbering = ChangeNumbering(self.db, self.conditions)
        self.shard_tasks = list(self._shard_tasks())

    def _shard_tasks(self) -> Iterator[Part]:
        """Yield the check of handles, and the tasks that delete what left the scope and fetch what entered it."""
        db, scope, shard, outbound, settings = self.db, self.scope, self._shard, self.outbound, self.settings
        times, sources = self.tuning.scope, self._repo_list_sources
        if settings.handle_rate:
            handles = HandleVerifier(
                outbound,
                settings.dns_servers,
                allow_private_hosts=settings.allow_private_hosts,
                on_lookup=lambda method, result: self.metrics.identity_lookups[method, result].inc(),
            )
            yield HandleChecks(db, handles, shard, rate=settings.handle_rate)
        yield ScopeNarrowing(db, scope, shard, self.metrics, times)
        yield ScopeBackfill(db, outbound, scope, sources, shard, self.metrics, times)
        if shard.index == 0:  # the lists are of all shards
            is_pds = settings.upstream == "pds"
            yield SignalDiscovery(db, outbound, scope, sources, self._reconciled_at, times, sources_are_hosts=is_pds)

    def _build_feeds(self) -> None:
        """Build what the role `feed` runs."""
        settings, db, client = self.settings, self.db, self.webhook_client
        limits = RefusalLimits.below(settings.consumer_lag_limit)
        self.tap_feed = TapFeed(db, self.conditions, self.metrics, limits, one_per_repo=client is not None)
        self.channel = Channel(self.tap_feed, self.metrics)
        self.jetstream_reader = JetstreamReader(db)
        self.rev_waits = RevWaits(db)
        self.webhook: Webhook | None = None
        self._password = settings.admin_password.get_secret_value() if settings.admin_password else None
        if client is not None and settings.webhook_url is not None:
            url = settings.webhook_url.get_secret_value()
            batch, password = settings.webhook_batch, self._password
            self.webhook = Webhook(self.tap_feed, client, url, batch, password, self.conditions, self.metrics)

    def _feed_routes(self) -> Iterator[web.RouteDef]:
        """Yield the routes of tap and of Jetstream. Changes and acknowledgements need the password, if there is one."""
        access = Access(self._password)
        yield from TapRoutes(self.db, self.identities).routes(access)
        yield web.get("/channel", access.guard(self.channel.connect if self.webhook is None else refuse_channel))
        values_stored = self.settings.store_values
        subscriptions = Subscriptions(self.db, self.jetstream_reader, self.metrics, values_stored=values_stored)
        yield web.get("/subscribe", subscriptions.subscribe)
        yield web.get("/wait-for/{did}", access.guard(self.rev_waits.respond))
        yield web.get(f"/xrpc/{SUBSCRIBE_EVENTS}", subscriptions.subscribe_events)
        yield web.get("/xrpc/network.bsky.jetstream.getZstdDictionary", get_dictionary)

    def _build_monitors(self) -> None:
        self.status_reading = StatusReading(
            self.db, self._shard, self.metrics, self.tuning.count_interval, self.tuning.max_count_share
        )
        self.database_monitor = DatabaseMonitor(self.db, DatabaseCheck(self.db.dsn), self.conditions, self.metrics)
        self.daemon_monitor = DaemonMonitor(
            self.batch_writer.totals, self.identities.lookups, self.hosts, self.streams, self.conditions
        )
        self.history = SampledHistory(self.batch_writer, self.resync_pool)

    def report(self) -> ProcessReport:
        """Return what `indexer status` shows of this process: what `/readyz` answers now."""
        roles = self.settings.roles
        owns = "live" not in roles or self.shard_ownership.owned.is_set()
        reasons = [asdict(reason) for reason in self.probe.not_ready()]
        return ProcessReport(roles, self._shard.positions, owns, reasons)

    def serve_http(self, listener: Listener | None = None) -> AbstractAsyncContextManager[Address]:
        """Serve health checks, metrics, the status page and feeds during a block, which gets the address.

        `listener` is the address of the settings, if it is bound already.
        """
        listener = listener or Listener(self.settings.http_bind)
        feeds = self._feed_routes() if "feed" in self.settings.roles else ()
        routes = [*status_routes(self.status.document, self.status.account), *feeds]
        checks = {"/healthz": self.probe.stalled, "/readyz": self.probe.not_ready}
        return serve_http(listener, checks, self.metrics.registry, self.conditions, routes=routes)

    async def run(self, stop: StopRequest) -> int:
        """Run all stages until `stop` is set, then drain. An exception of a stage is raised here.

        Returns:
            The number of received messages that could not be written in time.
        """
        return await run_stages(self._stages, self, stop)

    def _repo_list_sources(self) -> Sequence[str]:
        """Return the relays whose streams are open, then the others; none if no stream is open."""
        if not (sources := self._open_sources()):
            return ()
        return list(dict.fromkeys([*sources, *map(http_origin, self.settings.relays)]))

    def _open_sources(self) -> Sequence[str]:
        """Return the relays whose streams are open; with a Jetstream, all relays if it is open."""
        open_streams = open_relays(self.streams)
        if open_streams and self.settings.upstream == "jetstream":
            return list(map(http_origin, self.settings.relays))
        return list(map(http_origin, open_streams))

    def _stream_point(self, source: str) -> StreamPoint | None:
        """Return the last stored message of the stream of this source; None if that is not known or not open."""
        points = [stream.position.last_stored() for stream in self.streams]
        return next((point for point in points if point is not None and http_origin(point.relay) == source), None)

    def _reconciled_at(self) -> float | None:
        """Return when the last reconciliation of this process ended; None if none has ended.

        With a Jetstream, when the last complete comparison of its repos with their hosts began.
        """
        if self.settings.upstream == "jetstream":
            return self.repo_checks.began_at
        progress = self.reconciliation.crawl_progress
        return progress.finished_at if progress else None
