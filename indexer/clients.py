"""What asks the world, as the settings have it: outbound requests, the directories, the hosts of repos."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import time

from indexer.config import Settings
from indexer.identity import Resolver
from indexer.outbound import Outbound, Rates, host_of
from indexer.pds import PdsClient


@asynccontextmanager
async def requests_of(
    settings: Settings, on_request: Callable[[str], None] = lambda _result: None
) -> AsyncIterator[Outbound]:
    """The door for outbound requests; `on_request` hears what came of each."""
    outbound = Outbound(
        user_agent=settings.user_agent,
        allow_private_hosts=settings.allow_private_hosts,
        rates=_rates(settings),
        on_request=on_request,
        dns_servers=settings.dns_servers,
    )
    try:
        yield outbound
    finally:
        await outbound.close()


def resolver_of(settings: Settings, outbound: Outbound) -> Resolver:
    return Resolver(
        outbound,
        settings.plc_url,
        plc_rate=settings.plc_rate,
        allow_private_hosts=settings.allow_private_hosts,
        clock=time,
    )


def pds_client_of(settings: Settings, outbound: Outbound) -> PdsClient:
    """Raises OSError if there can be no spool directory."""
    return PdsClient(
        outbound,
        settings.limits,
        settings.data_dir / "spool",
        export_seconds=settings.export_time,
        export_rate=settings.export_rate,
    )


def origin_of(relay: str) -> str:
    """Where a relay answers questions, by its stream's URL."""
    return relay.replace("ws", "http", 1)


def _rates(settings: Settings) -> Rates:
    return Rates(
        host=settings.host_rate,
        host_concurrency=settings.host_concurrency,
        total=settings.outbound_rate,
        concurrency=settings.outbound_concurrency,
        own={host_of(origin_of(relay)): settings.host_rate for relay in settings.relays}
        | {host_of(url): settings.plc_rate for url in settings.plc_url},
    )
