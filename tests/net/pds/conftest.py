from collections.abc import AsyncIterator

import pytest

from indexer.net.http.http_client import OutboundClient, OutboundSettings, Timeouts
from tests.faulty_network import FaultyNetwork
from tests.net.http.scripted_host import ScriptedHost

LOCAL = OutboundSettings("test", allow_private_hosts=True, timeouts=Timeouts(read=3.0, rate_grace=1.0))


@pytest.fixture
async def net() -> AsyncIterator[FaultyNetwork]:
    async with FaultyNetwork() as network:
        yield network


@pytest.fixture
async def outbound() -> AsyncIterator[OutboundClient]:
    async with OutboundClient(LOCAL) as client:
        yield client


@pytest.fixture
async def host() -> AsyncIterator[ScriptedHost]:
    async with ScriptedHost() as host:
        yield host
