from collections.abc import AsyncIterator

import pytest

from indexer.outbound import OutboundClient, OutboundSettings, RateLimits
from tests.outbound.scripted_host import ScriptedHost


@pytest.fixture
async def host() -> AsyncIterator[ScriptedHost]:
    async with ScriptedHost() as serving:
        yield serving


@pytest.fixture
async def outbound() -> AsyncIterator[OutboundClient]:
    client = OutboundClient(
        OutboundSettings("test", allow_private_hosts=True, rates=RateLimits(host=1_000, total=1_000))
    )
    yield client
    await client.close()
