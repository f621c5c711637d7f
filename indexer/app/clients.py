"""Build from the settings what commands and the daemon share: clients for outbound requests, the core, the policy."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from time import time

from indexer.app.process_setup import available_cores
from indexer.app.settings import Settings, variable
from indexer.core.core import PYTHON_CORE, Core, load_core
from indexer.db import Database
from indexer.db.write import ROW_LAYOUT
from indexer.errors import SettingsError
from indexer.live.dead_letter_replay import DeadLetterReplay
from indexer.net.http.host_limits import HostPauses, RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings, Timeouts, host_of
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache, IdentityLifetimes
from indexer.net.identity.plc_export import PlcExport
from indexer.net.pds.pds_client import PdsClient
from indexer.readers.tap.webhook import CONCURRENCY
from indexer.sync.policy import Policy
from indexer.tasks.plc_operations import PlcOperations
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics

WEBHOOK_RATE = 10_000.0
"""Maximum requests per second to the webhook."""
KEY_LOOKUP_TIMEOUT = 15.0
"""Maximum seconds for a key, from the message that needs it."""
LOOKUP_CONCURRENCY = 248
"""Maximum concurrent requests to all hosts beside those of resyncs."""


def open_outbound_client(
    settings: Settings,
    on_request: Callable[[str], None] = lambda _result: None,
    timeouts: Timeouts | None = None,
    pauses: HostPauses | None = None,
) -> OutboundClient:
    """Return the client for all outbound requests except the stream and the webhook, to be used in a block.

    It calls `on_request` with the result of each request. `timeouts` are those of a request, `pauses` those of a host
    whose requests fail. Default: those of the classes.
    """
    relays = {host_of(http_origin(relay)): settings.host_rate for relay in settings.relays}
    rates = RateLimits(
        host=settings.host_rate,
        host_concurrency=settings.host_concurrency,
        total=settings.outbound_rate,
        total_concurrency=settings.resync_workers + LOOKUP_CONCURRENCY,
        configured_hosts=relays | {host_of(url): settings.plc_rate for url in settings.plc_url},
        pauses=pauses or HostPauses(),
    )
    outbound_settings = OutboundSettings(
        settings.user_agent,
        allow_private_hosts=settings.allow_private_hosts,
        rates=rates,
        timeouts=timeouts or Timeouts(),
        dns_servers=settings.dns_servers,
    )
    return OutboundClient(outbound_settings, on_request=on_request)


def open_webhook_client(
    settings: Settings, on_request: Callable[[str], None], timeouts: Timeouts, pauses: HostPauses
) -> AbstractAsyncContextManager[OutboundClient | None]:
    """Return the client for the webhook, to be used in a block, which gets None if the settings name no webhook.

    The operator chose its URL, so it may have any address.
    """
    if settings.webhook_url is None:
        return nullcontext()
    rates = RateLimits(
        total=WEBHOOK_RATE,
        total_concurrency=CONCURRENCY,
        host_concurrency=CONCURRENCY,
        configured_hosts={host_of(settings.webhook_url.get_secret_value()): WEBHOOK_RATE},
        pauses=pauses,
    )
    outbound_settings = OutboundSettings(settings.user_agent, allow_private_hosts=True, rates=rates, timeouts=timeouts)
    return OutboundClient(outbound_settings, on_request=on_request)


def core_of(settings: Settings) -> Core:
    """Return the core that the settings select. A native one starts its threads.

    Raises:
        SettingsError: The settings demand the native core, and it cannot be used.
    """
    return load_core(settings.core, settings.verify_threads or available_cores())


def make_did_resolver(
    settings: Settings, outbound: OutboundClient, on_log: Callable[[str, str], None] = lambda _directory, _result: None
) -> DidResolver:
    """Return the resolver for did:plc and did:web."""
    return DidResolver(
        outbound,
        settings.plc_url,
        plc_rate=settings.plc_rate,
        allow_private_hosts=settings.allow_private_hosts,
        clock=time,
        plc_lookup=settings.plc_lookup,
        on_log=on_log,
    )


def make_plc_operations(
    settings: Settings, db: Database, outbound: OutboundClient, conditions: Conditions, metrics: Metrics
) -> PlcOperations:
    """Return the task that reads the operations of the first PLC directory."""
    export = PlcExport(outbound, settings.plc_url[0], settings.user_agent)
    return PlcOperations(db, export, conditions, metrics, settings.allow_private_hosts)


@asynccontextmanager
async def open_identities(
    settings: Settings, db: Database, metrics: Metrics
) -> AsyncIterator[tuple[OutboundClient, IdentityCache]]:
    """Open the client for outbound requests and the identities for a command.

    Only the operator causes lookups, so identities are refreshed without a limit, and missing keys are looked up again.
    """
    async with open_outbound_client(settings, metrics.outbound_request) as outbound:
        resolver, lifetimes = make_did_resolver(settings, outbound), IdentityLifetimes(missing_max_age=0.0)
        identities = IdentityCache(
            resolver, db.identities, metrics, clock=time, refresh_rate=math.inf, lifetimes=lifetimes
        )
        try:
            yield outbound, identities
        finally:
            await identities.close()


@asynccontextmanager
async def open_replay(settings: Settings, db: Database) -> AsyncIterator[DeadLetterReplay]:
    """Open the replay of dead letters, with the same rules as a daemon with these settings."""
    async with open_identities(settings, db, Metrics()) as (outbound, identities):
        outbound.hosts.restore(await db.hosts.load())
        policy = await stored_policy(settings, db)
        yield DeadLetterReplay(db, identities, policy, key_timeout=KEY_LOOKUP_TIMEOUT)
        await db.hosts.save(outbound.hosts.unsaved())


def make_pds_client(settings: Settings, outbound: OutboundClient, core: Core = PYTHON_CORE) -> PdsClient:
    """Return the client that fetches exports into the spool directory. `core` reads them.

    Raises:
        SettingsError: The spool directory cannot be created.
    """
    directory = settings.data_dir / "spool"
    try:
        return PdsClient(
            outbound,
            settings.limits,
            directory,
            export_timeout=settings.export_time,
            reader=lambda directory, limits: core.open_export(directory, limits, ROW_LAYOUT),
        )
    except OSError as error:
        raise SettingsError(f"{variable('data_dir')}: cannot create {directory}: {error.strerror}") from error


def http_origin(relay: str) -> str:
    """Return the HTTP base URL of a relay from the URL of its stream."""
    return relay.replace("ws", "http", 1)


async def stored_policy(settings: Settings, db: Database) -> Policy:
    """Return the policy with the stored scope, or with that of the settings if none is stored yet."""
    scope = await db.scope.load()
    return settings.policy if scope is None else replace(settings.policy, scope=scope)
