from collections.abc import AsyncIterator

import pytest

from indexer.outbound import Outbound, Rates
from tests.outbound.host import Host


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host() as serving:
        yield serving


@pytest.fixture
async def outbound() -> AsyncIterator[Outbound]:
    client = Outbound(user_agent="test", allow_private_hosts=True, rates=Rates(host=1_000, total=1_000))
    yield client
    await client.close()
