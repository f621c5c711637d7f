"""Fixtures for the tests of crawls."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from indexer.db import Database
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from tests.net.http.scripted_host import ScriptedHost
from tests.tasks.crawl_scenario import Crawl


@pytest.fixture
async def host() -> AsyncIterator[ScriptedHost]:
    async with ScriptedHost() as serving:
        yield serving


@pytest.fixture
async def outbound() -> AsyncIterator[OutboundClient]:
    rates = RateLimits(host=1_000, total=1_000)
    client = OutboundClient(OutboundSettings("test", allow_private_hosts=True, rates=rates))
    yield client
    await client.close()


@pytest.fixture
def crawl(db: Database, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient) -> Crawl:
    return Crawl(db, sql, host, outbound)
