from collections.abc import AsyncIterator

import pytest

from indexer.localnet.network import LocalNetwork
from indexer.outbound import Outbound, Patience
from tests.outbound.host import Host


@pytest.fixture
async def net() -> AsyncIterator[LocalNetwork]:
    async with LocalNetwork() as network:
        yield network


@pytest.fixture
async def outbound() -> AsyncIterator[Outbound]:
    client = Outbound(user_agent="test", allow_private_hosts=True, patience=Patience(silence=0.3, judged_after=0.1))
    yield client
    await client.close()


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host() as serving:
        yield serving
